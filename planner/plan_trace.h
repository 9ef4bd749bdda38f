#pragma once
// The step of one plan.json as a Chrome trace: what `plan --out` and `simulate --trace` write, byte for byte the same.

#include <cstdint>
#include <string>

#include "planner/engine_simulation.h"

namespace zeroplan {

/// Ops beyond which a trace is cut to whole micro-steps, one at least: some 70 MB. A micro-step of the most layers that
/// a model may have, 10,000, is 90 MB.
inline constexpr std::int64_t kMostTracedOps = 400'000;
struct PlanTrace {
  std::string text;              // JSON
  std::int64_t micro_steps = 1;  // of the plan's that it holds, from the first on, and the update after them
};

/// Rank 0 of the plan's step, played by discrete events. A step of more than kMostTracedOps is played with fewer
/// micro-steps. Throws as simulate() and simulate_engine().
PlanTrace trace_of_plan(const PlanFile& file, SimulatedRanks ranks);
/// The same of a plan of DeepSpeed or FSDP2 that has been played with its trace.
PlanTrace trace_of_engine(const PlanFile& file, const EngineSimulation& played);

/// "holds a step of 3 of the plan's 16 micro-steps"; empty when it holds them all.
std::string trace_note(const PlanTrace& trace, const Plan& plan);

}  // namespace zeroplan
