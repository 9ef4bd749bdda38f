#pragma once
// A DeepSpeed configuration as DeepSpeed 0.19 understands it: defaults filled in, aliases and old names resolved,
// values that it coerces coerced. Reading is lenient: a value that DeepSpeed would refuse counts as not given, because
// saying so is the lint's work (planner/lint.h).

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/config_text.h"
#include "models/units.h"

namespace zeroplan {

enum class OffloadDevice : std::uint8_t { none, cpu, nvme };

/// offload_optimizer or offload_param. Sizes in elements, of one rank.
struct DeepspeedOffload {
  bool given = false;  // the section stands there and is an object
  OffloadDevice device = OffloadDevice::none;
  std::optional<std::string> nvme_path;
  std::int64_t buffer_count = 0;
  std::int64_t buffer_size = 100'000'000;   // offload_param
  std::int64_t max_in_cpu = 1'000'000'000;  // offload_param
  bool pin_memory = true;
  bool pipeline_read = false, pipeline_write = false, fast_init = false, super_offload = false;  // offload_optimizer
  double ratio = 1;                                                                              // offload_optimizer
};

/// Sizes in elements unless said otherwise. What is optional has no default in DeepSpeed or follows from other keys.
struct DeepSpeedConfig {
  std::optional<std::int64_t> train_batch, micro_batch, accumulation;
  int sequence_parallel = 1;

  DType precision = DType::fp32;     // of weights and compute
  bool precision_automatic = false;  // fp16.enabled or bf16.enabled is "auto" and the other does not decide
  bool autocast = false;             // torch_autocast.enabled: weights stay fp32
  bool master_16bit = false;         // fp16_ or bf16_master_weights_and_grads
  bool states_16bit = false;         // bf16_optimizer_states
  bool check_grad_overflow = true;   // bf16
  std::optional<DType> grad_accum;   // none: the type of the weights
  std::optional<DType> communication;
  double gradient_clipping = 1;

  int stage = 0;
  bool contiguous_gradients = true, reduce_scatter = true, overlap_comm = false, round_robin = false;
  std::int64_t reduce_bucket = 500'000'000;
  std::int64_t sub_group = 1'000'000'000;  // of a rank's partition
  std::int64_t prefetch_bucket = 50'000'000, max_live = 1'000'000'000, max_reuse = 1'000'000'000;
  std::int64_t param_persistence = 100'000, model_persistence = INT64_MAX;
  bool gather_on_save = false, allgather_sequential = false, fetch_by_all_reduce = false;
  std::int64_t hpz_ranks = 1;
  std::int64_t mics_ranks = -1;    // mics_shard_size, above 0: MiCS
  bool mics_hierarchical = false;  // mics_hierarchical_params_gather
  bool quantized_weights = false, quantized_gradients = false, quantized_nontrainable = false;
  DeepspeedOffload offload_optimizer, offload_param;
  bool zenflow = false;

  std::int64_t aio_block_bytes = 1 << 20;
  std::int64_t aio_threads = 1;  // intra_op_parallelism

  std::optional<std::string> optimizer;  // type as written
  bool flat_adam() const;                // Adam or AdamW, or none named
  bool torch_adam = false;               // optimizer.params: torch.optim's in place of DeepSpeed's own
  bool torch_foreach = true;             // torch_adam works on all tensors at once: neither foreach: false nor fused

  /// Paths whose value is "auto" and that Hugging Face's Trainer or Accelerate fills in; their fields hold what follows
  /// from `hidden` where it does, else DeepSpeed's default.
  std::vector<std::string> automatic;

  bool shards() const { return stage > 0; }
  /// Weights, gradients and states are sharded inside groups of mics_ranks neighbours, and copied between groups.
  bool mics() const { return stage == 3 && mics_ranks > 0; }
  // What MiCS_Optimizer is not given has no effect under MiCS (DeepSpeed 0.19.2, engine._return_mics_optimizer).
  bool hpz() const { return stage == 3 && hpz_ranks > 1 && !mics(); }
  bool sequential_gathers() const { return allgather_sequential && !mics(); }
  /// Gradients, masters and states of one rank's share are on the host (or on NVMe).
  bool optimizer_on_host() const { return stage > 0 && offload_optimizer.device != OffloadDevice::none; }
  bool parameters_on_host() const { return stage == 3 && offload_param.device != OffloadDevice::none; }
  bool optimizer_on_nvme() const { return stage == 3 && offload_optimizer.device == OffloadDevice::nvme; }
  bool parameters_on_nvme() const { return stage == 3 && offload_param.device == OffloadDevice::nvme; }
};

/// Reads `file`; "auto" bucket sizes follow from `hidden` as the Trainer computes them (hidden^2, 0.9 hidden^2, 10
/// hidden). Never throws on the content.
DeepSpeedConfig read_deepspeed_config(const ConfigText& file, std::optional<std::int64_t> hidden = std::nullopt);

/// A value as pydantic takes it for a bool or an integer: 1, "true", 5e8, "500000000". Nothing when it refuses.
std::optional<bool> coerced_bool(const ConfigNode& node);
std::optional<std::int64_t> coerced_integer(const ConfigNode& node);
std::optional<double> coerced_real(const ConfigNode& node);
/// "fp32", "float16", "torch.bfloat16".
std::optional<DType> dtype_named(std::string_view text);

}  // namespace zeroplan
