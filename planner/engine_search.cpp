#include "planner/engine_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <tuple>

#include "models/error.h"
#include "planner/engine_fit.h"
#include "planner/export_parts.h"
#include "sim/engine_time.h"

namespace zeroplan {
namespace {

constexpr std::size_t kMostBatches = 8;  // micro-batches tried of each kind
constexpr int kMostReplays = 60;         // of memory: each takes milliseconds to tenths of a second

struct Option {
  Plan plan;
  EngineTime time;
  double tokens_per_second = 0;
};

/// What differs between plans that are reported beside each other.
using Kind = std::tuple<int, int, Tier, Tier, Recompute>;
Kind kind_of(const Plan& p) {
  const auto last = [](const Placement& where) { return where.tier_of(where.total() - 1); };
  return {p.zero_stage, p.shard_ranks, last(p.optimizer), last(p.parameters), p.recompute};
}

class EngineSearch {
 public:
  EngineSearch(Answer& answer, const Workload& workload)
      : answer_(answer),
        request_(answer.request),
        workload_(workload),
        diskless_(answer.request.machine),
        fitter_(request_.model, request_.machine, request_.margin) {
    diskless_.nvme = {};
  }

  void run() {
    collect();
    std::stable_sort(options_.begin(), options_.end(), [&](const Option& a, const Option& b) { return better(a, b); });
    for (const Option& option : options_) {
      if (enough() || replays_ >= kMostReplays) break;
      consider(option);
    }
    finish();
  }

 private:
  bool deepspeed() const { return request_.engine == Engine::deepspeed; }

  // --- the space -----------------------------------------------------------------------------------

  std::vector<int> stages() const {
    if (deepspeed()) return stages_of(request_);
    // FSDP2 shards weights always; stage 2 is reshard_after_forward off.
    std::vector<int> stages;
    for (const int stage : request_.constraints.stages.empty() ? std::vector<int>{2, 3} : stages_of(request_)) {
      if (stage >= 2) stages.push_back(stage);
    }
    if (stages.empty()) throw InputError("--zero: FSDP2 has stages 2 (no resharding after forward) and 3");
    return stages;
  }

  /// Whole placements only: neither engine splits states block by block.
  /// NVMe is left out.
  std::vector<OffloadStyle> offloads(int stage) const {
    std::vector<OffloadStyle> styles;
    for (OffloadStyle s : offloads_of(request_, stage)) {
      s.gradients = Tier::hbm;
      s.whole = true;
      if (s.update == UpdateOn::device && s.optimizer != Tier::hbm) continue;
      if (s.optimizer == Tier::nvme || s.parameters == Tier::nvme) continue;  // no step time: docs/step-time.md
      // FSDP2's CPUOffloadPolicy takes parameters and optimizer together, to the host.
      const bool all_on_host = s.optimizer == Tier::host && s.parameters == Tier::host;
      if (!deepspeed() && s.optimizer != Tier::hbm && !all_on_host) continue;
      if (std::find(styles.begin(), styles.end(), s) == styles.end()) styles.push_back(s);
    }
    return styles;
  }

  std::vector<Recompute> recomputes() const {
    std::vector<Recompute> modes;
    for (const Recompute mode : recomputes_of(request_)) {
      if (mode != Recompute::selective) modes.push_back(mode);  // PyTorch checkpoints a block or not
    }
    if (modes.empty()) throw InputError("--recompute selective: DeepSpeed and FSDP2 checkpoint whole blocks (full)");
    return modes;
  }

  void refuse_nvme() const {
    const auto& fixed = request_.constraints.offload;
    if (fixed && fixed->what != OffloadWhat::none && fixed->to == Tier::nvme) {
      throw InputError(fmt::format("--offload ...:nvme: step times with NVMe are not modelled for {}; expected cpu",
                                   to_string(request_.engine)));
    }
  }

  void collect() {
    refuse_nvme();
    for (const int stage : stages()) {
      for (const OffloadStyle& offload : offloads(stage)) {
        for (const int group : deepspeed() ? std::vector<int>{stage == 0 ? 1 : request_.machine.ranks()}
                                           : shard_groups_of(request_, stage)) {
          for (const Recompute mode : recomputes()) {
            for (const std::int64_t batch : micro_batches_of(request_, workload_, kMostBatches)) {
              add({stage, group, offload, mode, batch, false, false});
            }
          }
        }
      }
    }
  }

