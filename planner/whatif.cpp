#include "planner/whatif.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "models/error.h"
#include "planner/parallel.h"
#include "planner/whatif_verdict.h"

namespace zeroplan {
namespace {

// Spec, Defaults.
constexpr std::int64_t kDefaultSeqLen = 4096;
constexpr std::int64_t kDefaultBatchTokens = 512 * 1024;
// Beyond this a common multiple is no batch that anybody trains with.
constexpr std::int64_t kLargestCommonMultiple = 1 << 20;
/// Numbers of nodes that are planned for one machine: 1 to 2,048 in powers of two.
constexpr std::size_t kMostCounts = 12;

/// Sequences a step that every alternative can split evenly.
void fill_workload(WhatifAnswer& answer, const std::vector<Alternative>& alternatives) {
  Request& request = answer.workload;
  if (!request.seq_len) {
    const std::int64_t most = request.model.max_positions;
    request.seq_len = most > 0 ? std::min(kDefaultSeqLen, most) : kDefaultSeqLen;
    answer.assumptions.push_back({"sequence length", fmt::format("{}", *request.seq_len),
                                  "default: the smaller of 4096 and the model's maximum"});
  }
  if (request.global_batch) return;
  std::int64_t unit = request.constraints.micro_batch.value_or(1);
  std::int64_t ranks = 1;
  for (const Alternative& alternative : alternatives) {
    ranks = std::lcm(ranks, static_cast<std::int64_t>(alternative.machine.ranks()));
    if (ranks * unit > kLargestCommonMultiple) {
      throw InputError("--hardware: no common global batch for these numbers of GPUs; give --global-batch");
    }
  }
  unit *= ranks;
  const std::int64_t sequences = (kDefaultBatchTokens + *request.seq_len - 1) / *request.seq_len;
  request.global_batch = (sequences + unit - 1) / unit * unit;
  answer.assumptions.push_back({"global batch", fmt::format("{} sequences", *request.global_batch),
                                fmt::format("default: 512 Ki tokens, rounded up to a multiple of {} so that every "
                                            "alternative can split it",
                                            unit)});
}

/// Which numbers of nodes were planned, said once for machines with the same ones.
void assume_counts(WhatifAnswer& answer) {
  std::map<std::vector<int>, std::vector<std::string_view>> names;
  std::vector<std::vector<int>> order;
  for (const WhatifRow& row : answer.rows) {
    if (row.alternative.nodes_given) continue;
    std::vector<int> counts;
    for (const NodeTrial& trial : row.trials) counts.push_back(trial.nodes);
    if (!names.contains(counts)) order.push_back(counts);
    names[counts].push_back(row.alternative.name);
  }
  for (const std::vector<int>& counts : order) {
    answer.assumptions.push_back(
        {fmt::format("numbers of nodes ({})", fmt::join(names[counts], ", ")),
         fmt::format("{}", fmt::join(counts, ", ")),
         fmt::format("each of them predicted, none scaled from another; those that share a step of {} sequences "
                     "evenly, --global-batch allows others",
                     *answer.workload.global_batch)});
  }
}

void mark_best(std::vector<WhatifRow>& rows) {
  WhatifRow* cheapest = nullptr;
  WhatifRow* fastest = nullptr;
  for (WhatifRow& row : rows) {
    const Candidate* best = row.best();
    if (best == nullptr) continue;
    if (fastest == nullptr || best->prediction.tokens_per_second > fastest->best()->prediction.tokens_per_second) {
      fastest = &row;
    }
    const auto cost = row.cost();
    if (cost && (cheapest == nullptr || cost->usd_per_million_tokens < cheapest->cost()->usd_per_million_tokens)) {
      cheapest = &row;
    }
  }
  if (fastest != nullptr) fastest->fastest = true;
  if (cheapest != nullptr) cheapest->cheapest = true;
}

WhatifRun run_of(const MachineSpec& machine, const Prediction& prediction, double tokens) {
  WhatifRun run;
  run.nodes = machine.nodes;
  const double hours = hours_for(tokens, prediction);
  run.time = Seconds(hours * kSecondsPerHour);
  run.node_hours = hours * machine.nodes;
  if (machine.price) run.usd = run.node_hours * machine.price->usd_per_hour;
  return run;
}

void check_limits(const WhatifLimits& limits, const std::vector<Alternative>& alternatives) {
  if (limits.any() && !limits.tokens) {
    throw InputError(
        fmt::format("{}: needs --tokens T, the length of the run", limits.budget_usd ? "--budget" : "--deadline"));
  }
  const bool priced =
      std::ranges::any_of(alternatives, [](const Alternative& a) { return a.machine.price.has_value(); });
  if (limits.budget_usd && !priced) {
    throw InputError(fmt::format("--budget: no price is known of {}; say it as {}@12.5USD, USD of a node and hour",
                                 alternatives.front().machine.name, alternatives.front().name));
  }
}

/// One machine with one number of nodes.
struct Planned {
  MachineSpec machine;
  std::optional<Answer> answer;
  std::string refusal;

