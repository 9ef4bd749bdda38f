#pragma once
// The analytic reader: longest path through the schedule, every op as if alone on what it uses.

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "models/schedule.h"
#include "models/trace.h"
#include "sim/cost_model.h"

namespace zeroplan {

/// What the compute stream did during the step; sums to the step time. Where compute waits, the wait belongs to what it
/// waited for.
struct TimeBreakdown {
  Seconds compute;                // kernels of forward and backward
  Seconds exposed_communication;  // waits for collectives
  Seconds exposed_offload;        // waits for copies and disks
  Seconds optimizer;              // Adam and the global norm, and waits for them on the host
  Seconds idle;
  Seconds total() const { return compute + exposed_communication + exposed_offload + optimizer + idle; }
};

struct Estimate {
  Seconds step;
  TimeBreakdown breakdown;
  std::array<Seconds, kNumStreams> stream_busy{};
  std::array<Seconds, kNumRoles> role_busy{};
  Trace trace;  // flat schedules and `with_trace` only
};

/// The demand of every work of a schedule, in its order.
std::vector<Demand> demands(const Schedule& schedule, const CostModel& cost);

/// Reusable working memory: one estimator serves many schedules. Not thread-safe.
class Estimator {
 public:
  Estimator();
  ~Estimator();
  Estimator(Estimator&&) noexcept;

  /// Repeated blocks are played until each op's winner (the predecessor that sets its start) and every advance from one
  /// iteration to the next are the same as before and stay so to the last iteration; the rest is added at once. The
  /// result equals the unfolded schedule's up to rounding.
  Estimate run(const Schedule& schedule, std::span<const Demand> demands, bool with_trace = false);

 private:
  class Player;
  std::unique_ptr<Player> player_;
};

/// As Estimator().run(schedule, demands(schedule, cost), with_trace).
Estimate estimate(const Schedule& schedule, const CostModel& cost, bool with_trace = false);

}  // namespace zeroplan
