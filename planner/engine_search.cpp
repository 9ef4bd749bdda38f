#include "planner/engine_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "models/error.h"
#include "planner/engine_counts.h"
#include "planner/engine_plans.h"
#include "planner/shortfall.h"
#include "sim/gpu_model.h"

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

/// A plan that does not fit: what it lacks at least, as a share of what there is.
struct Miss {
  Option option;
  double least_lack = 0;
};
/// All of it.
struct Shortage {
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
        plans_(request_),
        most_replays_(most_replays(request_.model)) {}

  void run() {
    collect();
    refuse_empty();
    consider_fastest();
    for (const int stage : stages()) {
      if (request_.per_stage ? !has_stage(stage) : found_.empty()) consider_frugal(stage);
    }
    finish();
  }

  /// The first that fits of those that take least at the highest stage; nothing when none does.
  std::optional<Candidate> frugal() {
    collect();
    consider_frugal(stages().back());
    return first_found();
  }
  /// The fastest that fits, of a few.
  std::optional<Candidate> fastest(int most_tried) {
    collect();
    most_replays_ = std::min(most_replays_, most_tried);
    consider_fastest();
    if (found_.empty()) consider_frugal(stages().back());
    return first_found();
  }

 private:
  void consider_fastest() {
    std::stable_sort(options_.begin(), options_.end(), [&](const Option& a, const Option& b) { return better(a, b); });
    for (const Option& option : options_) {
      if (enough() || replays_ >= most_replays_) break;
      consider(option);
    }
  }
  std::optional<Candidate> first_found() const { return found_.empty() ? std::nullopt : std::optional(found_.front()); }

