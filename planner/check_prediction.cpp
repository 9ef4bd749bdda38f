#include "planner/check_prediction.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "models/error.h"
#include "planner/check_parts.h"
#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kDefaultSequence = 4096;  // as `plan` has it
// Beyond them a number is a slip of the hand, and products leave 64 bits.
constexpr std::int64_t kMostSequences = std::int64_t{1} << 20;  // of a micro-step, and micro-steps
constexpr std::int64_t kMostPerStep = std::int64_t{1} << 30;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;  // of a micro-step

std::optional<std::int64_t> sane(std::optional<std::int64_t> count, std::int64_t most) {
  return count && *count >= 1 && *count <= most ? count : std::nullopt;
}

/// The count of a configuration's batch that is beyond what is modelled; "" when none is.
std::string batch_beyond(const DeepSpeedConfig& config) {
  const auto beyond = [](std::string_view key, std::optional<std::int64_t> count, std::int64_t most) {
    if (!count || *count <= most) return std::string();
    return fmt::format("{}: {} is beyond what is modelled, at most {}", key, format_count(*count), format_count(most));
  };
  std::string found = beyond("train_micro_batch_size_per_gpu", config.micro_batch, kMostSequences);
  if (found.empty()) found = beyond("gradient_accumulation_steps", config.accumulation, kMostSequences);
  return found.empty() ? beyond("train_batch_size", config.train_batch, kMostPerStep) : found;
}

/// A section or key that changes what is allocated or how long a step takes, and that no rule covers.
struct Unmodelled {
  std::string_view path;
  enum class Counts : std::uint8_t { present, on, above_one } when;
};
using Counts = Unmodelled::Counts;
constexpr std::array<Unmodelled, 19> kUnmodelled{
    {{"tensor_parallel.autotp_size", Counts::above_one},
     {"pipeline", Counts::present},
     {"expert_parallel", Counts::present},
     {"compile.deepcompile", Counts::on},
     {"compression_training", Counts::present},
     {"progressive_layer_drop.enabled", Counts::on},
     {"curriculum_learning.enabled", Counts::on},
     {"data_efficiency.enabled", Counts::on},
     {"sparse_attention", Counts::present},
     {"weight_quantization", Counts::present},
     {"quantize_training", Counts::present},
     {"hybrid_engine.enabled", Counts::on},
     {"amp.enabled", Counts::on},
     {"sparse_gradients", Counts::on},
     {"elasticity.enabled", Counts::on},
     {"optimizer.params.amsgrad", Counts::on},
     {"zero_optimization.zero_quantized_nontrainable_weights", Counts::on},
     {"zero_optimization.leaf_module", Counts::present},
     {"zero_optimization.stage3_module_granularity_threshold", Counts::above_one}}};

bool counts(const ConfigNode& node, Counts when) {
  if (node.kind == ConfigNode::Kind::null) return false;
  if (when == Counts::present) return !node.is_object() || !node.members.empty();
  if (when == Counts::on) return coerced_bool(node).value_or(false);
  return coerced_integer(node).value_or(0) > 1;
}

/// Only stage 3 reads ZeRO++'s keys, and MiCS_Optimizer is not given them.
void set_zero_plus_plus(const DeepSpeedConfig& c, EngineTimeRun& run) {
  if (c.stage < 3 || c.mics()) return;
  if (c.hpz()) run.hpz_ranks = static_cast<int>(c.hpz_ranks);
  run.quantized_weights = c.quantized_weights;
  run.quantized_gradients = c.quantized_gradients;
}

EngineTimeRun time_run(const DeepSpeedConfig& c, const EngineWorkload& w, const ModelSpec& model) {
  EngineTimeRun run;
  if (w.attention.value_or(usual_attention(model)) == EagerAttention::eager) run.attention = AttentionSoftware::eager;
  run.engine = TimedEngine::deepspeed;
  run.stage = c.stage;
  run.tokens = w.tokens;
  run.accumulation = w.accumulation;
  run.ranks = w.ranks;
  run.recompute = w.checkpointing ? TimedRecompute::full : TimedRecompute::none;
  run.type = c.precision;
  run.reduction = c.communication.value_or(c.precision);
  run.fp32_gradients = c.grad_accum == DType::fp32 && c.precision != DType::fp32;
  set_zero_plus_plus(c, run);
  run.max_reuse = c.max_reuse;
  run.persistence = c.param_persistence;
  if (c.mics()) run.shard_ranks = static_cast<int>(c.mics_ranks), run.hierarchical_gather = c.mics_hierarchical;
  run.optimizer = c.torch_adam ? OptimizerSoftware::torch_foreach : OptimizerSoftware::deepspeed;
  if (c.optimizer_on_host()) run.offload_optimizer = OffloadedOptimizer::host;
  if (c.optimizer_on_nvme()) {
    run.offload_optimizer = OffloadedOptimizer::nvme;
    run.pipelined_read = c.offload_optimizer.pipeline_read;
    run.pipelined_write = c.offload_optimizer.pipeline_write;
  }
  run.offload_parameters = c.parameters_on_host();
  run.parameters_on_nvme = c.parameters_on_nvme();
  run.pinned = !c.optimizer_on_host() || c.offload_optimizer.pin_memory;
  // DeepSpeed pins the flat buffer of trained parameters whatever offload_param says.
  run.pinned_parameters = !c.parameters_on_host() || c.offload_param.pin_memory || w.lora_rank == 0;
  return run;
}

