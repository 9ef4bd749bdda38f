#pragma once
// Where the time of a step goes, by phase and stream.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "models/schedule.h"
#include "sim/cost_model.h"
#include "sim/estimate.h"

namespace zeroplan {

struct StepRow {
  Phase phase = Phase::forward;
  Stream stream = Stream::compute;
  std::int64_t ops = 0;  // timed ones of one rank: allocations and joins take no time
  Seconds busy;          // their durations, each as if alone
  std::string longest;   // label of the longest op
  Seconds longest_duration;
};

struct StepTable {
  std::vector<StepRow> rows;  // phases in order, streams in order; none without ops
  std::int64_t ops = 0;
  Estimate estimate;
};

/// Works on folded and flat schedules alike; an op inside a repeat counts as often as it runs.
StepTable step_table(const Schedule& schedule, const CostModel& cost, const ModelSpec& model);
/// The same with demands of the schedule's works that are known already.
StepTable step_table(const Schedule& schedule, std::span<const Demand> costs, const ModelSpec& model);

}  // namespace zeroplan
