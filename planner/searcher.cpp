#include "planner/searcher.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "models/error.h"
#include "models/lower.h"

namespace zeroplan {
namespace {

constexpr int kRefined = 4;  // kinds of one family that are refined
constexpr int kRepairs = 3;  // times that blocks move outwards after the tiers were filled by estimate
/// GPU memory is not bought by the GiB: what it lacks weighs more than what the host lacks.
constexpr double kGpuLackWeight = 8;
/// Timed ops played to rank the short list, and to play the answer whole: some 15 and 20 ms where transfers share
/// memory and links all the time (docs/benchmarks.md; in lockstep it is four times as fast).
constexpr double kMostPlayedOps = 2.5e5;
constexpr double kMostWholeOps = 4e5;
constexpr int kFewestPlays = 5;  // of the short list, however many ops they have: estimates rank offload badly
constexpr int kMostSettled = 3;  // answers played whole until one stays the best

/// Whether weight gradients are added to a whole resident gradient; a lone rank that sends them to the host writes them
/// like a sharded one.
bool whole_gradients(const Plan& plan) {
  return plan.zero_stage < 2 || (plan.ranks == 1 && plan.gradients == Tier::hbm);
}

}  // namespace

Searcher::Searcher(const Request& request, const Workload& workload)
    : request_(request), workload_(workload), predictor_(request.model, request.machine), moves_(request) {}

namespace {

Tier farthest(const Placement& p) { return p.nvme > 0 ? Tier::nvme : p.host > 0 ? Tier::host : Tier::hbm; }

}  // namespace

Searcher::Family Searcher::family_of(const Plan& p) {
  return {p.zero_stage, p.shard_ranks, farthest(p.parameters), farthest(p.optimizer), p.gradients};
}

Searcher::Kind Searcher::kind_of(const Plan& p) {
  return std::tuple_cat(family_of(p), std::make_tuple(p.update, p.recompute, p.precision.split_master, p.micro_batch));
}

Prediction Searcher::evaluate(const Plan& plan) {
  ++stats_.evaluated;
  return predictor_.predict(plan, Detail::live);
}

bool Searcher::better(const Prediction& a, const Prediction& b) const {
  if (request_.objective == Objective::memory) {
    // Least of the scarce memory; equal memory by time.
    if (a.gpu.peak != b.gpu.peak) return a.gpu.peak < b.gpu.peak;
  }
  // One machine has one price: the fastest plan is the cheapest.
  return a.step < b.step;
}

std::vector<Candidate> Searcher::ranked() const {
  std::vector<Candidate> all;
  for (const auto& [kind, candidate] : best_) all.push_back(candidate);
  std::stable_sort(all.begin(), all.end(),
                   [&](const Candidate& a, const Candidate& b) { return better(a.prediction, b.prediction); });
  return all;
}

/// Step time that a new plan must beat to matter: that of the last family that could still be reported, and one more
/// because refining may change the order.
double Searcher::cut() const {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  if (request_.objective == Objective::memory) return kNone;
  std::map<Family, double> fastest;
  for (const auto& [kind, candidate] : best_) {
    double& step = fastest.try_emplace(family_of(candidate.plan), kNone).first->second;
    step = std::min(step, candidate.prediction.step.base());
  }
  const auto enough = static_cast<std::size_t>(request_.top_k + 1);
  if (fastest.size() < enough) return kNone;
  std::vector<double> steps;
  for (const auto& [family, step] : fastest) steps.push_back(step);
  std::nth_element(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(enough - 1), steps.end());
  return steps[enough - 1];
}

std::vector<Candidate> Searcher::run() {
  explore(false);
  // The split master is exact but rounds ties differently: taken up only when states do not all fit in GPU memory.
  const auto first = ranked();
  const int blocks = static_cast<int>(request_.model.sequence.size());
  if (request_.precision == DType::bf16 && (first.empty() || first.front().plan.optimizer.hbm < blocks)) explore(true);
  // Summing many micro-steps in 16 bits loses small gradients: only when nothing fits otherwise.
  if (request_.precision != DType::fp32 && best_.empty()) {
    explore(false, true);
    if (request_.precision == DType::bf16 && best_.empty()) explore(true, true);
  }
  // The few best of the families that can be reported.
  std::vector<Candidate> all;
  std::map<Family, int> taken;
  for (Candidate& c : ranked()) {
    const Family family = family_of(c.plan);
    if (!taken.contains(family) && static_cast<int>(taken.size()) > request_.top_k) continue;
    if (taken[family]++ < kRefined) all.push_back(std::move(c));
  }
  const std::size_t chosen = all.size();
  for (std::size_t i = 0; i < chosen; ++i) {
    for (const bool weights : {false, true}) {
      if (auto other = emptied(all[i], weights)) all.push_back(std::move(*other));
    }
  }
  for (Candidate& c : all) refine(c);
  std::stable_sort(all.begin(), all.end(),
                   [&](const Candidate& a, const Candidate& b) { return better(a.prediction, b.prediction); });
  return report(std::move(all));
}

/// Timed ops that the simulator would play: about 30 a layer and micro-step, forward and backward, on each rank of a
/// node.
double Searcher::whole_ops(const Plan& plan) const {
  return 30.0 * static_cast<double>(request_.model.num_layers * plan.accumulation) * request_.machine.gpus_per_node;
}

/// Those of Predictor::play_shortly().
double Searcher::played_ops(const Plan& plan) const {
  const std::int64_t micro_steps = std::min(plan.accumulation, kShortSteps + kLongerSteps);
  return whole_ops(plan) * static_cast<double>(micro_steps) / static_cast<double>(plan.accumulation);
}

void Searcher::play(Candidate& c) {
  use_played_step(c.prediction, predictor_.play_shortly(c.plan), request_.machine);
  ++stats_.simulated;
}

/// A plan that keeps everything on the GPU goes first if it is as fast as makes no difference.
void Searcher::prefer_simpler(std::vector<Candidate>& plans) const {
  if (plans.size() < 2 || request_.objective == Objective::memory) return;
  const auto offloads = [](const Candidate& c) { return c.plan.optimizer.hbm < c.plan.optimizer.total(); };
  if (!offloads(plans.front())) return;
  const Seconds limit = kNoDifference * plans.front().prediction.step;
  const auto simple = std::find_if(plans.begin(), plans.end(), [&](const Candidate& c) {
    return !offloads(c) && c.prediction.simulated == plans.front().prediction.simulated && c.prediction.step <= limit;
  });
  if (simple != plans.end()) std::rotate(plans.begin(), simple, simple + 1);
}

/// The best of `top_k` families, best first. An estimate sees no contention, so it is a lower bound of the played step:
/// the best candidate so far is laid out, then played, until what is best has been both. What the budget leaves
/// unplayed comes after what was played.
std::vector<Candidate> Searcher::report(std::vector<Candidate> all) {
  struct Entry {
    Candidate candidate;
    bool laid_out = false;
  };
  std::vector<Entry> pool;
  double budget = kMostPlayedOps;
  for (Candidate& c : all) {
    budget = std::max(budget, kFewestPlays * played_ops(c.plan));
    pool.push_back({std::move(c), false});
  }
  std::vector<Candidate> reported;
  const auto can_play = [&](const Candidate& c) { return !c.prediction.simulated && played_ops(c.plan) <= budget; };
  const auto order = [&](const Entry& a, const Entry& b) {
    const bool last_a = !a.candidate.prediction.simulated && !can_play(a.candidate);
    const bool last_b = !b.candidate.prediction.simulated && !can_play(b.candidate);
    if (last_a != last_b) return last_b;
    return better(a.candidate.prediction, b.candidate.prediction);
  };
  while (!pool.empty() && static_cast<int>(reported.size()) < request_.top_k) {
    const auto best = std::min_element(pool.begin(), pool.end(), order);
    Candidate& c = best->candidate;
    const auto same = [&](const Candidate& r) { return family_of(r.plan) == family_of(c.plan); };
    if (std::any_of(reported.begin(), reported.end(), same)) {
      pool.erase(best);
    } else if (!best->laid_out) {
      best->laid_out = lay_out_plan(c);
      if (!best->laid_out) pool.erase(best);
    } else if (can_play(c)) {
      budget -= played_ops(c.plan);
      play(c);
    } else {
      reported.push_back(std::move(c));
      pool.erase(best);
    }
  }
  settle(reported);
  return reported;
}

/// The answer itself is played whole, as `simulate` plays it. Where that takes longer than its short play, the next
/// plan may be the best, and is played whole too.
void Searcher::settle(std::vector<Candidate>& plans) {
  std::vector<Plan> whole;
  prefer_simpler(plans);
  while (!plans.empty() && static_cast<int>(whole.size()) < kMostSettled) {
    Candidate& answer = plans.front();
    if (!answer.prediction.simulated || whole_ops(answer.plan) > kMostWholeOps) return;
    if (std::find(whole.begin(), whole.end(), answer.plan) != whole.end()) return;
    use_played_step(answer.prediction, played_step(predictor_.simulate(answer.plan, {})), request_.machine);
    whole.push_back(answer.plan);
    std::stable_sort(plans.begin(), plans.end(), [&](const Candidate& a, const Candidate& b) {
      if (a.prediction.simulated != b.prediction.simulated) return a.prediction.simulated;
      return better(a.prediction, b.prediction);
    });
    prefer_simpler(plans);
  }
}

void Searcher::explore(bool split_master, bool narrow_sum) {
  if (narrow_sum) kernel_seconds_.clear();  // they were those of kernels that sum in fp32, which take longer
  for (Recompute recompute : recomputes_of(request_)) {
    for (int stage : stages_of(request_)) {
      for (int group : shard_groups_of(request_, stage)) {
        for (const OffloadStyle& style : offloads_of(request_, stage)) {
          explore_batches({stage, group, style, recompute, 1, split_master, narrow_sum});
        }
      }
    }
  }
}

void Searcher::explore_batches(Choice choice) {
  const auto batches = micro_batches_of(request_, workload_);
  stats_.space += batches.size();
  bool full = false;
  for (std::int64_t b : batches) {
    choice.micro_batch = b;
    // Memory grows with the micro-batch; a single micro-step is another case (gradients need no wider sum).
    const bool single = b == workload_.per_rank(request_.machine.ranks());
    if (full && !single) continue;
    if (try_choice(choice) == Fit::gpu_full && !single) full = true;
  }
}

/// States alone exceed the GPU: no need to lower.
bool Searcher::hopeless(const Plan& plan) const {
  return predictor_.resident_states(plan)[static_cast<std::size_t>(Memory::hbm)] > moves_.gpu_budget();
}

Searcher::Fit Searcher::try_choice(const Choice& choice) {
  Plan plan = plan_of(request_, workload_, choice);
  if (hopeless(plan)) return Fit::gpu_full;
  const KernelKey key{plan.recompute, plan.micro_batch, whole_gradients(plan)};
  const auto known = kernel_seconds_.find(key);
  // Sound: compute runs these kernels one after the other whatever the placement.
  if (known != kernel_seconds_.end() && known->second * (1 - 1e-9) > cut()) return Fit::no;
  const bool offloads = choice.offload.optimizer != Tier::hbm;
  const bool movable = offloads && !choice.offload.whole;
  // For least GPU memory everything that may leave leaves, if the other tiers hold it; otherwise what fits comes back.
  if (movable && request_.objective == Objective::memory) {
    const Prediction least = evaluate(plan);
    if (fits(least, request_.margin)) {
      keep(plan, least);
      return Fit::yes;
    }
  }
  if (movable && choice.offload.optimizer == Tier::nvme)
    plan.optimizer = Placement::all(Tier::host, plan.optimizer.total());
  Prediction p = evaluate(plan);
  kernel_seconds_.try_emplace(key, p.kernels.base());
  if (p.gpu.peak > moves_.gpu_budget()) return Fit::gpu_full;
  if (movable) {
    if (!moves_.spread(plan, choice.offload, p)) return Fit::no;
    p = evaluate(plan);
    // Where blocks moved to, buffers moved too: what is missing goes one tier further.
    for (int attempt = 0; attempt < kRepairs && !fits(p, request_.margin); ++attempt) {
      if (!moves_.relieve(plan, p)) break;
      p = evaluate(plan);
    }
  }
  if (!fits(p, request_.margin)) return Fit::no;
  keep(plan, p);
  return Fit::yes;
}

void Searcher::keep(const Plan& plan, const Prediction& prediction) {
  auto [it, fresh] = best_.try_emplace(kind_of(plan), Candidate{plan, prediction});
  if (!fresh && better(prediction, it->second.prediction)) it->second = {plan, prediction};
}

// --- refinement --------------------------------------------------------------------------------------

/// The space fills the GPU with states while every layer recomputes. The other end of that trade: everything that may
/// leave leaves, `weights` that all stayed too, and refining gives the memory to activations. Nothing when there is no
/// such plan.
std::optional<Candidate> Searcher::emptied(const Candidate& filled, bool weights) {
  const Plan& plan = filled.plan;
  const bool fixed = request_.constraints.offload || request_.constraints.recompute;
  if (plan.recompute == Recompute::none || fixed || request_.objective == Objective::memory) return std::nullopt;
  const bool all_weights = plan.parameters.hbm == plan.parameters.total();
  if (plan.optimizer.hbm == plan.optimizer.total() || (weights && (plan.zero_stage < 3 || !all_weights)))
    return std::nullopt;
  Candidate other = filled;
  const auto leave = [](Placement& p) {
    const int blocks = std::exchange(p.hbm, 0);
    (p.host > 0 || p.nvme == 0 ? p.host : p.nvme) += blocks;
    return blocks > 0;
  };
  const bool states = leave(other.plan.optimizer);
  const bool others = (weights || !all_weights) && leave(other.plan.parameters);
  if (!states && !others) return std::nullopt;
  other.prediction = evaluate(other.plan);
  return fits(other.prediction, request_.margin) ? std::optional(std::move(other)) : std::nullopt;
}

void Searcher::refine(Candidate& c) {
  refine_recompute(c);
  refine_prefetch(c);
}

/// The fewest layers that must recompute: fewer means less work and more memory, both steadily.
void Searcher::refine_recompute(Candidate& c) {
  if (c.plan.recompute == Recompute::none || request_.objective == Objective::memory || request_.constraints.recompute)
    return;
  int enough = c.plan.recompute_layers, too_few = 0;
  while (enough - too_few > 1) {
    const int middle = (enough + too_few) / 2;
    Plan plan = c.plan;
    plan.recompute_layers = middle;
    const Prediction p = evaluate(plan);
    const bool ok = fits(p, request_.margin + kArenaReserve);
    // As fast by the estimate is enough: fewer layers are less work for what the estimate does not see.
    if (ok && !better(c.prediction, p)) c = {plan, p};
    (ok ? enough : too_few) = middle;
  }
}

void Searcher::refine_prefetch(Candidate& c) {
  if (c.plan.zero_stage < 3) return;
  for (int layers : {0, 2}) {
    Plan plan = c.plan;
    plan.prefetch_layers = layers;
    const Prediction p = evaluate(plan);
    if (fits(p, request_.margin) && better(p, c.prediction)) c = {plan, p};
  }
}

/// The reported figures come from the laid-out arena. Where its gaps do not fit, states move outwards.
bool Searcher::lay_out_plan(Candidate& c) {
  constexpr int kAttempts = 8;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    c.prediction = predictor_.predict(c.plan, Detail::laid_out);
    if (fits(c.prediction, request_.margin)) return true;
    if (!moves_.relieve(c.plan, c.prediction)) return false;
  }
  return false;
}

