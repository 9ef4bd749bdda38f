#pragma once

#include <algorithm>
#include <cstdint>

namespace zeroplan {

/// How a matrix product is cut among threads: the last task of a row or column has fewer.
struct GemmTasks {
  std::int64_t rows, columns;            // of a task
  std::int64_t row_tasks, column_tasks;  // how many
};

constexpr std::int64_t kMostTaskRows = 960, kMostTaskColumns = 512;  // the accumulators of a task stay in cache
constexpr std::int64_t kTaskRowUnit = 24, kTaskColumnUnit = 32;      // multiples of every kernel's tile

/// The cut of `rows` x `columns` outputs that is soonest done by `threads` threads, among those that give each about
/// two to four tasks (a thread may be late). A task packs its rows and its columns; the runtime cuts so, and the cost
/// model of a probed host counts on it. Results do not depend on it.
constexpr GemmTasks gemm_tasks(std::int64_t rows, std::int64_t columns, int threads) {
  constexpr std::int64_t kPackedInMacs = 16;  // to pack a word takes 0.2 to 0.7 ns, a multiply-add 0.01 to 0.02
  const auto divide_up = [](std::int64_t n, std::int64_t by) { return (n + by - 1) / by; };
  const auto cut = [&](std::int64_t n, std::int64_t tasks, std::int64_t unit) {
    return divide_up(divide_up(n, tasks), unit) * unit;
  };
  const std::int64_t least_rows = divide_up(rows, kMostTaskRows), least_columns = divide_up(columns, kMostTaskColumns);
  if (threads == 1) {
    return {kMostTaskRows, std::clamp(columns, kTaskColumnUnit, kMostTaskColumns), least_rows, least_columns};
  }
  const std::int64_t most_rows = divide_up(rows, kTaskRowUnit), most_columns = divide_up(columns, kTaskColumnUnit);
  const std::int64_t wanted = std::min<std::int64_t>(2 * threads, most_rows * most_columns);
  const std::int64_t most = std::max<std::int64_t>(4 * threads, least_rows * least_columns);
  GemmTasks best{kTaskRowUnit, kTaskColumnUnit, most_rows, most_columns};
  std::int64_t least_time = INT64_MAX;
  for (std::int64_t r = least_rows; r <= std::min(most_rows, most); ++r) {
    const std::int64_t height = cut(rows, r, kTaskRowUnit), row_tasks = divide_up(rows, height);
    if (row_tasks != r) continue;
    for (std::int64_t c = std::max(least_columns, divide_up(wanted, r)); c <= most_columns && r * c <= most; ++c) {
      const std::int64_t width = cut(columns, c, kTaskColumnUnit), column_tasks = divide_up(columns, width);
      const std::int64_t time =
          divide_up(row_tasks * column_tasks, threads) * (height * width + kPackedInMacs * (height + width));
      if (column_tasks != c || time >= least_time) continue;
      least_time = time;
      best = {height, width, row_tasks, column_tasks};
    }
  }
  return best;
}

}  // namespace zeroplan
