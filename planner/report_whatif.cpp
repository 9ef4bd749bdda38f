// The answers of whatif and simulate as text.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "planner/report.h"
#include "planner/report_layout.h"

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

std::vector<std::string> cells_of(const WhatifRow& row, std::optional<double> num_tokens) {
  const MachineSpec& machine = row.alternative.machine;
  const Candidate* best = row.best();
  const auto cost = row.cost();
  const std::string price =
      machine.price ? fmt::format("{:.2f}", machine.price->usd_per_hour * machine.nodes) : "no price";
  std::vector<std::string> cells = {row.alternative.name,
                                    machine.name,
                                    best != nullptr ? "yes" : "no",
                                    best != nullptr ? format_seconds(best->prediction.step) : "-",
                                    best != nullptr ? fmt::format("{:.0f}", best->prediction.tokens_per_second) : "-",
                                    price,
                                    cost ? fmt::format("{:.3g}", cost->usd_per_million_tokens) : "-"};
  if (num_tokens) {
    const double hours = best != nullptr ? hours_for(*num_tokens, best->prediction) : 0;
    cells.push_back(best != nullptr ? format_count(std::llround(hours)) : "-");
    cells.push_back(cost ? format_count(std::llround(hours * cost->usd_per_hour)) : "-");
  }
  cells.push_back(marks(row));
  cells.push_back(best != nullptr ? describe(best->plan) : why_not(row));
  return cells;
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

std::string report_whatif(const WhatifAnswer& answer, std::optional<double> num_tokens, const ReportStyle& style) {
  std::vector<TextTable::Column> columns = {{"hardware", Align::left},
                                            {"machine", Align::left},
                                            {"fits", Align::left},
                                            {"step"},
                                            {"tokens/s"},
                                            {"USD/hour"},
                                            {"USD/Mtoken"}};
  if (num_tokens) {
    columns.push_back({"hours"});
    columns.push_back({"USD"});
  }
  columns.push_back({"", Align::left});
  columns.push_back({"plan", Align::left});
  TextTable table(columns);
  for (const WhatifRow& row : answer.rows) table.add(cells_of(row, num_tokens));
  std::string text = workload_line(answer.workload) + "\n" + table.text() + "\n";
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
