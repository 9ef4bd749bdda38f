#include "planner/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "models/error.h"
#include "planner/engine_advice.h"
#include "planner/engine_search.h"
#include "planner/searcher.h"
#include "planner/shortfall.h"

namespace zeroplan {
namespace {

void check_request(const Request& r) {
  if (r.model.trainable_parameters() != r.model.parameters()) {
    throw std::logic_error("search: the request's model has adapters; they go by lora_rank");
  }
  if (r.lora_rank != 0 && r.engine == Engine::zeroplan) {
    throw InputError(fmt::format(
        "--trainable lora:r={}: expected all, or --engine deepspeed or fsdp2: the zeroplan engine trains no adapters",
        r.lora_rank));
  }
  if (r.lora_rank < 0 || r.lora_rank > r.model.hidden) {
    throw InputError(fmt::format("--trainable lora:r={}: expected a rank of 1 to the model's hidden size, {}",
                                 r.lora_rank, r.model.hidden));
  }
  if (!(r.margin >= 0 && r.margin < 1)) throw InputError("--margin: expected 0 % or more and below 100 %");
  if (r.top_k < 1) throw InputError("--top: expected at least 1");
  for (int stage : r.constraints.stages) {
    if (stage < 0 || stage > 3) throw InputError(fmt::format("--zero {}: expected 0, 1, 2 or 3", stage));
  }
  if (r.constraints.offload && r.constraints.offload->to == Tier::nvme && r.machine.nvme.drives == 0 &&
      r.constraints.offload->what != OffloadWhat::none) {
    throw InputError(fmt::format("--offload ...:nvme: {} has no NVMe; say --nvme 4x2TB", r.machine.name));
  }
}

void add_assumptions(Answer& answer, const Predictor& predictor) {
  const auto add = [&](const std::vector<Assumption>& more) {
    for (const Assumption& a : more) {
      if (std::find(answer.assumptions.begin(), answer.assumptions.end(), a) == answer.assumptions.end())
        answer.assumptions.push_back(a);
    }
  };
  add(answer.request.model.assumptions);
  add(answer.request.machine.assumptions);
  const Candidate* first = !answer.plans.empty() ? &answer.plans.front()
                           : answer.shortfall    ? &answer.shortfall->nearest
                                                 : nullptr;
  if (!first) return;
  add(predictor.assumptions(first->plan));
  if (first->plan.accumulation > 1) {
    const bool wide = first->plan.precision.accumulation == DType::fp32;
    add({{"gradient accumulation", wide ? "fp32" : "16 bit",
          wide ? "more than one micro-step: small gradients would be lost in 16 bit"
               : "sums in fp32 do not fit; small gradients of many micro-steps are lost"}});
  }
  add({{"engine", "zeroplan",
        "our own runtime, its CUDA part still being built; DeepSpeed and FSDP2 hold other buffers and are slower: "
        "their predictions come with --engine"}});
  add({{"gradient clipping", fmt::format("global norm {:g}", first->plan.clip_norm),
        "default of the plan; the update waits for all gradients"}});
}

void add(SearchStats& sum, const SearchStats& more) {
  sum.space += more.space;
  sum.evaluated += more.evaluated;
  sum.simulated += more.simulated;
}

/// One row for each stage asked for: its best plan, or the one that comes nearest.
void plan_stages(Answer& answer, const Workload& workload) {
  for (int stage : stages_of(answer.request)) {
    Request one = answer.request;
    one.constraints.stages = {stage};
    one.top_k = 1;
    if (offloads_of(one, stage).empty()) continue;
    Searcher searcher(one, workload);
    auto plans = searcher.run();
    answer.plans.push_back(plans.empty() ? searcher.nearest() : std::move(plans.front()));
    add(answer.search, searcher.stats());
  }
  answer.feasible = std::any_of(answer.plans.begin(), answer.plans.end(), [](const Candidate& c) { return c.fits; });
}

}  // namespace

Answer search(const Request& request) {
  const auto start = std::chrono::steady_clock::now();
  check_request(request);
  Answer answer;
  answer.request = request;
  const Workload workload = workload_of(request, answer.assumptions, answer.warnings);
  answer.request.seq_len = workload.seq_len;
  answer.request.global_batch = workload.global_batch;
  for (const std::string& w : request.model.warnings) answer.warnings.push_back(w);
  for (const Assumption& a : request.machine.assumptions) {
    if (a.what != "network of a node") continue;
    answer.warnings.push_back(
        "the network between nodes is only a default, " + a.value +
        " a node: step times of several nodes hang on it; state yours in a machine.json (--machine)");
  }

  if (request.engine != Engine::zeroplan) {
    for (const auto* more : {&request.model.assumptions, &request.machine.assumptions}) {
      answer.assumptions.insert(answer.assumptions.end(), more->begin(), more->end());
    }
    search_engine(answer, workload);
    answer.search.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return answer;
  }
  Searcher searcher(answer.request, workload);
  if (request.per_stage) {
    plan_stages(answer, workload);
  } else {
    answer.plans = searcher.run();
    answer.feasible = !answer.plans.empty();
    add(answer.search, searcher.stats());
  }
  if (!answer.feasible) {
    Candidate nearest = searcher.nearest();
    answer.feasible = nearest.fits;  // what the search passed over: slow, and better than nothing
    if (nearest.fits) {
      answer.plans = {std::move(nearest)};
    } else {
      answer.shortfall = shortfall_of(answer.request, nearest);
    }
  }
  add_assumptions(answer, searcher.predictor());
  answer.search.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return answer;
}

std::vector<Advice> advise(const Answer& answer, const Candidate& candidate) {
  constexpr double kWorthSaying = 1.02;
  if (candidate.plan.engine != Engine::zeroplan) return advise_engine(answer, candidate);
  Predictor predictor(answer.request.model, answer.request.machine);
  std::vector<Advice> all;
  const auto step_with = [&](ResourceRole role, double factor) {
    return candidate.prediction.simulated ? predictor.played_step_with(candidate.plan, role, factor).base()
                                          : predictor.step_with(candidate.plan, role, factor).base();
  };
  const double now = step_with(ResourceRole::sm, 1);  // like with like: a long step is played shortly
  for (int r = 0; r < kNumRoles; ++r) {
    const auto role = static_cast<ResourceRole>(r);
    // Half of a time that is a small part of the step cannot matter.
    if (candidate.prediction.busy[static_cast<std::size_t>(r)] < 0.02 * candidate.prediction.step) continue;
    const double then = step_with(role, 0.5);
    if (now / then < kWorthSaying) continue;
    std::string name = role_name(role, answer.request.machine);
    const bool names_a_rate = name.ends_with("bandwidth") || name.ends_with("cores") || name.ends_with("arithmetic");
    all.push_back({"twice the " + name + (names_a_rate ? "" : " rate"), now / then});
  }
  std::stable_sort(all.begin(), all.end(), [](const Advice& a, const Advice& b) { return a.speedup > b.speedup; });
  return all;
}

}  // namespace zeroplan
