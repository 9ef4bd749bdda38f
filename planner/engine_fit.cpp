#include "planner/engine_fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <tuple>
#include <utility>

#include "sim/cost_model.h"

namespace zeroplan {

std::string_view to_string(GpuVerdict verdict) {
  switch (verdict) {
    case GpuVerdict::fits:
      return "fits";
    case GpuVerdict::fits_after_flushes:
      return "fits after flushes";
    case GpuVerdict::does_not_fit:
      return "does not fit";
  }
  return "";
}

std::int64_t blas_workspace(const GpuSpec& gpu) {
  constexpr std::int64_t kHopper = 32 << 20, kBeforeHopper = (8 << 20) + (128 << 10);
  constexpr std::int64_t kRocm = 32 << 20, kRocmCdna3 = 128 << 20;
  const std::string& capability = gpu.compute_capability;
  if (gpu.vendor == "AMD") {
    return capability.starts_with("gfx94") || capability.starts_with("gfx95") ? kRocmCdna3 : kRocm;
  }
  return std::atof(capability.c_str()) >= 9.0 ? kHopper : kBeforeHopper;  // unknown: 0
}

namespace {

Bytes largest_peak(const RunMemory& memory) {
  if (memory.steps.empty()) return memory.init_peak;
  const StepMemory& steady = memory.steps.back();
  return std::max({memory.init_peak, steady.forward, steady.backward, steady.step});
}

}  // namespace

struct EngineFitter::State {
  /// How a run is recorded, and what of it is known before.
  struct Recorder {
    std::function<EngineRecording(const EngineEnvironment&)> record;
    std::vector<HostBuffer> host;
    std::function<Bytes(const EngineEnvironment&)> process;
  };

  const ModelSpec& model;
  const MachineSpec& machine;
  double margin;
  using Key = std::tuple<std::int64_t, std::int64_t, bool, DType, std::int64_t, EagerAttention, int, bool, bool,
                         EagerCode, bool>;
  std::map<Key, EagerStep> steps;
  std::map<std::pair<int, DType>, MachineCostModel> costs;  // by shard ranks

  const EagerStep& step(const EngineWorkload& w, bool zero3 = false) {
    const EagerAttention attention = w.attention.value_or(usual_attention(model));
    const Key key{w.tokens.batch,     w.tokens.seq_len,  w.checkpointing,        w.type, w.lora_rank, attention,
                  w.checkpoint_every, w.keeps_operators, w.offloads_checkpoints, w.code, zero3};
    const auto found = steps.find(key);
    if (found != steps.end()) return found->second;
    EagerOptions options;
    options.tokens = w.tokens;
    options.checkpointing = w.checkpointing;
    options.type = w.type;
    options.attention = attention;
    options.lora_rank = w.lora_rank;
    options.checkpoint_every = w.checkpoint_every;
    options.keeps_operators = w.keeps_operators;
    options.offloads_checkpoints = w.offloads_checkpoints;
    options.code = w.code;
    options.zero3 = zero3;
    // Composer's state.outputs
    options.keeps_output = w.code == EagerCode::llm_foundry || w.code == EagerCode::llm_foundry_early;
    return steps.emplace(key, eager_step(model, options)).first->second;
  }

  EngineEnvironment environment(const EngineWorkload& w, int shard_ranks) {
    const auto& cost = costs.try_emplace({shard_ranks, w.type}, machine, shard_ranks, w.type).first->second;
    EngineEnvironment e;
    e.cublas_workspace = blas_workspace(machine.gpu);
    e.cost = &cost;
    e.allocator = parse_allocator_options(w.allocator_conf);
    if (w.ranks > 1) e.communicators = cost.communicator_memory();
    return e;
  }

  int ranks_per_node(const EngineWorkload& w) const { return std::min(w.ranks, machine.gpus_per_node); }

  Bytes capacity() const { return machine.gpu.memory * (1 - margin); }
  Bytes host_capacity() const { return machine.usable_dram() * (1 - margin); }
  static Bytes overhead(const EngineEnvironment& e, const HostUse& host) {
    return e.context + e.libraries + e.communicators + host.device_page_tables();
  }

  EngineFit unlimited(const EngineWorkload& w, const EngineEnvironment& free, EnginePrediction prediction) const {
    EngineFit result;
    result.prediction = std::move(prediction);
    const EnginePrediction& p = result.prediction;
    result.allocated = largest_peak(p.memory);
    result.reserved = std::max(p.memory.peak_reserved, p.reserved);
    result.reserved_low = std::min(p.reserved_low, result.reserved);
    result.reserved_high = std::max(p.reserved_high, result.reserved);
    result.overhead = overhead(free, p.host_use);
    result.capacity = capacity();
    result.host = p.host * static_cast<double>(ranks_per_node(w));
    result.host_capacity = host_capacity();
    return result;
  }

