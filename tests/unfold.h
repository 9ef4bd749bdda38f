#pragma once
// The independent reading of repeated blocks that tests compare every reader with: plays a folded schedule into a plain
// list of ops with plain edges.

#include <span>
#include <vector>

#include "models/schedule.h"

namespace zeroplan::tests {

struct UnfoldedOp {
  std::uint32_t op = 0;              // index into Schedule::ops()
  std::vector<std::uint32_t> after;  // indices into the unfolded list
};

std::vector<UnfoldedOp> unfold(const Schedule& schedule);

/// End of each unfolded op when works take `seconds`: the longest path over edges and stream order.
std::vector<double> longest_path(const Schedule& schedule, std::span<const UnfoldedOp> ops,
                                 std::span<const double> seconds);

}  // namespace zeroplan::tests