  /// A replay takes time in proportion to the layers.
  static int most_replays(const ModelSpec& model) {
    constexpr std::int64_t kMostLayers = 12'000, kFewest = 6;
    return static_cast<int>(
        std::clamp<std::int64_t>(kMostLayers / std::max<std::int64_t>(model.num_layers, 1), kFewest, kMostReplays));
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

  /// Whole placements only: neither engine splits states block by block. NVMe serves DeepSpeed's stage 3.
  std::vector<OffloadStyle> offloads(int stage) const {
    std::vector<OffloadStyle> styles;
    for (OffloadStyle s : offloads_of(request_, stage)) {
      s.gradients = Tier::hbm;
      s.whole = true;
      if (s.update == UpdateOn::device && s.optimizer != Tier::hbm) continue;
      const bool on_nvme = s.optimizer == Tier::nvme || s.parameters == Tier::nvme;
      if (on_nvme && (!deepspeed() || stage < 3)) continue;
      // FSDP2's CPUOffloadPolicy takes parameters and optimizer together, to the host.
      const bool all_on_host = s.optimizer == Tier::host && s.parameters == Tier::host;
      if (!deepspeed() && s.optimizer != Tier::hbm && !all_on_host) continue;
      if (std::find(styles.begin(), styles.end(), s) == styles.end()) styles.push_back(s);
    }
    return styles;
  }

  /// DeepSpeed shards over all ranks; at stage 3 hpZ's second copy of the weights lies in a node, on its GPUs.
  std::vector<int> groups(int stage, const OffloadStyle& offload) const {
    if (!deepspeed() || (stage == 3 && offload.parameters == Tier::hbm)) return shard_groups_of(request_, stage);
    return {stage == 0 ? 1 : request_.machine.ranks()};
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
    if (!deepspeed() && fixed && fixed->what != OffloadWhat::none && fixed->to == Tier::nvme) {
      throw InputError("--offload ...:nvme: expected cpu: FSDP2 offloads to host memory only");
    }
  }

  void refuse_adam() const {
    const auto& fixed = request_.constraints.offload;
    const bool host = fixed && (fixed->what == OffloadWhat::parameters || fixed->what == OffloadWhat::all);
    if (!host || !request_.adam || *request_.adam == AdamForm::loop) return;
    throw InputError(
        fmt::format("--adam {}: expected loop beside --offload: only that form is known with parameters on the host",
                    to_string(*request_.adam)));
  }

  /// Flags that leave no plan at all. A change that is tried for a shortfall may do so: then it does not help.
  void refuse_empty() const {
    if (answer_.search.space > 0) return;
    if (!deepspeed() && request_.constraints.offload && request_.constraints.offload->what == OffloadWhat::optimizer) {
      throw InputError(
          "--offload optimizer: FSDP2 moves parameters and optimizer together; expected parameters or all");
    }
    const auto& fixed = request_.constraints.offload;
    throw InputError(fmt::format(
        "--offload: no plan exists in this space: expected --zero {}",
        !deepspeed() || (fixed && fixed->to == Tier::nvme) ? "3" : "1 or higher (optimizer) or 3 (parameters)"));
  }

  void collect() {
    refuse_nvme();
    refuse_adam();
    if (!request_.machine.host_device) require_matmuls(request_.machine.gpu, request_.precision);
    for (const int stage : stages()) {
      for (const OffloadStyle& offload : offloads(stage)) {
        for (const int group : groups(stage, offload)) {
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
    if (!deepspeed())
      option.plan.adam = on_host(option.plan) ? AdamForm::loop : request_.adam.value_or(AdamForm::fused);
    option.plan.allocator_conf = request_.allocator_conf;
    ++answer_.search.space;
    option.time = plans_.time(option.plan);
    option.tokens_per_second = tokens() / option.time.step.base();
    if (engine_states_on_gpu(plans_.trained(), option.plan) > request_.machine.gpu.memory * (1 - request_.margin)) {
      hopeless_.push_back(option);
      return;
    }
    options_.push_back(option);
    ++answer_.search.evaluated;
  }

  static bool on_host(const Plan& plan) { return plan.optimizer.hbm < plan.optimizer.total(); }

  double tokens() const { return static_cast<double>(workload_.global_batch * workload_.seq_len); }

  bool better(const Option& a, const Option& b) const {
    if (request_.objective == Objective::memory) return frugality(a) < frugality(b);
    return worth(a.plan, a.tokens_per_second) > worth(b.plan, b.tokens_per_second);
  }
  /// Offload that gains what makes no difference does not come before a plan without it.
  static double worth(const Plan& plan, double tokens_per_second) {
    const auto leaves = [](const Placement& p) { return p.hbm < p.total(); };
    return leaves(plan.optimizer) || leaves(plan.parameters) ? tokens_per_second / kNoDifference : tokens_per_second;
  }

  /// Smaller: less on the GPU, before any replay.
  std::tuple<std::int64_t, bool, Bytes> frugality(const Option& o) const {
    return {o.plan.micro_batch, o.plan.recompute == Recompute::none, engine_states_on_gpu(plans_.trained(), o.plan)};
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
    EngineTrial trial = plans_.try_fit(option.plan);
    ++replays_;
    if (trial.fit) {
      found_.push_back(plans_.candidate(option.plan, option.time, *trial.fit));
      return;
    }
    too_large_[kind] =
        std::min(full == too_large_.end() ? option.plan.micro_batch : full->second, option.plan.micro_batch);
    misses_[option.plan.zero_stage].push_back({option, lack(option.plan, trial.device_at_least, trial.host)});
  }

  double lack(const Plan& plan, Bytes device, Bytes host) const {
    const auto over = [](Bytes needed, Bytes available) { return std::max(0.0, (needed - available) / available); };
    const MachineSpec& m = request_.machine;
    const double left = 1 - request_.margin;
    const Bytes nvme = engine_nvme(plans_.trained(), m, plan);
    return over(device, m.gpu.memory * left) + over(host, m.usable_dram() * left) +
           (nvme > Bytes() ? over(nvme, m.nvme.capacity * left) : 0);
  }

  /// The plan that lacks least, of equals the first. Only those that may be it are fitted.
  Shortage nearest_of(const std::vector<Miss>& misses) {
    std::vector<std::size_t> order(misses.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, {}, [&](std::size_t i) { return misses[i].least_lack; });
    std::pair least(std::numeric_limits<double>::infinity(), misses.size());
    for (const std::size_t i : order) {
      if (misses[i].least_lack > least.first) break;
      if (std::pair(misses[i].least_lack, i) > least) continue;
      const EngineFit fit = plans_.fit(misses[i].option.plan, FitDetail::needs);
      least = std::min(least, std::pair(lack(misses[i].option.plan, fit.device(), fit.host), i));
    }
    const Option& option = misses[least.second].option;
    const EngineFit fit = plans_.fit(option.plan, FitDetail::verdict);
    return Shortage{plans_.candidate(option.plan, option.time, fit), fit, least.first};
  }

  // --- what is reported ----------------------------------------------------------------------------

  void finish() {
    if (found_.empty()) set_shortfall();
    answer_.feasible = !found_.empty();
    if (request_.per_stage) {
      for (const auto& [stage, misses] : misses_) {
        if (!has_stage(stage)) found_.push_back(nearest_of(misses).candidate);
      }
    }
    std::stable_sort(found_.begin(), found_.end(), [&](const Candidate& a, const Candidate& b) {
      if (request_.per_stage) return a.plan.zero_stage < b.plan.zero_stage;
      if (request_.objective == Objective::memory) return a.prediction.gpu.peak < b.prediction.gpu.peak;
      return worth(a.plan, a.prediction.tokens_per_second) > worth(b.plan, b.prediction.tokens_per_second);
    });
    const auto most = static_cast<std::size_t>(request_.top_k);
    if (!request_.per_stage && found_.size() > most) found_.resize(most);
    answer_.plans = found_;
    const Candidate& shown = answer_.feasible ? answer_.plans.front() : answer_.shortfall->nearest;
    for (const Assumption& a : plans_.time(shown.plan).assumptions) answer_.assumptions.push_back(a);
    if (request_.machine.nvme.drives > 0 && !deepspeed()) {
      answer_.assumptions.push_back({"NVMe", "not used", "FSDP2 offloads to host memory only"});
    }
    assume_software(shown.plan);
    answer_.assumptions.push_back({"engine", deepspeed() ? "DeepSpeed 0.19.8" : "FSDP2 of torch 2.11",
                                   "transformers 5.17 in eager mode, SDPA attention, no chunked loss; memory replayed "
                                   "through PyTorch's allocator "
                                   "(docs/engines.md), step time by docs/step-time.md"});
  }

  /// What of PyTorch nobody said.
  void assume_software(const Plan& plan) {
    if (!deepspeed()) assume_adam(plan);
    if (request_.allocator_conf.empty()) {
      answer_.assumptions.push_back({"PYTORCH_CUDA_ALLOC_CONF", "not set", "PyTorch's defaults; --alloc-conf"});
    }
  }
  void assume_adam(const Plan& plan) {
    if (on_host(plan)) {
      answer_.assumptions.push_back(
          {"AdamW", "loop, on the host", "what torch.optim.AdamW does with parameters there, and what was measured"});
    } else if (!request_.adam) {
      answer_.assumptions.push_back(
          {"AdamW", "fused",
           fmt::format(
               "Hugging Face Trainer's since torch 2.8; torch.optim.AdamW by itself takes foreach, {} more in the "
               "step (--adam)",
               format_gib(foreach_roots(plans_.trained(), plan)))});
    } else if (*request_.adam != AdamForm::fused) {
      answer_.assumptions.push_back({"time of AdamW",
                                     fmt::format("{}: by its passes over memory{}", to_string(plan.adam),
                                                 plan.adam == AdamForm::loop ? " and its launches" : ""),
                                     "torch 2.11, optim/adam.py; not measured"});
    }
  }

  Shortage least_shortage() {
    std::vector<Miss> all;
    for (const auto& [stage, misses] : misses_) all.insert(all.end(), misses.begin(), misses.end());
    return nearest_of(all);
  }

  void set_shortfall() {
    const Shortage miss = least_shortage();
    Shortfall s;
    s.nearest = miss.candidate;
    const double left = 1 - request_.margin;
    if (miss.fit.device() > miss.fit.capacity) {
      s.lacks.push_back({"gpu", miss.fit.device(), request_.machine.gpu.memory * left});
    }
    if (!miss.fit.host_fits()) s.lacks.push_back({"host", miss.fit.host, miss.fit.host_capacity});
    s.changes = changes_that_fit(request_);
    if (const auto& nvme = miss.candidate.prediction.nvme; nvme && nvme->peak > nvme->capacity * left) {
      s.lacks.push_back({"nvme", nvme->peak, nvme->capacity * left});
    }
    s.optimizer_states = Bytes(12.0 * static_cast<double>(plans_.trained().trainable_parameters()));
    answer_.shortfall = s;
  }

  Answer& answer_;
  const Request& request_;
  const Workload& workload_;
  EnginePlans plans_;
  std::vector<Option> options_, hopeless_;  // hopeless: states alone are too large
  std::vector<Candidate> found_;
  std::map<Kind, std::int64_t> too_large_;   // the smallest micro-batch that did not fit
  std::map<int, std::vector<Miss>> misses_;  // by stage, as considered
  int most_replays_, replays_ = 0;
};

/// Of a request that needs no report.
struct QuickSearch {
  explicit QuickSearch(const Request& request) {
    answer.request = request;
    answer.request.top_k = 1;
    answer.request.per_stage = false;
    workload = workload_of(answer.request, answer.assumptions, answer.warnings);
  }
  Answer answer;
  Workload workload;
};

}  // namespace

void search_engine(Answer& answer, const Workload& workload) {
  try {
    EngineSearch(answer, workload).run();
  } catch (const InputError& e) {
    // What the models of memory and time refuse follows from the engine that was asked for.
    const std::string what = e.what();
    if (what.starts_with("--")) throw;
    throw InputError(fmt::format("--engine {}: {}", to_string(answer.request.engine), what));
  }
}

std::optional<Candidate> engine_plan_that_fits(const Request& request) {
  QuickSearch quick(request);
  return EngineSearch(quick.answer, quick.workload).frugal();
}

std::optional<Candidate> fastest_engine_plan(const Request& request) {
  constexpr int kMostTried = 12;
  QuickSearch quick(request);
  return EngineSearch(quick.answer, quick.workload).fastest(kMostTried);
}

}  // namespace zeroplan
