#pragma once
// The operands of a kernel, told apart by what their buffers hold. The order is block_program's: gradients and values
// as the program step lists them, then token ids, weights (own, tied), gradients of weights (own, tied).

#include <optional>
#include <vector>

#include "models/schedule.h"

namespace zeroplan {

/// Where a part of a value's gradient goes: added to `base` if there is one, which may be `out` itself.
struct GradientTarget {
  BufferId out;
  std::optional<BufferId> base;
};
struct WeightGradientTarget {
  BufferId buffer;
  bool adds = false;
};

struct KernelOperands {
  std::vector<BufferId> values;         // activations, in order
  std::optional<BufferId> gradient;     // of the op's output
  std::vector<GradientTarget> targets;  // of its inputs
  std::optional<BufferId> token_ids, logits, scalars;
  std::vector<BufferId> weights;  // own block's first, then the input embedding's
  std::vector<WeightGradientTarget> weight_gradients;
};

/// `backward`: the first activation gradient is the output's. Throws std::logic_error on an operand that no kernel has.
KernelOperands kernel_operands(const Schedule& schedule, const Op& op, bool backward);

}  // namespace zeroplan
