#pragma once
// What of a configuration of DeepSpeed or FSDP2 is known without a replay: states that stay on a GPU, activations that
// surely do.

#include "models/machine_spec.h"
#include "models/model_spec.h"
#include "models/plan.h"

namespace zeroplan {

/// `model` has the plan's adapters throughout.

/// Bytes of one rank's GPU that states hold whatever the micro-batch (deepspeed.md, engine-rules.md; gradients left
/// out, FSDP2's compute in 16 bits or not: weights in fp32). Never more than the peak that a replay finds
/// (tests/engine_counts_test.cpp). Plans with all of a kind of state on one tier only.
Bytes engine_states_on_gpu(const ModelSpec& model, const Plan& plan);

/// Bytes of a rank's GPU that foreach AdamW holds in FSDP2's update beyond the fused kernel: the square roots of its
/// share of the second moments, fp32.
Bytes foreach_roots(const ModelSpec& model, const Plan& plan);

/// Bytes that DeepSpeed keeps on a node's drives: master, moments and gradients (16 a trained parameter), weights
/// (deepspeed.md section 7). Tensors too small to be swapped are counted too.
Bytes engine_nvme(const ModelSpec& model, const MachineSpec& machine, const Plan& plan);

/// Bytes of activations alive on a GPU when the last forward of a step ends, beside engine_states_on_gpu(): inputs of
/// checkpointed layers, else what PyTorch's autograd surely saves of each layer (inputs of linears, attention and
/// activation functions). Never more than what a replay has alive then (tests/engine_counts_test.cpp).
Bytes engine_saved_activations(const ModelSpec& model, const Plan& plan);

}  // namespace zeroplan
