#pragma once
// One plan under DeepSpeed or FSDP2, played op by op: the steady step of the engine's tape on the machine's streams.

#include <array>
#include <string>
#include <vector>

#include "models/plan.h"
#include "planner/prediction.h"
#include "planner/report.h"
#include "planner/step_table.h"

namespace zeroplan {

/// How much longer kernels take in the played step than our own engine's would, so that each kind sums to what
/// predict_engine_time() says of it; 0: the step has none.
struct EngineStretch {
  double kernels = 0;      // of forward and backward
  double update = 0;       // of the optimizer on the GPU
  double host_update = 0;  // Adam on the host's cores
};

struct EngineSimulation {
  /// As `plan --engine` prints it: the step of sim/engine_time.h, the memory of the replay.
  Prediction prediction;
  std::vector<Assumption> assumptions;
  Bytes initialize, forward, backward, update;  // peaks of allocated, by phase of the steady step
  /// The same step with its ops on their streams, kernels stretched. No op stands for the host's own time; how far
  /// collectives and copies hide follows from edges and streams. Of more than three micro-steps two short steps are
  /// played and extended (short_play.h), unless all are asked for.
  Seconds played_step;
  TimeBreakdown played;
  EngineStretch stretch;
  std::int64_t micro_steps = 1;  // in `schedule`, `table` and `simulation`; of the plan's, when fewer
  Schedule schedule;
  StepTable table;        // by phase and stream
  Simulation simulation;  // with a trace when asked for
};

/// How much of the plan's step is played.
enum class PlayedMicroSteps : std::uint8_t {
  different,  // kDifferentMicroSteps at most, and the rest extended
  all,
};

/// Throws InputError when the plan's memory or time cannot be predicted, and as simulate().
EngineSimulation simulate_engine(const PlanFile& file, const SimulateOptions& options,
                                 PlayedMicroSteps micro_steps = PlayedMicroSteps::different);

/// For people, and `simulate --json`: simulation_json()'s keys but load_and_save, and `played`.
std::string report_engine_simulation(const PlanFile& file, const EngineSimulation& result, const ReportStyle& style);
std::string engine_simulation_json(const PlanFile& file, const EngineSimulation& result);

}  // namespace zeroplan
