#pragma once
// Memory over time, by tier and owner. Alloc and Free stand on one stream in id order, so this needs no clock.

#include <array>
#include <cstdint>
#include <vector>

#include "models/schedule.h"

namespace zeroplan {

using OwnerBytes = std::array<Bytes, kNumOwners>;

struct MemoryPeak {
  Bytes bytes;  // live, resident included
  Bytes resident;
  std::uint32_t at_op = 0;  // index of the Alloc after which the peak stands first; 0 when nothing is allocated
  OwnerBytes owners{};      // at the peak; sums to bytes
};

class MemoryTimeline {
 public:
  /// Folded and flat schedules give the same bytes: a repeated block adds the same net amount each time, so its highest
  /// iteration is the last one (net gain) or the first.
  explicit MemoryTimeline(const Schedule& schedule);

  const MemoryPeak& peak(Memory memory) const { return peaks_[static_cast<std::size_t>(memory)]; }

 private:
  std::array<MemoryPeak, kNumMemories> peaks_{};
};

/// Step and resident buffers alive just after op `at_op` of a schedule with flat layers, in `memory`, largest first.
std::vector<BufferId> live_after(const Schedule& schedule, std::uint32_t at_op, Memory memory);

}  // namespace zeroplan
