// What a ZeRO stage reads, and what contradicts it.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

std::string in_zero(std::string_view key) { return fmt::format("zero_optimization.{}", key); }

/// The value that a key has when it is left out.
bool at_default(const Linter& lint, const ConfigNode& node, const DeepspeedKey& key) {
  if (node.kind == ConfigNode::Kind::null) return true;
  if (key.default_text.empty()) return false;
  if (key.default_text == lint.file.excerpt(node)) return true;
  const auto number = node.integer();
  return number && std::to_string(*number) == key.default_text;
}

std::string stages_text(const DeepspeedKey& key) {
  return key.first_stage == key.last_stage ? fmt::format("stage {}", key.first_stage)
                                           : fmt::format("stages {} to {}", key.first_stage, key.last_stage);
}

/// Accelerate and the Trainer ask for it at any stage when weights are split by tensor parallelism: without it
/// get_state_dict() raises a ValueError (huggingface/accelerate, Accelerator.get_state_dict).
bool gathers_tensor_parallel(const Linter& lint, std::string_view key) {
  if (!key.ends_with("gather_16bit_weights_on_model_save")) return false;
  const ConfigNode* tensor = lint.value("tensor_parallel.autotp_size");
  return tensor != nullptr && coerced_integer(*tensor).value_or(1) > 1;
}

/// Keys of other stages. Offload sections have rules of their own.
void lint_dead_keys(Linter& lint) {
  const ConfigNode* zero = lint.value("zero_optimization");
  if (zero == nullptr || !zero->is_object()) return;
  const int stage = lint.config.stage;
  std::vector<std::string> at_zero;
  for (const ConfigMember& member : zero->members) {
    const std::string path = in_zero(member.key);
    const DeepspeedKey* key = lint.keys.find(path);
    if (key == nullptr || key->unread || member.repeated || member.key.starts_with("offload_")) continue;
    if (stage >= key->first_stage && stage <= key->last_stage) continue;
    if (member.key.starts_with("cpu_offload") || member.key == "zenflow") continue;
    if (gathers_tensor_parallel(lint, member.key)) continue;
    const bool plain = at_default(lint, member.value, *key) || member.value.is_auto();
    if (stage == 0) {
      at_zero.push_back(member.key);
    } else if (member.key == "round_robin_gradients") {
      if (!lint.is_true(path)) continue;
      Finding& finding =
          lint.report("round-robin-stage-3", path,
                      "round_robin_gradients has no effect at stage 3: it orders the flat layout of stages 1 "
                      "and 2.",
                      "remove it");
      lint.remove(finding, path);
    } else if (key->first_stage == 3) {
      Finding& finding =
          lint.report(plain ? "dead-below-3" : "stage3-key-below-3", path,
                      fmt::format("{} is read at stage 3 only: accepted, no effect at stage {}.", member.key, stage),
                      plain ? "" : "remove it, or use stage 3");
      if (!plain) lint.remove(finding, path);
    } else {
      lint.report("dead-at-stage", path,
                  fmt::format("{} is read at {}: no effect at stage {}.", member.key, stages_text(*key), stage));
    }
  }
  if (at_zero.empty()) return;
  lint.report("zero-keys-at-stage-0", "zero_optimization",
              fmt::format("nothing is sharded at stage 0: {} {} no effect.", fmt::join(at_zero, ", "),
                          at_zero.size() == 1 ? "has" : "have"));
}

void lint_stage_missing(Linter& lint) {
  const ConfigNode* zero = lint.value("zero_optimization");
  if (zero == nullptr || !zero->is_object() || zero->members.empty() || zero->find("stage") != nullptr) return;
  lint.report("stage-missing", "zero_optimization",
              "zero_optimization has no stage: the default is 0, nothing is sharded and the section does nothing.",
              "\"stage\": 2 (or 1, 3)");
}