/// Throws InputError when DeepSpeed would not run it, or the step time is not known.
void check_timed(const DeepSpeedConfig& config, const EngineWorkload& w, int ranks_per_node) {
  DeepSpeedJob job;
  job.config = config;
  job.config.quantized_weights = false;  // with offload_param their memory alone is not modelled
  job.ranks = w.ranks;
  job.ranks_per_node = ranks_per_node;
  job.accumulation = static_cast<int>(w.accumulation);
  check(job);
}

ModelSpec with_adapters(const ModelSpec& model, std::int64_t rank) {
  ModelSpec trained = model;
  if (rank > 0) apply_lora(trained, rank);
  return trained;
}

/// micro-batch x accumulation of a rank, as DeepSpeed works them out, and what had to be assumed.
class Batches {
 public:
  Batches(const DeepSpeedConfig& config, const CheckWorkload& flags, int ranks, std::vector<Assumption>& assumptions)
      : micro_(sane(config.micro_batch, kMostSequences)),
        accumulation_(sane(config.accumulation, kMostSequences)),
        train_(sane(config.train_batch, kMostPerStep)),
        demanded_(flags.global_batch.has_value()),
        ranks_(ranks),
        assumptions_(assumptions) {
    take("--micro-batch", flags.micro_batch, "train_micro_batch_size_per_gpu", micro_);
    if (micro_ && accumulation_ && !train_) train_ = *micro_ * *accumulation_ * ranks_;
    take("--global-batch", flags.global_batch, "train_batch_size", train_);
  }

  void resolve(EngineWorkload& w) {
    if (!micro_) micro_ = micro_of_train();
    if (!accumulation_) accumulation_ = accumulation_of_train();
    const std::int64_t product = *micro_ * *accumulation_ * ranks_;
    if (train_ && product != *train_) {
      if (demanded_) {
        throw InputError(fmt::format("--global-batch: expected a multiple of micro-batch {} x {} ranks, got {}",
                                     *micro_, ranks_, *train_));
      }
      assume("batch", fmt::format("{} x {} x {} ranks = {} sequences", *micro_, *accumulation_, ranks_, product),
             fmt::format("{} sequences a step cannot be: DeepSpeed stops (batch-identity)", *train_));
    }
    w.tokens.batch = *micro_;
    w.accumulation = *accumulation_;
  }

 private:
  static void take(std::string_view flag, std::optional<std::int64_t> given, std::string_view key,
                   std::optional<std::int64_t>& target) {
    if (!given) return;
    if (target && *target != *given) {
      throw InputError(fmt::format("{} {}: the configuration says {} ({})", flag, *given, *target, key));
    }
    target = given;
  }

  std::int64_t micro_of_train() {
    if (train_) return std::max<std::int64_t>(1, *train_ / (ranks_ * accumulation_.value_or(1)));
    assume("micro-batch", "1", "not in the file, or \"auto\"; --micro-batch");
    return 1;
  }
  std::int64_t accumulation_of_train() {
    if (train_) return std::max<std::int64_t>(1, divided_up(*train_, ranks_ * *micro_));
    assume("gradient accumulation", "1", "not in the file, or \"auto\"; --global-batch");
    return 1;
  }
  void assume(std::string what, std::string value, std::string source) {
    assumptions_.push_back({std::move(what), std::move(value), std::move(source)});
  }

  std::optional<std::int64_t> micro_, accumulation_, train_;
  bool demanded_;  // by a flag
  std::int64_t ranks_;
  std::vector<Assumption>& assumptions_;
};

std::int64_t sequence_of(const ModelSpec& model, const CheckWorkload& flags, std::vector<Assumption>& assumptions) {
  if (flags.seq_len) return *flags.seq_len;
  const std::int64_t longest = model.max_positions;
  const std::int64_t length = longest > 0 ? std::min(longest, kDefaultSequence) : kDefaultSequence;
  assumptions.push_back(
      {"sequence length", std::to_string(length), "default: the smaller of 4096 and the model's maximum; --seq-len"});
  return length;
}

