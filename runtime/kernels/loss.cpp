#include "models/error.h"
#include "runtime/kernels/exponential.h"
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

/// Calls use(first, count, e) with e[j] = e^(row[first + j] - largest), piece by piece.
template <class T, class Use>
void exponential_pieces(const T* row, std::int64_t vocab, Wide<T> largest, Use&& use) {
  for_pieces(vocab, [&](std::int64_t first, std::int64_t count) {
    Wide<T> e[kPiece];
    for (std::int64_t j = 0; j < count; ++j) e[j] = widen(row[first + j]);
    exponentials(e, count, Wide<T>{1}, largest);
    use(first, count, e);
  });
}

/// Loss of one row; the row becomes its gradient.
template <class T>
double row_loss(T* row, std::int64_t vocab, std::int64_t target, Wide<T> scale) {
  using W = Wide<T>;
  const W largest = lane_max<W>(vocab, [&](std::int64_t j) { return widen(row[j]); });
  W sum{0};
  exponential_pieces(row, vocab, largest, [&](std::int64_t, std::int64_t count, const W* e) {
    sum += lane_sum<W>(count, [&](std::int64_t j) { return e[j]; });
  });
  const W loss = std::log(sum) + largest - widen(row[target]);
  W right = widen(row[target]);
  exponentials(&right, 1, W{1}, largest);
  right = right / sum - W{1};  // before scaling: exact near 1
  const W factor = scale / sum;
  exponential_pieces(row, vocab, largest, [&](std::int64_t first, std::int64_t count, const W* e) {
    for (std::int64_t j = 0; j < count; ++j) row[first + j] = narrow<T>(e[j] * factor);
  });
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
