// The simulator's laws on random schedules, plans and machines.

#include <algorithm>
#include <cmath>
#include <map>

#include "models/error.h"
#include "models/lower.h"
#include "sim/simulate.h"
#include "tests/catch.h"
#include "tests/random_plan.h"
#include "tests/simulate_support.h"

namespace zeroplan::tests {
namespace {

constexpr double kNanosecond = 1e-9;

/// Random ops of every kind on random streams, few works each.
Schedule random_schedule(Random& random, const MachineSpec& machine) {
  ScheduleBuilder builder;
  const auto bytes = [&] { return Bytes(std::pow(10.0, 5 + 4 * random.unit())); };
  std::vector<WorkId> works;
  for (int w = 0; w < 12; ++w) {
    Work work = Join{};
    switch (random.between(0, 8)) {
      case 0:
        work = Compute{-1, kZero, Pass::forward, Pointwise{bytes()}};
        break;
      case 1:
        work = Compute{-1, kHeadLogits, Pass::forward,
                       Gemm{random.between(1, 4096), random.between(64, 8192), random.between(64, 8192), 1,
                            machine.gpu.peak_bf16 ? DType::bf16 : DType::fp16, false, random.chance(50)}};
        break;
      case 2:
        work = Copy{Memory::pinned, Memory::hbm, bytes()};
        break;
      case 3:
        work = Copy{Memory::hbm, Memory::pinned, bytes()};
        break;
      case 4:
        if (machine.nvme.drives > 0) work = Copy{Memory::nvme, Memory::pinned, bytes()};
        break;
      case 5:
        if (machine.nvme.drives > 0) work = Copy{Memory::pinned, Memory::nvme, bytes()};
        break;
      case 6:
        work = AdamStep{1'000'000, UpdateOn::host, bytes()};
        break;
      case 7:
        work = AdamStep{1'000'000, UpdateOn::device, bytes()};
        break;
      case 8: {
        Collective c;
        c.kind = static_cast<CollectiveKind>(random.between(0, 2));
        c.group = static_cast<Group>(random.between(0, 2));
        c.elements = c.padded = random.between(1, 1 << 26);
        work = c;
        break;
      }
    }
    works.push_back(builder.work(work));
  }
  const auto ops = random.between(1, 60);
  for (std::int64_t i = 0; i < ops; ++i) {
    std::vector<OpRef> after;
    const auto edges = random.between(0, 3);
    for (std::int64_t e = 0; e < edges && i > 0; ++e)
      after.push_back({static_cast<std::uint32_t>(random.between(0, i - 1))});
    const WorkId work = random.pick(works);
    builder.add(static_cast<Stream>(random.between(0, kNumStreams - 1)), Phase::forward, -1, work, after, {});
  }
  return builder.finish();
}

void check_simulation(const Simulation& s) {
  const double step = s.step.base();
  for (const ResourceUse& use : s.resources)
    require(use.utilisation <= 1 + kAgreement, use.name + " does more than it can");
  for (const UtilisationSample& sample : s.utilisation) {
    require(sample.utilisation <= 1 + kAgreement,
            s.resources[sample.resource].name + " is above its capacity at some time");
  }
  for (std::size_t i = 1; i < s.utilisation.size(); ++i)
    require(s.utilisation[i - 1].time <= s.utilisation[i].time, "time runs back");
  for (const StreamTime& stream : s.streams)
    require(stream.busy.base() <= step * (1 + kAgreement), "a stream is busy longer than the step");
  for (const Seconds part : {s.breakdown.compute, s.breakdown.exposed_communication, s.breakdown.exposed_offload,
                             s.breakdown.optimizer, s.breakdown.idle}) {
    require(part.base() >= -kAgreement * step, "a part of the breakdown is negative");
  }
  require(s.breakdown.total().base() <= step * (1 + kAgreement), "the breakdown is longer than the step");
}

/// On one rank sharing only slows: no op starts or ends before estimate() says.
void check_not_earlier(const Estimate& e, const Simulation& s) {
  for (std::size_t i = 0; i < e.trace.ops.size(); ++i) {
    const double slack = kAgreement * e.step.base();
    require(s.trace.ops[i].start >= e.trace.ops[i].start - Seconds(slack), "an op starts earlier than in estimate()");
    require(s.trace.ops[i].end >= e.trace.ops[i].end - Seconds(slack), "an op ends earlier than in estimate()");
  }
}

void check_same(const Simulation& a, const Simulation& b, double tolerance) {
  require(std::abs((a.step - b.step).base()) <= tolerance, "the steps differ");
  require(a.ops == b.ops, "the ops differ");
  for (std::size_t i = 0; i < std::min(a.trace.ops.size(), b.trace.ops.size()); ++i) {
    require(std::abs((a.trace.ops[i].start - b.trace.ops[i].start).base()) <= tolerance, "an op's start differs");
    require(std::abs((a.trace.ops[i].end - b.trace.ops[i].end).base()) <= tolerance, "an op's end differs");
  }
  for (std::size_t s = 0; s < kNumStreams; ++s) {
    require(std::abs((a.streams[s].wait - b.streams[s].wait).base()) <= tolerance * static_cast<double>(a.ops + 1),
            "waits differ");
  }
}

MachineSpec one_rank(MachineSpec machine) {
  machine.nodes = machine.gpus_per_node = machine.sockets = 1;
  machine.gpus_per_pcie_switch = machine.gpus_per_root_complex = 1;
  machine.interconnect = Interconnect::single;
  machine.gpu.gpus_per_c2c = 1;
  machine.nvlink = {};
  return machine;
}

using Cases = std::map<std::string, std::pair<int, std::string>>;

template <class Check>
void check_cases(std::uint64_t seed, std::int64_t cases, Check check) {
  Random random(seed);
  std::vector<MachineSpec> machines;
  while (machines.size() < 60) machines.push_back(random_machine(random));
  Cases failures;
  std::int64_t refused = 0;
  for (std::int64_t i = 0; i < cases; ++i) {
    const MachineSpec& machine = random.pick(machines);
    try {
      check(random, machine);
    } catch (const InputError&) {
      ++refused;  // a GPU without this precision
    } catch (const std::exception& e) {
      auto& [count, first] = failures[e.what()];
      if (count++ == 0)
        first = machine.name + ", " + std::to_string(machine.nodes) + " nodes, case " + std::to_string(i);
    }
  }
  for (const auto& [what, failure] : failures) {
    INFO(what << ": " << failure.first << " of " << cases << " cases, the first: " << failure.second);
    CHECK(what.empty());
  }
  CHECK(failures.empty());
  CHECK(refused < cases / 3);
}

void check_one_rank(Random& random, const MachineSpec& any) {
  const MachineSpec machine = one_rank(any);
  const Schedule schedule = random_schedule(random, machine);
  const Both both = play(schedule, machine);
  check_simulation(both.simulation);
  check_not_earlier(both.estimate, both.simulation);
}

void check_lone_ops(Random& random, const MachineSpec& any) {
  const MachineSpec machine = one_rank(any);
  const Schedule schedule = random_schedule(random, machine);
  for (const Op& op : schedule.ops()) {
    Script script;
    script.op(op.stream, schedule.work(op));
    const Both both = play(script.finish(), machine);
    const double expected = both.estimate.step.base();
    require(std::abs(both.simulation.step.base() - expected) <= kAgreement * expected,
            "a lone op does not take what estimate() says");
  }
}

/// estimate() divides what a node shares evenly among its ranks, which is what happens when all are at the same op.
void check_lockstep(Random& random, const MachineSpec& any) {
  MachineSpec machine = any;
  set_nodes(machine, std::min(machine.nodes, 3));
  if (machine.gpus_per_node > machine.sockets && machine.gpus_per_node % machine.sockets != 0) return;
  const Schedule schedule = random_schedule(random, machine);
  for (const Op& op : schedule.ops()) {
    if (const auto* c = std::get_if<Collective>(&schedule.work(op)); c != nullptr && c->group != Group::all) continue;
    Script script;
    script.op(op.stream, schedule.work(op));
    const Both both = play(script.finish(), machine, {SimulatedRanks::all, 0, true});
    const double expected = both.estimate.step.base();
    require(std::abs(both.simulation.step.base() - expected) <= kAgreement * expected,
            "ranks in lockstep do not share evenly");
  }
}

int random_shard(Random& random, const MachineSpec& machine) {
  std::vector<int> sizes{machine.ranks()};
  for (int size = 1; size < machine.gpus_per_node; ++size) {
    if (machine.gpus_per_node % size == 0) sizes.push_back(size);
  }
  for (int nodes = 1; nodes < machine.nodes; ++nodes) {
    if (machine.nodes % nodes == 0) sizes.push_back(nodes * machine.gpus_per_node);
  }
  return random.pick(sizes);
}

/// A machine of few nodes; all ranks and folded, twice, and with another rank reported.
void check_many_ranks(Random& random, const MachineSpec& any) {
  MachineSpec machine = any;
  set_nodes(machine, std::min(machine.nodes, 4));
  const int shard = random_shard(random, machine);
  const Schedule schedule = random_schedule(random, machine);
  const int rank = static_cast<int>(random.between(0, machine.gpus_per_node - 1));
  const Simulation folded = play(schedule, machine, {SimulatedRanks::folded, rank, true}, shard).simulation;
  const Simulation all = play(schedule, machine, {SimulatedRanks::all, rank, true}, shard).simulation;
  const Simulation again = play(schedule, machine, {SimulatedRanks::all, rank, true}, shard).simulation;
  check_simulation(folded);
  check_simulation(all);
  check_same(folded, all, kNanosecond);
  check_same(all, again, 0);
  require(all.events == again.events, "two runs differ in their events");
  require(all.events >= all.ops * all.simulated_ranks, "fewer events than ops");
}

void check_plan_folding(Random& random, const MachineSpec& any) {
  MachineSpec machine = any;
  set_nodes(machine, std::min(machine.nodes, 2));
  const ModelSpec model = random_model(random);
  const Plan plan = random_plan(random, model, machine.ranks(), machine.gpus_per_node, 40);
  const MachineCostModel cost(machine, plan.shard_ranks, plan.precision.weights);
  Lowering lowering(model);
  const Schedule flat = lowering.zeroplan(plan, Folding::none), folded = lowering.zeroplan(plan, Folding::layers);
  Simulator simulator(machine);
  const Simulation a = simulator.run(flat, demands(flat, cost), plan.shard_ranks, {SimulatedRanks::folded, 0, true});
  const Simulation b = simulator.run(folded, demands(folded, cost), plan.shard_ranks);
  const Simulation c = simulator.run(flat, demands(flat, cost), plan.shard_ranks, {SimulatedRanks::all, 0, true});
  check_simulation(a);
  check_simulation(c);
  require(a.step >= (1 - kAgreement) * Estimator().run(folded, demands(folded, cost)).step,
          "a plan is faster than in estimate()");
  require(a.step == b.step && a.ops == b.ops && a.events == b.events, "a folded schedule takes another time");
  check_same(a, c, kNanosecond);
}

}  // namespace

TEST_CASE("A lone op takes what estimate() says") { check_cases(1, 60, check_lone_ops); }
TEST_CASE("An op of all ranks at once takes what estimate() says") { check_cases(5, 60, check_lockstep); }
TEST_CASE("On one rank nothing ends earlier than in estimate()") { check_cases(2, 300, check_one_rank); }
TEST_CASE("Folded ranks and all ranks have the same times") { check_cases(3, 60, check_many_ranks); }
TEST_CASE("Folded and flat schedules of plans have the same times") { check_cases(4, 25, check_plan_folding); }

TEST_CASE("Ten thousand random schedules on one rank end no earlier than in estimate()", "[.slow]") {
  check_cases(12, slow_cases(10'000), check_one_rank);
}
TEST_CASE("Many random schedules on all ranks and folded", "[.slow]") {
  check_cases(13, slow_cases(1500), check_many_ranks);
}
TEST_CASE("Many plans, folded and flat", "[.slow]") { check_cases(14, slow_cases(500), check_plan_folding); }

}  // namespace zeroplan::tests
