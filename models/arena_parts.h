#pragma once
// The packing problem inside lay_out(): lives in time, offsets in memory.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "models/arena.h"

namespace zeroplan::arena {

/// Occupied during [begin, end), counted in Alloc ops.
struct Life {
  std::int32_t begin = 0, end = 0;
  std::int64_t size = 0;
  std::uint32_t buffer = 0;
  friend bool operator==(const Life&, const Life&) = default;
};

struct Placed {
  std::vector<std::int64_t> offset;  // by index into the lives
  std::int64_t height = 0;           // highest end
  std::int64_t live_peak = 0;        // most bytes alive at one time
};

inline std::size_t index(std::int32_t i) { return static_cast<std::size_t>(i); }

/// Lives in order of begin.
Placed place(std::span<const Life> lives, LayoutEffort effort);

}  // namespace zeroplan::arena
