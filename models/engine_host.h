#pragma once
// Host memory of an engine's rank, as a list of buffers.

#include <cstdint>
#include <vector>

namespace zeroplan {

enum class HostKind : std::uint8_t {
  pageable,
  pinned,  // PyTorch's pinned allocator: taken as a power of two
  locked,  // page-aligned and locked by DeepSpeed itself: taken as it is
};

struct HostBuffer {
  const char* name = "";
  std::int64_t bytes = 0;  // of one
  std::int64_t count = 1;
  HostKind kind = HostKind::pageable;
};

}  // namespace zeroplan
