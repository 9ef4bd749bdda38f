#pragma once
// DeepSpeed 0.19.8 as an engine: what its ZeRO optimizers allocate, copy and communicate, emitted onto a tape at the
// moments at which the real ones do (engine-rules.md section 2, deepspeed.md).

#include <cstdint>
#include <memory>
#include <vector>

#include "models/deepspeed_config.h"
#include "models/eager_step.h"
#include "models/engine_host.h"
#include "models/engine_walk.h"

namespace zeroplan {

/// A DeepSpeed configuration as it is run.
struct DeepSpeedJob {
  DeepSpeedConfig config;
  int ranks = 1;
  int rank = 0;  // whose memory: at stages 1 and 2 ranks own different slices
  int accumulation = 1;
  bool zero_init = false;  // the model is built under deepspeed.zero.Init (stage 3)
};

/// Throws InputError naming the key for combinations that no rule covers (MiCS, quantized collectives, ZenFlow,
/// sequence parallelism, autocast, ...), and where DeepSpeed itself would refuse. Never approximates silently.
void check(const DeepSpeedJob& job);

/// The engine keeps references to the step and the tape. Throws what check() throws.
std::unique_ptr<EngineHooks> make_deepspeed_engine(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape);

/// Steps after which the memory of a step repeats: the first makes the moments and records stage 3's trace, the second
/// is the first to use them, and what it leaves reserved is what the third finds.
int deepspeed_steady_steps(const DeepSpeedJob& job);

/// The rank whose slices need most, at stages 1 and 2: the largest sum of parameters that touch its partition, then the
/// largest slice, then the lowest rank. 0 at the other stages, where only padding differs.
int deepspeed_worst_rank(const EagerStep& step, const DeepSpeedJob& job);

/// What a rank keeps in host memory (engine-rules.md 2.13), the process itself aside.
std::vector<HostBuffer> deepspeed_host_memory(const EagerStep& step, const DeepSpeedJob& job);

}  // namespace zeroplan
