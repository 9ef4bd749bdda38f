#pragma once
// When the slots of a block program are allocated and freed: from their first to their last use.

#include "models/block_program.h"

namespace zeroplan {

/// Fills in alloc_before and free_after of every step. What comes from outside is alive at first; what goes out, or is
/// saved for backward, stays.
void births_and_deaths(BlockProgram& program);

}  // namespace zeroplan