void lint_reduction(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  const ConfigNode* factor = lint.value("gradient_predivide_factor");
  const bool divides = factor != nullptr && factor->is_number() && factor->number != 1;
  const bool prescales = lint.is_true("prescale_gradients");
  if (config.stage >= 2 && config.reduce_scatter && (divides || prescales)) {
    const std::string path = prescales ? "prescale_gradients" : "gradient_predivide_factor";
    Finding& finding = lint.report(
        "prescale-reduce-scatter", path,
        fmt::format("{} with reduce_scatter at stage {}: DeepSpeed stops with an AssertionError.", path, config.stage),
        "remove it");
    lint.remove(finding, path);
  }
  const ConfigNode* op = lint.value("gradient_allreduce_op");
  const bool deep = lint.is_true("compile.deepcompile");
  if (op != nullptr && op->text == "sum" && (config.stage == 3 || config.zenflow || deep)) {
    Finding& finding = lint.report(
        "allreduce-sum", "gradient_allreduce_op",
        fmt::format("gradient_allreduce_op sum with {}: ValueError at start.", config.stage == 3 ? "stage 3"
                                                                               : config.zenflow  ? "ZenFlow"
                                                                                                 : "DeepCompile"),
        "\"gradient_allreduce_op\": \"mean\"");
    lint.replace(finding, *op, "\"mean\"");
  }
  const ConfigNode* gather = lint.value(in_zero("allgather_bucket_size"));
  const auto bucket = gather == nullptr ? std::nullopt : coerced_integer(*gather);
  if (bucket && *bucket % 2 != 0 && (config.stage == 1 || config.stage == 2)) {
    Finding& finding = lint.report("allgather-bucket-odd", in_zero("allgather_bucket_size"),
                                   fmt::format("{} is odd: AssertionError when the optimizer of stages 1 and 2 starts, "
                                               "although the value has no other effect.",
                                               *bucket),
                                   fmt::format("\"allgather_bucket_size\": {}", *bucket - *bucket % 2));
    if (*bucket > 0) lint.replace(finding, *gather, std::to_string(*bucket - 1));
  }
  if (lint.is_false("managed_gradient_accumulation") && config.stage <= 1 && config.overlap_comm) {
    lint.report(
        "managed-accumulation-overlap", "managed_gradient_accumulation",
        fmt::format("managed_gradient_accumulation false with overlap_comm is refused at stage {}.", config.stage),
        "\"overlap_comm\": false");
  }
  if (config.shards() && config.stage < 3 && lint.is_false(in_zero("contiguous_gradients")) &&
      config.optimizer_on_host()) {
    lint.report("contiguous-forced", in_zero("contiguous_gradients"),
                "forced to true because the optimizer is offloaded: the bucket buffers are there all the same.");
  }
  if (config.stage == 3 && !config.reduce_scatter) {
    const ConfigNode* type = lint.value("optimizer.type");
    const bool muon = type != nullptr && (type->text == "Muon" || same_but_case(type->text, "Muon"));
    if (!muon && !config.quantized_gradients) {
      Finding& finding = lint.report("stage3-all-reduce", in_zero("reduce_scatter"),
                                     "at stage 3 gradients are then all-reduced and sliced: twice the traffic of a "
                                     "reduce-scatter.",
                                     "\"reduce_scatter\": true");
      lint.replace(finding, *lint.value(in_zero("reduce_scatter")), "true");
    }
  }
}

/// The name under which a stage-3 key stands in the file.
std::string stage3_name(const Linter& lint, std::string_view key) {
  const std::string full = fmt::format("zero_optimization.stage3_{}", key);
  return lint.has(full) ? full : in_zero(key);
}

