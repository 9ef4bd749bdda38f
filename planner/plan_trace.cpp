#include "planner/plan_trace.h"

#include <fmt/format.h>

#include <algorithm>

#include "models/lower.h"
#include "sim/chrome_trace.h"

namespace zeroplan {
namespace {

/// Ops of a layer in one micro-step, about: forward, backward, gathers, reductions, Allocs and Frees.
constexpr std::int64_t kOpsOfLayer = 100;

/// Of the plan's micro-steps those that a trace holds.
std::int64_t traced_micro_steps(const PlanFile& file) {
  const std::int64_t ops = kOpsOfLayer * file.model.num_layers;
  return std::clamp<std::int64_t>(kMostTracedOps / ops, 1, file.plan.accumulation);
}

}  // namespace

PlanTrace trace_of_plan(const PlanFile& file, SimulatedRanks ranks) {
  SimulateOptions options;
  options.ranks = ranks;
  options.with_trace = true;
  if (file.plan.engine != Engine::zeroplan) return trace_of_engine(file, simulate_engine(file, options));
  Plan plan = file.plan;
  plan.accumulation = traced_micro_steps(file);
  Predictor predictor(file.model, file.machine);
  const Simulation simulation = predictor.simulate(plan, options);
  const Schedule schedule = lower(file.model, plan, Folding::none);
  return {chrome_trace(schedule, file.model, simulation.trace, options.rank, &simulation), plan.accumulation};
}

PlanTrace trace_of_engine(const PlanFile& file, const EngineSimulation& played) {
  const ModelSpec trained = adapted_model(file.model, file.plan.lora_rank);
  return {chrome_trace(played.schedule, trained, played.simulation.trace, 0, &played.simulation), played.micro_steps};
}

std::string trace_note(const PlanTrace& trace, const Plan& plan) {
  if (trace.micro_steps >= plan.accumulation) return "";
  return fmt::format("holds a step of {} of the plan's {} micro-steps", trace.micro_steps, plan.accumulation);
}

}  // namespace zeroplan