  /// The run on a card without a limit, and if that reserves more than the card has, again with its limit.
  EngineFit fit_of(const EngineWorkload& w, const EngineEnvironment& free, const EngineRecording& run,
                   FitDetail detail) const {
    const bool whole = detail == FitDetail::whole;
    EngineFit result = unlimited(w, free, predict(run, free, whole ? LeadDetail::bounds : LeadDetail::expected));
    if (result.device() <= result.capacity) return result;
    if (detail == FitDetail::verdict) result.reserved_low = std::min(result.reserved, reserved_in_step(run, free));
    if (whole || result.reserved_low + result.overhead <= result.capacity) {
      limited(result, free, run);
    } else {
      result.gpu = GpuVerdict::does_not_fit;
    }
    return result;
  }

  EngineFit fit(const EngineWorkload& w, int shard_ranks, const Recorder& recorder, FitDetail detail) {
    const EngineEnvironment free = environment(w, shard_ranks);
    return fit_of(w, free, recorder.record(free), detail);
  }

  /// What needs no eager step.
  EngineTrial trial_of_known(const EngineWorkload& w, int shard_ranks, Bytes known) {
    EngineTrial trial;
    trial.device_at_least = known + overhead(environment(w, shard_ranks), {});
    return trial;
  }

  EngineTrial trial(const EngineWorkload& w, int shard_ranks, const Recorder& recorder, EngineTrial trial) {
    const EngineEnvironment free = environment(w, shard_ranks);
    const HostUse host = host_use(recorder.host);
    trial.host = (recorder.process(free) + host.total()) * static_cast<double>(ranks_per_node(w));
    if (trial.host > host_capacity()) return trial;
    const EngineRecording run = recorder.record(free);
    trial.device_at_least = live_peak(run.tape) + overhead(free, host);
    if (trial.device_at_least > capacity()) return trial;
    EngineFit result = fit_of(w, free, run, FitDetail::verdict);
    trial.device_at_least = result.device();
    if (result.fits_in_step()) trial.fit = std::move(result);
    return trial;
  }

  static void limited(EngineFit& result, EngineEnvironment card, const EngineRecording& run) {
    const Bytes room = result.capacity - result.overhead;
    card.allocator.capacity = static_cast<std::int64_t>(std::max(room.base(), 0.0));
    const RunMemory memory = replay_run(run, card);
    result.flushes = memory.num_alloc_retries;
    result.gpu = memory.out_of_memory ? GpuVerdict::does_not_fit : GpuVerdict::fits_after_flushes;
    if (!memory.out_of_memory) return;
    result.failed_at = memory.failed_at;
    result.failure = memory.out_of_memory->message();
  }

  /// Of rank 0: what needs no eager step.
  DeepSpeedJob job(const DeepSpeedConfig& config, const EngineWorkload& w) const {
    DeepSpeedJob job;
    job.config = config;
    job.ranks = w.ranks;
    job.accumulation = static_cast<int>(w.accumulation);
    job.ranks_per_node = machine.gpus_per_node;
    job.zero_init = config.stage == 3;  // launch.sh asks for it
    check(job);
    return job;
  }
  /// What of a job follows from the model's parameters.
  void complete(DeepSpeedJob& job, const EagerStep& step) const {
    job.rank = deepspeed_worst_rank(step, job);
    const EngineEnvironment outside;
    job.flattens_on_host = deepspeed_flattens_on_host(step, job, capacity() - outside.context - outside.libraries);
  }

