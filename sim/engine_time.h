#pragma once
// Step time of a training run under DeepSpeed or PyTorch FSDP: kernels of eager or compiled PyTorch, collectives that
// hide behind them and slow them, the host that launches both, the optimizer, offload. Mechanisms and figures:
// docs/step-time.md; the numbers: models/catalog/fits/engine_time.json.

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "models/assumption.h"
#include "models/machine_spec.h"
#include "models/model_spec.h"
#include "models/units.h"
#include "sim/engine_time_fit.h"

namespace zeroplan {

enum class TimedEngine : std::uint8_t { deepspeed, fsdp1, fsdp2 };
std::string_view to_string(TimedEngine value);

/// Whose modules run: they decide how many kernels a layer takes and what they move.
enum class KernelStack : std::uint8_t {
  hugging_face,     // transformers, eager
  torchtitan,       // plain PyTorch modules, eager
  compiled_blocks,  // torch.compile of every block
  compiled_graph,   // one graph of the whole step
  composer,         // llm-foundry's MPT: low-precision LayerNorm, fused qkv, GELU in one kernel
  composer_fp32,    // the same before May 2023: LayerNorm in fp32, attention that unpads
  megatron,         // Megatron's GPT under DeepSpeed
};
std::string_view to_string(KernelStack value);

enum class AttentionSoftware : std::uint8_t {
  sdpa,          // FlashAttention 2, PyTorch's SDPA
  triton_flash,  // the Triton kernel of 2023
  early_flash,   // HazyResearch's first one
  unfused,       // scores in memory, fused softmax; also what GPUs before Ampere run
  eager,         // transformers' own: a kernel for each operation on the scores
};
std::string_view to_string(AttentionSoftware value);

/// What of a layer's forward runs again in backward: its linears, its attention, the rest.
enum class TimedRecompute : std::uint8_t {
  none,
  full,          // 1, 1, 1
  selective,     // every second matmul is kept, attention is kept: 1/2, 0, 1
  second_layer,  // every second layer in full: 1/2, 1/2, 1/2
};

/// torch_foreach, torch_loop: torch.optim.AdamW an operation after the other, over all tensors or tensor by tensor.
enum class OptimizerSoftware : std::uint8_t { torch_fused, torch_foreach, torch_loop, decoupled, deepspeed };

enum class OffloadedOptimizer : std::uint8_t {
  none,
  host,    // states and update on the host
  nvme,    // states on the node's drives, update on the host (DeepSpeed at stage 3)
  states,  // states on the host, update on the GPU (DeepCompile)
};

/// One rank's training run. Defaults are what Hugging Face Trainer does.
struct EngineTimeRun {
  TimedEngine engine = TimedEngine::deepspeed;
  /// ZeRO stage. FSDP: 3 reshards after forward, 2 keeps gathered weights (SHARD_GRAD_OP), 0 is DDP.
  int stage = 3;
  TokenShape tokens;                 // of a micro-step on one data-parallel rank
  std::int64_t accumulation = 1;     // micro-steps
  std::int64_t remainder_batch = 0;  // sequences of one more, smaller micro-step; 0: none
  int ranks = 0;                     // data-parallel; 0: all of the machine over tensor_parallel
  int shard_ranks = 0;               // HSDP, MiCS: ranks that share one copy; 0: all
  bool hierarchical_gather = false;  // MiCS: between nodes first, then inside them
  int tensor_parallel = 1;           // with sequence parallelism, inside a node
  bool async_tensor_parallel = false;
  TimedRecompute recompute = TimedRecompute::none;
  /// torch >= 2.1 without reentrant checkpoints: recompute stops before the block's last linear.
  bool early_stop = true;
  DType type = DType::bf16;       // of compute: bf16, fp16 or fp32
  DType reduction = DType::bf16;  // of gradients on the wire
  bool fp8 = false;               // dynamic tensorwise fp8 in all linears of the layers, fp8 all-gather
  bool fp32_gradients = false;    // weight gradients leave matmuls in fp32, or are summed in fp32
  /// ZeRO++, DeepSpeed at stage 3. hpZ: ranks that keep a second copy of the weights between them, for all gathers but
  /// those of a step's first forward; 0, 1: none.
  int hpz_ranks = 0;
  bool quantized_weights = false;    // qwZ: gathers carry 8-bit values
  bool quantized_gradients = false;  // qgZ: gradients cross as 4-bit values; on one node as ever
  /// DeepSpeed's stage 3: stage3_max_reuse_distance and stage3_param_persistence_threshold, in elements.
  std::int64_t max_reuse = 1'000'000'000, persistence = 100'000;
  KernelStack stack = KernelStack::hugging_face;
  AttentionSoftware attention = AttentionSoftware::sdpa;
  bool chunked_loss = false;  // cross-entropy over chunks of tokens, logits in 16 bits
  OptimizerSoftware optimizer = OptimizerSoftware::deepspeed;
  OffloadedOptimizer offload_optimizer = OffloadedOptimizer::none;
  bool offload_parameters = false;
  /// With offload_parameters: they lie on the node's drives, and layers are read ahead beside the kernels.
  bool parameters_on_nvme = false;
  /// States on NVMe: the next sub-group is read, the one before written, while the host updates one.
  bool pipelined_read = false, pipelined_write = false;
  bool offload_activations = false;  // checkpoints of full recompute to the host
  bool pinned = true;                // host buffers of the offloaded optimizer
  bool pinned_parameters = true;     // of offloaded parameters
  bool communicates = true;          // false: a fake process group, as in data/groundtruth
  /// Software of the run: "torch 2.1", or empty for today's. Chooses the matmul efficiency.
  std::string_view era;
  /// One's own measurement of it: 0.88 x sustained rate / dense peak, or from a step.
  std::optional<double> matmul_efficiency;
  /// Parameters a second that a node's CPU Adam updates; without, from the host model.
  std::optional<double> host_adam;
  /// "What if": the time of every collective is multiplied by it.
  double collective_scale = 1;
};

enum class StepLimit : std::uint8_t { compute, communication, host, optimizer, offload };
std::string_view to_string(StepLimit value);

/// All parts add up to `step`.
struct EngineTime {
  Seconds step;
  Seconds compute;                // kernels of forward, backward, recompute and loss
  Seconds exposed_communication;  // collectives not hidden, and what hidden ones cost the kernels
  Seconds host;                   // waiting for launches and hooks beyond both; fixed work of a step
  Seconds optimizer;              // on the GPU
  Seconds offload;                // CPU Adam, copies that nothing hides
  Seconds host_update;            // of `offload`: Adam on the host's cores
  Seconds overhead;               // of `host`: fixed work of a step outside the engine's own timers
  /// Of `compute`: matmuls, attention, streaming kernels and copies, loss head; recompute included.
  Seconds matmul, attention, streaming, head;
  Seconds forward, backward;  // per step, all micro-steps; the rest is the update
  StepLimit limit = StepLimit::compute;
  std::vector<Assumption> assumptions;
};

/// Steady-state step of one rank; all ranks are taken to be alike. Experts (grouped products, even load), encoders and
/// NVMe go by mechanism alone: no measured row has them, and assumptions say so. Not modelled, refused with InputError:
/// pipeline and context parallelism (no field for them), experts under other stacks than transformers or under fp8,
/// GPUs that cannot do the type, a tensor-parallel group larger than a node, more ranks than a whole number of nodes.
/// Card nearly full: allocator retries are not in it (docs/step-time.md). Takes microseconds.
EngineTime predict_engine_time(const ModelSpec& model, const MachineSpec& machine, const EngineTimeRun& run,
                               const EngineTimeFit& fit = builtin_engine_time_fit());

/// The machine with the network that DeepSpeed's collectives get of it: a share of the NICs' sum for each GPU
/// generation, on InfiniBand; on other networks as much of what the collective model gives them. As it is on one node.
MachineSpec deepspeed_network(const MachineSpec& machine, const EngineTimeFit& fit = builtin_engine_time_fit());

/// The matmul efficiency that a GPU gets, and where it comes from.
struct ChosenEfficiency {
  double value = 0;  // of the dense 16-bit peak
  std::string_view source;
  bool from_rule = false;  // 0.88 x sustained rate
};
ChosenEfficiency matmul_efficiency(const GpuSpec& gpu, std::string_view era, const EngineTimeFit& fit);

}  // namespace zeroplan
