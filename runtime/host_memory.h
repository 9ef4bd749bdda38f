#pragma once
// This machine's memory, as Linux and a container's limit have it.

#include <optional>
#include <string_view>

#include "models/units.h"

namespace zeroplan {

/// An amount of /proc/meminfo, such as "MemTotal"; nothing where it cannot be read.
std::optional<Bytes> host_memory(std::string_view key);

/// The limit of a container: cgroup v2's memory.max at the root that the process sees. Nothing where there is none.
std::optional<Bytes> container_memory();

/// What a process can still have: MemAvailable, and no more than the limit of a container. Nothing where neither can be
/// read.
std::optional<Bytes> available_memory();

}  // namespace zeroplan
