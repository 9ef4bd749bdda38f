// The answers of whatif and simulate as text.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "planner/report.h"
#include "planner/report_layout.h"
#include "planner/whatif_verdict.h"

namespace zeroplan {
namespace {

/// What stands where the plan of a row that fits would.
std::string why_not(const WhatifRow& row) {
  if (!row.answer) return row.refusal;
  std::vector<std::string> lacks;
  if (row.answer->shortfall) {
    for (const Shortfall::Lack& lack : row.answer->shortfall->lacks) {
      lacks.push_back(fmt::format("{} in {}", format_gib(lack.missing()), tier_title(lack.tier)));
    }
  }
  return fmt::format("missing: {}", fmt::join(lacks, ", "));
}

std::string marks(const WhatifRow& row) {
  if (row.cheapest && row.fastest) return "cheapest, fastest";
  return row.cheapest ? "cheapest" : row.fastest ? "fastest" : "";
}

/// Whether the row keeps the limits, and else by how much it does not.
std::string kept_text(const WhatifRow& row, const WhatifLimits& limits) {
  const auto run = row.run(limits);
  if (!run) return "-";
  std::vector<std::string> parts;
  if (const Seconds late = run->late(limits); late > Seconds()) parts.push_back(days_text(late) + " late");
  if (const double over = run->over(limits); over > 0) parts.push_back(usd_text(over) + " over");
  if (limits.budget_usd && !run->usd) parts.push_back("no price: left out of the budget");
  return parts.empty() ? "kept" : fmt::format("{}", fmt::join(parts, ", "));
}

std::vector<TextTable::Column> columns_of(const WhatifLimits& limits) {
  std::vector<TextTable::Column> columns = {{"hardware", Align::left}, {"machine", Align::left}};
  if (limits.any()) columns.push_back({"nodes"});
  for (const auto& column : std::initializer_list<TextTable::Column>{
           {"fits", Align::left}, {"step"}, {"tokens/s"}, {"USD/hour"}, {"USD/Mtoken"}}) {
    columns.push_back(column);
  }
  if (limits.tokens) {
    columns.push_back({"hours"});
    columns.push_back({"USD"});
  }
  if (limits.any()) columns.push_back({"limits", Align::left});
  columns.push_back({"", Align::left});
  columns.push_back({"plan", Align::left});
  return columns;
}

std::vector<std::string> cells_of(const WhatifRow& row, const WhatifLimits& limits) {
  const MachineSpec& machine = row.alternative.machine;
  const Candidate* best = row.best();
  const auto cost = row.cost();
  const auto run = row.run(limits);
  std::vector<std::string> cells = {row.alternative.name, machine.name};
  if (limits.any()) cells.push_back(fmt::format("{}", machine.nodes));
  cells.push_back(best != nullptr ? "yes" : "no");
  cells.push_back(best != nullptr ? format_seconds(best->prediction.step) : "-");
  cells.push_back(best != nullptr ? fmt::format("{:.0f}", best->prediction.tokens_per_second) : "-");
  cells.push_back(machine.price ? fmt::format("{:.2f}", machine.price->usd_per_hour * machine.nodes) : "no price");
  cells.push_back(cost ? fmt::format("{:.3g}", cost->usd_per_million_tokens) : "-");
  if (limits.tokens) {
    cells.push_back(run ? whole_text(run->time.base() / kSecondsPerHour) : "-");
    cells.push_back(run && run->usd ? whole_text(*run->usd) : "-");
  }
  if (limits.any()) cells.push_back(kept_text(row, limits));
  cells.push_back(marks(row));
  cells.push_back(best != nullptr ? describe(best->plan) : why_not(row));
  return cells;
}

/// The numbers of nodes that were planned of one machine, with what they gain over the fewest that fit.
std::string trials_section(const WhatifRow& row, const ReportStyle& style) {
  const auto fewest = std::ranges::find_if(row.trials, [](const NodeTrial& t) { return t.run.has_value(); });
  if (row.trials.size() < 2 || fewest == row.trials.end()) return "";
  TextTable table({{"nodes"}, {"tokens/s"}, {"speedup"}, {"time", Align::right}, {"USD"}});
  for (const NodeTrial& trial : row.trials) {
    const bool fits = trial.run.has_value();
    table.add({fmt::format("{}", trial.nodes), fits ? fmt::format("{:.0f}", trial.tokens_per_second) : "does not fit",
               fits ? fmt::format("{:.2f}", trial.tokens_per_second / fewest->tokens_per_second) : "-",
               fits ? days_text(trial.run->time) : "-", fits && trial.run->usd ? whole_text(*trial.run->usd) : "-"});
  }
  const std::string title = fmt::format("{} by number of nodes (each predicted)", row.alternative.name);
  return inked(title, Ink::bold, style) + "\n" + table.text() + "\n";
}

/// Within limits: which row to take and why, or what is nearest and what would have to change.
std::string verdict_section(const WhatifAnswer& answer, const ReportStyle& style) {
  if (!answer.verdict) return "";
  const WhatifVerdict& verdict = *answer.verdict;
  std::string text =
      verdict.recommended ? inked("Take", Ink::good, style) : inked("Not within the limits", Ink::bad, style);
  text += fmt::format("\n  {}\n", verdict.why);
  if (!verdict.changes.empty()) text += "  What would do, each planned, the cheapest change first:\n";
  for (const WhatifChange& change : verdict.changes) {
    text += fmt::format("    {}\n      {}\n", change.what, change.flag);
  }
  const auto shown = verdict.recommended ? verdict.recommended : verdict.nearest;
  return text + "\n" + (shown ? trials_section(answer.rows[*shown], style) : "");
}

std::string workload_line(const Request& request) {
  return fmt::format("{}: {} parameters; {} sequences of {} tokens a step, {}\n", request.model.name,
                     format_count(request.model.parameters()), request.global_batch.value_or(0),
                     format_count(request.seq_len.value_or(0)), to_string(request.precision));
}

bool has_answer(const WhatifRow& row) { return row.answer.has_value(); }

/// What every row assumes is said once; the rest behind the names of the machines that it is assumed of.
std::vector<Assumption> row_assumptions(const WhatifAnswer& answer) {
  struct Shared {
    Assumption assumption;
    std::vector<std::string_view> names;
  };
  std::vector<Shared> found;
  for (const WhatifRow& row : answer.rows) {
    if (!row.answer) continue;
    for (const Assumption& a : row.answer->assumptions) {
      auto known = std::ranges::find(found, a, &Shared::assumption);
      if (known == found.end()) known = found.insert(found.end(), {a, {}});
      known->names.push_back(row.alternative.name);
    }
  }
  const auto answered = static_cast<std::size_t>(std::ranges::count_if(answer.rows, &has_answer));
  std::vector<Assumption> all = answer.assumptions;
  for (const Shared& shared : found) {
    if (shared.names.size() >= answered) all.push_back(shared.assumption);
  }
  for (Shared& shared : found) {
    if (shared.names.size() >= answered) continue;
    shared.assumption.what = fmt::format("{}: {}", fmt::join(shared.names, ", "), shared.assumption.what);
    all.push_back(std::move(shared.assumption));
  }
  return all;
}

}  // namespace

std::string report_whatif(const WhatifAnswer& answer, const ReportStyle& style) {
  TextTable table(columns_of(answer.limits));
  for (const WhatifRow& row : answer.rows) table.add(cells_of(row, answer.limits));
  std::string text = workload_line(answer.workload) + "\n" + table.text() + "\n" + verdict_section(answer, style);
  text += inked("Prices", Ink::bold, style) + "\n";
  for (const WhatifRow& row : answer.rows) {
    text += fmt::format("  {}: {}\n", row.alternative.name, price_text(row.alternative.machine));
  }
  return text + "\n" + assumptions_section(row_assumptions(answer), style);
}

std::string report_step(const PlanFile& file, const Prediction& prediction, const StepTable& table,
                        const ReportStyle& style) {
  std::string text = fmt::format("{} on {}: {}\n  {}\n  {} a step, {}\n\n", file.model.name, file.machine.name,
                                 gpus_text(file.machine), describe(file.plan), format_seconds(prediction.step),
                                 format_speed(prediction.tokens_per_second));
  text +=
      overflow_section(prediction) + memory_section(prediction, style) + "\n" + time_section(prediction, style) + "\n";
  text += phase_section(table, prediction.step, style);
  return text + fmt::format("\n{} timed ops a rank, {} ranks, all alike\n", format_count(table.ops), file.plan.ranks);
}

std::string report_simulation(const PlanFile& file, const Prediction& prediction, const Simulation& simulation,
                              Seconds estimated, const ReportStyle& style) {
  std::string text = fmt::format(
      "{} on {}: {}\n  {}\n  {} a step, {}; {} as the longest path, every op as if alone\n\n", file.model.name,
      file.machine.name, gpus_text(file.machine), describe(file.plan), format_seconds(prediction.step),
      format_speed(prediction.tokens_per_second), format_seconds(estimated));
  text +=
      overflow_section(prediction) + memory_section(prediction, style) + "\n" + time_section(prediction, style) + "\n";
  text += streams_section(simulation, prediction.step, style) + "\n";
  return text + busiest_section(simulation, style) + "\n" + simulated_line(simulation);
}

}  // namespace zeroplan
