#pragma once
// Answers as JSON with stable keys (spec section 4). What is not known is left out.

#include <optional>
#include <string>

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

/// `whatif --json`: rows, one a machine.
std::string whatif_json(const WhatifAnswer& answer, std::optional<double> num_tokens);

/// `simulate --estimate --json`: prediction, ranks, ops, limited_by, and streams by phase.
std::string step_json(const PlanFile& file, const Prediction& prediction, const StepTable& table,
                      const std::vector<Assumption>& assumptions);

/// `simulate --json`: prediction, ranks, simulated_ranks, ops (timed, of one rank), events, limited_by, streams,
/// resources, load_and_save.
std::string simulation_json(const PlanFile& file, const Prediction& prediction, const Simulation& simulation,
                            Seconds estimated, const std::vector<TransientUse>& transients,
                            const std::vector<Assumption>& assumptions);

}  // namespace zeroplan