void lint_gathers(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  if (config.stage != 3) return;
  const std::string prefetch = stage3_name(lint, "prefetch_bucket_size");
  if (config.allgather_sequential && lint.has(prefetch) && config.prefetch_bucket > 1) {
    lint.report(
        "sequential-prefetch", prefetch,
        "stage3_allgather_sequential forces prefetch to one parameter at each module: this value has no effect.",
        "remove it, or turn stage3_allgather_sequential off");
  }
  if (config.fetch_by_all_reduce) {
    lint.report("fetch-by-all-reduce", stage3_name(lint, "use_all_reduce_for_fetch_params"),
                "parameters are gathered by an all-reduce of a zero-filled buffer: twice the traffic, one copy less in "
                "memory.");
  }
  if (lint.has(prefetch) && config.prefetch_bucket > config.max_live) {
    lint.report("prefetch-above-live", prefetch,
                fmt::format("prefetch stops at max_live_parameters, {}.", format_count(config.max_live)));
  }
  if (lint.has(in_zero("sub_group_size")) && config.sub_group == 0) {
    lint.report("sub-group-zero", in_zero("sub_group_size"),
                "0 makes one sub-group of each parameter, and a scalar all-reduce for each in every step.",
                "\"sub_group_size\": 1000000000");
  }
  const std::string save = stage3_name(lint, "gather_16bit_weights_on_model_save");
  if (!config.gather_on_save && !lint.has(in_zero("stage3_gather_fp16_weights_on_model_save"))) {
    lint.report(
        lint.has(save) ? "save-gather-off" : "save-without-weights", lint.has(save) ? save : "zero_optimization",
        "save_16bit_model() and the Trainer then write no model weights, without an error: only shards that "
        "zero_to_fp32.py has to put together.",
        "\"stage3_gather_16bit_weights_on_model_save\": true (collects the 16-bit model in rank 0's host memory)");
  }
}

void lint_buckets(Linter& lint) {
  constexpr std::int64_t kSmall = 5'000'000;
  const std::string reduce = in_zero("reduce_bucket_size"), gather = in_zero("allgather_bucket_size");
  const ConfigNode* node = lint.value(reduce);
  if (node == nullptr || !lint.config.shards() || !coerced_integer(*node) || *coerced_integer(*node) < 1) return;
  const std::int64_t bucket = *coerced_integer(*node);
  const ConfigNode* other = lint.value(gather);
  const std::int64_t gathered = other == nullptr ? 0 : coerced_integer(*other).value_or(0);
  const std::string bytes =
      fmt::format("{:.3g} MB", static_cast<double>(bucket) * size_of(lint.config.precision) / 1e6);
  if (bucket < gathered / 10) {
    lint.report(
        "buckets-uneven", reduce,
        fmt::format("{} elements ({}) beside allgather_bucket_size {}: the second has no effect on current torch, "
                    "the first sends gradients in messages of {} and every larger parameter alone.",
                    format_count(bucket), bytes, format_count(gathered), bytes),
        "\"reduce_bucket_size\": 50000000 to 500000000");
  } else if (bucket < kSmall) {
    lint.report(
        "bucket-small", reduce,
        fmt::format("{} elements are messages of {}: below a network's full rate, and every larger parameter is "
                    "reduced alone.",
                    format_count(bucket), bytes),
        "\"reduce_bucket_size\": 50000000 to 500000000");
  }
}

/// What the Trainer would put in place of "auto".
std::string automatic_bucket(const Linter& lint) {
  if (lint.model == nullptr) return "";
  const std::int64_t elements = lint.model->hidden * lint.model->hidden;
  return fmt::format(" The Trainer's \"auto\" would be {} here, {:.1f} MB.", format_count(elements),
                     bytes_of(elements, lint.config.precision).base() / 1e6);
}

void lint_defaults(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  if (!lint.has("gradient_clipping")) {
    lint.report("default-clipping", "",
                "gradient_clipping is not given: DeepSpeed clips at 1.0 since June 2026 (PR 8068) and did not before.",
                "\"gradient_clipping\": 1.0, or 0.0 for none");
  }
  for (const char* section : {"offload_optimizer", "offload_param"}) {
    const DeepspeedOffload& offload =
        section == std::string_view("offload_param") ? config.offload_param : config.offload_optimizer;
    if (offload.device == OffloadDevice::none || !offload.given || lint.has(in_zero(section) + ".pin_memory")) continue;
    lint.report("default-pinning", in_zero(section),
                "pin_memory is not given: pinned since August 2026 (PR 8207), pageable and slower before.",
                "\"pin_memory\": true");
  }
  const bool bucketed = config.contiguous_gradients || config.optimizer_on_host();
  if (config.shards() && bucketed && !lint.has(in_zero("reduce_bucket_size"))) {
    const Bytes bucket = bytes_of(config.reduce_bucket, config.precision);
    lint.report("default-bucket", "zero_optimization",
                fmt::format("reduce_bucket_size is not given: 5e8 elements, {}{}.{}", format_gib(bucket),
                            config.stage == 3     ? " for good"
                            : config.overlap_comm ? " twice in backward"
                                                  : " in backward",
                            automatic_bucket(lint)),
                "\"reduce_bucket_size\": 50000000 to 500000000");
  }
  const bool checked = config.stage == 1 || config.stage == 2;
  const std::string brain = lint.has("bf16") ? "bf16" : "bfloat16";
  if (checked && lint.is_true(brain + ".enabled") && !lint.has(brain + ".check_grad_overflow")) {
    lint.report(
        "default-overflow-check", brain,
        "check_grad_overflow is not given: steps with inf or nan gradients are skipped since June 2026 (PR 8035), and "
        "were not before.");
  }
  if (config.stage == 3 && lint.is_true(brain + ".check_grad_overflow")) {
    lint.report("overflow-check-stage-3", brain + ".check_grad_overflow",
                "no effect at stage 3: the check runs for fp16 only there.");
  }
  const bool own_optimizer = config.stage == 1 && config.precision == DType::bf16 && config.grad_accum == DType::fp32;
  if (lint.is_true(brain + ".immediate_grad_update") && !own_optimizer) {
    lint.report("immediate-grad-update", brain + ".immediate_grad_update",
                "no effect: only BF16_Optimizer reads it (stage 1 with bf16 and grad_accum_dtype fp32, or pipelines).");
  }
}