  /// Takes over what was planned, reports of all plans included.
  WhatifRow row(const Alternative& alternative) && {
    WhatifRow row;
    row.alternative = alternative;
    row.alternative.machine = std::move(machine);
    row.answer = std::move(answer);
    row.refusal = std::move(refusal);
    return row;
  }
};

MachineSpec with_nodes(MachineSpec machine, int nodes) {
  if (machine.nodes != nodes) set_nodes(machine, nodes);
  return machine;
}

/// What is planned of each alternative.
std::vector<std::vector<Planned>> jobs_of(const Request& workload, const std::vector<Alternative>& alternatives,
                                          const WhatifLimits& limits) {
  std::vector<std::vector<Planned>> jobs;
  for (const Alternative& a : alternatives) {
    std::vector<int> counts{a.machine.nodes};
    if (limits.any() && !a.nodes_given) {
      counts =
          node_counts(*workload.global_batch, a.machine.gpus_per_node, workload.constraints.micro_batch.value_or(1));
    }
    std::vector<Planned>& mine = jobs.emplace_back();
    for (const int n : counts) mine.push_back({with_nodes(a.machine, n), std::nullopt, ""});
  }
  return jobs;
}

std::vector<std::vector<Planned>> plan_all(const Request& workload, std::vector<std::vector<Planned>> jobs) {
  std::vector<Planned*> all;
  for (std::vector<Planned>& of_row : jobs) {
    for (Planned& job : of_row) all.push_back(&job);
  }
  run_parallel(all.size(), [&](std::size_t i) {
    Request request = workload;
    request.machine = all[i]->machine;
    try {
      all[i]->answer = search(request);
    } catch (const InputError& error) {
      all[i]->refusal = error.what();
    }
  });
  return jobs;
}

/// Bytes that the nearest plan of a row lacks; endless for a machine that cannot run the workload.
double missing(const WhatifRow& row) {
  if (!row.answer) return std::numeric_limits<double>::infinity();
  double sum = 0;
  if (row.answer->shortfall) {
    for (const Shortfall::Lack& lack : row.answer->shortfall->lacks) sum += lack.missing().base();
  }
  return sum;
}

/// Whether `a` is the better row of one machine: what fits, then what keeps the limits, then what misses them least,
/// then what is preferred.
bool better_count(const WhatifRow& a, const WhatifRow& b, const WhatifLimits& limits) {
  const auto run_a = a.run(limits), run_b = b.run(limits);
  if (!run_a || !run_b) {
    if (run_a.has_value() != run_b.has_value()) return run_a.has_value();
    return missing(a) < missing(b);
  }
  const double excess_a = run_a->excess(limits), excess_b = run_b->excess(limits);
  if (excess_a != excess_b) return excess_a < excess_b;
  return preferred(*run_a, *run_b, limits.prefer);
}

WhatifRow row_of(const Alternative& alternative, std::vector<Planned> planned, const WhatifLimits& limits) {
  std::optional<WhatifRow> best;
  std::vector<NodeTrial> trials;
  for (Planned& one : planned) {
    WhatifRow row = std::move(one).row(alternative);
    const Candidate* fitting = row.best();
    trials.push_back({row.alternative.machine.nodes, fitting != nullptr ? fitting->prediction.tokens_per_second : 0,
                      row.run(limits)});
    if (!best || better_count(row, *best, limits)) best = std::move(row);
  }
  best->trials = std::move(trials);
  return std::move(*best);
}

/// Runs of the machines whose number of nodes was given, with more.
std::vector<WhatifPoint> runs_with_more_nodes(const WhatifAnswer& answer) {
  std::vector<std::size_t> rows;
  std::vector<std::vector<Planned>> jobs;
  for (std::size_t i = 0; i < answer.rows.size(); ++i) {
    const Alternative& a = answer.rows[i].alternative;
    if (!a.nodes_given || a.machine.host_device) continue;  // searched already; a probed machine is one node
    std::vector<Planned> mine;
    for (const int n : node_counts(*answer.workload.global_batch, a.machine.gpus_per_node,
                                   answer.workload.constraints.micro_batch.value_or(1))) {
      if (n > a.machine.nodes) mine.push_back({with_nodes(a.machine, n), std::nullopt, ""});
    }
    rows.push_back(i);
    jobs.push_back(std::move(mine));
  }
  jobs = plan_all(answer.workload, std::move(jobs));
  std::vector<WhatifPoint> points;
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    for (Planned& one : jobs[j]) {
      const auto run = std::move(one).row(answer.rows[rows[j]].alternative).run(answer.limits);
      if (run) points.push_back({rows[j], false, *run});
    }
  }
  return points;
}

void judge(WhatifAnswer& answer) {
  answer.verdict = verdict_of(answer, {});
  if (!answer.verdict->recommended) answer.verdict = verdict_of(answer, runs_with_more_nodes(answer));
  if (answer.verdict->recommended) answer.rows[*answer.verdict->recommended].recommended = true;
}

}  // namespace

