#pragma once
// Loops that kernels share: rows over a pool, and sums in a fixed order that compilers may vectorise.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "runtime/kernels/views.h"
#include "runtime/thread_pool.h"

namespace zeroplan {

inline std::int64_t rows_of(std::size_t elements, std::int64_t width, const char* what) {
  const auto count = static_cast<std::int64_t>(elements);
  if (width <= 0 || count % width != 0) {
    throw std::logic_error(std::string(what) + ": " + std::to_string(count) + " elements are no rows of " +
                           std::to_string(width));
  }
  return count / width;
}

/// Calls body(row) for each row, in parallel when there is enough to do. `width`: elements a row.
template <class Body>
void for_rows(std::int64_t rows, std::int64_t width, ThreadPool& pool, Body&& body) {
  constexpr std::int64_t kElementsPerRange = 1 << 14;
  const std::int64_t grain = std::max<std::int64_t>(1, kElementsPerRange / std::max<std::int64_t>(1, width));
  pool.for_ranges(rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) body(row);
  });
}

/// Sum of term(i) for i in [0, count): 16 interleaved partial sums, then these pairwise.
template <class W, class Term>
W lane_sum(std::int64_t count, Term&& term) {
  constexpr int kLanes = 16;
  W lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int lane = 0; i < count; ++i, ++lane) lanes[lane] += term(i);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

/// Sums over rows for each column of `gradient`: add(row, column, count, sums) adds a row's part for count columns. 64
/// rows are summed at a time, then these sums, so that fp32 stays good for many rows.
template <class W, class G, class Add>
void column_sums(std::int64_t rows, const WeightGradient<G>& gradient, Add&& add, ThreadPool& pool) {
  constexpr std::int64_t kColumns = 64, kRows = 64;
  pool.for_ranges(static_cast<std::int64_t>(gradient.out.size()), kColumns, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t column = begin; column < end; column += kColumns) {
      const std::int64_t count = std::min(kColumns, end - column);
      W total[kColumns] = {};
      for (std::int64_t first = 0; first < rows; first += kRows) {
        W sums[kColumns] = {};
        for (std::int64_t row = first; row < std::min(rows, first + kRows); ++row) add(row, column, count, sums);
        for (std::int64_t j = 0; j < count; ++j) total[j] += sums[j];
      }
      G* out = gradient.out.data() + column;
      for (std::int64_t j = 0; j < count; ++j) {
        out[j] = narrow<G>(gradient.accumulate ? widen(out[j]) + total[j] : total[j]);
      }
    }
  });
}

/// Greatest value(i) for i in [0, count), count >= 1.
template <class W, class Value>
W lane_max(std::int64_t count, Value&& value) {
  constexpr int kLanes = 16;
  W lanes[kLanes];
  for (W& lane : lanes) lane = value(0);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const W here = value(i + lane);
      lanes[lane] = here > lanes[lane] ? here : lanes[lane];
    }
  }
  for (; i < count; ++i) lanes[0] = value(i) > lanes[0] ? value(i) : lanes[0];
  for (int lane = 1; lane < kLanes; ++lane) lanes[0] = lanes[lane] > lanes[0] ? lanes[lane] : lanes[0];
  return lanes[0];
}

/// Calls body(first, count) for pieces of [0, width) that fit a buffer of kPiece elements on the stack.
inline constexpr std::int64_t kPiece = 256;
template <class Body>
void for_pieces(std::int64_t width, Body&& body) {
  for (std::int64_t first = 0; first < width; first += kPiece) body(first, std::min(kPiece, width - first));
}

}  // namespace zeroplan