  /// A job of the rank that needs most, and the step that it trains. Not to be copied: a Recorder keeps references.
  struct Prepared {
    const EagerStep& step;
    DeepSpeedJob job;
  };
  Prepared prepare(DeepSpeedJob job, const EngineWorkload& w) {
    const EagerStep& trained = step(w, job.config.stage == 3);
    complete(job, trained);
    return {trained, std::move(job)};
  }
  static Recorder recorder(const EagerStep& step, const DeepSpeedJob& job, const EngineWorkload& w) {
    return {[&](const EngineEnvironment& e) { return zeroplan::record_deepspeed(step, w.tokens, job, e); },
            deepspeed_host_memory(step, job), [&](const EngineEnvironment& e) { return process_of(job, e); }};
  }
  static Recorder recorder(const EagerStep& step, const Fsdp2Options& options, const EngineWorkload& w) {
    return {[&](const EngineEnvironment& e) {
              return zeroplan::record_fsdp2(step, w.tokens, static_cast<int>(w.accumulation), options, e);
            },
            fsdp2_host_memory(step, options), [](const EngineEnvironment& e) { return e.fsdp2_process; }};
  }
};

namespace {

std::string caveat_of(const DeepSpeedConfig& config) {
  if (config.mics()) return "MiCS as DeepSpeed 0.19.2 runs it; later releases do not train with it";
  const bool nvme = config.optimizer_on_nvme() || config.parameters_on_nvme();
  return nvme ? "NVMe as DeepSpeed's source has it, not measured" : "";
}

void say_whose(EngineFit& fit, const DeepSpeedJob& job) {
  fit.rank = job.rank;
  fit.caveat = caveat_of(job.config);
}

}  // namespace

EngineFitter::EngineFitter(const ModelSpec& model, const MachineSpec& machine, double margin)
    : state_(new State{model, machine, margin, {}, {}}) {}
EngineFitter::~EngineFitter() = default;

EngineFit EngineFitter::deepspeed(const DeepSpeedConfig& config, const EngineWorkload& w, FitDetail detail) {
  const auto [step, job] = state_->prepare(state_->job(config, w), w);
  EngineFit fit = state_->fit(w, job.shard_ranks(), State::recorder(step, job, w), detail);
  say_whose(fit, job);
  return fit;
}

EngineFit EngineFitter::fsdp2(const Fsdp2Options& options, const EngineWorkload& w, FitDetail detail) {
  const EagerStep& step = state_->step(w);
  check(options);
  return state_->fit(w, options.group(), State::recorder(step, options, w), detail);
}

EngineTrial EngineFitter::try_deepspeed(const DeepSpeedConfig& config, const EngineWorkload& w, Bytes known) {
  DeepSpeedJob of_rank_0 = state_->job(config, w);
  EngineTrial trial = state_->trial_of_known(w, of_rank_0.shard_ranks(), known);
  if (trial.device_at_least > state_->capacity()) return trial;
  const auto [step, job] = state_->prepare(std::move(of_rank_0), w);
  trial = state_->trial(w, job.shard_ranks(), State::recorder(step, job, w), trial);
  if (trial.fit) say_whose(*trial.fit, job);
  return trial;
}

EngineTrial EngineFitter::try_fsdp2(const Fsdp2Options& options, const EngineWorkload& w, Bytes known) {
  check(options);
  const EngineTrial trial = state_->trial_of_known(w, options.group(), known);
  if (trial.device_at_least > state_->capacity()) return trial;
  return state_->trial(w, options.group(), State::recorder(state_->step(w), options, w), trial);
}

EngineRecording EngineFitter::record_deepspeed(const DeepSpeedConfig& config, const EngineWorkload& w,
                                               RecordedMicroSteps recorded) {
  const auto [step, job] = state_->prepare(state_->job(config, w), w);
  return zeroplan::record_deepspeed(step, w.tokens, job, state_->environment(w, job.shard_ranks()), 0, recorded);
}

EngineRecording EngineFitter::record_fsdp2(const Fsdp2Options& options, const EngineWorkload& w,
                                           RecordedMicroSteps recorded) {
  check(options);
  return zeroplan::record_fsdp2(state_->step(w), w.tokens, static_cast<int>(w.accumulation), options,
                                state_->environment(w, options.group()), 0, recorded);
}

EngineFit EngineFitter::deepspeed_text(std::string_view json, const EngineWorkload& workload) {
  const ConfigText text = ConfigText::parse(std::string(json), "deepspeed.json");
  return deepspeed(read_deepspeed_config(text, state_->model.hidden), workload);
}

namespace {

std::string verdict_text(const EngineFit& fit) {
  if (fit.gpu == GpuVerdict::does_not_fit) return fmt::format("does not fit ({}: {})", fit.failed_at, fit.failure);
  if (!fit.host_fits()) return fmt::format("does not fit: the host leaves {}", format_gib(fit.host_capacity));
  if (fit.gpu == GpuVerdict::fits) return "fits";
  if (fit.fits_in_step()) return "fits; gives cached memory back when the host runs far ahead";
  return fmt::format("fits only after the allocator gives cached memory back ({} times, each a standstill)",
                     fit.flushes);
}

}  // namespace

std::string describe(const EngineFit& fit) {
  // A card reserves no more than it has.
  const Bytes room = fit.capacity - fit.overhead;
  const bool all = fit.gpu != GpuVerdict::does_not_fit && fit.reserved > room;
  const std::string reserved = all ? "all " + format_gib(room) : format_gib(fit.reserved);
  const std::string text = fmt::format("{} allocated, {} reserved, {} on the host of a node", format_gib(fit.allocated),
                                       reserved, format_gib(fit.host));
  const std::string caveat = fit.caveat.empty() ? "" : " (" + fit.caveat + ")";
  return text + "; " + verdict_text(fit) + caveat;
}

}  // namespace zeroplan
