// Steps of data/groundtruth: one H200, N ranks of which one is real.

#include <fmt/format.h>

#include <algorithm>

#include "models/error.h"
#include "planner/row_values.h"
#include "planner/validate_rows.h"
#include "planner/validate_step_time.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kManyTokens = 4096;  // above, kernels decide; below, the host does (step-time.md section 6)
constexpr std::int64_t kFewTokens = 512;    // of a micro-step: only the host decides

/// Sum over forward, backward and update of the median of all steps but the first.
Seconds median_step(const JsonValue& phases) {
  double sum = 0;
  constexpr std::size_t kPhases = 3;
  constexpr double kLongest = 1e6;
  for (std::size_t phase = 0; phase < kPhases; ++phase) {
    std::vector<double> seconds;
    for (const JsonValue& step : phases.items().subspan(1)) {
      if (step.items().size() != kPhases) step.fail("seconds of forward, backward and update");
      seconds.push_back(step.items()[phase].as_real(0, kLongest));
    }
    std::sort(seconds.begin(), seconds.end());
    const std::size_t middle = seconds.size() / 2;
    sum += seconds.size() % 2 == 1 ? seconds[middle] : (seconds[middle - 1] + seconds[middle]) / 2;
  }
  return Seconds(sum);
}

/// The measuring host: 16 cores, 107.9 GB/s read-modify-write (docs/cost-model.md section 5, the same kind of machine).
MachineSpec measuring_machine(const std::string& gpu) {
  if (gpu != "NVIDIA H200") throw InputError("step time: the measuring machine had an NVIDIA H200, found " + gpu);
  MachineSpec machine;
  machine.name = "H200, 16 cores";
  machine.gpu = find_gpu("H200-SXM-141GB");
  machine.physical_cores = 16;
  machine.dram_bandwidth = 107.9_GBps;
  return machine;
}

bool on_host(const JsonValue& row, std::string_view what) {
  const JsonValue* zero = row.find("zero");
  const JsonValue* offload = zero == nullptr ? nullptr : zero->find(what);
  if (offload == nullptr) return false;
  const std::string device = row_text(*offload, "device", "none");
  if (device == "none") return false;
  if (device != "cpu") throw InputError("step time: offload to " + device + " is not modelled");
  return true;
}

void set_deepspeed(const JsonValue& row, EngineTimeRun& run) {
  run.engine = TimedEngine::deepspeed;
  run.stage = static_cast<int>(row_integer(row, "stage", 0));
  run.optimizer = OptimizerSoftware::deepspeed;
  if (on_host(row, "offload_optimizer")) {
    run.offload_optimizer = OffloadedOptimizer::host;
    run.pinned = row_flag(row.at("zero").at("offload_optimizer"), "pin_memory", false);
  }
  run.offload_parameters = on_host(row, "offload_param");
  if (const JsonValue* zero = row.find("zero"); zero != nullptr && run.stage == 3) {
    run.quantized_weights = row_flag(*zero, "zero_quantized_weights", false);
    run.hpz_ranks = static_cast<int>(row_integer(*zero, "zero_hpz_partition_size", 1));
  }
  const JsonValue* extra = row.find("extra");
  const JsonValue* types = extra == nullptr ? nullptr : extra->find("data_types");
  const JsonValue* optimizer = extra == nullptr ? nullptr : extra->find("optimizer");
  const JsonValue* params = optimizer == nullptr ? nullptr : optimizer->find("params");
  if (params != nullptr && row_flag(*params, "torch_adam", false)) run.optimizer = OptimizerSoftware::torch_foreach;
  run.fp32_gradients = types != nullptr && row_text(*types, "grad_accum_dtype", "") == "fp32";
}

void set_fsdp2(const JsonValue& row, EngineTimeRun& run) {
  run.engine = TimedEngine::fsdp2;
  run.stage = row_flag(row, "reshard", true) ? 3 : 2;
  run.shard_ranks = static_cast<int>(row_integer(row, "shard", 0));
  run.optimizer = OptimizerSoftware::torch_fused;
  run.reduction = row_flag(row, "reduce_fp32", true) && !row_flag(row, "pure_bf16", false) ? DType::fp32 : DType::bf16;
  if (row_flag(row, "offload", false)) {
    run.offload_optimizer = OffloadedOptimizer::host;
    run.offload_parameters = true;
  }
}

std::string group_of(const JsonValue& row, const EngineTimeRun& run) {
  if (run.offload_optimizer != OffloadedOptimizer::none || run.offload_parameters) return "offload";
  if (row_integer(row, "lora", 0) > 0) return "LoRA";
  if (run.type == DType::fp32) return "fp32";
  if (run.attention == AttentionSoftware::eager) return "eager attention";
  if (run.engine == TimedEngine::deepspeed && run.stage == 3) return "ZeRO-3, hooks on the host";
  if (run.tokens.tokens() <= kFewTokens) return "at most 512 tokens";
  return run.tokens.tokens() > kManyTokens ? "more than 4096 tokens" : "at most 4096 tokens";
}

}  // namespace

std::shared_ptr<const ModelSpec> GroundtruthSteps::model_of(const std::string& name, std::int64_t lora) {
  std::shared_ptr<const ModelSpec>& model = models_[fmt::format("{} {}", name, lora)];
  if (model) return model;
  ModelSpec spec = model_as_measured(name);
  if (lora > 0) apply_lora(spec, lora);
  model = std::make_shared<const ModelSpec>(std::move(spec));
  return model;
}

std::optional<MeasuredStep> GroundtruthSteps::read(const JsonValue& row, const std::string& label) {
  const JsonValue* phases = row.find("phase_s");
  if (phases == nullptr || phases->items().size() < 2) return std::nullopt;
  MeasuredStep step;
  step.row = label;
  step.kind = row.at("model").as_string();
  EngineTimeRun& run = step.run;
  row.find("stage") != nullptr ? set_deepspeed(row, run) : set_fsdp2(row, run);
  run.communicates = false;
  run.ranks = static_cast<int>(row.at("n").as_int(1, 1 << 20));
  run.tokens = {row_integer(row, "mb", 1), row_integer(row, "seq", 1)};
  run.accumulation = row_integer(row, "gas", 1);
  run.recompute = row_flag(row, "ac", false) ? TimedRecompute::full : TimedRecompute::none;
  run.early_stop = !row_flag(row, "reentrant", false);
  run.type = row_precision(row);
  const std::string attention = row_text(row, "attn", "sdpa");
  if (attention != "sdpa" && attention != "eager")
    throw InputError(fmt::format("attn: expected sdpa or eager, found \"{}\"", attention));
  if (attention == "eager") run.attention = AttentionSoftware::eager;
  step.machine = measuring_machine(row_text(row, "gpu", "NVIDIA H200"));
  step.model = model_of(step.kind, row_integer(row, "lora", 0));
  step.measured = median_step(*phases);
  step.groups = {group_of(row, run)};
  return step;
}

}  // namespace zeroplan
