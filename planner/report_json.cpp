#include "planner/report_json.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "planner/cost.h"

namespace zeroplan {
namespace {

using Json = nlohmann::ordered_json;

std::int64_t whole(Bytes bytes) { return std::llround(bytes.base()); }

// Names may come from paths, which need not be UTF-8.
std::string dump(const Json& value) { return value.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"; }

/// The peak is the sum of its rounded parts: a reader may add them up.
Json tier_json(const TierMemory& memory) {
  Json breakdown = Json::object();
  std::int64_t sum = 0;
  for (const auto& [owner, bytes] : memory.breakdown) {
    breakdown[owner] = whole(bytes);
    sum += whole(bytes);
  }
  Json json;
  json["peak_bytes"] = memory.breakdown.empty() ? whole(memory.peak) : sum;
  json["capacity_bytes"] = whole(memory.capacity);
  if (memory.pinned.base() > 0) json["pinned_bytes"] = whole(memory.pinned);
  if (!memory.at_op.empty()) json["at_op"] = memory.at_op;
  json["breakdown"] = std::move(breakdown);
  return json;
}

Json traffic_json(const Traffic& traffic) {
  return {{"all_gather_bytes", whole(traffic.all_gather)},
          {"reduce_scatter_bytes", whole(traffic.reduce_scatter)},
          {"all_reduce_bytes", whole(traffic.all_reduce)},
          {"h2d_bytes", whole(traffic.h2d)},
          {"d2h_bytes", whole(traffic.d2h)},
          {"nvme_read_bytes", whole(traffic.nvme_read)},
          {"nvme_write_bytes", whole(traffic.nvme_write)}};
}

Json breakdown_json(const TimeBreakdown& time) {
  return {{"compute", time.compute.base()},
          {"exposed_communication", time.exposed_communication.base()},
          {"exposed_offload", time.exposed_offload.base()},
          {"optimizer", time.optimizer.base()},
          {"idle", time.idle.base()}};
}

Json prediction_json(const Prediction& p) {
  Json json;
  json["step_seconds"] = p.step.base();
  json["tokens_per_second"] = p.tokens_per_second;
  json["tokens_per_second_per_gpu"] = p.tokens_per_second_per_gpu;
  if (p.mfu) json["mfu"] = *p.mfu;
  if (p.hfu) json["hfu"] = *p.hfu;
  json["memory"]["gpu"] = tier_json(p.gpu);
  if (p.host) json["memory"]["host"] = tier_json(*p.host);
  if (p.nvme) json["memory"]["nvme"] = tier_json(*p.nvme);
  json["time"] = breakdown_json(p.time);
  json["traffic"] = traffic_json(p.traffic);
  json["limited_by"] = p.limited_by;
  json["simulated"] = p.simulated;
  return json;
}

Json price_json(const MachineSpec& machine) {
  Json json;
  json["usd_per_hour"] = machine.price->usd_per_hour * machine.nodes;
  if (!machine.price->region.empty()) json["region"] = machine.price->region;
  if (!machine.price->date.empty()) json["date"] = machine.price->date;
  if (!machine.price->source.empty()) json["source"] = machine.price->source;
  return json;
}

/// Nothing when neither a price nor a number of tokens is known.
Json cost_json(const MachineSpec& machine, const Prediction& prediction, std::optional<double> num_tokens) {
  Json json;
  const auto cost = cost_of(machine, prediction);
  if (cost) json["usd_per_million_tokens"] = cost->usd_per_million_tokens;
  if (num_tokens) {
    const double hours = hours_for(*num_tokens, prediction);
    json["hours"] = hours;
    if (cost) json["usd"] = hours * cost->usd_per_hour;
  }
  return json;
}

Json candidate_json(const Candidate& candidate, const MachineSpec& machine, std::optional<double> num_tokens) {
  Json json;
  json["plan"] = Json::parse(plan_keys_json(candidate.plan, -1));
  json["engine"] = to_string(candidate.plan.engine);
  json["summary"] = describe(candidate.plan);
  json["fits"] = candidate.fits;
  json["prediction"] = prediction_json(candidate.prediction);
  if (Json cost = cost_json(machine, candidate.prediction, num_tokens); !cost.is_null()) json["cost"] = std::move(cost);
  return json;
}

/// `parameters` are those of the model itself, without adapters.
Json model_json(const ModelSpec& model, std::int64_t lora_rank) {
  return {{"name", model.name},
          {"parameters", model.parameters()},
          {"trainable", adapted_model(model, lora_rank).trainable_parameters()}};
}

Json machine_json(const MachineSpec& machine) {
  Json json{
      {"name", machine.name}, {"gpu", machine.gpu.name}, {"gpus", machine.gpus_per_node}, {"nodes", machine.nodes}};
  if (machine.price) json["price"] = price_json(machine);
  return json;
}

Json assumptions_json(const std::vector<Assumption>& assumptions) {
  Json json = Json::array();
  for (const Assumption& a : assumptions) json.push_back({{"what", a.what}, {"value", a.value}, {"source", a.source}});
  return json;
}

Json shortfall_json(const Shortfall& shortfall) {
  Json json;
  json["lacks"] = Json::array();
  for (const Shortfall::Lack& lack : shortfall.lacks) {
    json["lacks"].push_back({{"tier", lack.tier},
                             {"needed_bytes", whole(lack.needed)},
                             {"available_bytes", whole(lack.available)},
                             {"missing_bytes", whole(lack.needed) - whole(lack.available)}});
  }
  json["optimizer_state_bytes"] = whole(shortfall.optimizer_states);
  json["changes"] = Json::array();
  for (const Shortfall::Change& change : shortfall.changes) {
    json["changes"].push_back({{"what", change.what},
                               {"flag", change.flag},
                               {"step_seconds", change.result.prediction.step.base()},
                               {"tokens_per_second", change.result.prediction.tokens_per_second}});
  }
  return json;
}

Json workload_json(const Request& request) {
  Json json = Json::object();
  if (request.seq_len) json["seq_len"] = *request.seq_len;
  if (request.global_batch) json["global_batch"] = *request.global_batch;
  return json;
}

/// What a run of all tokens takes and, within limits, by how much it misses them.
void add_run(Json& json, const WhatifRun& run, const WhatifLimits& limits) {
  json["hours"] = run.time.base() / kSecondsPerHour;
  json["node_hours"] = run.node_hours;
  if (run.usd) json["usd"] = *run.usd;
  if (!limits.any()) return;
  if (limits.deadline) json["late_days"] = run.late(limits).base() / kSecondsPerDay;
  if (limits.budget_usd && run.usd) json["over_budget_usd"] = run.over(limits);
  if (run.usd || !limits.budget_usd) json["within_limits"] = run.meets(limits);
}

Json trials_json(const WhatifRow& row, const WhatifLimits& limits) {
  Json json = Json::array();
  for (const NodeTrial& trial : row.trials) {
    Json one{{"nodes", trial.nodes}, {"fits", trial.tokens_per_second > 0}};
    if (trial.tokens_per_second > 0) one["tokens_per_second"] = trial.tokens_per_second;
    if (trial.run) add_run(one, *trial.run, limits);
    json.push_back(std::move(one));
  }
  return json;
}

Json whatif_row_json(const WhatifRow& row, const WhatifLimits& limits, const std::string& plan_file) {
  const MachineSpec& machine = row.alternative.machine;
  const Candidate* best = row.best();
  Json json;
  json["hardware"] = row.alternative.name;
  json["machine"] = machine_json(machine);
  json["fits"] = best != nullptr;
  if (machine.price) json["price"] = price_json(machine);
  if (best != nullptr) {
    json.update(candidate_json(*best, machine, limits.tokens));
    json["cheapest"] = row.cheapest;
    json["fastest"] = row.fastest;
  }
  if (const auto run = row.run(limits)) add_run(json["run"], *run, limits);
  if (limits.any()) json["recommended"] = row.recommended;
  if (!row.alternative.nodes_given) json["node_counts"] = trials_json(row, limits);
  if (!plan_file.empty()) json["plan_file"] = plan_file;
  if (row.answer && row.answer->shortfall) json["shortfall"] = shortfall_json(*row.answer->shortfall);
  if (!row.refusal.empty()) json["error"] = row.refusal;
  json["assumptions"] = assumptions_json(row.answer ? row.answer->assumptions : machine.assumptions);
  return json;
}

Json limits_json(const WhatifLimits& limits) {
  Json json;
  if (limits.tokens) json["tokens"] = *limits.tokens;
  if (limits.budget_usd) json["budget_usd"] = *limits.budget_usd;
  if (limits.deadline) json["deadline_days"] = *limits.deadline / Seconds(kSecondsPerDay);
  json["prefer"] = limits.prefer == Prefer::cheapest ? "cheapest" : "fastest";
  return json;
}

Json verdict_json(const WhatifAnswer& answer) {
  const WhatifVerdict& verdict = *answer.verdict;
  Json json{{"within_limits", verdict.recommended.has_value()}, {"why", verdict.why}};
  const auto name = [&](std::size_t row) { return answer.rows[row].alternative.name; };
  if (verdict.recommended) json["recommended"] = name(*verdict.recommended);
  if (verdict.recommended) return json;
  if (verdict.nearest) json["nearest"] = name(*verdict.nearest);
  json["changes"] = Json::array();
  for (const WhatifChange& change : verdict.changes) {
    Json one{{"what", change.what}, {"flag", change.flag}, {"hardware", change.hardware}, {"nodes", change.run.nodes}};
    add_run(one, change.run, answer.limits);
    json["changes"].push_back(std::move(one));
  }
  return json;
}

Json whatif_answer_json(const NamedWhatif& named) {
  const WhatifAnswer& answer = named.answer;
  Json json;
  if (!named.name.empty()) json["name"] = named.name;
  json["model"] = model_json(answer.workload.model, answer.workload.lora_rank);
  json["workload"] = workload_json(answer.workload);
  if (answer.limits.tokens) json["limits"] = limits_json(answer.limits);
  json["rows"] = Json::array();
  for (std::size_t i = 0; i < answer.rows.size(); ++i) {
    json["rows"].push_back(
        whatif_row_json(answer.rows[i], answer.limits, i < named.plan_files.size() ? named.plan_files[i] : ""));
  }
  if (answer.verdict) json["verdict"] = verdict_json(answer);
  json["assumptions"] = assumptions_json(answer.assumptions);
  return json;
}

}  // namespace

std::string time_json(const TimeBreakdown& time) { return breakdown_json(time).dump(); }

std::string plan_json(const Answer& answer, std::optional<double> num_tokens) {
  Json json;
  json["model"] = model_json(answer.request.model, answer.request.lora_rank);
  json["machine"] = machine_json(answer.request.machine);
  json["workload"] = workload_json(answer.request);
  json["feasible"] = answer.feasible;
  json["plans"] = Json::array();
  for (const Candidate& candidate : answer.plans) {
    json["plans"].push_back(candidate_json(candidate, answer.request.machine, num_tokens));
  }
  if (answer.shortfall) json["shortfall"] = shortfall_json(*answer.shortfall);
  json["assumptions"] = assumptions_json(answer.assumptions);
  json["warnings"] = answer.warnings;
  json["search"] = {{"space", answer.search.space},
                    {"evaluated", answer.search.evaluated},
                    {"simulated", answer.search.simulated},
                    {"seconds", answer.search.seconds}};
  return dump(json);
}

std::string whatif_json(const std::vector<NamedWhatif>& answers) {
  if (answers.size() == 1) return dump(whatif_answer_json(answers.front()));
  Json json;
  json["answers"] = Json::array();
  for (const NamedWhatif& named : answers) json["answers"].push_back(whatif_answer_json(named));
  return dump(json);
}

std::string step_json(const PlanFile& file, const Prediction& prediction, const StepTable& table,
                      const std::vector<Assumption>& assumptions) {
  Json json;
  json["model"] = model_json(file.model, file.plan.lora_rank);
  json["machine"] = machine_json(file.machine);
  json["fits"] = fits(prediction, 0);
  json["prediction"] = prediction_json(prediction);
  json["ranks"] = file.plan.ranks;
  json["ops"] = table.ops;
  json["limited_by"] = prediction.limited_by;
  json["streams"] = Json::array();
  for (const StepRow& row : table.rows) {
    json["streams"].push_back({{"phase", to_string(row.phase)},
                               {"stream", to_string(row.stream)},
                               {"ops", row.ops},
                               {"busy_seconds", row.busy.base()}});
  }
  json["assumptions"] = assumptions_json(assumptions);
  return dump(json);
}

std::string simulation_json(const PlanFile& file, const Prediction& prediction, const Simulation& simulation,
                            Seconds estimated, const std::vector<TransientUse>& transients,
                            const std::vector<Assumption>& assumptions) {
  Json json;
  json["model"] = model_json(file.model, file.plan.lora_rank);
  json["machine"] = machine_json(file.machine);
  json["fits"] = fits(prediction, 0);
  json["prediction"] = prediction_json(prediction);
  json["estimated_step_seconds"] = estimated.base();
  json["ranks"] = simulation.ranks;
  json["simulated_ranks"] = simulation.simulated_ranks;
  json["ops"] = simulation.ops;
  json["events"] = simulation.events;
  json["limited_by"] = prediction.limited_by;
  json["streams"] = Json::array();
  for (int s = 0; s < kNumStreams; ++s) {
    const StreamTime& stream = simulation.streams[static_cast<std::size_t>(s)];
    if (stream.ops == 0) continue;
    json["streams"].push_back({{"stream", to_string(static_cast<Stream>(s))},
                               {"ops", stream.ops},
                               {"busy_seconds", stream.busy.base()},
                               {"wait_seconds", stream.wait.base()},
                               {"slowdown_seconds", stream.slowdown.base()}});
  }
  json["resources"] = Json::array();
  for (const ResourceUse& use : simulation.resources) {
    if (use.utilisation > 0) json["resources"].push_back({{"name", use.name}, {"utilisation", use.utilisation}});
  }
  json["load_and_save"] = Json::array();
  for (const TransientUse& use : transients) {
    Json row{{"what", to_string(use.what)},
             {"gpu_peak_bytes", whole(use.gpu)},
             {"host_peak_bytes", whole(use.host)},
             {"nvme_peak_bytes", whole(use.nvme)}};
    if (use.time) row["seconds"] = use.time->base();
    json["load_and_save"].push_back(std::move(row));
  }
  json["assumptions"] = assumptions_json(assumptions);
  return dump(json);
}

}  // namespace zeroplan
