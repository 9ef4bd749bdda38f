#include "models/error.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/loops.h"
#include "runtime/kernels/scratch.h"

namespace zeroplan {
namespace {

void check_targets(std::span<const std::int32_t> targets, std::int64_t vocab) {
  for (const std::int32_t target : targets) {
    if (target != kIgnoredTarget && (target < 0 || target >= vocab)) {
      throw InputError("target " + std::to_string(target) + " is outside the vocabulary of " + std::to_string(vocab));
    }
  }
}

/// Loss of one row; the row becomes its gradient.
template <class T>
double row_loss(T* row, std::int64_t vocab, std::int64_t target, Wide<T> scale) {
  using W = Wide<T>;
  W largest = widen(row[0]);
  for (std::int64_t j = 1; j < vocab; ++j) largest = widen(row[j]) > largest ? widen(row[j]) : largest;
  const W sum = lane_sum<W>(vocab, [&](std::int64_t j) { return exponential(widen(row[j]) - largest); });
  const W loss = std::log(sum) + largest - widen(row[target]);
  const W right = exponential(widen(row[target]) - largest) / sum - W{1};
  for (std::int64_t j = 0; j < vocab; ++j) row[j] = narrow<T>(exponential(widen(row[j]) - largest) / sum * scale);
  row[target] = narrow<T>(right * scale);
  return loss;
}

}  // namespace

template <class T>
double cross_entropy(std::span<T> logits, std::int64_t vocab, std::span<const std::int32_t> targets, double scale,
                     double loss_before, ThreadPool& pool) {
  const auto rows = static_cast<std::int64_t>(targets.size());
  expect_count(logits.size(), rows * vocab, "logits");
  check_targets(targets, vocab);
  const auto losses = scratch<double>(ScratchSlot::order, rows);
  for_rows(rows, vocab, pool, [&](std::int64_t i) {
    T* row = logits.data() + i * vocab;
    const std::int32_t target = targets[static_cast<std::size_t>(i)];
    double& loss = losses[static_cast<std::size_t>(i)];
    if (target == kIgnoredTarget) {
      std::fill(row, row + vocab, T{});
      loss = 0;
    } else {
      loss = row_loss(row, vocab, target, static_cast<Wide<T>>(scale));
    }
  });
  double total = loss_before;
  for (const double loss : losses) total += loss;
  return total;
}

#define ZEROPLAN_LOSS(T) \
  template double cross_entropy(std::span<T>, std::int64_t, std::span<const std::int32_t>, double, double, ThreadPool&)
ZEROPLAN_LOSS(Bf16);
ZEROPLAN_LOSS(Fp16);
ZEROPLAN_LOSS(float);
ZEROPLAN_LOSS(double);

}  // namespace zeroplan
