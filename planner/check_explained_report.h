#pragma once
// What stands beside a prediction of `check`: stages, gains, loading and saving, other releases, remarks.

#include <string>
#include <utility>
#include <vector>

#include "planner/check_prediction.h"
#include "planner/report.h"

namespace zeroplan {

/// Lines below the memory's: who holds what at the highest moment, what a step moves.
std::vector<std::pair<std::string, std::string>> memory_details(const EnginePrediction& prediction);

/// Sections with a blank line before each; empty when there is nothing to say.
std::string explained_text(const CheckPrediction& prediction, const ReportStyle& style);

/// An object: breakdown, traffic, stages, gains, storage, estimator, releases, remarks.
std::string explained_json(const CheckPrediction& prediction);

}  // namespace zeroplan
