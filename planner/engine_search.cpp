#include "planner/engine_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <tuple>

#include "models/error.h"
#include "planner/engine_candidate.h"
#include "planner/engine_counts.h"
#include "planner/engine_fit.h"
#include "planner/export_parts.h"
#include "sim/engine_time.h"

namespace zeroplan {
namespace {

constexpr std::size_t kMostBatches = 8;  // micro-batches tried of each kind
constexpr int kMostReplays = 60;         // of memory: each takes milliseconds to tenths of a second
constexpr int kMostFrugal = 6;           // of those with least on the GPU, where no faster one fits

struct Option {
  Plan plan;
  EngineTime time;
  double tokens_per_second = 0;
};

/// A plan that does not fit, and by how much.
struct Miss {
  Candidate candidate;
  EngineFit fit;
  double lack = 0;
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
      if (enough() || replays_ >= most_replays()) break;
      consider(option);
    }
    for (const int stage : stages()) {
      if (request_.per_stage ? !has_stage(stage) : found_.empty()) consider_frugal(stage);
    }
    finish();
  }

 private:
  /// A replay takes time in proportion to the layers.
  int most_replays() const {
    constexpr std::int64_t kMostLayers = 12'000, kFewest = 6;
    return static_cast<int>(std::clamp<std::int64_t>(kMostLayers / std::max<std::int64_t>(request_.model.num_layers, 1),
                                                     kFewest, kMostReplays));
  }

  bool deepspeed() const { return request_.engine == Engine::deepspeed; }

  // --- the space -----------------------------------------------------------------------------------

  std::vector<int> stages() const {
    if (deepspeed()) return stages_of(request_);
    // FSDP2 shards weights always; stage 2 is reshard_after_forward off.
    std::vector<int> stages;
    for (const int stage : request_.constraints.stages.empty() ? std::vector<int>{2, 3} : stages_of(request_)) {
      if (stage < 2) {
        throw InputError(
            fmt::format("--zero {}: FSDP2 has stages 2 (no resharding after forward) and 3; expected those", stage));
      }
      stages.push_back(stage);
    }
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

  /// Flags that leave no plan at all.
  void refuse_empty() const {
    if (answer_.search.space > 0) return;
    if (!deepspeed() && request_.constraints.offload && request_.constraints.offload->what == OffloadWhat::optimizer) {
      throw InputError(
          "--offload optimizer: FSDP2 moves parameters and optimizer together; expected parameters or all");
    }
    throw InputError(fmt::format("no plan exists in this space: --offload needs --zero {}",
                                 deepspeed() ? "1 or higher (optimizer) or 3 (parameters)" : "3"));
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
    refuse_empty();
  }

  void add(const Choice& choice) {
    Option option;
    option.plan = plan_of(request_, workload_, choice);
    option.plan.engine = request_.engine;
    ++answer_.search.space;
    option.time = time_of(option.plan);
    option.tokens_per_second = tokens() / option.time.step.base();
    if (engine_states_on_gpu(request_.model, option.plan) > request_.machine.gpu.memory * (1 - request_.margin)) {
      hopeless_.push_back(option);
      return;
    }
    options_.push_back(option);
    ++answer_.search.evaluated;
  }

  double tokens() const { return static_cast<double>(workload_.global_batch * workload_.seq_len); }

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
    if (request_.objective == Objective::memory) return frugality(a) < frugality(b);
    return a.tokens_per_second > b.tokens_per_second;
  }

  /// Smaller: less on the GPU, before any replay.
  std::tuple<std::int64_t, bool, Bytes> frugality(const Option& o) const {
    return {o.plan.micro_batch, o.plan.recompute == Recompute::none, engine_states_on_gpu(request_.model, o.plan)};
  }

  // --- memory --------------------------------------------------------------------------------------

  bool enough() const {
    if (request_.per_stage) return found_.size() >= stages().size();
    // States alone do not rank memory: the smallest micro-batch of every kind is replayed, then the least are shown.
    return request_.objective != Objective::memory && static_cast<int>(found_.size()) >= request_.top_k;
  }
  bool has_stage(int stage) const {
    return std::ranges::any_of(found_, [&](const Candidate& c) { return c.plan.zero_stage == stage; });
  }

