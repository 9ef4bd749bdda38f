#pragma once
// One training micro-step of a Hugging Face model as PyTorch runs it eagerly (transformers 5.17, torch 2.11): every
// allocation and free of an activation or gradient, in order, with the kernels between them and the module hooks of
// both directions. Engines (DeepSpeed, FSDP2) add what they do at the hooks; the allocator model replays the result.
// It is bookkeeping, not estimation: checked against ../shared/data/activations op by op.

#include <cstdint>
#include <string>
#include <vector>

#include "models/model_spec.h"
#include "models/schedule.h"
#include "models/units.h"

namespace zeroplan {

enum class EagerAttention : std::uint8_t { sdpa, eager };

/// Whose modules run. llm-foundry's MPT has fused attention and cross-entropy and, with amp_bf16, holds its output
/// until the next step; `llm_foundry_early` is that of before May 2023: LayerNorm in fp32, PyTorch's cross-entropy.
/// Megatron's GPT is taken for transformers' GPT-2 with its own loss, in which one fp32 buffer is logits, softmax and
/// gradient.
enum class EagerCode : std::uint8_t { transformers, llm_foundry, llm_foundry_early, megatron };

struct EagerOptions {
  TokenShape tokens;           // micro-batch x sequence
  bool checkpointing = false;  // gradient checkpointing of every block
  bool reentrant = false;      // of that checkpointing
  /// Checkpointed are layers checkpoint_every, 2 checkpoint_every, ... counted from 1 (torchtitan's
  /// selective_ac_option).
  int checkpoint_every = 1;
  /// A checkpointed layer keeps every second matrix product and its attention (torchtitan's selective_ac_option "op"):
  /// recomputing starts from them.
  bool keeps_operators = false;
  /// The inputs of checkpointed layers wait in host memory (DeepSpeed's cpu_checkpointing).
  bool offloads_checkpoints = false;
  EagerCode code = EagerCode::transformers;
  EagerAttention attention = EagerAttention::sdpa;
  DType type = DType::bf16;    // of parameters and compute
  std::int64_t lora_rank = 0;  // adapters on all linear layers of dense causal models (peft); 0: none
  /// As it runs under DeepSpeed's stage 3, which puts a function of its own in F.linear's place
  /// (runtime/zero/linear.py).
  bool zero3 = false;
  bool keeps_output = false;  // the caller holds the model's output (the logits) until backward has ended
  /// As PyTorch's CPU kernels have it, on which the rows of data/activations were recorded: LayerNorm's statistics in
  /// the input's type. Those of CUDA are fp32 (aten/src/ATen/native/cuda/layer_norm_kernel.cu).
  bool cpu_statistics = false;
};

struct EagerParameter {
  std::string name;  // Hugging Face name
  std::vector<std::int64_t> shape;
  std::int64_t elements = 0;
  bool trainable = true;
};

struct EagerModule {
  std::string name;             // "model.layers.3.self_attn.q_proj"; "" for the root
  std::string type;             // "Linear"
  std::vector<int> parameters;  // its own, not its children's: indices into EagerStep::parameters
  int layer = -1;               // the block it belongs to; -1: outside the blocks
  bool is_block = false;        // it is a block itself: the unit that FSDP wraps and checkpointing recomputes
};

enum class EagerEventKind : std::uint8_t {
  alloc,        // storage `id` of `bytes` is born
  free,         // storage `id` dies
  kernel,       // work runs: `id` indexes EagerStep::works
  gradient,     // the gradient of parameter `id` is complete, in storage `storage`; the engine owns it from here:
                // no free event for that storage follows
  forward_pre,  // module `id`
  forward_post,
  backward_pre,
  backward_post,
  hold,         // a recomputed region keeps parameter `id` as it is gathered now (hold number `storage`), whatever the
                // parameter does meanwhile (only with EagerOptions::zero3)
  let_go,       // hold `storage` of parameter `id` ends
  forward_end,  // the loss is there and the output dropped (unless keeps_output)
  backward_end,
};

struct EagerEvent {
  EagerEventKind kind = EagerEventKind::alloc;
  std::int32_t id = 0;
  std::int32_t storage = -1;  // of gradient; number of a hold
  std::int64_t bytes = 0;     // alloc only
  bool adds_bias = false;     // kernel: a product that adds its bias itself (addmm), which cuBLASLt runs
};

struct EagerStep {
  std::vector<EagerParameter> parameters;  // in the order of named_parameters()
  std::vector<EagerModule> modules;        // in the order of named_modules(); 0 is the root
  std::vector<Compute> works;
  std::vector<EagerEvent> events;
};

/// What transformers runs for the model when nobody asks: SDPA, but for families that have none.
EagerAttention usual_attention(const ModelSpec& model);
/// Whether the softmax of this family's eager attention runs in fp32 when the model is in 16 bits.
bool eager_softmax_is_fp32(const ModelSpec& model);

/// Throws InputError naming the family or the option when no eager graph is known for it; never approximates silently.
EagerStep eager_step(const ModelSpec& model, const EagerOptions& options);

/// What data/activations measures: bytes above parameters and inputs, storages rounded to 512.
struct EagerPeaks {
  Bytes saved;  // alive after forward, the loss included
  Bytes forward;
  Bytes backward;  // each gradient is dropped as soon as it is complete
};
EagerPeaks eager_peaks(const EagerStep& step);

}  // namespace zeroplan