  void add(const Choice& choice) {
    Option option;
    option.plan = plan_of(request_, workload_, choice);
    option.plan.engine = request_.engine;
    ++answer_.search.space;
    if (states_on_gpu(option.plan) > request_.machine.gpu.memory * (1 - request_.margin)) return;
    option.time = time_of(option.plan);
    const double tokens = static_cast<double>(workload_.global_batch * workload_.seq_len);
    option.tokens_per_second = tokens / option.time.step.base();
    options_.push_back(option);
    ++answer_.search.evaluated;
  }

  /// What stays on a GPU whatever the micro-batch (deepspeed.md's and engine-rules.md's formulas, gradients left out):
  /// a bound that needs no replay.
  Bytes states_on_gpu(const Plan& p) const {
    const auto all = static_cast<double>(request_.model.parameters());
    const double own = all / p.shard_ranks, weight = size_of(p.precision.weights);
    const bool states = p.optimizer.hbm == p.optimizer.total(), weights = p.parameters.hbm == p.parameters.total();
    if (!deepspeed()) return Bytes(weights ? own * 12 : 0);
    if (p.zero_stage == 0) return Bytes(all * (weight + 12));
    if (p.zero_stage < 3) return Bytes(all * weight + (states ? own * 12 : 0));
    return Bytes(own * ((weights ? weight : 0) + (states ? 12 : 0)));
  }

  EngineTime time_of(const Plan& p) const {
    EngineTimeRun run;
    run.engine = deepspeed() ? TimedEngine::deepspeed : TimedEngine::fsdp2;
    run.stage = p.zero_stage;
    run.tokens = p.micro_step();
    run.accumulation = p.accumulation;
    run.ranks = p.ranks;
    run.shard_ranks = p.zero_stage == 0 || p.shard_ranks == p.ranks ? 0 : p.shard_ranks;
    run.recompute = p.recompute == Recompute::none ? TimedRecompute::none : TimedRecompute::full;
    run.type = p.precision.weights;
    run.reduction = deepspeed() ? p.precision.gradients : DType::fp32;
    run.optimizer = deepspeed() ? OptimizerSoftware::deepspeed : OptimizerSoftware::torch_fused;
    if (p.optimizer.hbm < p.optimizer.total()) run.offload_optimizer = OffloadedOptimizer::host;
    run.offload_parameters = p.parameters.hbm < p.parameters.total();
    return predict_engine_time(request_.model, request_.machine, run);
  }

  bool better(const Option& a, const Option& b) const {
    if (request_.objective == Objective::memory) return states_on_gpu(a.plan) < states_on_gpu(b.plan);
    return a.tokens_per_second > b.tokens_per_second;
  }

  // --- memory --------------------------------------------------------------------------------------

  bool enough() const {
    if (!request_.per_stage) return static_cast<int>(found_.size()) >= request_.top_k;
    return found_.size() >= stages().size();
  }
  /// Reported once.
  bool taken(const Plan& plan) const {
    return std::ranges::any_of(found_, [&](const Candidate& c) {
      return request_.per_stage ? c.plan.zero_stage == plan.zero_stage : kind_of(c.plan) == kind_of(plan);
    });
  }

  void consider(const Option& option) {
    const Kind kind = kind_of(option.plan);
    const auto full = too_large_.find(kind);
    if (taken(option.plan)) return;
    if (full != too_large_.end() && option.plan.micro_batch >= full->second) return;  // less did not fit
    const EngineFit fit = fit_of(option.plan);
    ++replays_;
    Candidate candidate{option.plan, prediction_of(option, fit), fit.fits_in_step()};
    if (candidate.fits) {
      found_.push_back(std::move(candidate));
      return;
    }
    too_large_[kind] =
        std::min(full == too_large_.end() ? option.plan.micro_batch : full->second, option.plan.micro_batch);
    const double lacking = lack(fit);
    if (!nearest_ || lacking < nearest_lack_) {
      nearest_ = std::move(candidate);
      nearest_fit_ = fit;
      nearest_lack_ = lacking;
    }
  }

