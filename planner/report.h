#pragma once
// Answers as text for people.

#include <optional>
#include <string>
#include <vector>

#include "planner/required_rates.h"
#include "planner/search.h"
#include "planner/step_table.h"
#include "planner/whatif.h"

namespace zeroplan {

struct ReportStyle {
  bool colour = false;
  bool unicode = false;
};

/// What a report on a search says beside the answer.
struct PlanReport {
  std::vector<Advice> advice;        // advise() of the best plan
  std::vector<RequiredRate> rates;   // required_rates() of the best plan
  std::optional<double> num_tokens;  // of the whole run: hours and cost are printed
  std::string command;               // the command line that was given, quoted for a shell
  std::string fix_command;           // the same with the first change that makes it fit; empty: there is none
  std::string written_to;            // folder with the files; empty: none were written
  std::vector<std::string> written;  // their names
  std::string under_deepspeed;       // what the best plan would take there; empty: not known
};

/// The best of `answer.plans`: the first that fits, or with a row for each stage the one with most tokens per second.
/// nullptr when none fits.
const Candidate* best_of(const Answer& answer);

/// The answer of `plan`: fits or not and by how much, memory by owner, time by what it waits for, the limit, what would
/// help, alternatives, assumptions, what to run next.
std::string report_plan(const Answer& answer, const PlanReport& extra, const ReportStyle& style);

/// The answer of `whatif`: one table, and within limits which row to take or what would have to change.
std::string report_whatif(const WhatifAnswer& answer, const ReportStyle& style);

/// The answer of `simulate --estimate`: memory, and time by phase and stream.
std::string report_step(const PlanFile& file, const Prediction& prediction, const StepTable& table,
                        const ReportStyle& style);

/// The answer of `simulate`: memory, time by stream with what waiting and sharing cost, the busiest resources.
/// `estimated` is the longest path's step.
std::string report_simulation(const PlanFile& file, const Prediction& prediction, const Simulation& simulation,
                              Seconds estimated, const ReportStyle& style);

}  // namespace zeroplan
