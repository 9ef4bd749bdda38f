#pragma once
// Whom a wait of the compute stream is blamed on: one rule for estimate() and simulate().

#include <cstddef>
#include <cstdint>

#include "models/schedule.h"

namespace zeroplan {

/// The parts of a TimeBreakdown, in its order.
enum class Blame : std::uint8_t { compute, communication, offload, optimizer, idle };
inline constexpr std::size_t kNumBlames = 5;

/// What an op's own time counts as, and a wait for it.
inline Blame blame_of(const Op& op, const Work& work) {
  const bool updates = op.phase == Phase::optimizer || std::holds_alternative<AdamStep>(work);
  // Engines without a stream of their own for these run them on compute.
  if (std::holds_alternative<Collective>(work)) return Blame::communication;
  if (std::holds_alternative<Copy>(work)) return Blame::offload;
  switch (op.stream) {
    case Stream::compute:
      return updates ? Blame::optimizer : Blame::compute;
    case Stream::host:
      return updates ? Blame::optimizer : Blame::offload;
    case Stream::gather:
    case Stream::reduce:
      return Blame::communication;
    case Stream::h2d:
    case Stream::d2h:
    case Stream::nvme_read:
    case Stream::nvme_write:
      return Blame::offload;
  }
  return Blame::idle;
}

}  // namespace zeroplan
