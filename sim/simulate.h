#pragma once
// The simulating reader: the schedule of every rank played at once on the machine's resources, which are shared.
// What is modelled and what is not: docs/simulator.md.

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/machine_spec.h"
#include "models/schedule.h"
#include "models/trace.h"
#include "sim/cost_model.h"
#include "sim/estimate.h"
#include "sim/topology.h"

namespace zeroplan {

enum class SimulatedRanks : std::uint8_t {
  folded,  // nodes are equal and run the same schedule: one of them stands for all
  all,     // every rank of every node
};

struct SimulateOptions {
  SimulatedRanks ranks = SimulatedRanks::folded;
  int rank = 0;             // whose times are reported; folded: a rank of the first node
  bool with_trace = false;  // fills `trace` and `utilisation`; flat schedules only
  /// Begin where this schedule first differs from that of the run before, and keep checkpoints for the next: for trying
  /// one change after the other. The same bits as without.
  bool reuse = false;
};

/// What one stream of the reported rank did; the rest of the step it was idle.
struct StreamTime {
  Seconds busy;      // ops running, waits for peers included
  Seconds wait;      // of busy: a collective whose last member had not arrived
  Seconds slowdown;  // of busy: beyond what the same ops take alone, waits apart
  std::int64_t ops = 0;
};

/// Use of one resource of the reported rank's node over the step.
struct ResourceUse {
  std::string name;  // "gpu 3 nvlink out"
  ResourceKind kind = ResourceKind::sm;
  double utilisation = 0;  // of its capacity, average over the step
};

/// Share of `Simulation::resources[resource]` in use from `time` on. Sorted by time.
struct UtilisationSample {
  Seconds time;
  std::uint32_t resource = 0;
  double utilisation = 0;
};

struct Simulation {
  Seconds step;             // the last op of any rank ends
  TimeBreakdown breakdown;  // of the reported rank; sums to its own end
  std::array<StreamTime, kNumStreams> streams{};
  std::array<Seconds, kNumRoles> role_busy{};  // as Estimate's: demands summed
  std::vector<ResourceUse> resources;          // of the reported rank's node
  std::int64_t ranks = 0;                      // of the job
  int gpus_per_node = 0;
  std::int64_t simulated_ranks = 0;
  std::int64_t ops = 0;     // timed ops of one rank
  std::int64_t events = 0;  // ops ended and transfers begun or changed in rate, all simulated ranks
  int last_rank = 0;        // the lowest of those that end last
  Seconds resumed_at;       // options.reuse: what came before was taken over from the run before
  Trace trace;              // of the reported rank
  /// Beside `trace`, by op: when a collective's last member had arrived; of other ops, the start.
  std::vector<Seconds> transfer_starts;
  std::vector<UtilisationSample> utilisation;
};

/// Plays schedules on one machine. Reusable, not thread-safe: one per thread.
///
///   Simulator simulator(machine);
///   const Simulation s = simulator.run(schedule, demands(schedule, cost), plan.shard_ranks);
class Simulator {
 public:
  /// Throws InputError when the machine cannot be built as a graph (Topology::build).
  explicit Simulator(const MachineSpec& machine);
  ~Simulator();
  Simulator(Simulator&&) noexcept;

  /// `demands` as from demands(schedule, cost); every rank runs the schedule. A folded schedule is played unfolded and
  /// gives the same times as the flat one. Deterministic: equal arguments give equal bits. Throws std::logic_error on a
  /// trace of a folded schedule, a rank that is not simulated, or ranks that wait for each other for ever; InputError
  /// on shard groups that lie across nodes in part, a step of more than 20 million timed ops a rank, more than 500,000
  /// ranks or more than this host's memory holds.
  Simulation run(const Schedule& schedule, std::span<const Demand> demands, int shard_ranks,
                 const SimulateOptions& options = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// As Simulator(machine).run(...).
Simulation simulate(const Schedule& schedule, std::span<const Demand> demands, const MachineSpec& machine,
                    int shard_ranks, const SimulateOptions& options = {});

}  // namespace zeroplan
