#pragma once
// A plan.json beside a measured.json: the prediction of one, compared with the other, and the reports.

#include <string>

#include "models/compare.h"
#include "models/plan.h"
#include "planner/prediction.h"
#include "planner/report.h"

namespace zeroplan {

/// The step of the file's plan on the file's machine, every rank played, and the arena of each tier.
PredictedStep predicted_step(Predictor& predictor, const PlanFile& file, const Schedule& flat);

/// A comparison with what its reports need besides.
struct PlanComparison {
  Comparison comparison;
  Prediction prediction;            // for the lines that are not measured
  std::vector<std::string> labels;  // of comparison.ops
};
/// Throws InputError as compare() does.
PlanComparison compare_plan(const PlanFile& file, const Measured& measured, const std::string& measured_name);

/// Memory by tier, time by phase and kind of op, the step, what no op accounts for.
std::string report_comparison(const PlanFile& file, const Measured& measured, const PlanComparison& result,
                              const ReportStyle& style);
/// `compare --json` (spec section 4): memory, ops, unattributed_seconds; and step, rows, losses.
std::string comparison_json(const PlanFile& file, const Measured& measured, const PlanComparison& result);

}  // namespace zeroplan
