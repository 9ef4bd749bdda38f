#pragma once
// What the simulator's tests share: schedules of given works, played by estimate() and simulate().

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>

#include "models/schedule.h"
#include "sim/cost_model.h"
#include "sim/estimate.h"
#include "sim/simulate.h"

namespace zeroplan::tests {

inline constexpr double kAgreement = 1e-12;  // relative

/// A schedule of given works.
class Script {
 public:
  OpRef op(Stream stream, Work work, std::initializer_list<OpRef> after = {}) {
    return builder_.add(stream, Phase::forward, -1, builder_.work(work),
                        std::span<const OpRef>(after.begin(), after.size()), {});
  }
  Schedule finish() { return builder_.finish(); }

 private:
  ScheduleBuilder builder_;
};

struct Both {
  Estimate estimate;
  Simulation simulation;
  /// Every op as if alone: estimate()'s step may be longer, as it is no shorter than the busiest resource needs.
  Seconds longest_path() const {
    Seconds end;
    for (const Span& span : estimate.trace.ops) end = std::max(end, span.end);
    return end;
  }
  double slower() const { return simulation.step / longest_path(); }
};

inline Both play(const Schedule& schedule, const MachineSpec& machine, SimulateOptions options = {},
                 int shard_ranks = 0) {
  if (shard_ranks == 0) shard_ranks = machine.ranks();
  const MachineCostModel cost(machine, shard_ranks, machine.gpu.peak_bf16 ? DType::bf16 : DType::fp16);
  const auto asked = demands(schedule, cost);
  options.with_trace = !schedule.folded();
  return {Estimator().run(schedule, asked, options.with_trace),
          simulate(schedule, asked, machine, shard_ranks, options)};
}

inline void require(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

}  // namespace zeroplan::tests
