#include "runtime/kernels/gemm.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/loops.h"

namespace zeroplan {
namespace {

template <class Part>
std::int64_t total_width(std::span<const Part> parts, std::int64_t in) {
  std::int64_t width = 0;
  for (const Part& part : parts) {
    if constexpr (requires { part.weight.out; }) {
      width += rows_of(part.weight.out.size(), in, "linear weight gradient");
    } else {
      width += rows_of(part.weight.size(), in, "linear weight");
    }
  }
  return width;
}

/// Bias gradient from columns [first, ...) of dy.
template <class T, class G>
void bias_gradient(std::span<const T> dy, std::int64_t first, std::int64_t width, std::int64_t tokens,
                   const WeightGradient<G>& gradient, ThreadPool& pool) {
  column_sums<Wide<T>>(
      tokens, gradient,
      [&](std::int64_t token, std::int64_t column, std::int64_t count, Wide<T>* sums) {
        const T* row = dy.data() + token * width + first + column;
        for (std::int64_t j = 0; j < count; ++j) sums[j] += widen(row[j]);
      },
      pool);
}

}  // namespace

template <class T>
void linear_forward(std::span<const T> x, std::span<const LinearPart<T>> parts, std::int64_t in, std::span<T> y,
                    ThreadPool& pool) {
  const std::int64_t tokens = rows_of(x.size(), in, "linear input");
  const std::int64_t width = total_width(parts, in);
  expect_count(y.size(), tokens * width, "linear output");
  std::int64_t first = 0;
  for (const LinearPart<T>& part : parts) {
    const std::int64_t out = static_cast<std::int64_t>(part.weight.size()) / in;
    if (!part.bias.empty()) expect_count(part.bias.size(), out, "linear bias");
    const GemmTerm<T, T> term{{x.data(), in, 1}, Matrix<T>{part.weight.data(), in, 1}.transposed(), in};
    gemm<T, T, T>(tokens, out, {&term, 1},
                  {y.data() + first, width, nullptr, 0, part.bias.empty() ? nullptr : part.bias.data()}, pool);
    first += out;
  }
}

template <class T>
void linear_backward_data(std::span<const T> dy, std::span<const LinearPart<T>> parts, std::int64_t in,
                          ValueGradient<T> dx, ThreadPool& pool) {
  const std::int64_t width = total_width(parts, in);
  const std::int64_t tokens = rows_of(dy.size(), width, "linear output gradient");
  expect_gradient(dx, tokens * in, "linear input gradient");
  std::vector<GemmTerm<T, T>> terms;
  std::int64_t first = 0;
  for (const LinearPart<T>& part : parts) {
    const std::int64_t out = static_cast<std::int64_t>(part.weight.size()) / in;
    terms.push_back({{dy.data() + first, width, 1}, {part.weight.data(), in, 1}, out});
    first += out;
  }
  gemm<T, T, T>(tokens, in, terms, {dx.out.data(), in, dx.base.empty() ? nullptr : dx.base.data(), in, nullptr}, pool);
}

template <class T, class G>
void linear_backward_weight(std::span<const T> dy, std::span<const T> x, std::span<const LinearPartGradient<G>> parts,
                            std::int64_t in, ThreadPool& pool) {
  const std::int64_t tokens = rows_of(x.size(), in, "linear input");
  const std::int64_t width = total_width(parts, in);
  expect_count(dy.size(), tokens * width, "linear output gradient");
  std::int64_t first = 0;
  for (const LinearPartGradient<G>& part : parts) {
    const std::int64_t out = static_cast<std::int64_t>(part.weight.out.size()) / in;
    G* to = part.weight.out.data();
    const GemmTerm<T, T> term{Matrix<T>{dy.data() + first, width, 1}.transposed(), {x.data(), in, 1}, tokens};
    gemm<T, T, G>(out, in, {&term, 1}, {to, in, part.weight.accumulate ? to : nullptr, in, nullptr}, pool);
    if (!part.bias.out.empty()) {
      expect_count(part.bias.out.size(), out, "linear bias gradient");
      bias_gradient(dy, first, width, tokens, part.bias, pool);
    }
    first += out;
  }
}

#define ZEROPLAN_LINEAR(T)                                                                                     \
  template void linear_forward(std::span<const T>, std::span<const LinearPart<T>>, std::int64_t, std::span<T>, \
                               ThreadPool&);                                                                   \
  template void linear_backward_data(std::span<const T>, std::span<const LinearPart<T>>, std::int64_t,         \
                                     ValueGradient<T>, ThreadPool&)
ZEROPLAN_LINEAR(Bf16);
ZEROPLAN_LINEAR(Fp16);
ZEROPLAN_LINEAR(float);
ZEROPLAN_LINEAR(double);

#define ZEROPLAN_LINEAR_WEIGHT(T, G)                                                                                   \
  template void linear_backward_weight(std::span<const T>, std::span<const T>, std::span<const LinearPartGradient<G>>, \
                                       std::int64_t, ThreadPool&)
ZEROPLAN_LINEAR_WEIGHT(Bf16, Bf16);
ZEROPLAN_LINEAR_WEIGHT(Bf16, float);
ZEROPLAN_LINEAR_WEIGHT(Fp16, Fp16);
ZEROPLAN_LINEAR_WEIGHT(Fp16, float);
ZEROPLAN_LINEAR_WEIGHT(float, float);
ZEROPLAN_LINEAR_WEIGHT(double, double);

}  // namespace zeroplan
