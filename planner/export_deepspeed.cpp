// deepspeed.json for DeepSpeed 0.19: only keys it accepts, each in its section, none of a stage that ignores it.

#include <nlohmann/json.hpp>

#include "planner/export_deepspeed_choices.h"
#include "planner/export_parts.h"

namespace zeroplan {

namespace {

using Json = nlohmann::ordered_json;

std::string_view device_of(Tier tier) { return tier == Tier::nvme ? "nvme" : tier == Tier::host ? "cpu" : "none"; }

/// Hugging Face's Trainer compares these with its own arguments and refuses to start when they differ: a left-out
/// learning rate would silently be DeepSpeed's 1e-3. The values are the Trainer's defaults.
Json optimizer_json() {
  return {{"type", "AdamW"}, {"params", {{"lr", 5e-5}, {"betas", {0.9, 0.999}}, {"eps", 1e-8}, {"weight_decay", 0.0}}}};
}

Json offload_optimizer_json(const DeepspeedChoices& choices) {
  Json j{{"device", device_of(choices.optimizer)}, {"pin_memory", true}};
  if (choices.optimizer == Tier::nvme) {
    j["nvme_path"] = kNvmePath;
    j["buffer_count"] = kOptimizerSwapBuffers;
    j["pipeline_read"] = true;
    j["pipeline_write"] = true;
  }
  if (choices.optimizer_ratio < 1) j["ratio"] = choices.optimizer_ratio;
  return j;
}

Json offload_parameters_json(const DeepspeedChoices& choices) {
  Json j{{"device", device_of(choices.parameters)}, {"pin_memory", true}};
  if (choices.parameters == Tier::nvme) {
    j["nvme_path"] = kNvmePath;
    j["buffer_count"] = choices.swap_buffers;
    j["buffer_size"] = choices.swap_buffer;
    j["max_in_cpu"] = choices.max_in_cpu;
  }
  return j;
}

Json zero_json(const DeepspeedChoices& choices) {
  Json j{{"stage", choices.stage}};
  if (choices.stage == 0) return j;
  j["contiguous_gradients"] = true;
  j["overlap_comm"] = true;
  j["reduce_scatter"] = true;
  j["reduce_bucket_size"] = choices.reduce_bucket;
  if (choices.optimizer != Tier::hbm) j["offload_optimizer"] = offload_optimizer_json(choices);
  if (choices.stage < 3) return j;
  if (choices.parameters != Tier::hbm) j["offload_param"] = offload_parameters_json(choices);
  j["sub_group_size"] = choices.sub_group;
  j["stage3_prefetch_bucket_size"] = choices.prefetch_bucket;
  j["stage3_max_live_parameters"] = choices.live_parameters;
  j["stage3_max_reuse_distance"] = choices.reuse_distance;
  j["stage3_param_persistence_threshold"] = choices.persistence_threshold;
  j["stage3_model_persistence_threshold"] = choices.persistent_parameters;
  if (choices.hpz_ranks > 1) j["zero_hpz_partition_size"] = choices.hpz_ranks;
  return j;
}

/// DeepSpeed's own defaults, written out as the place to tune.
Json aio_json() {
  return {{"block_size", 1048576},
          {"queue_depth", 8},
          {"intra_op_parallelism", 1},
          {"single_submit", false},
          {"overlap_events", true}};
}

Json config_json(const Plan& plan, const DeepspeedChoices& choices) {
  Json j;
  j["train_batch_size"] = plan.global_batch();
  j["train_micro_batch_size_per_gpu"] = plan.micro_batch;
  j["gradient_accumulation_steps"] = plan.accumulation;
  j["gradient_clipping"] = plan.clip_norm;
  if (plan.precision.weights == DType::bf16) j["bf16"] = {{"enabled", true}};
  if (plan.precision.weights == DType::fp16) j["fp16"] = {{"enabled", true}, {"loss_scale", 0}};  // 0: dynamic
  if (choices.fp32_accumulation) j["data_types"] = {{"grad_accum_dtype", "fp32"}};
  j["optimizer"] = optimizer_json();
  j["zero_optimization"] = zero_json(choices);
  if (choices.optimizer == Tier::nvme || choices.parameters == Tier::nvme) j["aio"] = aio_json();
  return j;
}

}  // namespace

DeepspeedExport export_deepspeed(const ExportSubject& subject) {
  DeepspeedExport exported;
  const DeepspeedChoices choices = choose_deepspeed(subject, exported.notes);
  exported.json = config_json(subject.plan, choices).dump(2) + "\n";
  exported.stage = choices.stage;
  exported.on_host = choices.optimizer != Tier::hbm;
  exported.nvme = choices.optimizer == Tier::nvme || choices.parameters == Tier::nvme;
  if (exported.on_host || choices.parameters != Tier::hbm) {
    const HostNeed host = deepspeed_host_need(subject, choices);
    const Bytes capacity = subject.machine.usable_dram() * (1 - subject.margin);
    exported.exact_pinning = host.exact <= capacity && host.rounded > capacity;
  }
  return exported;
}

}  // namespace zeroplan