  EngineFit fit_of(const Plan& plan) {
    const EngineWorkload w{plan.micro_step(), plan.accumulation, plan.ranks, plan.recompute != Recompute::none,
                           plan.precision.weights};
    if (!deepspeed()) return fitter_.fsdp2(fsdp2_options(plan), w);
    const Prediction none;
    return fitter_.deepspeed_text(export_deepspeed({plan, request_.model, diskless_, none, request_.margin}).json, w);
  }

  static Fsdp2Options fsdp2_options(const Plan& plan) {
    Fsdp2Options o;
    o.ranks = plan.ranks;
    o.shard_ranks = plan.shard_ranks == plan.ranks ? 0 : plan.shard_ranks;
    o.reshard_after_forward = o.reshard_root = plan.zero_stage == 3;
    o.compute = plan.precision.weights;
    o.offload = plan.parameters.hbm < plan.parameters.total();
    return o;
  }

  static double lack(const EngineFit& fit) {
    const auto over = [](Bytes needed, Bytes available) { return std::max(0.0, (needed - available) / available); };
    return over(fit.device(), fit.capacity) + over(fit.host, fit.host_capacity);
  }

  // --- what is reported ----------------------------------------------------------------------------

  Prediction prediction_of(const Option& option, const EngineFit& fit) const {
    Prediction p;
    const EngineTime& t = option.time;
    p.step = t.step;
    p.tokens_per_second = option.tokens_per_second;
    p.tokens_per_second_per_gpu = p.tokens_per_second / option.plan.ranks;
    p.time.compute = t.compute;
    p.time.exposed_communication = t.exposed_communication;
    p.time.exposed_offload = t.offload;
    p.time.optimizer = t.optimizer;
    p.time.idle = t.host;
    p.kernels = t.compute;
    p.limited_by = limit_of(t);
    set_utilisation(p, option.plan);
    set_memory(p, fit);
    return p;
  }

  static std::string limit_of(const EngineTime& t) {
    const std::array<std::pair<StepLimit, Seconds>, 5> parts{{{StepLimit::compute, t.compute},
                                                              {StepLimit::communication, t.exposed_communication},
                                                              {StepLimit::host, t.host},
                                                              {StepLimit::optimizer, t.optimizer},
                                                              {StepLimit::offload, t.offload}}};
    for (const auto& [limit, seconds] : parts) {
      if (limit == t.limit)
        return fmt::format("{}: {:.0f} % of the step", to_string(limit), 100.0 * (seconds / t.step));
    }
    return std::string(to_string(t.limit));
  }

  void set_utilisation(Prediction& p, const Plan& plan) const {
    const GpuSpec& gpu = request_.machine.gpu;
    const auto peak = plan.precision.weights == DType::bf16   ? gpu.peak_bf16
                      : plan.precision.weights == DType::fp16 ? gpu.peak_fp16
                                                              : gpu.peak_fp32;
    if (!peak) return;
    const double flops = model_flops(request_.model, plan.micro_step(), AttentionCount::causal).base() *
                         static_cast<double>(plan.accumulation);
    p.mfu = flops / p.step.base() / peak->base();
    const double again = plan.recompute == Recompute::none ? 1.0 : 4.0 / 3.0;  // forward once more
    p.hfu = *p.mfu * again;
  }

  void set_memory(Prediction& p, const EngineFit& fit) const {
    const auto put = [](TierMemory& tier, std::string_view owner, Bytes bytes) {
      if (bytes <= Bytes()) return;
      tier.breakdown.emplace_back(owner, bytes);
      tier.peak += bytes;
    };
    Bytes owned;
    for (int o = 0; o < kNumOwners; ++o) {
      const Bytes bytes = fit.prediction.owners[static_cast<std::size_t>(o)];
      put(p.gpu, to_string(static_cast<Owner>(o)), bytes);
      owned += bytes;
    }
    // The host's lead fills the card at most.
    const Bytes reserved = fit.fits() ? std::min(fit.reserved, fit.capacity - fit.overhead) : fit.reserved;
    put(p.gpu, "allocator_cache", reserved - owned);
    const EngineEnvironment environment;
    put(p.gpu, "context", environment.context);
    put(p.gpu, "libraries", environment.libraries);
    put(p.gpu, "nccl", fit.overhead - environment.context - environment.libraries);
    p.gpu.capacity = request_.machine.gpu.memory;
    p.lower_bound = fit.allocated;
    TierMemory host;
    const auto ranks = static_cast<double>(request_.machine.gpus_per_node);
    const Bytes engine = ranks * fit.prediction.host_use.total();
    put(host, "offload", engine);
    put(host, "processes", fit.host - engine);
    host.pinned = ranks * fit.prediction.host_use.pinned;
    host.capacity = request_.machine.usable_dram();
    p.host = host;
  }

