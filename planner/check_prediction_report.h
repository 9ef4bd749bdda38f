#pragma once
// check's prediction for people and as JSON.

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "planner/check_prediction.h"
#include "planner/report.h"

namespace zeroplan {

/// Memory by phase, host, step time, then the nearest configuration as a diff of keys, then assumptions.
std::string report_prediction(const CheckPrediction& prediction, const MachineSpec& machine, const ReportStyle& style);

/// Keys of docs/check.md; sizes in bytes, times in seconds. What is not predicted has no key but in "not_predicted".
nlohmann::ordered_json prediction_json(const CheckPrediction& prediction);
/// Null when there is none.
nlohmann::ordered_json nearest_json(const CheckPrediction& prediction);

}  // namespace zeroplan
