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
  refuse(job.config.hpz_ranks < 1 || job.ranks % job.config.hpz_ranks != 0, "zero_optimization.zero_hpz_partition_size",
         "expected a divisor of the ranks");
}

}  // namespace

void check(const DeepSpeedJob& job) {
  check_numbers(job);
  const DeepSpeedConfig& config = job.config;
  refuse(config.mics_ranks > 0, "zero_optimization.mics_shard_size", kNoRule);
  refuse(config.quantized_weights, "zero_optimization.zero_quantized_weights", kNoRule);
  refuse(config.quantized_gradients, "zero_optimization.zero_quantized_gradients", kNoRule);
  refuse(config.zenflow, "zero_optimization.zenflow", kNoRule);
  refuse(config.offload_optimizer.super_offload, "offload_optimizer.super_offload", kNoRule);
  refuse(config.offload_optimizer.ratio < 1, "offload_optimizer.ratio", kNoRule);
  refuse(config.fetch_by_all_reduce, "zero_optimization.stage3_use_all_reduce_for_fetch_params", kNoRule);
  refuse(config.sequence_parallel > 1, "sequence_parallel_size", kNoRule);
  refuse(config.autocast, "torch_autocast", kNoRule);
  refuse(config.master_16bit, "master_weights_and_grads", kNoRule);
  refuse(config.states_16bit, "bf16_optimizer_states", kNoRule);
  refuse(!config.flat_adam(), "optimizer.type", "only Adam and AdamW of DeepSpeed's own are modelled");
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

}  // namespace zeroplan