  void finish() {
    std::stable_sort(found_.begin(), found_.end(), [&](const Candidate& a, const Candidate& b) {
      if (request_.per_stage) return a.plan.zero_stage < b.plan.zero_stage;
      return a.prediction.tokens_per_second > b.prediction.tokens_per_second;
    });
    answer_.plans = found_;
    answer_.feasible = !found_.empty();
    if (!answer_.feasible) {
      if (!nearest_) {
        throw InputError(fmt::format("--engine {}: the states alone exceed {} a GPU in every configuration",
                                     to_string(request_.engine), format_gib(request_.machine.gpu.memory)));
      }
      set_shortfall();
    }
    const Candidate& shown = answer_.feasible ? answer_.plans.front() : answer_.shortfall->nearest;
    for (const Assumption& a : time_of(shown.plan).assumptions) answer_.assumptions.push_back(a);
    if (request_.machine.nvme.drives > 0) {
      answer_.assumptions.push_back(
          {"offload to NVMe", "not tried", "its step time is not modelled under other engines"});
    }
    answer_.assumptions.push_back({"engine", deepspeed() ? "DeepSpeed 0.19.8" : "FSDP2 of torch 2.11",
                                   "transformers 5.17 in eager mode, SDPA attention, no chunked loss; memory replayed "
                                   "through PyTorch's allocator "
                                   "(docs/engines.md), step time by docs/step-time.md"});
  }

  void set_shortfall() {
    Shortfall s;
    s.nearest = *nearest_;
    const double left = 1 - request_.margin;
    if (nearest_fit_.device() > nearest_fit_.capacity) {
      s.lacks.push_back({"gpu", nearest_fit_.device(), request_.machine.gpu.memory * left});
    }
    if (!nearest_fit_.host_fits()) s.lacks.push_back({"host", nearest_fit_.host, nearest_fit_.host_capacity});
    s.changes = more_host_memory();
    s.optimizer_states = Bytes(12.0 * static_cast<double>(request_.model.parameters()));
    answer_.shortfall = s;
  }

  /// When the host alone is too small: the memory that would do, checked.
  std::vector<Shortfall::Change> more_host_memory() const {
    if (nearest_fit_.gpu == GpuVerdict::does_not_fit || nearest_fit_.host_fits()) return {};
    constexpr double kStep = 64 * kGiB;
    MachineSpec larger = request_.machine;
    for (double dram = std::ceil(nearest_fit_.host.base() / kStep) * kStep; dram <= 1024 * kTiB; dram += kStep) {
      set_host_memory(larger, Bytes(dram));
      if (nearest_fit_.host > larger.usable_dram() * (1 - request_.margin)) continue;
      Candidate result = *nearest_;
      result.prediction.host->capacity = larger.usable_dram();
      result.fits = true;
      return {
          {fmt::format("{} of host memory a node (now {})", format_gib(Bytes(dram)), format_gib(request_.machine.dram)),
           fmt::format("--host-memory {:.0f}GiB", dram / kGiB), result}};
    }
    return {};
  }

  Answer& answer_;
  const Request& request_;
  const Workload& workload_;
  MachineSpec diskless_;  // on the machine itself the exporter may move states to NVMe
  EngineFitter fitter_;
  std::vector<Option> options_;
  std::vector<Candidate> found_;
  std::map<Kind, std::int64_t> too_large_;  // the smallest micro-batch that did not fit
  std::optional<Candidate> nearest_;
  EngineFit nearest_fit_;
  double nearest_lack_ = 0;
  int replays_ = 0;
};

}  // namespace

void search_engine(Answer& answer, const Workload& workload) { EngineSearch(answer, workload).run(); }

}  // namespace zeroplan
