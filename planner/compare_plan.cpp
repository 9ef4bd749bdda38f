#include "planner/compare_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "models/arena.h"
#include "models/error.h"
#include "models/lower.h"
#include "planner/report_layout.h"

namespace zeroplan {
namespace {

using Json = nlohmann::ordered_json;

std::int64_t arena_bytes(const Schedule& schedule, Memory memory) {
  return std::llround(lay_out(schedule, memory).size.base());
}

/// As the runtime lays it out: one arena a memory and rank; the host's and the disks' of all ranks of a node.
std::vector<MeasuredTier> planned_memory(const PlanFile& file) {
  const Schedule schedule = lower(file.model, file.plan, Folding::micro_steps);
  const std::int64_t ranks = file.machine.gpus_per_node;
  std::vector<MeasuredTier> tiers{{Tier::hbm, arena_bytes(schedule, Memory::hbm), 0}};
  const std::int64_t host = arena_bytes(schedule, Memory::pinned) + arena_bytes(schedule, Memory::dram);
  const std::int64_t nvme = arena_bytes(schedule, Memory::nvme);
  if (host > 0) tiers.push_back({Tier::host, ranks * host, 0});
  if (nvme > 0) tiers.push_back({Tier::nvme, ranks * nvme, 0});
  return tiers;
}

std::string error_text(Seconds predicted, Seconds measured) {
  const auto error = relative_error(predicted, measured);
  return error ? fmt::format("{:+.1f} %", 100 * *error) : "-";
}

std::string_view tier_name(Tier tier) {
  switch (tier) {
    case Tier::hbm:
      return "GPU, one rank";
    case Tier::host:
      return "host, the node";
    case Tier::nvme:
      return "NVMe, the node";
  }
  return "?";
}

/// The parts of GPU memory that are not in the arena.
Bytes outside_arena(const Prediction& prediction) {
  Bytes sum;
  for (const auto& [owner, bytes] : prediction.gpu.breakdown) {
    if (owner == "context" || owner == "libraries" || owner == "nccl") sum += bytes;
  }
  return sum;
}

std::string memory_text(const PlanComparison& result, const ReportStyle& style) {
  std::string text = inked("Memory planned and used", Ink::bold, style) + "\n";
  TextTable table({{"tier", Align::left}, {"predicted"}, {"measured"}, {"", Align::left}});
  for (const ComparedTier& tier : result.comparison.memory) {
    const bool equal = tier.predicted == tier.measured;
    table.add({std::string(tier_name(tier.tier)), format_count(tier.predicted) + " B",
               format_count(tier.measured) + " B",
               equal ? "equal" : fmt::format("{:+} B", tier.predicted - tier.measured)});
  }
  text += table.text();
  if (const Bytes outside = outside_arena(result.prediction); outside > Bytes()) {
    text += fmt::format("  not measured: {} a GPU for context, libraries and NCCL\n", format_gib(outside));
  }
  return text;
}

std::string ops_text(const Comparison& c, const ReportStyle& style) {
  std::string text = inked("Time by phase and kind of op, rank 0", Ink::bold, style) +
                     " (medians of each op, summed; collectives without waits)\n";
  TextTable table({{"phase", Align::left}, {"kind", Align::left}, {"ops"}, {"predicted"}, {"measured"}, {"error"}});
  const auto add = [&](std::string_view phase, std::string_view kind, const std::string& count, Seconds predicted,
                       Seconds measured) {
    table.add({std::string(phase), std::string(kind), count, format_seconds(predicted), format_seconds(measured),
               error_text(predicted, measured)});
  };
  for (const ComparedRow& row : c.rows) {
    add(to_string(row.phase), to_string(row.kind), format_count(row.count), row.predicted, row.measured);
  }
  add("", "waits for peers", "", c.predicted_wait, c.measured_wait);
  text += table.text();
  if (c.median_kind_error) {
    text += fmt::format("  median error of a kind of op: {:.1f} %\n", 100 * *c.median_kind_error);
  }
  return text;
}

std::string step_text(const Measured& m, const Comparison& c, const ReportStyle& style) {
  std::string text = inked("Step", Ink::bold, style) +
                     fmt::format(": predicted {}, measured {} (median of steps {} to {}), error {}\n",
                                 format_seconds(c.predicted_step), format_seconds(c.measured_step), m.warmup_steps + 1,
                                 m.steps, error_text(c.predicted_step, c.measured_step));
  const Coverage &measured = c.measured_coverage, &predicted = c.predicted_coverage;
  text += fmt::format("  of step {}, {} are in ops and {} unattributed: nothing of rank 0 ran (predicted: {} and {})\n",
                      m.median_step + 1, format_seconds(measured.covered), format_seconds(measured.unattributed),
                      format_seconds(predicted.covered), format_seconds(predicted.unattributed));
  return text;
}

/// What threads of a host need to wake each other is in an op's predicted time and not in its measured one: half of it
/// passes before the op starts, half after it has ended.
void leave_out_handoffs(const MachineCostModel& cost, const Schedule& flat, Simulation& simulation) {
  for (std::size_t i = 0; i < flat.ops().size(); ++i) {
    Span& span = simulation.trace.ops[i];
    const Seconds half = 0.5 * std::min(cost.handoff(flat.work(flat.ops()[i])), span.end - span.start);
    span = {span.start + half, span.end - half};
    simulation.transfer_starts[i] = std::clamp(simulation.transfer_starts[i] + half, span.start, span.end);
  }
}

}  // namespace

PredictedStep predicted_step(Predictor& predictor, const PlanFile& file, const Schedule& flat) {
  SimulateOptions options;
  options.ranks = SimulatedRanks::all;
  options.with_trace = true;
  Simulation simulation = predictor.simulate(file.plan, options);
  if (simulation.trace.ops.size() != flat.ops().size()) throw std::logic_error("compare: another schedule was played");
  const MachineCostModel& cost = predictor.cost_model(file.plan);
  leave_out_handoffs(cost, flat, simulation);
  std::vector<Seconds> seconds;
  for (std::size_t i = 0; i < flat.ops().size(); ++i) {
    const Seconds played = simulation.trace.ops[i].end - simulation.transfer_starts[i];
    seconds.push_back(cost.undisturbed(flat.work(flat.ops()[i])).value_or(played));
  }
  return {simulation.step, std::move(simulation.trace), std::move(simulation.transfer_starts), std::move(seconds),
          planned_memory(file)};
}

PlanComparison compare_plan(const PlanFile& file, const Measured& measured, const std::string& measured_name) {
  const std::string_view engine = to_string(file.plan.engine);
  if (measured.engine != engine) {
    throw InputError(
        fmt::format("{}: /engine: expected the plan's \"{}\", got \"{}\"", measured_name, engine, measured.engine));
  }
  const Schedule flat = lower(file.model, file.plan, Folding::none);
  Predictor predictor(file.model, file.machine);
  const PredictedStep predicted = predicted_step(predictor, file, flat);
  PlanComparison result;
  result.comparison =
      compare(flat, file.model, plan_identity(file), file.plan.ranks, predicted, measured, measured_name);
  result.prediction = predictor.predict(file.plan, Detail::laid_out);
  for (const ComparedOp& op : result.comparison.ops)
    result.labels.push_back(label(flat, flat.ops()[op.op], file.model));
  return result;
}

std::string report_comparison(const PlanFile& file, const Measured& m, const PlanComparison& result,
                              const ReportStyle& style) {
  const std::string ranks = m.ranks == 1 ? "1 rank" : fmt::format("{} ranks", m.ranks);
  std::string text = fmt::format("{}: {}\n", file.model.name, describe(file.plan));
  text += fmt::format("predicted for {}; measured by {} ({}) with {}, {} steps, loss {:.4g} to {:.4g}\n\n",
                      file.machine.name, m.engine, m.backend, ranks, m.steps, m.losses.front(), m.losses.back());
  text += memory_text(result, style) + "\n";
  text += ops_text(result.comparison, style) + "\n";
  return text + step_text(m, result.comparison, style);
}

namespace {

Json memory_json(const std::vector<ComparedTier>& tiers) {
  Json json = Json::array();
  for (const ComparedTier& tier : tiers) {
    json.push_back(
        {{"tier", to_string(tier.tier)}, {"predicted_bytes", tier.predicted}, {"measured_bytes", tier.measured}});
  }
  return json;
}

Json ops_json(const PlanComparison& result) {
  Json json = Json::array();
  for (std::size_t i = 0; i < result.labels.size(); ++i) {
    const ComparedOp& op = result.comparison.ops[i];
    json.push_back({{"op", result.labels[i]},
                    {"id", op.op},
                    {"kind", to_string(op.kind)},
                    {"phase", to_string(op.phase)},
                    {"predicted_seconds", op.predicted.base()},
                    {"measured_seconds", op.measured.base()}});
  }
  return json;
}

Json rows_json(const std::vector<ComparedRow>& rows) {
  Json json = Json::array();
  for (const ComparedRow& row : rows) {
    Json one{{"phase", to_string(row.phase)},
             {"kind", to_string(row.kind)},
             {"ops", row.count},
             {"predicted_seconds", row.predicted.base()},
             {"measured_seconds", row.measured.base()}};
    if (const auto error = relative_error(row.predicted, row.measured)) one["error"] = *error;
    json.push_back(std::move(one));
  }
  return json;
}

}  // namespace

std::string comparison_json(const PlanFile& file, const Measured& m, const PlanComparison& result) {
  const Comparison& c = result.comparison;
  Json json;
  json["model"] = {{"name", file.model.name}, {"parameters", file.model.parameters()}};
  json["machine"] = {{"name", file.machine.name}};
  json["engine"] = m.engine;
  json["backend"] = m.backend;
  json["ranks"] = m.ranks;
  json["steps"] = m.steps;
  json["memory"] = memory_json(c.memory);
  json["predicted_step_seconds"] = c.predicted_step.base();
  json["measured_step_seconds"] = c.measured_step.base();
  if (const auto error = relative_error(c.predicted_step, c.measured_step)) json["step_error"] = *error;
  if (c.median_kind_error) json["median_kind_error"] = *c.median_kind_error;
  json["unattributed_seconds"] = c.measured_coverage.unattributed.base();
  json["predicted_unattributed_seconds"] = c.predicted_coverage.unattributed.base();
  json["wait_seconds"] = c.measured_wait.base();
  json["predicted_wait_seconds"] = c.predicted_wait.base();
  json["rows"] = rows_json(c.rows);
  json["ops"] = ops_json(result);
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace zeroplan
