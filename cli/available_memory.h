#pragma once
// What of this machine's memory a process can still have.

#include <optional>

#include "models/units.h"

namespace zeroplan {

/// MemAvailable of /proc/meminfo, and no more than the limit of a container (cgroup v2's memory.max at the root that
/// the process sees). Nothing where neither can be read.
std::optional<Bytes> available_memory();

}  // namespace zeroplan
