#pragma once
// Eager steps written by hand for the engine tests: the chains of LayerNorm and Linear that deepspeed.md section 12
// measured, with gradients but without activations.

#include <string>
#include <vector>

#include "models/deepspeed_engine.h"
#include "models/eager_step.h"
#include "models/engine_tape.h"

namespace zeroplan::test {

/// `blocks` of [LayerNorm(width), Linear width -> 4 width, Linear 4 width -> width], then Linear width -> classes;
/// biases everywhere. Each block is a container module that is hooked, too.
struct ChainModel {
  int blocks = 8;
  std::int64_t width = 512, classes = 101;
  int element_size = 2;    // of gradients
  bool bias_first = true;  // which of a Linear's gradients is complete first
  bool checkpointed = false;
};
EagerStep chain_step(const ChainModel& model);

std::int64_t parameters_of(const EagerStep& step);

/// The configuration that section 12 measured: bf16, a bucket of 3e6 elements.
DeepSpeedJob job_of(int stage, int ranks);
/// Recorded up to the steady step, without token ids and cuBLAS's workspaces.
EngineTape tape_of(const EagerStep& step, const DeepSpeedJob& job);

/// Bytes alive on the tape, without any allocator: after initialize, and per step as a measuring script would see them
/// (forward and backward: the largest of the micro-steps; step: of the boundary).
struct PlainStep {
  std::int64_t start = 0, forward = 0, backward = 0, step = 0, after = 0;
  std::int64_t end_of_forward = 0;
};
struct PlainRun {
  std::int64_t init_peak = 0, after_init = 0;
  std::vector<PlainStep> steps;
};
PlainRun count_plainly(const EngineTape& tape);

/// Collectives of the last step, in order.
std::vector<Collective> collectives_of_last_step(const EngineTape& tape);

}  // namespace zeroplan::test
