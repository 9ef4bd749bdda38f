#include <mutex>

#include "runtime/kernels/kernels.h"
#include "runtime/kernels/loops.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kElementGrain = 1 << 14;

template <class Body>
void for_elements(std::size_t count, ThreadPool& pool, Body&& body) {
  pool.for_ranges(static_cast<std::int64_t>(count), kElementGrain, body);
}

}  // namespace

template <class T>
void add_forward(std::span<const std::span<const T>> terms, std::span<T> y, ThreadPool& pool) {
  constexpr std::size_t kMostTerms = 8;
  if (terms.size() < 2 || terms.size() > kMostTerms) throw std::logic_error("add: 2 to 8 terms");
  for (const auto& term : terms) expect_count(term.size(), static_cast<std::int64_t>(y.size()), "term of a sum");
  for_elements(y.size(), pool, [&](std::int64_t begin, std::int64_t end) {
    const T* a = terms[0].data();
    const T* b = terms[1].data();
    T* out = y.data();
    if (terms.size() == 2) {
      for (std::int64_t i = begin; i < end; ++i) out[i] = narrow<T>(widen(a[i]) + widen(b[i]));
      return;
    }
    for (std::int64_t i = begin; i < end; ++i) {
      Wide<T> sum = widen(a[i]);
      for (std::size_t k = 1; k < terms.size(); ++k) sum += widen(terms[k][static_cast<std::size_t>(i)]);
      out[i] = narrow<T>(sum);
    }
  });
}

template <class T>
void gradient_sum(std::span<const T> dy, ValueGradient<T> dx, ThreadPool& pool) {
  expect_gradient(dx, static_cast<std::int64_t>(dy.size()), "gradient sum");
  if (dx.base.empty()) throw std::logic_error("gradient sum: nothing to add to");
  const std::array<std::span<const T>, 2> terms{dx.base, dy};
  add_forward<T>(terms, dx.out, pool);
}

template <class G, class Sum>
void accumulate(std::span<const G> gradient, std::span<Sum> sum, ThreadPool& pool) {
  expect_count(sum.size(), static_cast<std::int64_t>(gradient.size()), "accumulated gradient");
  for_elements(sum.size(), pool, [&](std::int64_t begin, std::int64_t end) {
    const G* from = gradient.data();
    Sum* to = sum.data();
    for (std::int64_t i = begin; i < end; ++i) to[i] = narrow<Sum>(widen(to[i]) + widen(from[i]));
  });
}

template <class G>
void sum_of_squares(std::span<const G> gradient, ExactSum& sum, ThreadPool& pool) {
  constexpr std::int64_t kBlock = 64;
  std::mutex mutex;
  for_elements(gradient.size(), pool, [&](std::int64_t begin, std::int64_t end) {
    ExactSum part;
    for (std::int64_t first = begin; first < end; first += kBlock) {
      const G* block = gradient.data() + first;
      part.add(lane_sum<double>(std::min(kBlock, end - first), [&](std::int64_t i) {
        const double value = static_cast<double>(widen(block[i]));
        return value * value;
      }));
    }
    const std::lock_guard lock(mutex);
    sum.add(part);
  });
}

template <class From, class To>
void convert(std::span<const From> from, std::span<To> to, ThreadPool& pool) {
  expect_count(to.size(), static_cast<std::int64_t>(from.size()), "converted values");
  for_elements(to.size(), pool, [&](std::int64_t begin, std::int64_t end) {
    const From* source = from.data();
    To* target = to.data();
    for (std::int64_t i = begin; i < end; ++i) target[i] = narrow<To>(widen(source[i]));
  });
}

#define ZEROPLAN_SUMS(T)                                                                     \
  template void add_forward(std::span<const std::span<const T>>, std::span<T>, ThreadPool&); \
  template void gradient_sum(std::span<const T>, ValueGradient<T>, ThreadPool&);             \
  template void accumulate(std::span<const T>, std::span<T>, ThreadPool&);                   \
  template void sum_of_squares(std::span<const T>, ExactSum&, ThreadPool&)
ZEROPLAN_SUMS(Bf16);
ZEROPLAN_SUMS(Fp16);
ZEROPLAN_SUMS(float);
ZEROPLAN_SUMS(double);
template void accumulate(std::span<const Bf16>, std::span<float>, ThreadPool&);
template void accumulate(std::span<const Fp16>, std::span<float>, ThreadPool&);

#define ZEROPLAN_CONVERT(From, To) template void convert(std::span<const From>, std::span<To>, ThreadPool&)
ZEROPLAN_CONVERT(Bf16, Bf16);
ZEROPLAN_CONVERT(Bf16, Fp16);
ZEROPLAN_CONVERT(Bf16, float);
ZEROPLAN_CONVERT(Fp16, Bf16);
ZEROPLAN_CONVERT(Fp16, Fp16);
ZEROPLAN_CONVERT(Fp16, float);
ZEROPLAN_CONVERT(float, Bf16);
ZEROPLAN_CONVERT(float, Fp16);
ZEROPLAN_CONVERT(float, float);

}  // namespace zeroplan