// --- nothing fits ------------------------------------------------------------------------------------

/// Bytes of a node that are missing.
double Searcher::lack(const Prediction& p) const {
  const auto over = [&](const TierMemory& t) {
    return std::max(0.0, (t.peak - (1 - request_.margin) * t.capacity).base());
  };
  return kGpuLackWeight * request_.machine.gpus_per_node * over(p.gpu) + (p.host ? over(*p.host) : 0) +
         (p.nvme ? over(*p.nvme) : 0);
}

/// The smallest micro-batch of every choice, the GPU filled as far as it goes, the rest on the host whether it can hold
/// it or not.
Candidate Searcher::nearest() {
  std::optional<Candidate> best;
  const auto consider = [&](const Plan& plan, const Prediction& p) {
    if (!best || lack(p) < lack(best->prediction)) best = Candidate{plan, p, false};
  };
  Choice choice;
  choice.micro_batch = micro_batches_of(request_, workload_).front();
  for (bool split : {false, true}) {
    if (split && request_.precision != DType::bf16) continue;
    choice.split_master = split;
    for (Recompute recompute : recomputes_of(request_)) {
      for (int stage : stages_of(request_)) {
        for (int group : shard_groups_of(request_, stage)) {
          for (const OffloadStyle& style : offloads_of(request_, stage)) {
            choice.recompute = recompute, choice.stage = stage, choice.shard_ranks = group, choice.offload = style;
            Plan plan = plan_of(request_, workload_, choice);
            const Prediction p = evaluate(plan);
            consider(plan, p);
            if (style.optimizer == Tier::hbm || style.whole || p.gpu.peak > moves_.gpu_budget()) continue;
            moves_.fill_gpu(plan, style, p);
            consider(plan, evaluate(plan));
          }
        }
      }
    }
  }
  if (!best)
    throw InputError(
        "no plan exists in this space: --offload needs --zero 1 or higher (optimizer) or 3 (parameters), and NVMe a "
        "--nvme");
  best->prediction = predictor_.predict(best->plan, Detail::laid_out);
  // Gaps of the arena are not what is missing: a block or two less on the GPU makes room for them.
  for (int attempt = 0; attempt < 4 && best->prediction.gpu.peak > moves_.gpu_budget(); ++attempt) {
    Plan& plan = best->plan;
    Placement& placed = plan.optimizer.hbm > 0 && plan.optimizer.host > 0 ? plan.optimizer : plan.parameters;
    if (placed.hbm == 0 || placed.host == 0) break;
    --placed.hbm, ++placed.host;
    best->prediction = predictor_.predict(plan, Detail::laid_out);
  }
  best->fits = fits(best->prediction, request_.margin);
  return *best;
}

}  // namespace zeroplan
