#pragma once
// PyTorch FSDP2 (fully_shard, torch 2.11) as an engine: one unit a block, the root unit holds the rest
// (engine-rules.md section 3). Emits what its hooks allocate, copy and communicate onto a tape.

#include <cstdint>
#include <memory>
#include <vector>

#include "models/eager_step.h"
#include "models/engine_host.h"
#include "models/engine_walk.h"
#include "models/plan.h"

namespace zeroplan {

/// What AdamW reads and writes of a share, in passes over it. Fused: gradient, parameter and moments read, all but the
/// gradient written. An operation after the other (torch 2.11, _multi_tensor_adam and _single_tensor_adam): decay 2,
/// lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4.
inline constexpr std::int64_t kFusedAdamPasses = 7, kUnfusedAdamPasses = 20;

struct Fsdp2Options {
  int ranks = 1;
  int shard_ranks = 0;  // HSDP: ranks that share one copy; 0: all
  bool reshard_after_forward = true;
  /// The root unit too: what fully_shard(root, reshard_after_forward=True) does. Left at its default, the root's
  /// parameters stay gathered until its backward.
  bool reshard_root = true;
  DType parameters = DType::fp32;  // as stored; compute is the eager step's type (MixedPrecisionPolicy.param_dtype)
  DType compute = DType::bf16;
  DType reduction = DType::fp32;  // MixedPrecisionPolicy.reduce_dtype
  bool offload = false;           // CPUOffloadPolicy: parameters, gradients and optimizer on the host
  /// Of the update on the GPU (torch 2.11, optim/adam.py): foreach, what torch.optim.AdamW chooses by itself for
  /// sharded parameters on a GPU, holds the square roots of a rank's second moments at once (_multi_tensor_adam:
  /// _foreach_sqrt); loop those of a parameter and two more of its size (_single_tensor_adam: denom). On the host it is
  /// the loop, and no GPU memory.
  AdamForm adam = AdamForm::fused;

  int group() const { return shard_ranks == 0 ? ranks : shard_ranks; }
  bool mixed() const { return parameters != compute; }
};

/// Throws InputError naming the option when ranks are not a multiple of the shard group, a type is not a float type, or
/// AdamW is to group on the host, where torch does not.
void check(const Fsdp2Options& options);

/// The engine keeps references to the step and the tape.
std::unique_ptr<EngineHooks> make_fsdp2_engine(const EagerStep& step, const Fsdp2Options& options, EngineTape& tape);

/// What a rank keeps in host memory, the process itself aside: nothing without offload. Parameters and gradients are
/// pinned one by one.
std::vector<HostBuffer> fsdp2_host_memory(const EagerStep& step, const Fsdp2Options& options);

}  // namespace zeroplan
