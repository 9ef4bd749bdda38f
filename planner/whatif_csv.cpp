#include "planner/whatif_csv.h"

#include <fmt/format.h>

#include <utility>

namespace zeroplan {
namespace {

using Cell = std::pair<std::string_view, std::string>;

std::string quoted(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string inside;
  for (const char c : text) inside += c == '"' ? std::string("\"\"") : std::string(1, c);
  return '"' + inside + '"';
}

std::string yes_no(bool value) { return value ? "yes" : "no"; }

class RowCells {
 public:
  RowCells(const NamedWhatif& named, std::size_t index)
      : named_(named), row_(named.answer.rows[index]), index_(index), limits_(named.answer.limits) {}

  std::vector<Cell> all() {
    add_machine();
    add_prediction();
    add_run();
    add("recommended", limits_.any() ? yes_no(row_.recommended) : "");
    add("plan", row_.best() != nullptr ? describe(row_.best()->plan) : "");
    add("plan_file", index_ < named_.plan_files.size() ? named_.plan_files[index_] : "");
    add("error", row_.refusal);
    return std::move(cells_);
  }

 private:
  void add(std::string_view column, std::string text) { cells_.emplace_back(column, std::move(text)); }
  void add(std::string_view column, double value) { add(column, fmt::format("{}", value)); }
  void add(std::string_view column, const std::optional<double>& value) {
    add(column, value ? fmt::format("{}", *value) : std::string());
  }

  void add_machine() {
    const MachineSpec& machine = row_.alternative.machine;
    add("workload", named_.name);
    add("model", named_.answer.workload.model.name);
    add("hardware", row_.alternative.name);
    add("machine", machine.name);
    add("gpu", machine.gpu.name);
    add("gpus_per_node", fmt::format("{}", machine.gpus_per_node));
    add("nodes", fmt::format("{}", machine.nodes));
    add("usd_per_node_hour", machine.price ? std::optional(machine.price->usd_per_hour) : std::nullopt);
    add("price_date", machine.price ? machine.price->date : "");
    add("price_source", machine.price ? machine.price->source : "");
  }

  void add_prediction() {
    const Candidate* best = row_.best();
    add("fits", yes_no(best != nullptr));
    const Prediction* p = best != nullptr ? &best->prediction : nullptr;
    add("step_seconds", p != nullptr ? std::optional(p->step.base()) : std::nullopt);
    add("tokens_per_second", p != nullptr ? std::optional(p->tokens_per_second) : std::nullopt);
    add("mfu", p != nullptr ? p->mfu : std::nullopt);
    const auto cost = row_.cost();
    add("usd_per_million_tokens", cost ? std::optional(cost->usd_per_million_tokens) : std::nullopt);
  }

  void add_run() {
    const auto run = row_.run(limits_);
    add("hours", run ? std::optional(run->time.base() / kSecondsPerHour) : std::nullopt);
    add("usd", run ? run->usd : std::nullopt);
    const bool against_deadline = run && limits_.deadline;
    const bool against_budget = run && limits_.budget_usd && run->usd;
    add("late_days", against_deadline ? std::optional(run->late(limits_).base() / kSecondsPerDay) : std::nullopt);
    add("over_budget_usd", against_budget ? std::optional(run->over(limits_)) : std::nullopt);
    const bool known = run && limits_.any() && (run->usd || !limits_.budget_usd);
    add("within_limits", known ? yes_no(run->meets(limits_)) : "");
  }

  const NamedWhatif& named_;
  const WhatifRow& row_;
  std::size_t index_;
  const WhatifLimits& limits_;
  std::vector<Cell> cells_;
};

}  // namespace

std::string whatif_csv(const std::vector<NamedWhatif>& answers) {
  std::string header, lines;
  for (const NamedWhatif& named : answers) {
    for (std::size_t i = 0; i < named.answer.rows.size(); ++i) {
      const std::vector<Cell> cells = RowCells(named, i).all();
      const bool first = header.empty();
      std::string line;
      for (const auto& [column, text] : cells) {
        if (first) header += fmt::format("{}{}", header.empty() ? "" : ",", column);
        line += fmt::format("{}{}", &text == &cells.front().second ? "" : ",", quoted(text));
      }
      lines += line + "\r\n";
    }
  }
  return header + "\r\n" + lines;
}

}  // namespace zeroplan