  /// Whatever the limit of replays: a stage is not said to be too large before what takes least was tried.
  void consider_frugal(int stage) {
    std::vector<Option> frugal;
    for (const std::vector<Option>* options : {&options_, &hopeless_}) {
      if (!frugal.empty()) break;
      std::ranges::copy_if(*options, std::back_inserter(frugal),
                           [&](const Option& o) { return o.plan.zero_stage == stage; });
    }
    std::ranges::stable_sort(frugal, [&](const Option& a, const Option& b) { return frugality(a) < frugality(b); });
    if (frugal.size() > kMostFrugal) frugal.resize(kMostFrugal);
    for (const Option& option : frugal) {
      consider(option);
      if (has_stage(stage)) return;
    }
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
    Candidate candidate{
        option.plan,
        engine_candidate_prediction(request_.model, request_.machine, option.plan, option.time, fit, tokens()),
        fit.fits_in_step()};
    if (candidate.fits) {
      found_.push_back(std::move(candidate));
      return;
    }
    too_large_[kind] =
        std::min(full == too_large_.end() ? option.plan.micro_batch : full->second, option.plan.micro_batch);
    const double lacking = lack(fit);
    const auto nearest = nearest_.find(option.plan.zero_stage);
    if (nearest != nearest_.end() && nearest->second.lack <= lacking) return;
    nearest_.insert_or_assign(option.plan.zero_stage, Miss{std::move(candidate), fit, lacking});
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

  void finish() {
    if (found_.empty()) set_shortfall();
    answer_.feasible = !found_.empty();
    if (request_.per_stage) {
      for (const auto& [stage, miss] : nearest_) {
        if (!has_stage(stage)) found_.push_back(miss.candidate);
      }
    }
    std::stable_sort(found_.begin(), found_.end(), [&](const Candidate& a, const Candidate& b) {
      if (request_.per_stage) return a.plan.zero_stage < b.plan.zero_stage;
      if (request_.objective == Objective::memory) return a.prediction.gpu.peak < b.prediction.gpu.peak;
      return a.prediction.tokens_per_second > b.prediction.tokens_per_second;
    });
    const auto most = static_cast<std::size_t>(request_.top_k);
    if (!request_.per_stage && found_.size() > most) found_.resize(most);
    answer_.plans = found_;
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

  const Miss& least_miss() const {
    return std::ranges::min_element(nearest_, {}, [](const auto& entry) { return entry.second.lack; })->second;
  }

  void set_shortfall() {
    const Miss& miss = least_miss();
    Shortfall s;
    s.nearest = miss.candidate;
    const double left = 1 - request_.margin;
    if (miss.fit.device() > miss.fit.capacity) {
      s.lacks.push_back({"gpu", miss.fit.device(), request_.machine.gpu.memory * left});
    }
    if (!miss.fit.host_fits()) s.lacks.push_back({"host", miss.fit.host, miss.fit.host_capacity});
    s.changes = more_host_memory(miss);
    s.optimizer_states = Bytes(12.0 * static_cast<double>(request_.model.parameters()));
    answer_.shortfall = s;
  }

  /// When the host alone is too small: the memory that would do, checked.
  std::vector<Shortfall::Change> more_host_memory(const Miss& miss) const {
    const EngineFit& fit = miss.fit;
    const bool card_holds = fit.gpu != GpuVerdict::does_not_fit && fit.reserved_low + fit.overhead <= fit.capacity;
    if (!card_holds || fit.host_fits()) return {};
    constexpr double kStep = 64 * kGiB;
    MachineSpec larger = request_.machine;
    for (double dram = std::ceil(fit.host.base() / kStep) * kStep; dram <= 1024 * kTiB; dram += kStep) {
      set_host_memory(larger, Bytes(dram));
      if (fit.host > larger.usable_dram() * (1 - request_.margin)) continue;
      Candidate result = miss.candidate;
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
  std::vector<Option> options_, hopeless_;  // hopeless: states alone are too large
  std::vector<Candidate> found_;
  std::map<Kind, std::int64_t> too_large_;  // the smallest micro-batch that did not fit
  std::map<int, Miss> nearest_;             // by stage, of those that do not fit
  int replays_ = 0;
};

}  // namespace

void search_engine(Answer& answer, const Workload& workload) { EngineSearch(answer, workload).run(); }

}  // namespace zeroplan