void assume_rest(const DeepSpeedConfig& c, const CheckWorkload& flags, std::vector<Assumption>& assumptions) {
  if (!flags.checkpointing) {
    assumptions.push_back(
        {"gradient checkpointing", "none", "an argument of the training script, not of this file; --recompute full"});
  }
  if (c.precision_automatic) {
    assumptions.push_back({"precision", std::string(to_string(c.precision)), "\"auto\": the Trainer's arguments say"});
  }
  assumptions.push_back(
      {"training", "one model on given tokens", "no reference or reward model, generation (RL) or evaluation"});
  if (flags.allocator_conf.empty()) {
    assumptions.push_back({"PYTORCH_CUDA_ALLOC_CONF", "not set", "PyTorch's defaults; --alloc-conf"});
  }
  if (c.stage == 3) assumptions.push_back({"loading", "under deepspeed.zero.Init", "stage 3"});
  if (!c.optimizer) {
    assumptions.push_back({"optimizer", "AdamW of DeepSpeed's own", "none in the file: the script passes one"});
  }
}

EngineWorkload workload_of(const DeepSpeedConfig& config, const CheckInput& input, const CheckWorkload& flags,
                           std::vector<Assumption>& assumptions) {
  EngineWorkload w;
  w.ranks = input.machine->ranks();
  w.tokens.seq_len = sequence_of(*input.model, flags, assumptions);
  Batches(config, flags, w.ranks, assumptions).resolve(w);
  w.checkpointing = flags.checkpointing.value_or(false);
  w.type = config.precision;
  w.lora_rank = flags.lora_rank;
  w.allocator_conf = flags.allocator_conf;
  assume_rest(config, flags, assumptions);
  return w;
}

bool correctable_error(const CheckAnswer& answer) {
  return std::ranges::any_of(answer.findings,
                             [](const Finding& f) { return f.rule->severity == Severity::error && !f.edits.empty(); });
}

EstimatorLine estimator_line(const DeepSpeedConfig& config, const ModelSpec& model, std::int64_t largest,
                             const MachineSpec& machine) {
  EstimatorQuestion q;
  q.parameters = model.parameters();
  q.largest_module = largest;
  q.gpus_per_node = machine.gpus_per_node;
  q.nodes = machine.nodes;
  q.offload_optimizer = config.optimizer_on_host();
  q.offload_parameters = config.parameters_on_host();
  if (config.stage == 3) return {"estimate_zero3_model_states_mem_needs", deepspeed_zero3_estimate(q)};
  return {"estimate_zero2_model_states_mem_needs", deepspeed_zero2_estimate(q, EstimatorForm::since_2024)};
}

LossBlocks blocks_of(const ModelSpec& model, const EngineWorkload& w) {
  EagerOptions options;
  options.tokens = w.tokens;
  options.checkpointing = w.checkpointing;
  options.type = w.type;
  options.attention = usual_attention(model);
  options.lora_rank = w.lora_rank;
  return loss_blocks(eager_step(model, options), w.tokens, model.vocab);
}

/// Elements of the largest parameter, and the most that one module holds.
struct Largest {
  std::int64_t parameter = 0, module = 0;
};

/// Of the model without adapters; its tensors as we count them when no eager graph is known.
Largest largest_of(const ModelSpec& model) {
  EagerOptions options;
  options.tokens = {1, 1};
  options.attention = usual_attention(model);
  try {
    const EagerStep step = eager_step(model, options);
    return {largest_gather(step), largest_module(step)};
  } catch (const InputError&) {
    return {largest_parameter(model), largest_parameter(model)};
  }
}

/// What stands beside the run; most of it needs a predicted memory.
void explain(CheckPrediction& p, const NearestSubject& subject, CheckPredictor& predictor, const CheckWorkload& flags) {
  const ModelSpec& model = *subject.input.model;
  const MachineSpec& machine = *subject.input.machine;
  const DeepSpeedConfig config = read_deepspeed_config(subject.file, model.hidden);
  const ModelSpec trained = with_adapters(model, flags.lora_rank);
  p.storage = storage_needs(trained, machine, config);
  const Largest largest = largest_of(model);
  if (config.stage >= 2 && flags.lora_rank == 0) p.estimator = estimator_line(config, model, largest.module, machine);
  p.releases = release_differences(config, trained, machine, flags.release);
  StepFacts facts{{}, largest.parameter};
  if (p.run.memory) {
    p.stages = stage_rows(subject, predictor);
    p.gains = gains(subject, predictor);
    facts.loss = blocks_of(model, p.run.workload);
  }
  p.remarks = check_remarks(p, subject.input, config, facts);
}

