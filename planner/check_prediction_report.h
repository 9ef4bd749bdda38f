#pragma once
// check's prediction for people and as JSON.

#include <string>

#include "planner/check_prediction.h"
#include "planner/report.h"

namespace zeroplan {

/// Memory by phase, host, step time, then the nearest configuration as a diff of keys, then assumptions.
std::string report_prediction(const CheckPrediction& prediction, const MachineSpec& machine, const ReportStyle& style);

/// A JSON object with the keys of docs/check.md; sizes in bytes, times in seconds. What is not predicted has no key but
/// in "not_predicted".
std::string prediction_json(const CheckPrediction& prediction);
/// "null" when there is none.
std::string nearest_json(const CheckPrediction& prediction);

}  // namespace zeroplan
