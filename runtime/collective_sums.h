#pragma once
// The one place where collectives add: every communicator forms its sums here, so their bits agree.

#include <cstdint>
#include <span>

#include "models/units.h"

namespace zeroplan {

/// The instructions that sums are made with; the bits are the same.
enum class SumPath { best, portable };

/// Every target[i] = sources[0][i] + sources[1][i] + ... for i in [0, count), added in that order in fp32 and rounded
/// to `type` once; a NaN becomes the quiet NaN of the type without a sign. A target may be one of the sources (not
/// overlap one with a shift). At least one source. Throws std::logic_error for integer types.
void sum_in_order(std::span<const void* const> sources, std::span<void* const> targets, std::int64_t count, DType type,
                  SumPath path = SumPath::best);

}  // namespace zeroplan
