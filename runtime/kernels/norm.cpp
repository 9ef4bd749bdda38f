#include "runtime/kernels/kernels.h"
#include "runtime/kernels/loops.h"

namespace zeroplan {
namespace {

std::int64_t per_token(NormFunction function) { return function == NormFunction::rms ? 1 : 2; }

/// Mean (0 for rms) and 1 / standard deviation of one token, as saved.
template <class W>
struct Statistics {
  W mean, rstd;
};
template <class W>
Statistics<W> saved(NormFunction function, std::span<const W> statistics, std::int64_t token) {
  const auto i = static_cast<std::size_t>(token);
  if (function == NormFunction::rms) return {W{0}, statistics[i]};
  return {statistics[2 * i], statistics[2 * i + 1]};
}

template <class T>
Statistics<Wide<T>> measure(const NormShape& shape, const T* x) {
  using W = Wide<T>;
  const auto width = static_cast<W>(shape.width);
  W mean{0};
  if (shape.function == NormFunction::layer) {
    mean = lane_sum<W>(shape.width, [&](std::int64_t i) { return widen(x[i]); }) / width;
  }
  const W squares = lane_sum<W>(shape.width, [&](std::int64_t i) {
    const W centred = widen(x[i]) - mean;
    return centred * centred;
  });
  return {mean, W{1} / std::sqrt(squares / width + static_cast<W>(shape.epsilon))};
}

template <class T>
void check_weights(const NormShape& shape, std::span<const T> weight, std::span<const T> bias) {
  expect_count(weight.size(), shape.width, "norm weight");
  if (!bias.empty()) expect_count(bias.size(), shape.width, "norm bias");
}

/// dx of one token: rstd (g - mean(g) - xhat mean(g xhat)), g = dy w; without mean(g) for rms.
template <class T>
void backward_row(const NormShape& shape, const T* dy, const T* x, const T* weight, Statistics<Wide<T>> s, T* out,
                  const T* base) {
  using W = Wide<T>;
  const auto width = static_cast<W>(shape.width);
  const auto hat = [&](std::int64_t i) { return (widen(x[i]) - s.mean) * s.rstd; };
  const auto g = [&](std::int64_t i) { return widen(dy[i]) * widen(weight[i]); };
  W mean_g{0};
  if (shape.function == NormFunction::layer) mean_g = lane_sum<W>(shape.width, g) / width;
  const W along = lane_sum<W>(shape.width, [&](std::int64_t i) { return g(i) * hat(i); }) / width;
  for (std::int64_t i = 0; i < shape.width; ++i) {
    const W dx = s.rstd * (g(i) - mean_g - hat(i) * along);
    out[i] = narrow<T>(base == nullptr ? dx : widen(base[i]) + dx);
  }
}

}  // namespace

template <class T>
void norm_forward(const NormShape& shape, std::span<const T> x, std::span<const T> weight, std::span<const T> bias,
                  std::span<T> y, std::span<Wide<T>> statistics, ThreadPool& pool) {
  using W = Wide<T>;
  const std::int64_t width = shape.width, tokens = rows_of(x.size(), width, "norm input");
  check_weights(shape, weight, bias);
  expect_count(y.size(), tokens * width, "norm output");
  expect_count(statistics.size(), tokens * per_token(shape.function), "norm statistics");
  for_rows(tokens, width, pool, [&](std::int64_t token) {
    const T* from = x.data() + token * width;
    T* to = y.data() + token * width;
    const Statistics<W> s = measure(shape, from);
    for (std::int64_t i = 0; i < width; ++i) {
      const W scaled = (widen(from[i]) - s.mean) * s.rstd * widen(weight[static_cast<std::size_t>(i)]);
      to[i] = narrow<T>(bias.empty() ? scaled : scaled + widen(bias[static_cast<std::size_t>(i)]));
    }
    W* kept = statistics.data() + token * per_token(shape.function);
    if (shape.function == NormFunction::layer) *kept++ = s.mean;
    *kept = s.rstd;
  });
}

template <class T, class G>
void norm_backward(const NormShape& shape, std::span<const T> dy, std::span<const T> x, std::span<const T> weight,
                   std::span<const Wide<T>> statistics, ValueGradient<T> dx, WeightGradient<G> weight_gradient,
                   WeightGradient<G> bias_gradient, ThreadPool& pool) {
  using W = Wide<T>;
  const std::int64_t width = shape.width, tokens = rows_of(x.size(), width, "norm input");
  check_weights<T>(shape, weight, {});
  expect_count(dy.size(), tokens * width, "norm output gradient");
  expect_count(statistics.size(), tokens * per_token(shape.function), "norm statistics");
  expect_gradient(dx, tokens * width, "norm input gradient");
  const auto row_sum = [&](const WeightGradient<G>& gradient, auto&& factor) {
    column_sums<W>(
        tokens, gradient,
        [&](std::int64_t token, std::int64_t column, std::int64_t count, W* sums) {
          const Statistics<W> s = saved<W>(shape.function, statistics, token);
          const T* g = dy.data() + token * width + column;
          const T* value = x.data() + token * width + column;
          for (std::int64_t j = 0; j < count; ++j) sums[j] += widen(g[j]) * factor(widen(value[j]), s);
        },
        pool);
  };
  // Before dx, which may take the storage of dy.
  if (!weight_gradient.out.empty()) {
    expect_count(weight_gradient.out.size(), width, "norm weight gradient");
    row_sum(weight_gradient, [](W value, Statistics<W> s) { return (value - s.mean) * s.rstd; });
  }
  if (!bias_gradient.out.empty()) {
    expect_count(bias_gradient.out.size(), width, "norm bias gradient");
    row_sum(bias_gradient, [](W, Statistics<W>) { return W{1}; });
  }
  for_rows(tokens, width, pool, [&](std::int64_t token) {
    const std::int64_t at = token * width;
    backward_row(shape, dy.data() + at, x.data() + at, weight.data(), saved<W>(shape.function, statistics, token),
                 dx.out.data() + at, dx.base.empty() ? nullptr : dx.base.data() + at);
  });
}

#define ZEROPLAN_NORM(T)                                                                                   \
  template void norm_forward(const NormShape&, std::span<const T>, std::span<const T>, std::span<const T>, \
                             std::span<T>, std::span<Wide<T>>, ThreadPool&)
ZEROPLAN_NORM(Bf16);
ZEROPLAN_NORM(Fp16);
ZEROPLAN_NORM(float);
ZEROPLAN_NORM(double);

#define ZEROPLAN_NORM_BACKWARD(T, G)                                                                            \
  template void norm_backward(const NormShape&, std::span<const T>, std::span<const T>, std::span<const T>,     \
                              std::span<const Wide<T>>, ValueGradient<T>, WeightGradient<G>, WeightGradient<G>, \
                              ThreadPool&)
ZEROPLAN_NORM_BACKWARD(Bf16, Bf16);
ZEROPLAN_NORM_BACKWARD(Bf16, float);
ZEROPLAN_NORM_BACKWARD(Fp16, Fp16);
ZEROPLAN_NORM_BACKWARD(Fp16, float);
ZEROPLAN_NORM_BACKWARD(float, float);
ZEROPLAN_NORM_BACKWARD(double, double);

}  // namespace zeroplan
