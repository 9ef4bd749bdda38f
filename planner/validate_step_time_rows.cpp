#include "planner/validate_step_time_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "models/error.h"

namespace zeroplan {
namespace {

/// Runs of this size would not fit without recompute; taken where a row does not say.
constexpr double kCheckpointedParameters = 10e9;
/// torchtitan's default is per-op selective recompute; its largest models run full.
constexpr double kTitanFullParameters = 20e9;
/// hfu over mfu above this means recompute, whatever the column says (step-time.md section 5).
constexpr double kRecomputeRatio = 1.15;
constexpr Seconds kLongestStep(1e6);
constexpr std::string_view kOldTorch = "torch 2.6 or older";

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

void refuse_experts(const Cells& cells) {
  const std::string name = lower(cells.text("model"));
  for (const std::string_view part : {"mixtral", "moe", "-a3b", "-a22b", "deepseek-v", "gpt-oss"})
    if (has(name, part)) throw InputError("MoE");
  if (cells.number("ep", 1) > 1 || has(cells.text("zero_variant"), "MoE")) throw InputError("MoE");
}

void refuse_what_was_not_measured(const Cells& cells) {
  if (cells.text("status") != "ok") throw InputError("no step was measured (" + cells.text("status") + ")");
  if (cells.contains("value_kind", "recalled") || cells.contains("value_kind", "ratio"))
    throw InputError("no measured step (" + cells.text("value_kind") + ")");
  if (cells.contains("extra_notes", "includes evaluation")) throw InputError("the step includes evaluation or saving");
  refuse_experts(cells);
}

void refuse_what_is_not_modelled(const Cells& cells) {
  if (cells.number("pp", 1) > 1) throw InputError("pipeline parallelism");
  if (cells.number("cp", 1) > 1) throw InputError("context parallelism");
  const std::string precision = lower(cells.text("precision"));
  for (const std::string_view part : {"nvfp4", "mxfp8", "amp_fp8", "rowwise", "delayed"})
    if (has(precision, part)) throw InputError(fmt::format("{} is not modelled", part));
  if (cells.contains("attn_impl", "flex") || cells.contains("extra_notes", "FlexAttention"))
    throw InputError("FlexAttention is not modelled");
  if (cells.contains("extra_notes", "deterministic")) throw InputError("deterministic mode is not modelled");
}

TimedEngine engine_of(const Cells& cells) {
  const std::string framework = lower(cells.text("framework"));
  if (has(framework, "no deepspeed")) throw InputError("engine not modelled: " + cells.text("framework"));
  if (has(framework, "fsdp1")) return TimedEngine::fsdp1;
  if (has(framework, "fsdp2") || has(framework, "simplefsdp")) return TimedEngine::fsdp2;
  if (has(framework, "deepspeed")) return TimedEngine::deepspeed;
  throw InputError("engine not modelled: " + cells.text("framework"));
}

bool is_composer(const Cells& cells) { return cells.contains("framework", "Composer"); }
bool is_titan(const Cells& cells) { return cells.contains("framework", "torchtitan"); }
/// Early llm-foundry: fp32 LayerNorm under autocast, the first flash attention.
bool is_early_composer(const Cells& cells) {
  return cells.text("date").starts_with("2023-02") || cells.text("date").starts_with("2023-03");
}
bool says_pure(const Cells& cells) { return cells.contains("extra_notes", "PURE"); }

KernelStack stack_of(const Cells& cells, TimedEngine engine) {
  if (is_composer(cells)) return is_early_composer(cells) ? KernelStack::composer_fp32 : KernelStack::composer;
  const std::string compile = lower(cells.text("compile"));
  const std::string framework = lower(cells.text("framework"));
  if (is_titan(cells)) {
    if (has(framework, "graph") || has(framework, "simplefsdp")) return KernelStack::compiled_graph;
    // The 405B table leaves the column empty; its text compiles.
    const bool blocks = compile.starts_with("per-") || (compile.empty() && cells.contains("model", "405B"));
    return blocks ? KernelStack::compiled_blocks : KernelStack::torchtitan;
  }
  const std::string variant = lower(cells.text("zero_variant"));
  const bool compiled = has(compile, "compile") || has(variant, "compile");
  if (compiled) return KernelStack::compiled_blocks;
  const bool megatron = engine == TimedEngine::deepspeed && cells.text("model").starts_with("GPT");
  return megatron ? KernelStack::megatron : KernelStack::hugging_face;
}

AttentionSoftware attention_of(const Cells& cells, TimedEngine engine) {
  if (is_composer(cells)) {
    if (is_early_composer(cells)) return AttentionSoftware::early_flash;
    return cells.contains("attn_impl", "triton") ? AttentionSoftware::triton_flash : AttentionSoftware::sdpa;
  }
  if (cells.contains("extra_notes", "eager attention")) return AttentionSoftware::eager;
  // Megatron-DeepSpeed and transformers of 2020 to mid 2023 keep the scores in memory.
  const std::string& date = cells.text("date");
  const bool old = !date.empty() && date < "2023-07";
  const bool gpt = !cells.contains("ffn_type", "swiglu");
  return engine == TimedEngine::deepspeed && (old || (date.empty() && gpt)) ? AttentionSoftware::unfused
                                                                            : AttentionSoftware::sdpa;
}

TimedRecompute selective(const Cells& cells) {
  const std::string& detail = cells.text("ac_detail");
  const bool second = has(detail, "2nd layer") && !has(detail, "per-op or");
  return second || !is_titan(cells) ? TimedRecompute::second_layer : TimedRecompute::selective;
}

TimedRecompute recompute_of(const Cells& cells) {
  if (is_composer(cells) && cells.stated("hfu") && cells.stated("mfu"))
    return cells.number("hfu") / cells.number("mfu") > kRecomputeRatio ? TimedRecompute::full : TimedRecompute::none;
  const std::string& stated = cells.text("activation_checkpointing");
  if (stated == "full") return TimedRecompute::full;
  if (stated == "none") return TimedRecompute::none;
  if (stated == "selective") return selective(cells);
  if (!stated.empty()) throw InputError("activation_checkpointing: \"" + stated + "\" is not modelled");
  if (cells.contains("extra_notes", "no checkpointing")) return TimedRecompute::none;
  const double parameters = cells.number("n_params");
  if (is_titan(cells)) return parameters >= kTitanFullParameters ? TimedRecompute::full : TimedRecompute::selective;
  return parameters >= kCheckpointedParameters ? TimedRecompute::full : TimedRecompute::none;
}

/// "1024 tokens per GPU per micro-batch".
std::int64_t noted_tokens(const Cells& cells) {
  const std::string& note = cells.text("extra_notes");
  const std::size_t at = note.find(" tokens per GPU");
  if (at == std::string::npos) return 0;
  std::size_t start = at;
  while (start > 0 && std::isdigit(static_cast<unsigned char>(note[start - 1])) != 0) --start;
  std::int64_t value = 0;
  const auto parsed = std::from_chars(note.data() + start, note.data() + at, value);
  return parsed.ec == std::errc{} ? value : 0;
}

void set_batch(const Cells& cells, EngineTimeRun& run) {
  if (const std::int64_t tokens = noted_tokens(cells); !cells.stated("micro_batch") && tokens > 0) {
    constexpr std::int64_t kUsualSequence = 2048;
    const std::int64_t seq = std::min(tokens, kUsualSequence);
    run.tokens = {tokens / seq, seq};
    run.accumulation = 1;
    return;
  }
  const double micro = cells.number("micro_batch");
  run.tokens = {cells.integer("micro_batch"), cells.integer("seq_len")};
  double each = micro * cells.number("grad_accum", 1);
  if (cells.stated("global_batch") && is_composer(cells)) each = cells.number("global_batch") / run.ranks;
  run.accumulation = static_cast<std::int64_t>(std::floor(each / micro + 1e-9));
  run.remainder_batch = std::llround(each - static_cast<double>(run.accumulation) * micro);
}

void set_offload(const Cells& cells, TimedEngine engine, EngineTimeRun& run) {
  const auto on_host = [&](std::string_view column) {
    const std::string& text = cells.text(column);
    if (text.empty() || text == "none") return false;
    if (text != "cpu") throw InputError(fmt::format("{}: \"{}\" is not modelled", column, text));
    return true;
  };
  if (cells.text("offload_optimizer").starts_with("optimizer states")) {
    run.offload_optimizer = OffloadedOptimizer::states;
  } else if (on_host("offload_optimizer")) {
    run.offload_optimizer = OffloadedOptimizer::host;
  }
  if (cells.contains("zero_variant", "ZenFlow") || cells.contains("extra_notes", "ZenFlow"))
    throw InputError("ZenFlow is not modelled");
  run.offload_parameters = on_host("offload_param");
  run.offload_activations = on_host("offload_activation");
  if (run.offload_activations && engine != TimedEngine::deepspeed)
    throw InputError("activation offload is modelled for DeepSpeed's checkpoints only");
}

void set_precision(const Cells& cells, TimedEngine engine, EngineTimeRun& run) {
  const std::string precision = lower(cells.text("precision"));
  run.fp8 = has(precision, "float8");
  run.type = has(precision, "fp16") ? DType::fp16 : DType::bf16;
  if (precision == "fp32") run.type = DType::fp32;
  const bool pure = says_pure(cells) || has(precision, "bf16-true") || has(precision, "parameters in bf16");
  // llm-foundry and torchtitan reduce in fp32; other FSDP1 users take one type for all (accelerate, fms-fsdp).
  const bool fp32 = engine == TimedEngine::fsdp2 || is_composer(cells) || is_titan(cells);
  run.reduction = engine != TimedEngine::deepspeed && fp32 && !pure ? DType::fp32 : run.type;
}

void set_software(const Cells& cells, EngineTimeRun& run) {
  run.stack = stack_of(cells, run.engine);
  run.attention = attention_of(cells, run.engine);
  run.recompute = recompute_of(cells);
  const bool titan = is_titan(cells), composer = is_composer(cells);
  run.chunked_loss = (composer && !is_early_composer(cells)) || run.stack == KernelStack::megatron ||
                     cells.contains("extra_notes", "chunked cross");
  run.early_stop = !cells.contains("framework_version", "torch 1.") && run.engine != TimedEngine::deepspeed;
  run.optimizer = composer                               ? OptimizerSoftware::decoupled
                  : run.engine == TimedEngine::deepspeed ? OptimizerSoftware::deepspeed
                                                         : OptimizerSoftware::torch_fused;
  run.era = titan && !cells.text("date").empty() && cells.text("date") >= "2025-07" ? std::string_view{} : kOldTorch;
  run.async_tensor_parallel = cells.contains("extra_notes", "AsyncTP");
}

Seconds measured_step(const Cells& cells, const EngineTimeRun& run) {
  if (cells.stated("step_time_s")) return Seconds(cells.number("step_time_s"));
  const double each = static_cast<double>(run.tokens.batch * run.accumulation + run.remainder_batch);
  const double tokens = each * static_cast<double>(run.tokens.seq_len);
  if (cells.stated("tokens_per_s_per_gpu"))
    return Seconds(tokens / run.tensor_parallel / cells.number("tokens_per_s_per_gpu"));
  if (cells.stated("samples_per_s")) return Seconds(each * run.ranks / cells.number("samples_per_s"));
  if (!cells.stated("tflops_per_gpu")) throw InputError("step time not stated");
  // Sources that print TFLOPS alone count the recomputed forward (step-time.md section 2).
  const double flops = (run.recompute == TimedRecompute::full ? 8 : 6) * cells.number("n_params");
  return Seconds(flops * tokens / run.tensor_parallel / (cells.number("tflops_per_gpu") * 1e12));
}

std::vector<std::string> groups_of(const Cells& cells, const MeasuredStep& step) {
  if (is_composer(cells)) return {"MosaicML " + step.machine.gpu.name.substr(0, 4)};
  if (is_titan(cells)) {
    if (step.run.tensor_parallel == 1 && !step.run.fp8) return {"torchtitan bf16 without TP"};
    return {"torchtitan fp8 or TP"};
  }
  if (step.run.engine != TimedEngine::deepspeed) return {"other FSDP"};
  if (cells.contains("extra_notes", "noise")) return {"DeepSpeed, noise of 40 % stated"};
  const bool stated = cells.stated("hidden") && cells.stated("micro_batch") && cells.stated("seq_len");
  return {stated ? "DeepSpeed, batch and shape stated" : "DeepSpeed, batch or shape assumed"};
}

std::optional<TimeFit> host_adam_of(const MeasuredStep& step) {
  if (step.run.engine != TimedEngine::deepspeed) return std::nullopt;
  const std::string& arch = step.machine.gpu.arch;
  if (arch == "Volta") return TimeFit::deepspeed_adam_volta;
  return arch == "Ampere" ? TimeFit::deepspeed_adam_ampere : TimeFit::deepspeed_adam_hopper;
}

/// A row of another model of that name would be compared in vain.
void check_parameters(const Cells& cells, const ModelSpec& model) {
  constexpr double kTolerance = 0.12;  // nominal sizes: "GPT 13B"
  if (!cells.stated("n_params")) return;
  const double ratio = static_cast<double>(model.parameters()) / cells.number("n_params");
  if (std::abs(ratio - 1) > kTolerance)
    throw InputError(fmt::format("its shape has {} parameters, the row says {}", format_count(model.parameters()),
                                 cells.text("n_params")));
}

}  // namespace

std::string PublishedRows::describe(const CsvTable::Row& row) const {
  const Cells cells(table_, row);
  if (!cells.whole()) return row.cells.front();
  std::string text = fmt::format("{}, {} x {}, {}", cells.text("model"), cells.text("n_gpus"), cells.text("gpu"),
                                 cells.text("framework"));
  if (cells.stated("micro_batch")) text += fmt::format(", {} x {}", cells.text("micro_batch"), cells.text("seq_len"));
  return text;
}

void PublishedRows::read_engine(const Cells& cells, MeasuredStep& step) {
  refuse_what_is_not_modelled(cells);
  step.run.stage = static_cast<int>(cells.integer("zero_stage_equiv"));
  step.run.tensor_parallel = static_cast<int>(std::max<std::int64_t>(1, cells.integer("tp", 1)));
  step.kind = cells.text("model");
}

std::shared_ptr<const ModelSpec> PublishedRows::stated_or_known_model(const Cells& cells) {
  try {
    refuse_experts(cells);
    return model_of(cells, config_of(cells));
  } catch (const InputError&) {
    const std::optional<ModelSpec> known = catalog_model_of(cells);
    if (!known) throw;
    check_parameters(cells, *known);
    return std::make_shared<const ModelSpec>(*known);
  }
}

std::shared_ptr<const ModelSpec> PublishedRows::model_of(const Cells& cells, const std::string& config) {
  std::shared_ptr<const ModelSpec>& model = models_[config];
  if (!model) model = std::make_shared<const ModelSpec>(read_model(config, cells.text("model")));
  check_parameters(cells, *model);
  return model;
}

namespace {

void read_ranks(const Cells& cells, MeasuredStep& step) {
  step.run.ranks = step.machine.ranks() / step.run.tensor_parallel;
  if (cells.contains("zero_variant", "HYBRID") || cells.contains("zero_variant", "HSDP"))
    step.run.shard_ranks = std::min(step.run.ranks, step.machine.gpus_per_node);
}

/// "ZeRO++ (qwZ+hpZ+qgZ)": secondary shards inside a node.
void set_zero_plus_plus(const Cells& cells, MeasuredStep& step) {
  if (!cells.contains("zero_variant", "ZeRO++")) return;
  step.run.hpz_ranks = std::min(step.run.ranks, step.machine.gpus_per_node);
  step.run.quantized_weights = step.run.quantized_gradients = true;
}

void read_settings(const Cells& cells, MeasuredStep& step) {
  set_zero_plus_plus(cells, step);
  set_offload(cells, step.run.engine, step.run);
  set_precision(cells, step.run.engine, step.run);
  set_software(cells, step.run);
}

/// Plain data-parallel training, which FSDP2 on one rank bounds from below.
bool is_data_parallel(const Cells& cells) {
  const std::string& framework = cells.text("framework");
  const bool deepspeed = has(framework, "+ DeepSpeed");
  const bool plain = framework.starts_with("HF Trainer") || framework == "Accelerate DDP" || framework == "PyTorch" ||
                     framework == "H2O LLM Studio";
  return plain && cells.text("zero_stage_equiv") == "0" && !deepspeed;
}

/// Cards of rows that the catalog does not have: Turing's of 24 GB, as CUDA's messages print their size. Memory alone
/// is asked of them.
std::optional<GpuSpec> turing_card(const Cells& cells) {
  const std::string& name = cells.text("gpu");
  if (name != "TITAN RTX-24GB" && name != "RTX 6000-24GB") return std::nullopt;
  GpuSpec gpu = find_gpu("A10G");
  gpu.name = name;
  gpu.memory = 23.65_GiB;
  return gpu;
}

/// A GPU's share of a step: one token of what is not stated.
void set_batch_or_least(const Cells& cells, EngineTimeRun& run) {
  if (cells.stated("micro_batch") && cells.stated("seq_len")) return set_batch(cells, run);
  run.tokens = {cells.integer("micro_batch", 1), cells.integer("seq_len", 1)};
  run.accumulation = 1;
}

}  // namespace

MeasuredStep PublishedRows::read(const CsvTable::Row& row) {
  const Cells cells(table_, row);
  if (!cells.whole()) throw InputError("more or fewer cells than the header");
  refuse_what_was_not_measured(cells);
  MeasuredStep step;
  step.line = row.line;
  step.row = describe(row);
  step.run.engine = engine_of(cells);
  read_engine(cells, step);
  const std::string config = config_of(cells);
  step.machine = machine_of(cells);
  read_ranks(cells, step);
  set_batch(cells, step.run);
  read_settings(cells, step);
  step.measured = measured_step(cells, step.run);
  if (!(step.measured > Seconds() && step.measured < kLongestStep)) throw InputError("the measured step is no time");
  step.model = model_of(cells, config);
  step.host_adam = host_adam_of(step);
  step.engine_timers = cells.contains("extra_notes", "timers");
  step.groups = groups_of(cells, step);
  return step;
}

MeasuredStep PublishedRows::read_run(const CsvTable::Row& row, Unstated unstated) {
  const Cells cells(table_, row);
  if (!cells.whole()) throw InputError("more or fewer cells than the header");
  MeasuredStep step;
  step.line = row.line;
  step.row = describe(row);
  step.run.engine = is_data_parallel(cells) ? TimedEngine::fsdp2 : engine_of(cells);
  read_engine(cells, step);
  step.model = stated_or_known_model(cells);
  const std::optional<GpuSpec> card = turing_card(cells);
  step.machine = machine_of(cells, card);
  read_ranks(cells, step);
  if (unstated == Unstated::one_token) {
    set_batch_or_least(cells, step.run);
  } else {
    set_batch(cells, step.run);
  }
  read_settings(cells, step);
  return step;
}

}  // namespace zeroplan
