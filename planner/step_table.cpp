#include "planner/step_table.h"

#include <array>

namespace zeroplan {
namespace {

bool is_timed(const Work& work) {
  return !std::holds_alternative<Alloc>(work) && !std::holds_alternative<Free>(work) &&
         !std::holds_alternative<Join>(work);
}

constexpr std::size_t kNumPhases = 3;

}  // namespace

StepTable step_table(const Schedule& schedule, const CostModel& cost, const ModelSpec& model) {
  return step_table(schedule, demands(schedule, cost), model);
}

StepTable step_table(const Schedule& schedule, std::span<const Demand> costs, const ModelSpec& model) {
  StepTable table;
  table.estimate = Estimator().run(schedule, costs);
  const std::vector<std::int64_t> times = schedule.multiplicities();
  std::array<StepRow, kNumPhases * kNumStreams> rows;
  for (std::size_t i = 0; i < schedule.ops().size(); ++i) {
    const Op& op = schedule.ops()[i];
    if (!is_timed(schedule.work(op))) continue;
    StepRow& row = rows[static_cast<std::size_t>(op.phase) * kNumStreams + static_cast<std::size_t>(op.stream)];
    const Seconds duration = costs[op.work.index].alone();
    row.phase = op.phase;
    row.stream = op.stream;
    row.ops += times[i];
    row.busy += duration * static_cast<double>(times[i]);
    table.ops += times[i];
    if (duration > row.longest_duration) {
      row.longest = label(schedule, op, model);
      row.longest_duration = duration;
    }
  }
  for (StepRow& row : rows) {
    if (row.ops > 0) table.rows.push_back(std::move(row));
  }
  return table;
}

}  // namespace zeroplan
