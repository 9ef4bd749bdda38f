#pragma once
// What lowerings share: flat layouts, slots reused in turn, what a block is and where its states live.

#include <optional>
#include <vector>

#include "models/block_program.h"
#include "models/lower.h"
#include "models/plan.h"
#include "models/schedule.h"

namespace zeroplan {

/// Buffers used in turn: whoever takes the next one waits for the op that used it last.
struct Ring {
  std::vector<BufferId> buffers;
  std::vector<OpRef> last_use;  // oldest first: last_use[0] belongs to the buffer that take() hands out
  std::size_t next = 0;

  struct Slot {
    BufferId buffer;
    OpRef free_after;
  };
  Slot take() {
    Slot slot{buffers[next], last_use.front()};
    next = (next + 1) % buffers.size();
    last_use.erase(last_use.begin());
    return slot;
  }
  /// Must follow each take(), in the same order.
  void give_back(OpRef last) { last_use.push_back(last); }
};

/// One kernel's work from its program step and the sizes at hand.
struct WorkSizes {
  TokenShape tokens;
  DType type = DType::bf16;
  DType gradient_type = DType::bf16;
  bool accumulate_gradients = false;
};
Compute work_of(const BlockKind& kind, int kind_index, const BlockProgram& program, const ProgramStep& step,
                const WorkSizes& sizes);

/// Bytes of a slot for one micro-step.
Bytes slot_bytes(const BlockKind& kind, const ProgramSlot& slot, const WorkSizes& sizes);

}  // namespace zeroplan
