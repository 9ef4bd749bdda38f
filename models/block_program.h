#pragma once
// The execution order of one block kind, derived from its graph: forward, and backward for each recompute mode, with
// the births and deaths of every activation and gradient. It does not depend on sizes, so one program serves every
// plan.

#include <cstdint>
#include <vector>

#include "models/model_spec.h"
#include "models/plan.h"
#include "models/schedule.h"

namespace zeroplan {

/// A piece of storage inside a block: an activation (in-place results share one) or the gradient of one.
struct ProgramSlot {
  BufferRole role = BufferRole::value;  // value or value_gradient
  int value = -1;                       // the value whose size and name it has
};

struct ProgramOperand {
  int slot = -1;
  Access access = Access::read;
};

/// One kernel. `accumulate`: its result is added to an existing gradient of the input.
struct ProgramStep {
  int graph_op = -1;  // -1: two gradients of one value are added (kGradientSum)
  Pass pass = Pass::forward;
  bool accumulate = false;
  bool weight_gradient = false;  // writes the block's gradient buffer
  std::vector<ProgramOperand> operands;
  std::vector<int> alloc_before;  // slots
  std::vector<int> free_after;
};

/// Slots that come from outside or go out. -1: none.
struct BlockProgram {
  std::vector<ProgramSlot> slots;
  std::vector<ProgramStep> forward, backward;
  int input = -1, output = -1;                    // values; input is freed by this block (forward or backward)
  int output_gradient = -1, input_gradient = -1;  // may be one slot: the residual stream hands its gradient through
  int memory = -1, memory_gradient = -1;          // encoder output: read, and its gradient added to
  std::vector<int> saved;                         // slots alive between forward and backward, input included
};

/// Throws std::logic_error when the graph overwrites in place a value that a backward needs.
BlockProgram build_program(const BlockKind& kind, Recompute recompute);

}  // namespace zeroplan
