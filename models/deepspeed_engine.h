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
  /// Stages 1 and 2 put the flat weights together in host memory, which a card without room for them beside the loaded
  /// model needs (deepspeed.md 4.1; releases before that choice always did).
  bool flattens_on_host = false;
  int ranks_per_node = 0;  // 0: not told; only hierarchical gathers of MiCS ask

  /// Ranks over which parameters, gradients and states are sharded.
  int shard_ranks() const { return config.mics() ? static_cast<int>(config.mics_ranks) : ranks; }
  int replicas() const { return ranks / shard_ranks(); }
  /// Nodes that a group spans for MiCS's hierarchical gathers (mics_utils._generate_mics_config).
  int gather_nodes() const { return ranks_per_node > 0 ? shard_ranks() / ranks_per_node : 0; }
};

/// Throws InputError naming the key for combinations that no rule covers (quantized collectives, ZenFlow,
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

/// Whether DeepSpeed puts the flat weights of stages 1 and 2 together on the host: a card with `room` (context and
/// libraries taken off) is too small for them beside the loaded model.
bool deepspeed_flattens_on_host(const EagerStep& step, const DeepSpeedJob& job, Bytes room);

/// What a rank keeps in host memory (engine-rules.md 2.13), the process itself aside.
std::vector<HostBuffer> deepspeed_host_memory(const EagerStep& step, const DeepSpeedJob& job);

}  // namespace zeroplan
