#pragma once
// What a run costs: prices come from the catalog or the user, never from here.

#include <optional>
#include <string>

#include "planner/prediction.h"

namespace zeroplan {

inline constexpr double kSecondsPerHour = 3600;
inline constexpr double kSecondsPerDay = 24 * kSecondsPerHour;

struct RunCost {
  double usd_per_hour = 0;  // all nodes
  double usd_per_million_tokens = 0;
};

/// Nothing when the machine's price is not known.
std::optional<RunCost> cost_of(const MachineSpec& machine, const Prediction& prediction);

/// Hours that so many tokens take.
double hours_for(double tokens, const Prediction& prediction);

/// "12.30 USD an hour (us-east-1, on demand, 2026-11-01; SOURCE)".
std::string price_text(const MachineSpec& machine);

}  // namespace zeroplan