void lint_other_sections(Linter& lint) {
  const int stage = lint.config.stage;
  for (const char* path :
       {"wall_clock_breakdown", "memory_breakdown", "flops_profiler.enabled", "comms_logger.enabled"}) {
    if (lint.is_true(path)) {
      lint.report("profiling-on", path,
                  "device synchronisations around phases or collectives: for measuring, slower steps.");
    }
  }
  if (lint.has("activation_checkpointing")) {
    lint.report(
        "activation-section", "activation_checkpointing",
        "only models that call deepspeed.checkpointing read this section; it turns nothing on in a Hugging Face "
        "model: use gradient_checkpointing_enable() or the Trainer's gradient_checkpointing.");
  }
  if (lint.is_true("activation_checkpointing.contiguous_memory_optimization")) {
    const ConfigNode* count = lint.value("activation_checkpointing.number_checkpoints");
    if (count == nullptr || count->kind == ConfigNode::Kind::null) {
      lint.report("contiguous-checkpoints", "activation_checkpointing.contiguous_memory_optimization",
                  "contiguous_memory_optimization needs number_checkpoints to lay out its buffers.",
                  "\"number_checkpoints\": the number of checkpointed layers");
    }
  }
  const ConfigNode* sparse = lint.value("sparse_attention.mode");
  constexpr std::array<std::string_view, 5> kModes = {"dense", "fixed", "variable", "bigbird", "bslongformer"};
  if (sparse != nullptr && std::ranges::find(kModes, sparse->text) == kModes.end()) {
    lint.report("sparse-attention-mode", "sparse_attention.mode",
                fmt::format("{} is none of {}: NotImplementedError at start.", lint.file.excerpt(*sparse),
                            fmt::join(kModes, ", ")),
                "one of them, or remove the section");
  }
  if (stage > 0 && lint.is_true("sparse_gradients")) {
    Finding& finding =
        lint.report("sparse-gradients-zero", "sparse_gradients",
                    fmt::format("sparse_gradients works at stage 0: no effect at stage {}.", stage), "remove it");
    lint.remove(finding, "sparse_gradients");
  }
  if (lint.is_true(in_zero("legacy_stage1"))) {
    Finding& finding = lint.report("legacy-stage1", in_zero("legacy_stage1"),
                                   "legacy_stage1 is gone: an exception at engine start.", "remove it");
    lint.remove(finding, in_zero("legacy_stage1"));
  }
  if (stage == 3 && lint.is_true(in_zero("elastic_checkpoint"))) {
    lint.report("elastic-checkpoint-stage-3", in_zero("elastic_checkpoint"), "a warning at stage 3, no effect.");
  }
}

}  // namespace

void lint_stage(Linter& lint) {
  lint_stage_missing(lint);
  lint_dead_keys(lint);
  lint_reduction(lint);
  lint_gathers(lint);
  lint_buckets(lint);
  lint_defaults(lint);
  lint_other_sections(lint);
}

}  // namespace zeroplan