const Candidate* WhatifRow::best() const {
  if (!answer || !answer->feasible) return nullptr;
  const Candidate* best = nullptr;
  for (const Candidate& candidate : answer->plans) {
    if (!candidate.fits) continue;
    if (best == nullptr ||
        (answer->request.per_stage && candidate.prediction.tokens_per_second > best->prediction.tokens_per_second)) {
      best = &candidate;
    }
  }
  return best;
}

std::optional<RunCost> WhatifRow::cost() const {
  const Candidate* candidate = best();
  if (candidate == nullptr) return std::nullopt;
  return cost_of(alternative.machine, candidate->prediction);
}

bool WhatifAnswer::any_fits() const {
  return std::ranges::any_of(rows, [](const WhatifRow& row) { return row.best() != nullptr; });
}

bool WhatifAnswer::satisfied() const { return verdict ? verdict->recommended.has_value() : any_fits(); }

std::optional<WhatifRun> WhatifRow::run(const WhatifLimits& limits) const {
  const Candidate* candidate = best();
  if (candidate == nullptr || !limits.tokens) return std::nullopt;
  return run_of(alternative.machine, candidate->prediction, *limits.tokens);
}

Seconds WhatifRun::late(const WhatifLimits& limits) const {
  return limits.deadline && time > *limits.deadline ? time - *limits.deadline : Seconds();
}

double WhatifRun::over(const WhatifLimits& limits) const {
  return limits.budget_usd && usd ? std::max(0.0, *usd - *limits.budget_usd) : 0;
}

double WhatifRun::excess(const WhatifLimits& limits) const {
  const double longer = limits.deadline ? late(limits) / *limits.deadline : 0;
  return std::max(longer, limits.budget_usd ? over(limits) / *limits.budget_usd : 0);
}

bool WhatifRun::meets(const WhatifLimits& limits) const {
  return late(limits) == Seconds() && over(limits) == 0 && (usd || !limits.budget_usd);
}

std::vector<int> node_counts(std::int64_t global_batch, int gpus_per_node, std::int64_t micro_batch) {
  std::vector<int> all;
  const std::int64_t unit = gpus_per_node * micro_batch;
  for (std::int64_t n = 1; global_batch % unit == 0 && n <= std::min<std::int64_t>(global_batch / unit, kMostNodes);
       ++n) {
    if (global_batch / unit % n == 0) all.push_back(static_cast<int>(n));
  }
  if (all.empty()) return {1};
  if (all.size() <= kMostCounts) return all;
  std::vector<int> some;
  const double ratio = std::pow(all.back(), 1.0 / (kMostCounts - 1));
  for (std::size_t i = 0; i < kMostCounts; ++i) {
    const double wanted = std::pow(ratio, static_cast<double>(i));
    const auto nearest = std::ranges::min_element(all, {}, [&](int n) { return std::abs(std::log(n / wanted)); });
    if (some.empty() || some.back() != *nearest) some.push_back(*nearest);
  }
  return some;
}

WhatifAnswer plan_alternatives(const Request& workload, const std::vector<Alternative>& alternatives,
                               const WhatifLimits& limits) {
  check_limits(limits, alternatives);
  WhatifAnswer answer;
  answer.workload = workload;
  answer.limits = limits;
  fill_workload(answer, alternatives);
  std::vector<std::vector<Planned>> planned = plan_all(answer.workload, jobs_of(answer.workload, alternatives, limits));
  for (std::size_t i = 0; i < alternatives.size(); ++i) {
    answer.rows.push_back(row_of(alternatives[i], std::move(planned[i]), limits));
  }
  if (std::ranges::none_of(answer.rows, [](const WhatifRow& row) { return row.answer.has_value(); })) {
    throw InputError(answer.rows.front().refusal);
  }
  mark_best(answer.rows);
  if (!limits.any()) return answer;
  assume_counts(answer);
  judge(answer);
  return answer;
}

}  // namespace zeroplan
