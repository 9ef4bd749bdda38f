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
  EngineStretch stretch;
  Simulation simulation;
};

class EnginePlayer {
 public:
  EnginePlayer(const PlanFile& file, const SimulateOptions& options, PlayedMicroSteps micro_steps)
      : file_(file),
        request_(request_of(file)),
        plans_(request_),
        wired_(file.plan.engine == Engine::deepspeed ? deepspeed_network(file.machine) : file.machine),
        cost_(wired_, file.plan.shard_ranks, file.plan.precision.weights, &plans_.trained()),
        simulator_(wired_),
        options_(options),
        micro_steps_(micro_steps) {}

  EngineSimulation run() {
    time_ = plans_.time(file_.plan);
    const EngineFit fit = plans_.fit(file_.plan);
    result_.prediction = plans_.candidate(file_.plan, time_, fit).prediction;
    result_.assumptions = time_.assumptions;
    set_phases(fit.prediction.memory);
    const std::int64_t all = file_.plan.accumulation;
    const bool extended = micro_steps_ == PlayedMicroSteps::different && all > kDifferentMicroSteps;
    result_.micro_steps = extended ? kDifferentMicroSteps : all;
    Play shown = play(result_.micro_steps, options_);
    const PlayedStep step = extended ? extend(shown.simulation) : played_step(shown.simulation);
    result_.played_step = step.step;
    result_.played = step.time;
    result_.stretch = shown.stretch;
    result_.table = step_table(shown.schedule, shown.demands, plans_.trained());
    result_.schedule = std::move(shown.schedule);
    result_.simulation = std::move(shown.simulation);
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

  Play play(std::int64_t micro_steps, const SimulateOptions& options) {
    const EngineRecording run = plans_.record(file_.plan, micro_steps, RecordedMicroSteps::all);
    Play play{steady_schedule(run.tape, plans_.trained(), run.host), {}, {}, {}};
    play.demands = demands(play.schedule, cost_);
    stretch(play, micro_steps);
    play.simulation = simulator_.run(play.schedule, play.demands, file_.plan.shard_ranks, options);
    return play;
  }

  /// Kernels of this many of the plan's micro-steps.
  void stretch(Play& play, std::int64_t micro_steps) const {
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
    play.stretch = {factor(Part::kernel, time_.compute * share), factor(Part::update, time_.optimizer),
                    factor(Part::host_update, time_.host_update)};
    const std::array<double, kNumParts> factors{play.stretch.kernels, play.stretch.update, play.stretch.host_update, 0};
    for (std::size_t w = 0; w < parts.size(); ++w) {
      const double by = factors[static_cast<std::size_t>(parts[w])];
      if (by > 0) stretch_demand(play.demands[w], by);
    }
  }

  /// The whole step, of which `longer` has the different micro-steps.
  PlayedStep extend(const Simulation& longer) {
    SimulateOptions plain = options_;
    plain.with_trace = false;
    const std::int64_t all = file_.plan.accumulation;
    const Simulation shorter = play(kDifferentMicroSteps - 1, plain).simulation;
    return extend_plays({shorter, longer, kDifferentMicroSteps - 1, kDifferentMicroSteps}, all, Seconds(),
                        [&] { return played_step(play(all, plain).simulation); });
  }

  const PlanFile& file_;
  Request request_;
  EnginePlans plans_;
  MachineSpec wired_;  // with the network that the engine's collectives get
  MachineCostModel cost_;
  Simulator simulator_;
  SimulateOptions options_;
  PlayedMicroSteps micro_steps_;
  EngineTime time_;
  EngineSimulation result_;
};

}  // namespace

EngineSimulation simulate_engine(const PlanFile& file, const SimulateOptions& options, PlayedMicroSteps micro_steps) {
  return EnginePlayer(file, options, micro_steps).run();
}

}  // namespace zeroplan
