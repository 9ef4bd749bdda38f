#pragma once
// measured.json (schema 1): what `zeroplan run --measure` saw, of the step that plan.json describes. Times are those of
// rank 0. The file knows its plan by a hash, so that `compare` refuses the measurement of another one.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/plan.h"
#include "models/schedule.h"
#include "models/trace.h"
#include "models/units.h"

namespace zeroplan {

/// One op of the flat schedule, lower(model, plan, Folding::none), by index.
struct MeasuredOp {
  Span span;  // in the step `median_step`, from that step's beginning
  /// Collectives: when the last member had arrived. [start, transfer_start) is waiting, [transfer_start, end) moves
  /// data.
  std::optional<Seconds> transfer_start;
  /// Median over the measured steps of end - start, of collectives of end - transfer_start.
  Seconds seconds;
  friend bool operator==(const MeasuredOp&, const MeasuredOp&) = default;
};

/// Bytes of the arenas: the GPU's (device's) of rank 0, host and NVMe of all ranks of the node together.
struct MeasuredTier {
  Tier tier = Tier::hbm;
  std::int64_t planned = 0;  // what the layout asked for
  std::int64_t used = 0;     // what was taken at run time
  friend bool operator==(const MeasuredTier&, const MeasuredTier&) = default;
};

/// Bytes that rank 0 moved in one step, counted where they moved. Collectives count the full message, as the
/// prediction's `traffic` does; `sent` and `received` are what crossed to and came from other ranks.
struct MeasuredTraffic {
  std::int64_t all_gather = 0, reduce_scatter = 0, all_reduce = 0, h2d = 0, d2h = 0, nvme_read = 0, nvme_write = 0;
  std::int64_t sent = 0, received = 0;
  friend bool operator==(const MeasuredTraffic&, const MeasuredTraffic&) = default;
};

struct Measured {
  std::string engine;   // "zeroplan"
  std::string backend;  // "host", "cuda"
  std::string plan;     // plan_identity() of the plan that ran
  int ranks = 1;
  std::string cpu;           // of the machine; empty: unknown
  int cores = 1;             // of the machine
  int threads_per_rank = 1;  // of the compute pool
  /// Which implementation ran: {"adam", "avx512"}, {"disk", "io_uring"}. In order, each name once.
  std::vector<std::pair<std::string, std::string>> paths;

  std::int64_t steps = 1;             // that ran; 1 or more
  std::int64_t warmup_steps = 0;      // the first so many are left out of every median; < steps
  std::int64_t median_step = 0;       // the step that `ops` show, counted from 0
  std::vector<double> losses;         // one a step; may be infinite or not-a-number
  std::vector<Seconds> step_seconds;  // one a step: from its beginning to the end of rank 0's last op
  std::vector<MeasuredTier> memory;   // tiers that are in use, each once
  MeasuredTraffic traffic;
  std::vector<MeasuredOp> ops;

  /// Median of the steps after the warm-up.
  Seconds step() const;
  friend bool operator==(const Measured&, const Measured&) = default;
};

/// Sixteen hexadecimal digits that depend on every key of the plan and of the model's configuration, on nothing else.
std::string plan_identity(const PlanFile& file);

/// One step as an executor saw it. Times count from the step's beginning.
struct StepTimes {
  Trace trace;
  /// By op, for collectives when the last member had arrived; empty, or as long as the trace. Other ops: ignored.
  std::vector<Seconds> transfer_starts;
};
/// Fills `warmup_steps`, `median_step` and `ops` from `traced`, the last traced.size() steps of `measured.steps`.
/// `step_seconds` must be filled. The first `warmup_steps` steps of the run are left out; when that leaves none, the
/// last step is kept. Throws std::logic_error when sizes do not fit the schedule.
void set_op_times(Measured& measured, const Schedule& flat, std::span<const StepTimes> traced,
                  std::int64_t warmup_steps);

/// Strict, with lines in errors (InputError).
Measured read_measured(std::string_view text, const std::string& file_name);
/// Writes what read_measured reads; round-trips exactly. Throws InputError when the step has too many ops for a file.
std::string write_measured(const Measured& measured);

}  // namespace zeroplan
