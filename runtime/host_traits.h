#pragma once
// What this machine tells of itself; the kernels' counts depend on it.

#include "models/host_kernels.h"

namespace zeroplan {

/// What is known of this machine without measuring: instructions, tile, near_memory (the second-level cache).
HostKernels host_traits();

}  // namespace zeroplan
