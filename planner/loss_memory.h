#pragma once
// Blocks as large as the logits that a micro-step holds at once: what a loss that works on chunks would save.

#include <cstdint>

#include "models/eager_step.h"
#include "models/units.h"

namespace zeroplan {

struct LossBlocks {
  Bytes block;               // tokens x vocabulary in fp32
  int fp32 = 0;              // such blocks alive at the moment when they hold most
  int half = 0;              // blocks of half that size alive then (logits in 16 bits, their gradient)
  Bytes held;                // by both kinds
  bool in_backward = false;  // that moment is after the loss is there
};

/// tokens x vocabulary of `type`.
Bytes logits_bytes(std::int64_t tokens, std::int64_t vocabulary, DType type);

/// Counts storages of that size (512 bytes of rounding more) in the step's events. Nothing is counted for a
/// vocabulary of 0.
LossBlocks loss_blocks(const EagerStep& step, TokenShape tokens, std::int64_t vocabulary);

}  // namespace zeroplan
