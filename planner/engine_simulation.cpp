#include "planner/engine_simulation.h"

#include <algorithm>
#include <utility>

#include "models/engine_schedule.h"
#include "planner/engine_plans.h"

namespace zeroplan {
namespace {

enum class Part : std::uint8_t { kernel, update, host_update, other };
constexpr std::size_t kNumParts = 4;

Part part_of(const Op& op, const Work& work) {
  if (const auto* adam = std::get_if<AdamStep>(&work))
    return adam->where == UpdateOn::host ? Part::host_update : Part::update;
  const auto* compute = std::get_if<Compute>(&work);
  if (compute == nullptr || compute->on_host) return Part::other;
  return op.phase == Phase::optimizer ? Part::update : Part::kernel;
}

void stretch_demand(Demand& demand, double factor) {
  demand.latency = demand.latency * factor;
  for (Seconds& busy : demand.busy) busy = busy * factor;
}

/// The step of one recording, played.
struct Play {
  Schedule schedule;
  std::vector<Demand> demands;
  Simulation simulation;
};

class EnginePlayer {
 public:
  EnginePlayer(const PlanFile& file, const SimulateOptions& options)
      : file_(file),
        request_(request_of(file)),
        plans_(request_),
        wired_(file.plan.engine == Engine::deepspeed ? deepspeed_network(file.machine) : file.machine),
        cost_(wired_, file.plan.shard_ranks, file.plan.precision.weights, &plans_.trained()),
        simulator_(wired_),
        options_(options) {}

  EngineSimulation run() {
    const EngineTime time = plans_.time(file_.plan);
    const EngineFit fit = plans_.fit(file_.plan);
    result_.prediction = plans_.candidate(file_.plan, time, fit).prediction;
    result_.assumptions = time.assumptions;
    set_phases(fit.prediction.memory);
    result_.micro_steps = std::min<std::int64_t>(file_.plan.accumulation, kDifferentMicroSteps);
    Play whole = play(result_.micro_steps, time, options_);
    result_.played_step = whole.simulation.step;
    result_.played = whole.simulation.breakdown;
    if (file_.plan.accumulation > kDifferentMicroSteps) extend(time);
    result_.table = step_table(whole.schedule, whole.demands, plans_.trained());
    result_.schedule = std::move(whole.schedule);
    result_.simulation = std::move(whole.simulation);
    return std::move(result_);
  }

 private:
  static Request request_of(const PlanFile& file) {
    Request r;
    r.model = file.model;
    r.machine = file.machine;
    r.lora_rank = file.plan.lora_rank;
    r.engine = file.plan.engine;
    r.margin = 0;  // of a search; a plan that somebody states fits what is there, or not
    return r;
  }

  void set_phases(const RunMemory& memory) {
    result_.initialize = memory.init_peak;
    if (memory.steps.empty()) return;
    const StepMemory& steady = memory.steps.back();
    result_.forward = steady.forward;
    result_.backward = steady.backward;
    result_.update = steady.step;
  }

  Play play(std::int64_t micro_steps, const EngineTime& time, const SimulateOptions& options) {
    const EngineRecording run = plans_.record(file_.plan, micro_steps);
    Play play{steady_schedule(run.tape, plans_.trained(), run.host), {}, {}};
    play.demands = demands(play.schedule, cost_);
    stretch(play, micro_steps, time);
    play.simulation = simulator_.run(play.schedule, play.demands, file_.plan.shard_ranks, options);
    return play;
  }

  /// Kernels of this many of the plan's micro-steps.
  void stretch(Play& play, std::int64_t micro_steps, const EngineTime& time) {
    std::array<Seconds, kNumParts> sums{};
    std::vector<Part> parts(play.demands.size(), Part::other);
    for (const Op& op : play.schedule.ops()) {
      const Part part = parts[op.work.index] = part_of(op, play.schedule.work(op));
      sums[static_cast<std::size_t>(part)] += play.demands[op.work.index].alone();
    }
    const double share = static_cast<double>(micro_steps) / static_cast<double>(file_.plan.accumulation);
    const auto factor = [&](Part part, Seconds wanted) {
      const Seconds now = sums[static_cast<std::size_t>(part)];
      return now > Seconds() && wanted > Seconds() ? wanted / now : 0;
    };
    result_.stretch = {factor(Part::kernel, time.compute * share), factor(Part::update, time.optimizer),
                       factor(Part::host_update, time.host_update)};
    const std::array<double, kNumParts> factors{result_.stretch.kernels, result_.stretch.update,
                                                result_.stretch.host_update, 0};
    for (std::size_t w = 0; w < parts.size(); ++w) {
      const double by = factors[static_cast<std::size_t>(parts[w])];
      if (by > 0) stretch_demand(play.demands[w], by);
    }
  }

  /// What one micro-step more takes, for those that were not played.
  void extend(const EngineTime& time) {
    const EngineStretch stretch = result_.stretch;
    SimulateOptions plain = options_;
    plain.with_trace = false;
    const Simulation brief = play(kDifferentMicroSteps - 1, time, plain).simulation;
    result_.stretch = stretch;
    extend_play(result_.played_step, result_.played, brief,
                static_cast<double>(file_.plan.accumulation - kDifferentMicroSteps));
  }

  const PlanFile& file_;
  Request request_;
  EnginePlans plans_;
  MachineSpec wired_;  // with the network that the engine's collectives get
  MachineCostModel cost_;
  Simulator simulator_;
  SimulateOptions options_;
  EngineSimulation result_;
};

}  // namespace

EngineSimulation simulate_engine(const PlanFile& file, const SimulateOptions& options) {
  return EnginePlayer(file, options).run();
}

}  // namespace zeroplan
