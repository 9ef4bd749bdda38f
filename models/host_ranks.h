#pragma once

#include <algorithm>

namespace zeroplan {

/// Threads of one rank's compute pool when `ranks` ranks share a node whose device is its `cores` cores: the runtime
/// starts so many, and the cost model of a probed host counts on it.
constexpr int host_threads_per_rank(int cores, int ranks) { return std::max(1, cores / std::max(1, ranks)); }

}  // namespace zeroplan
