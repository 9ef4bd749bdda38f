#pragma once
// What `zeroplan probe` measures with several threads. Where threads meet, in wall time: other programs may hold the
// cores for a while, so each figure is the lower quartile of many short runs. Where they only work beside each other,
// in their processor time.

#include <vector>

#include "models/host_kernels.h"

namespace zeroplan {

/// 1, 2, 4, ... and `cores`.
std::vector<int> probed_threads(int cores);

/// Until a sleeping thread of a ThreadPool runs its first range.
Seconds pool_wake();
/// Until a sleeping thread sees that another has finished an op, as runtime/stream_threads.cpp tells it.
Seconds stream_wake(int cores);
/// What the optimizer's update, which only streams, reads and writes: four arrays read, three of them written.
std::vector<HostMemoryRate> memory_rates(int cores);
/// Of products of matrices, one in each thread.
std::vector<HostSpeedup> speedups(int cores);
/// Collectives of 2, 4 and 8 ranks of a ThreadCommunicator.
std::vector<HostCollectiveTime> collective_times(int cores);

}  // namespace zeroplan