/// What the step time does not tell apart, where the file says something of it.
void assume_timed(const DeepSpeedConfig& config, const RunPrediction& run, std::vector<Assumption>& assumptions) {
  if (!run.time) return;
  for (const Assumption& a : run.time->assumptions) assumptions.push_back(a);
  if (run.workload.ranks == 1 || config.stage == 0) return;
  assumptions.push_back({"overlap of collectives", "as in the runs that step times are fitted to",
                         "bucket sizes, overlap_comm, prefetch and live limits do not enter the step time; stage 3's "
                         "reuse distance does"});
}

}  // namespace

std::string_view to_string(NearestAim aim) { return aim == NearestAim::fits ? "fits" : "faster"; }

std::string unmodelled_sections(const ConfigText& file) {
  for (const Unmodelled& each : kUnmodelled) {
    const ConfigMember* member = file.find(each.path);
    if (member != nullptr && counts(member->value, each.when)) {
      return fmt::format("{}: no rule of the prediction covers it", each.path);
    }
  }
  return "";
}

CheckPredictor::CheckPredictor(const ModelSpec& model, const MachineSpec& machine, const CheckWorkload& flags)
    : machine_(machine), trained_(with_adapters(model, flags.lora_rank)), fitter_(model, machine, flags.margin) {}

std::optional<EngineTime> CheckPredictor::time(const DeepSpeedConfig& config, const EngineWorkload& workload,
                                               std::string& why) const {
  try {
    check_timed(config, workload, machine_.gpus_per_node);
    return predict_engine_time(trained_, machine_, time_run(config, workload, trained_));
  } catch (const InputError& e) {
    why = e.what();
    return std::nullopt;
  }
}

std::optional<EngineFit> CheckPredictor::memory(const DeepSpeedConfig& config, const EngineWorkload& workload,
                                                std::string& why) {
  try {
    return fitter_.deepspeed(config, workload);
  } catch (const InputError& e) {
    why = e.what();
    return std::nullopt;
  }
}

RunPrediction CheckPredictor::predict(const DeepSpeedConfig& config, const EngineWorkload& workload) {
  RunPrediction run;
  run.workload = workload;
  std::string why;
  run.memory = memory(config, workload, why);
  if (!run.memory) run.missing.push_back({"memory", why});
  run.time = time(config, workload, why);
  if (!run.time) run.missing.push_back({"time", why});
  return run;
}

CheckPrediction predict_check(const CheckInput& input, const CheckAnswer& answer, const CheckWorkload& flags) {
  CheckPrediction p;
  p.corrected = correctable_error(answer);
  p.ranks_per_node = input.machine->gpus_per_node;
  const std::string text = p.corrected ? fix_deepspeed(input).text : input.file.text();
  const ConfigText file = ConfigText::parse(text, input.file.name());
  const DeepSpeedConfig config = read_deepspeed_config(file, input.model->hidden);
  if (const std::string beyond = batch_beyond(config); !beyond.empty()) {
    p.run.workload.tokens = {std::clamp<std::int64_t>(config.micro_batch.value_or(1), 1, kMostSequences),
                             sequence_of(*input.model, flags, p.assumptions)};
    p.run.workload.accumulation = std::clamp<std::int64_t>(config.accumulation.value_or(1), 1, kMostSequences);
    p.run.workload.ranks = input.machine->ranks();
    p.run.workload.type = config.precision;
    p.run.missing = {{"memory", beyond}, {"time", beyond}};
    return p;
  }
  p.run.workload = workload_of(config, input, flags, p.assumptions);
  const TokenShape tokens = p.run.workload.tokens;
  const std::string unmodelled =
      tokens.batch > kMostTokens / tokens.seq_len
          ? fmt::format("a micro-step of {} x {} tokens is beyond what is modelled", tokens.batch, tokens.seq_len)
          : unmodelled_sections(file);
  if (!unmodelled.empty()) {
    p.run.missing = {{"memory", unmodelled}, {"time", unmodelled}};
    return p;
  }
  CheckPredictor predictor(*input.model, *input.machine, flags);
  p.run = predictor.predict(config, p.run.workload);
  assume_timed(config, p.run, p.assumptions);
  for (const Assumption& a : input.machine->assumptions) p.assumptions.push_back(a);
  const NearestSubject subject{file, input, p.run};
  explain(p, subject, predictor, flags);
  p.nearest = nearest_config(subject, predictor);
  return p;
}

}  // namespace zeroplan
