// Plans of DeepSpeed and FSDP2, played op by op, beside what the search says of them.

#include "planner/engine_simulation.h"

#include <nlohmann/json.hpp>

#include "planner/engine_plans.h"
#include "tests/catch.h"

using namespace zeroplan;

namespace {

Request request_for(Engine engine, int stage, std::int64_t batch) {
  Request request;
  request.model = find_model("smollm2-135m");
  request.machine = machine_for(parse_gpu_request("4xA100-80G"), 1);
  request.engine = engine;
  request.seq_len = 512;
  request.global_batch = batch;
  request.constraints.stages = {stage};
  request.constraints.micro_batch = 2;
  return request;
}

PlanFile planned(const Request& request) {
  const Answer answer = search(request);
  REQUIRE(answer.feasible);
  return {answer.plans.front().plan, request.model, request.machine};
}

}  // namespace

TEST_CASE("The played step of another engine has the kernels, the memory and the step of its plan") {
  for (const Engine engine : {Engine::deepspeed, Engine::fsdp2}) {
    for (const int stage : {1, 2, 3}) {
      if (engine == Engine::fsdp2 && stage == 1) continue;
      for (const std::int64_t batch : {8, 16, 40}) {  // 1, 2 and 5 micro-steps
        INFO(to_string(engine) << " stage " << stage << " batch " << batch);
        const Request request = request_for(engine, stage, batch);
        const PlanFile file = planned(request);
        const EngineSimulation r = simulate_engine(file, {});
        EnginePlans plans(request);
        const EngineTime time = plans.time(file.plan);
        const EngineFit fit = plans.fit(file.plan);
        CHECK(r.prediction.step == time.step);
        CHECK(r.prediction.lower_bound == fit.allocated);
        CHECK(r.micro_steps == std::min<std::int64_t>(file.plan.accumulation, 3));
        CHECK(r.stretch.kernels > 0);
        // Kernels sum to the plan's; collectives beside them share the GPU's memory, passes of other streams hide.
        CHECK(r.played.compute >= time.compute * 0.95);
        CHECK(r.played.compute <= time.compute * 1.2);
        CHECK(r.played_step >= r.played.compute);
        CHECK(r.played.total().base() == Approx(r.played_step.base()).epsilon(1e-6));
        CHECK_FALSE(r.table.rows.empty());
      }
    }
  }
}

TEST_CASE("A card that a plan fills is not over its own size by a rounding") {
  const Request request = request_for(Engine::deepspeed, 3, 16);
  const PlanFile file = planned(request);
  EnginePlans plans(request);
  const EngineTime time = plans.time(file.plan);
  EngineFit fit = plans.fit(file.plan);
  fit.gpu = GpuVerdict::fits_after_flushes;
  fit.capacity = request.machine.gpu.memory;
  fit.reserved = fit.reserved_high = fit.capacity * 2;
  const Bytes overhead = fit.overhead;
  for (int i = 0; i < 1000; ++i) {
    fit.overhead = overhead + Bytes(1e6 / 7 * i);
    REQUIRE(fit.fits_in_step());
    const Prediction p = plans.candidate(file.plan, time, fit).prediction;
    CHECK(fits(p, 0));
    CHECK(p.gpu.peak > fit.capacity - Bytes(3 << 20));
  }
}

TEST_CASE("All ranks played give the step of the folded node; a trace has a span for each op") {
  const PlanFile file = planned(request_for(Engine::deepspeed, 3, 16));
  SimulateOptions all;
  all.ranks = SimulatedRanks::all;
  all.with_trace = true;
  const EngineSimulation whole = simulate_engine(file, all);
  const EngineSimulation folded = simulate_engine(file, {});
  CHECK(whole.simulation.step.base() == Approx(folded.simulation.step.base()).epsilon(1e-9));
  CHECK(whole.simulation.trace.ops.size() == whole.schedule.ops().size());
  CHECK(folded.simulation.trace.ops.empty());
}

TEST_CASE("simulate --json of another engine: the plan's step, and the played one under its own key") {
  const PlanFile file = planned(request_for(Engine::fsdp2, 3, 40));
  const EngineSimulation r = simulate_engine(file, {});
  const auto json = nlohmann::json::parse(engine_simulation_json(file, r));
  CHECK(json.at("prediction").at("step_seconds").get<double>() == Approx(r.prediction.step.base()));
  CHECK(json.at("played").at("step_seconds").get<double>() == Approx(r.played_step.base()));
  CHECK(json.at("played").at("micro_steps").get<int>() == 3);
  CHECK(json.at("ranks").get<int>() == 4);
  CHECK_FALSE(json.contains("load_and_save"));
}
