// A run that begins where a change begins to matter gives the bits of a run from the start.

#include "sim/replay.h"

#include "models/lower.h"
#include "sim/simulate.h"
#include "tests/catch.h"
#include "tests/random_plan.h"
#include "tests/sim_machines.h"

namespace zeroplan::tests {
namespace {

MachineSpec machine() {
  MachineSpec m = node_of("A100-SXM4-80GB", 4, Interconnect::nvswitch);
  m.dram_bandwidth = 100.0_GBps;
  return m;
}

bool same_bits(const Simulation& a, const Simulation& b) {
  bool same = a.step == b.step && a.ops == b.ops && a.events == b.events && a.last_rank == b.last_rank;
  same = same && a.breakdown.total() == b.breakdown.total() && a.trace.ops.size() == b.trace.ops.size();
  for (std::size_t i = 0; same && i < a.trace.ops.size(); ++i) {
    same = a.trace.ops[i].start == b.trace.ops[i].start && a.trace.ops[i].end == b.trace.ops[i].end;
  }
  same = same && a.utilisation.size() == b.utilisation.size();
  for (std::size_t i = 0; same && i < a.utilisation.size(); ++i) {
    same =
        a.utilisation[i].time == b.utilisation[i].time && a.utilisation[i].utilisation == b.utilisation[i].utilisation;
  }
  for (std::size_t i = 0; same && i < a.resources.size(); ++i)
    same = a.resources[i].utilisation == b.resources[i].utilisation;
  return same;
}

struct Step {
  Schedule schedule;
  std::vector<Demand> demands;
};

Step offloaded_step(const Plan& base, int layers) {
  Random random(1);
  const ModelSpec model = shortened(find_model("llama-2-7b"), layers, random);
  Plan plan = base;
  plan.ranks = plan.shard_ranks = 4;
  plan.zero_stage = 3;
  const int blocks = static_cast<int>(model.sequence.size());
  plan.optimizer = Placement::all(Tier::host, blocks);
  plan.parameters = Placement::all(Tier::hbm, blocks);
  Step step{lower(model, plan, Folding::none), {}};
  step.demands = demands(step.schedule, MachineCostModel(machine(), 4, DType::bf16));
  return step;
}

constexpr SimulateOptions kReuse{SimulatedRanks::folded, 0, true, true};
constexpr SimulateOptions kFresh{SimulatedRanks::folded, 0, true, false};

Simulation again(Simulator& simulator, const Step& step) {
  return simulator.run(step.schedule, step.demands, 4, kReuse);
}
Simulation fresh(const Step& step) { return simulate(step.schedule, step.demands, machine(), 4, kFresh); }

}  // namespace

TEST_CASE("A slower optimizer on the host leaves the forward pass as it was") {
  Simulator simulator(machine());
  Step step = offloaded_step({}, 6);
  const Simulation first = again(simulator, step);
  CHECK(first.resumed_at == Seconds());
  CHECK(same_bits(first, fresh(step)));
  for (std::size_t w = 0; w < step.demands.size(); ++w) {
    if (!std::holds_alternative<AdamStep>(step.schedule.works()[w])) continue;
    for (Seconds& busy : step.demands[w].busy) busy = 2 * busy;
  }
  const Simulation second = again(simulator, step);
  CHECK(second.resumed_at > Seconds());
  CHECK(second.step > first.step);
  CHECK(same_bits(second, fresh(step)));
  const Simulation third = again(simulator, step);  // nothing changed: the last checkpoint
  CHECK(third.resumed_at > second.resumed_at);
  CHECK(same_bits(third, second));
}

TEST_CASE("Another schedule, rank or group starts over") {
  Simulator simulator(machine());
  const Step step = offloaded_step({}, 4);
  again(simulator, step);
  SimulateOptions other = kReuse;
  other.rank = 1;
  CHECK(simulator.run(step.schedule, step.demands, 4, other).resumed_at == Seconds());
  CHECK(simulator.run(step.schedule, step.demands, 2, other).resumed_at == Seconds());
  Plan plan;
  plan.prefetch_layers = 0;
  const Step changed = offloaded_step(plan, 4);
  CHECK(same_bits(simulator.run(changed.schedule, changed.demands, 4, kReuse), fresh(changed)));
}

TEST_CASE("Random changes of random schedules give the bits of a fresh run") {
  Random random(31);
  const MachineSpec m = machine();
  Simulator simulator(m);
  int resumed = 0;
  for (int i = 0; i < 60; ++i) {
    const auto seed = random.bits();
    // The same ops up to a border, others after it.
    const auto make = [&](std::int64_t border, std::uint64_t after) {
      Random before_border(seed), behind(after);
      Step step;
      ScheduleBuilder builder;
      for (std::int64_t k = 0; k < 200; ++k) {
        Random& r = k < border ? before_border : behind;
        const Bytes bytes(1e6 * static_cast<double>(1 + r.between(0, 99)));
        Work work = Compute{-1, kZero, Pass::forward, Pointwise{bytes}};
        const auto kind = r.between(0, 5);
        if (kind == 1) work = Copy{Memory::pinned, Memory::hbm, bytes};
        if (kind == 2) work = Copy{Memory::hbm, Memory::pinned, bytes};
        if (kind == 3) work = AdamStep{1'000'000, UpdateOn::host, bytes};
        if (kind == 4)
          work = Collective{CollectiveKind::all_gather, static_cast<Group>(r.between(0, 2)), 1 << 22, 1 << 22,
                            DType::bf16};
        const auto stream = static_cast<Stream>(kind == 4 ? 1 : r.between(0, kNumStreams - 1));
        const OpRef edge{static_cast<std::uint32_t>(r.between(0, std::max<std::int64_t>(0, k - 1)))};
        builder.add(stream, Phase::forward, -1, builder.work(work), std::span<const OpRef>(&edge, k > 0 ? 1 : 0), {});
      }
      step.schedule = builder.finish();
      step.demands = demands(step.schedule, MachineCostModel(m, 2, DType::bf16));
      return step;
    };
    const Step base = make(200, 0);
    simulator.run(base.schedule, base.demands, 2, kReuse);
    for (int change = 0; change < 3; ++change) {
      const Step step = make(random.between(0, 200), random.bits());
      const Simulation s = simulator.run(step.schedule, step.demands, 2, kReuse);
      resumed += s.resumed_at > Seconds() ? 1 : 0;
      REQUIRE(same_bits(s, simulate(step.schedule, step.demands, m, 2, kFresh)));
    }
  }
  CHECK(resumed > 60);
}

}  // namespace zeroplan::tests
