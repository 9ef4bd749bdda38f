#include "runtime/thread_clock.h"

#include <algorithm>
#include <ctime>

namespace zeroplan {

double thread_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double time_of(const std::function<void()>& run, double least_seconds) {
  run();
  const double once = thread_seconds();
  run();
  const double first = thread_seconds() - once;
  if (first >= least_seconds) return first;
  constexpr double kMostRuns = 10000;
  const int runs = static_cast<int>(std::min(kMostRuns, least_seconds / std::max(first, 1e-9)) + 1);
  const double begin = thread_seconds();
  for (int i = 0; i < runs; ++i) run();
  return (thread_seconds() - begin) / runs;
}

}  // namespace zeroplan
