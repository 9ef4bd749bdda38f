#pragma once
// Time of tests that bound how much something computes: what others do on the machine is not in it.

#include <ctime>

namespace zeroplan::tests {

/// Seconds that the threads of this process have computed.
inline double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace zeroplan::tests
