#pragma once
// PyTorch FSDP2 (fully_shard, torch 2.11) as an engine: one unit a block, the root unit holds the rest
// (engine-rules.md section 3). Emits what its hooks allocate, copy and communicate onto a tape.

#include <cstdint>
#include <memory>
#include <vector>

#include "models/eager_step.h"
#include "models/engine_host.h"
#include "models/engine_walk.h"

namespace zeroplan {

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
  /// torch.optim.AdamW without fused=True: its grouped form holds the square roots of a rank's second moments at once
  /// (torch 2.11, optim/adam.py, _multi_tensor_adam: _foreach_sqrt).
  bool foreach_adam = false;

  int group() const { return shard_ranks == 0 ? ranks : shard_ranks; }
  bool mixed() const { return parameters != compute; }
};

/// Throws InputError naming the option when ranks are not a multiple of the shard group, a type is not a float type, or
/// foreach_adam is asked for on the host, where torch does not group.
void check(const Fsdp2Options& options);

/// The engine keeps references to the step and the tape.
std::unique_ptr<EngineHooks> make_fsdp2_engine(const EagerStep& step, const Fsdp2Options& options, EngineTape& tape);

/// What a rank keeps in host memory, the process itself aside: nothing without offload. Parameters and gradients are
/// pinned one by one.
std::vector<HostBuffer> fsdp2_host_memory(const EagerStep& step, const Fsdp2Options& options);

}  // namespace zeroplan
