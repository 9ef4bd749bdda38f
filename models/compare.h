#pragma once
// Prediction beside measurement: two traces over the ops of one flat schedule.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "models/measured.h"
#include "models/model_spec.h"
#include "models/op_kind.h"
#include "models/schedule.h"
#include "models/trace.h"

namespace zeroplan {

/// What was expected of the step that ran.
struct PredictedStep {
  Seconds step;
  Trace trace;                           // of rank 0
  std::vector<Seconds> transfer_starts;  // by op: collectives, when the last member had arrived; others: the start
  std::vector<Seconds> seconds;          // by op, as MeasuredOp::seconds
  std::vector<MeasuredTier> memory;      // `planned` of the tiers in use; `used` is ignored
};

struct ComparedTier {
  Tier tier = Tier::hbm;
  std::int64_t predicted = 0, measured = 0;  // bytes; 0 when only the other side uses the tier
};
/// An op that takes time: not Alloc, Free or Join. Collectives without the wait for peers.
struct ComparedOp {
  std::uint32_t op = 0;  // index in the flat schedule
  OpKind kind = OpKind::matmul;
  Phase phase = Phase::forward;
  Seconds predicted, measured;
};
struct ComparedRow {
  Phase phase = Phase::forward;
  OpKind kind = OpKind::matmul;
  std::int64_t count = 0;
  Seconds predicted, measured;  // summed
};
/// How much of a step the ops of rank 0 account for.
struct Coverage {
  Seconds covered;       // some op ran, on any stream; a collective's wait for peers counts
  Seconds unattributed;  // none did: threads that wake up or wait for a core, and what comes before and after the ops
};

struct Comparison {
  Seconds predicted_step, measured_step;           // measured: the median of the steps after the warm-up
  std::vector<ComparedTier> memory;                // GPU, host, NVMe
  std::vector<ComparedOp> ops;                     // in schedule order
  std::vector<ComparedRow> rows;                   // by phase, then kind; bookkeeping included
  Seconds predicted_wait, measured_wait;           // collectives of rank 0 waiting for peers, summed
  Coverage predicted_coverage, measured_coverage;  // measured: of the step that the file shows op by op
  /// Median over the kinds (bookkeeping apart) of |predicted - measured| / measured; nothing when no kind took time.
  std::optional<double> median_kind_error;

  bool memory_equal() const;
};

/// (predicted - measured) / measured; nothing when nothing was measured.
std::optional<double> relative_error(Seconds predicted, Seconds measured);

/// Throws InputError naming `measured_name` when the measurement is of another plan (`plan` is plan_identity() of the
/// one compared), of another number of ranks or ops; std::logic_error when the prediction does not fit the schedule.
Comparison compare(const Schedule& flat, const ModelSpec& model, std::string_view plan, int ranks,
                   const PredictedStep& predicted, const Measured& measured, const std::string& measured_name);

/// Of one trace, in a step that took `step`.
Coverage coverage(const Trace& trace, Seconds step);

}  // namespace zeroplan
