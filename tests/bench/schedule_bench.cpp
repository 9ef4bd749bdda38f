// Schedules a second: lowering, estimate, memory. Run with ninja zeroplan_bench and see docs/benchmarks.md.

#include <benchmark/benchmark.h>

#include "models/lower.h"
#include "sim/estimate.h"
#include "sim/memory_timeline.h"

namespace zeroplan {
namespace {

/// Llama-2-70B, ZeRO-3 on one node of eight, as the goals say.
struct Case {
  ModelSpec model = find_model("llama-2-70b");
  MachineSpec machine = machine_for(parse_gpu_request("8xA100-80G"), 1);
  Plan plan;
  MachineCostModel cost{machine, 8, DType::bf16};

  explicit Case(std::int64_t accumulation) {
    plan.ranks = plan.shard_ranks = 8;
    plan.zero_stage = 3;
    plan.accumulation = accumulation;
    plan.optimizer = plan.parameters = Placement::all(Tier::hbm, static_cast<int>(model.sequence.size()));
    plan.recompute = Recompute::full;
    plan.recompute_layers = static_cast<int>(model.num_layers);
    check_plan(plan, model, "benchmark");
  }
};

Folding folding_of(const benchmark::State& state) { return state.range(0) != 0 ? Folding::layers : Folding::none; }

void find_model_70b(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(find_model("70B"));
}

void machine_for_a100(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(machine_for(parse_gpu_request("4xA100-80G"), 1));
}

void cost_model_a100(benchmark::State& state) {
  const Case c(1);
  for (auto _ : state) benchmark::DoNotOptimize(MachineCostModel(c.machine, 8, DType::bf16));
}

void lower_70b(benchmark::State& state) {
  const Case c(state.range(1));
  Lowering lowering(c.model);
  std::size_t ops = 0;
  for (auto _ : state) {
    const Schedule s = lowering.zeroplan(c.plan, folding_of(state));
    ops = s.ops().size();
    benchmark::DoNotOptimize(s);
  }
  state.counters["ops"] = static_cast<double>(ops);
}

void demands_70b(benchmark::State& state) {
  const Case c(state.range(1));
  const Schedule s = Lowering(c.model).zeroplan(c.plan, folding_of(state));
  for (auto _ : state) benchmark::DoNotOptimize(demands(s, c.cost));
  state.counters["works"] = static_cast<double>(s.works().size());
}

void estimate_70b(benchmark::State& state) {
  const Case c(state.range(1));
  const Schedule s = Lowering(c.model).zeroplan(c.plan, folding_of(state));
  const std::vector<Demand> d = demands(s, c.cost);
  Estimator estimator;
  for (auto _ : state) benchmark::DoNotOptimize(estimator.run(s, d));
}

void memory_70b(benchmark::State& state) {
  const Case c(state.range(1));
  const Schedule s = Lowering(c.model).zeroplan(c.plan, folding_of(state));
  for (auto _ : state) benchmark::DoNotOptimize(MemoryTimeline(s));
}

/// What one plan of a search costs: lower + demands + estimate + memory.
void full_estimate_70b(benchmark::State& state) {
  const Case c(state.range(1));
  Lowering lowering(c.model);
  Estimator estimator;
  for (auto _ : state) {
    const Schedule s = lowering.zeroplan(c.plan, folding_of(state));
    benchmark::DoNotOptimize(estimator.run(s, demands(s, c.cost)));
    benchmark::DoNotOptimize(MemoryTimeline(s));
  }
  state.counters["per second"] =
      benchmark::Counter(static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

void flat_and_folded(benchmark::internal::Benchmark* b) {
  b->ArgNames({"folded", "micro_steps"});
  for (const std::int64_t folded : {0, 1}) {
    for (const std::int64_t micro_steps : {1, 16}) b->Args({folded, micro_steps});
  }
}

}  // namespace

BENCHMARK(find_model_70b)->Unit(benchmark::kMicrosecond);
BENCHMARK(machine_for_a100)->Unit(benchmark::kMicrosecond);
BENCHMARK(cost_model_a100)->Unit(benchmark::kMicrosecond);
BENCHMARK(lower_70b)->Apply(flat_and_folded)->Unit(benchmark::kMicrosecond);
BENCHMARK(demands_70b)->Apply(flat_and_folded)->Unit(benchmark::kMicrosecond);
BENCHMARK(estimate_70b)->Apply(flat_and_folded)->Unit(benchmark::kMicrosecond);
BENCHMARK(memory_70b)->Apply(flat_and_folded)->Unit(benchmark::kMicrosecond);
BENCHMARK(full_estimate_70b)->Apply(flat_and_folded)->Unit(benchmark::kMicrosecond);

}  // namespace zeroplan

BENCHMARK_MAIN();
