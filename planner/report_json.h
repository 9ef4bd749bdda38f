#pragma once
// Answers as JSON with stable keys (spec section 4). What is not known is left out.

#include <optional>
#include <string>
#include <vector>

#include "planner/search.h"
#include "planner/step_table.h"
#include "planner/transients.h"
#include "planner/whatif.h"

namespace zeroplan {

/// `plan --json`. `num_tokens` adds hours and, with a price, USD to each plan's "cost". Ends with a line break, as all
/// do.
std::string plan_json(const Answer& answer, std::optional<double> num_tokens);

/// The object "time" of a prediction: seconds of each part of a step. Without a line break.
std::string time_json(const TimeBreakdown& time);

/// One workload of `whatif`.
struct NamedWhatif {
  std::string name;  // empty: the only one, of the command line
  WhatifAnswer answer;
  std::vector<std::string> plan_files;  // by row, below --out; empty: the row has none, or nothing is written
};
/// `whatif --json`: rows, one a machine; several workloads stand in `answers`.
std::string whatif_json(const std::vector<NamedWhatif>& answers);

/// `simulate --estimate --json`: prediction, ranks, ops, limited_by, and streams by phase.
std::string step_json(const PlanFile& file, const Prediction& prediction, const StepTable& table,
                      const std::vector<Assumption>& assumptions);

/// `simulate --json`: prediction, ranks, simulated_ranks, ops (timed, of one rank), events, limited_by, streams,
/// resources, load_and_save.
std::string simulation_json(const PlanFile& file, const Prediction& prediction, const Simulation& simulation,
                            Seconds estimated, const std::vector<TransientUse>& transients,
                            const std::vector<Assumption>& assumptions);

}  // namespace zeroplan
