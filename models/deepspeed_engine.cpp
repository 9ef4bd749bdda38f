#include "models/deepspeed_engine.h"

#include <fmt/format.h>

#include <algorithm>

#include "models/deepspeed_stage_parts.h"
#include "models/error.h"

namespace zeroplan {
namespace {

void refuse(bool condition, std::string_view key, std::string_view why) {
  if (condition) throw InputError(fmt::format("deepspeed: {}: {}", key, why));
}

constexpr std::string_view kNoRule = "its memory is not modelled: no measured rule covers it";

void check_numbers(const DeepSpeedJob& job) {
  refuse(job.ranks < 1, "ranks", "expected at least 1");
  refuse(job.rank < 0 || job.rank >= job.ranks, "rank", "outside the ranks");
  refuse(job.accumulation < 1, "gradient_accumulation_steps", "expected at least 1");
  refuse(job.config.stage < 0 || job.config.stage > 3, "zero_optimization.stage", "expected 0 to 3");
  refuse(job.config.reduce_bucket < 1, "zero_optimization.reduce_bucket_size", "expected at least 1");
  // A slip of the hand, whose bytes leave 64 bits.
  constexpr std::int64_t kMostElements = 1'000'000'000'000'000;
  constexpr std::string_view kAtMost = "expected at most 1e15";
  refuse(job.config.reduce_bucket > kMostElements, "zero_optimization.reduce_bucket_size", kAtMost);
  refuse(job.config.offload_param.buffer_size > kMostElements, "zero_optimization.offload_param.buffer_size", kAtMost);
  refuse(job.config.hpz_ranks < 1 || job.ranks % job.config.hpz_ranks != 0, "zero_optimization.zero_hpz_partition_size",
         "expected a divisor of the ranks");
}

/// What MiCS itself asserts, or cannot do (DeepSpeed 0.19.2: runtime/zero/mics.py, mics_utils.py).
void check_mics(const DeepSpeedJob& job) {
  const DeepSpeedConfig& config = job.config;
  constexpr std::string_view kKey = "zero_optimization.mics_shard_size";
  refuse(job.ranks % config.mics_ranks != 0, kKey, "expected a divisor of the ranks");
  refuse(config.optimizer_on_host() && job.replicas() > 1, kKey,
         "DeepSpeed stops: MiCS reduces gradients between groups on the GPU only (offload_optimizer)");
  refuse(config.parameters_on_host(), kKey,
         "MiCS gathers shards from where they lie: with offload_param from the host");
  if (!config.mics_hierarchical) return;
  constexpr std::string_view kHierarchical = "zero_optimization.mics_hierarchical_params_gather";
  refuse(job.ranks_per_node < 1, kHierarchical, "expected to be told how many ranks share a node");
  refuse(job.gather_nodes() < 2, kHierarchical, "DeepSpeed asserts that a group spans several nodes");
  refuse(job.shard_ranks() % job.gather_nodes() != 0, kHierarchical, "expected groups of whole nodes");
}

/// ZeRO++. Gradients are quantized between nodes only (stage3.__avg_scatter_grads); MiCS is given neither.
void check_quantized(const DeepSpeedJob& job) {
  const DeepSpeedConfig& config = job.config;
  const bool reduces = config.stage == 3 && config.quantized_gradients && !config.mics();
  constexpr std::string_view kGradients = "zero_optimization.zero_quantized_gradients";
  refuse(reduces && job.ranks_per_node < 1, kGradients, "expected to be told how many ranks share a node");
  refuse(reduces && job.ranks > job.ranks_per_node && job.ranks % job.ranks_per_node != 0, kGradients,
         "expected whole nodes");
  refuse(config.stage == 3 && config.quantized_gradients && !config.reduce_scatter,
         "zero_optimization.zero_quantized_gradients", "DeepSpeed asserts reduce_scatter");
  refuse(config.quantized_weights && !config.mics() && config.parameters_on_host(),
         "zero_optimization.zero_quantized_weights", "with offload_param: its memory is not modelled");
  refuse(config.quantized_nontrainable, "zero_optimization.zero_quantized_nontrainable_weights", kNoRule);
}

/// torch.optim.AdamW of GPU tensors takes foreach by itself (torch 2.11, optim/adam.py). In 16 bits stage 0 puts
/// another optimizer around it than around FusedAdam (FP16_UnfusedOptimizer).
void check_torch_adam(const DeepSpeedConfig& config) {
  constexpr std::string_view kKey = "optimizer.params.torch_adam";
  refuse(config.optimizer_on_host(), kKey, "on the host its temporaries are not modelled");
  refuse(config.stage == 0 && config.precision != DType::fp32, kKey,
         "at stage 0 in 16 bits: its memory is not modelled");
  refuse(!config.torch_foreach, kKey, "with foreach: false or fused: true: its memory is not modelled");
}

}  // namespace

void check(const DeepSpeedJob& job) {
  check_numbers(job);
  const DeepSpeedConfig& config = job.config;
  if (config.mics()) check_mics(job);
  check_quantized(job);
  refuse(config.zenflow, "zero_optimization.zenflow", kNoRule);
  refuse(config.offload_optimizer.super_offload, "offload_optimizer.super_offload", kNoRule);
  refuse(config.offload_optimizer.ratio < 1, "offload_optimizer.ratio", kNoRule);
  refuse(config.fetch_by_all_reduce, "zero_optimization.stage3_use_all_reduce_for_fetch_params", kNoRule);
  refuse(config.sequence_parallel > 1, "sequence_parallel_size", kNoRule);
  refuse(config.autocast, "torch_autocast", kNoRule);
  refuse(config.master_16bit, "master_weights_and_grads", kNoRule);
  refuse(config.states_16bit, "bf16_optimizer_states", kNoRule);
  refuse(!config.flat_adam(), "optimizer.type", "only Adam and AdamW are modelled");
  if (config.torch_adam) check_torch_adam(config);
  refuse(config.stage == 0 && config.grad_accum.has_value() && *config.grad_accum != config.precision,
         "data_types.grad_accum_dtype", "DeepSpeed refuses a type other than the model's at stage 0");
  refuse(config.stage == 1 && config.precision == DType::fp16 && config.grad_accum == DType::fp32,
         "data_types.grad_accum_dtype", kNoRule);
}

std::unique_ptr<EngineHooks> make_deepspeed_engine(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape) {
  check(job);
  if (job.config.stage == 0) return make_stage0(step, job, tape);
  if (job.config.stage == 3) return make_stage3(step, job, tape);
  return uses_bf16_optimizer(job.config) ? make_bf16_optimizer(step, job, tape) : make_stage12(step, job, tape);
}

int deepspeed_steady_steps(const DeepSpeedJob&) { return 3; }

int deepspeed_worst_rank(const EagerStep& step, const DeepSpeedJob& job) {
  if (job.config.stage != 1 && job.config.stage != 2) return 0;
  const ZeroLayout layout = zero_layout(step, job.ranks, job.config.round_robin);
  std::vector<std::int64_t> touching(static_cast<std::size_t>(job.ranks)), largest(touching.size());
  for (std::size_t p = 0; p < step.parameters.size(); ++p) {
    if (layout.start[p] < 0) continue;
    const std::int64_t elements = step.parameters[p].elements;
    const std::int64_t end = layout.start[p] + elements - 1;
    for (std::int64_t owner = layout.start[p] / layout.partition; owner <= end / layout.partition; ++owner) {
      const auto rank = static_cast<std::size_t>(owner);
      touching[rank] += elements;
      largest[rank] = std::max(largest[rank], layout.owned(p, elements, static_cast<int>(owner)));
    }
  }
  std::size_t worst = 0;
  for (std::size_t rank = 1; rank < touching.size(); ++rank) {
    if (std::pair(touching[rank], largest[rank]) > std::pair(touching[worst], largest[worst])) worst = rank;
  }
  return static_cast<int>(worst);
}

bool deepspeed_flattens_on_host(const EagerStep& step, const DeepSpeedJob& job, Bytes room) {
  if (job.config.stage != 1 && job.config.stage != 2) return false;
  std::int64_t loaded = 0, flat = 0;
  for (const EagerParameter& parameter : step.parameters) {
    loaded += parameter.elements;
    if (parameter.trainable) flat += parameter.elements;
  }
  return bytes_of(loaded + flat, job.config.precision) > room;
}

}  // namespace zeroplan
