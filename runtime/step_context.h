#pragma once
// What changes from step to step, shared by all streams of one rank while a step runs.

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/adam.h"

namespace zeroplan {

/// Tokens of one rank and step: [accumulation, micro_batch, seq_len] each.
struct StepInput {
  std::span<const std::int32_t> inputs, targets;
  AdamSettings adam;
  std::int64_t update = 1;  // Adam's step number, from 1
  double loss_scale = 1;    // what losses are multiplied with before backward (fp16)
};

/// Written by one stream each, read when the step is over.
struct StepOutput {
  std::vector<double> losses;  // by micro-step: sum over this rank's tokens, nats
  double gradient_norm = 0;    // of the mean loss, before clipping; 0 without a global norm
  bool skipped = false;        // gradients were not finite: nothing was updated
};

}  // namespace zeroplan
