#pragma once
// What a plan costs on a machine: memory by tier and owner, time by what it waits for, traffic, the limit.

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/assumption.h"
#include "models/machine_spec.h"
#include "models/model_spec.h"
#include "models/plan.h"
#include "models/schedule.h"
#include "planner/short_play.h"
#include "sim/cost_model.h"
#include "sim/estimate.h"
#include "sim/memory_timeline.h"
#include "sim/simulate.h"

namespace zeroplan {

/// One tier as the spec's `memory` shows it: GPU per rank, host and NVMe per node.
struct TierMemory {
  Bytes peak;         // GPU: planned arena + context + libraries + NCCL; host, NVMe: everything the plan keeps there
  Bytes capacity;     // what the machine leaves to us
  Bytes pinned;       // host only
  std::string at_op;  // GPU: the op at which the live peak stands
  std::vector<std::pair<std::string, Bytes>> breakdown;  // owner -> bytes; sums to peak; no zero entries

  Bytes needed() const { return peak; }
};

struct Traffic {  // bytes of one rank and step; collectives count the full message
  Bytes all_gather, reduce_scatter, all_reduce, h2d, d2h, nvme_read, nvme_write;
};

struct Prediction {
  Seconds step;
  double tokens_per_second = 0;  // whole job
  double tokens_per_second_per_gpu = 0;
  std::optional<double> mfu,
      hfu;  // causal attention count over the dense peak of the compute type; absent without a peak
  TierMemory gpu;
  std::optional<TierMemory> host, nvme;  // absent when unused
  TimeBreakdown time;
  Seconds kernels;  // forward and backward kernels one after the other: no placement is faster
  Traffic traffic;
  std::array<Seconds, kNumRoles> busy{};  // by resource, whole step
  std::string limited_by;                 // "GPU arithmetic: 87 % of the step"
  Bytes lower_bound;                      // live GPU peak; gpu.peak minus overheads is the laid-out arena
  bool simulated = false;                 // step and time come from discrete events, not from the longest path
};

/// Fixed GPU memory besides the arena (spec, Defaults): context, libraries, NCCL.
struct DeviceOverhead {
  Bytes context = Bytes(0.61 * kGiB);
  Bytes libraries = Bytes(0.21 * kGiB);
  Bytes communicators;
};

enum class Detail : std::uint8_t {
  live,      // GPU memory is the live peak: what the search compares
  laid_out,  // the arena is laid out: what is reported
};

/// Predicts many plans of one (model, machine). Not thread-safe; one per thread.
class Predictor {
 public:
  Predictor(const ModelSpec& model, const MachineSpec& machine);
  ~Predictor();

  /// Precondition: check_plan() passed. Throws InputError when the machine cannot run it at all (precision, group).
  Prediction predict(const Plan& plan, Detail detail);
  /// Plays the plan's step with shared resources. Precondition as for predict().
  Simulation simulate(const Plan& plan, const SimulateOptions& options);
  /// The step by discrete events. Of one with many micro-steps two short ones are played (short_play.h).
  PlayedStep play_shortly(const Plan& plan);
  /// As play_shortly, with one resource's time scaled.
  Seconds played_step_with(const Plan& plan, ResourceRole role, double factor);
  /// The step time with one resource's time scaled: 0.5 is "twice as fast".
  Seconds step_with(const Plan& plan, ResourceRole role, double factor);
  std::vector<Assumption> assumptions(const Plan& plan) const;
  /// The costs of a plan's works. Valid as long as this.
  const MachineCostModel& cost_model(const Plan& plan);
  /// Bytes of states that stay on each tier whatever the micro-batch: a sound lower bound, much cheaper than predict().
  std::array<Bytes, kNumMemories> resident_states(const Plan& plan) const;

  const ModelSpec& model() const;
  const MachineSpec& machine() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Takes step time, breakdown and what follows from them over from the play.
void use_played_step(Prediction& prediction, const PlayedStep& played, const MachineSpec& machine);

/// Micro-steps that play_shortly() plays of a longer step: two short steps, of these many.
inline constexpr std::int64_t kShortSteps = 2, kLongerSteps = 3;

/// peak <= capacity x (1 - margin) on every tier.
bool fits(const Prediction& prediction, double margin);

}  // namespace zeroplan
