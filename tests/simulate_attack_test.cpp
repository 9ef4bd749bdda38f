// The simulator under attack: sizes and durations at the edge, nothing to share, too much at once, many machines.

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "models/error.h"
#include "models/lower.h"
#include "sim/event_queue.h"
#include "sim/sharing.h"
#include "sim/simulate.h"
#include "tests/catch.h"
#include "tests/random_plan.h"
#include "tests/sim_machines.h"
#include "tests/simulate_support.h"

namespace zeroplan::tests {
namespace {

MachineSpec node(int gpus) {
  MachineSpec machine = measured_machine("a100-sxm-8");
  machine.gpus_per_node = gpus;
  machine.socket_link = 20.0_GBps;
  return machine;
}

Copy up(double bytes) { return {Memory::pinned, Memory::hbm, Bytes(bytes)}; }

/// One of every kind of op that has an amount, with that amount.
Schedule everything(double amount, bool disks) {
  Script script;
  script.op(Stream::compute, Compute{-1, kZero, Pass::forward, Pointwise{Bytes(amount)}});
  script.op(Stream::h2d, up(amount));
  script.op(Stream::d2h, Copy{Memory::hbm, Memory::pinned, Bytes(amount)});
  script.op(Stream::host, Compute{-1, kZero, Pass::forward, Pointwise{Bytes(amount)}, true});
  script.op(Stream::host, AdamStep{static_cast<std::int64_t>(std::min(amount, 1e15)), UpdateOn::host, Bytes(amount)});
  if (disks) {
    script.op(Stream::nvme_read, Copy{Memory::nvme, Memory::pinned, Bytes(amount)});
    script.op(Stream::nvme_write, Copy{Memory::pinned, Memory::nvme, Bytes(amount)});
  }
  Collective collective;
  collective.elements = collective.padded = static_cast<std::int64_t>(std::min(amount, 1e15));
  for (const CollectiveKind kind :
       {CollectiveKind::all_gather, CollectiveKind::reduce_scatter, CollectiveKind::all_reduce}) {
    collective.kind = kind;
    script.op(Stream::gather, collective);
  }
  return script.finish();
}

MachineSpec with_disks(MachineSpec machine) {
  machine.nvme = {2, Bytes(1e12), 6.0_GBps, 3.0_GBps};
  return machine;
}

void check_forward(const Simulation& s) {
  for (const Span& op : s.trace.ops) {
    REQUIRE(std::isfinite(op.end.base()));
    REQUIRE(op.start >= Seconds());
    REQUIRE(op.end >= op.start);
    REQUIRE(op.end <= s.step);
  }
}

}  // namespace

TEST_CASE("attacked: transfers of nothing end at once") {
  const MachineSpec machine = with_disks(node(8));
  for (const SimulatedRanks ranks : {SimulatedRanks::folded, SimulatedRanks::all}) {
    const Simulation s = play(everything(0, true), machine, {ranks, 0, true}).simulation;
    check_forward(s);
    CHECK(s.step.base() < 1e-3);  // launches and latencies
  }
}

TEST_CASE("attacked: denormal and huge amounts keep time finite and forward") {
  const MachineSpec machine = with_disks(node(4));
  for (const double amount : {5e-324, 1e-310, 1e-200, 1.0, 1e18, 1e100, 1e280}) {
    INFO(amount);
    const Both both = play(everything(amount, true), machine, {SimulatedRanks::folded, 0, true});
    check_forward(both.simulation);
    CHECK(both.simulation.step.base() >= both.estimate.step.base() * (1 - kAgreement));
  }
}

TEST_CASE("attacked: a tiny op beside a huge one ends long before it") {
  Script script;
  script.op(Stream::h2d, up(1e30));
  script.op(Stream::d2h, Copy{Memory::hbm, Memory::pinned, Bytes(1)});
  const Simulation s = play(script.finish(), node(1)).simulation;
  CHECK(s.trace.ops[1].end.base() < 1e-3);
  CHECK(s.trace.ops[0].end.base() > 1e18);
}

TEST_CASE("attacked: a resource without capacity and an amount that is none are refused") {
  FairSharing sharing;
  for (const double bad : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    CHECK_THROWS_AS(sharing.add_resource(bad), std::logic_error);
    const auto resource = sharing.add_resource(1);
    const auto flow = sharing.add_flow();
    const std::vector<Use> uses{{resource, bad}};
    CHECK_THROWS_AS(sharing.start(flow, uses), std::logic_error);
  }
}

TEST_CASE("attacked: collectives of one rank take no time") {
  Script script;
  Collective collective;
  collective.group = Group::shard;
  collective.elements = collective.padded = 1 << 20;
  for (int i = 0; i < 100; ++i) script.op(Stream::gather, collective);
  const Schedule schedule = script.finish();
  for (const SimulatedRanks ranks : {SimulatedRanks::folded, SimulatedRanks::all}) {
    const Simulation s = play(schedule, node(8), {ranks, 0, true}, 1).simulation;
    CHECK(s.step == Seconds());
  }
}

TEST_CASE("attacked: a crowd of ranks is refused with what it takes, folded it is played") {
  MachineSpec machine = node(8);
  machine.network.bandwidth = 100.0_GBps;
  machine.network.nics = 8;
  machine.network.kind = "InfiniBand";
  set_nodes(machine, 65'000);
  Script script;
  Collective collective;
  collective.elements = collective.padded = 1 << 26;
  script.op(Stream::gather, collective);
  const Schedule schedule = script.finish();
  CHECK_THROWS_AS(play(schedule, machine, {SimulatedRanks::all, 0, true}), InputError);
  CHECK_THROWS_WITH(play(schedule, machine, {SimulatedRanks::all, 0, true}), HasText("520,000 ranks"));
  CHECK_THROWS_WITH(play(schedule, machine, {SimulatedRanks::all, 0, true}), HasText("KB a rank"));
  CHECK_THROWS_WITH(play(schedule, machine, {SimulatedRanks::all, 0, true}), HasText("folded"));
  CHECK(play(schedule, machine, {SimulatedRanks::folded, 0, true}).simulation.ranks == 520'000);
}

namespace {

void check_equal_times(std::uint32_t count) {
  EventQueue queue;
  // Neither rising nor falling: a bijection of 0 .. count - 1.
  for (std::uint64_t i = 0; i < count; ++i)
    queue.push({1.0, static_cast<std::uint32_t>((i * 2'654'435'761u) % count), 0});
  std::uint32_t expected = 0;
  bool in_order = true;
  while (!queue.empty()) in_order = queue.pop().id == expected++ && in_order;
  CHECK(in_order);  // ties break by id; none is lost
  CHECK(expected == count);
}

}  // namespace

TEST_CASE("attacked: a million events at one time come out by id") { check_equal_times(1'000'003); }
TEST_CASE("attacked: ten million events at one time come out by id", "[.slow]") { check_equal_times(10'000'019); }

TEST_CASE("attacked: many equal ops of many ranks end together, none is lost") {
  Script script;
  for (int i = 0; i < 2000; ++i) {
    script.op(Stream::compute, Compute{-1, kZero, Pass::forward, Pointwise{Bytes(1e6)}});
    script.op(Stream::h2d, up(1e6));
  }
  MachineSpec machine = node(8);
  machine.network.bandwidth = 100.0_GBps;
  machine.network.nics = 8;
  machine.network.kind = "InfiniBand";
  set_nodes(machine, 4);
  const Simulation s = play(script.finish(), machine, {SimulatedRanks::all, 31, true}).simulation;
  check_forward(s);
  CHECK(s.ops == 4000);
  CHECK(s.events >= s.ops * s.simulated_ranks);
  CHECK(s.last_rank == 0);
}

TEST_CASE("attacked: threads that play the same get the same bits") {
  Random random(7);
  std::vector<MachineSpec> machines;
  for (int i = 0; i < 6; ++i) machines.push_back(random_machine(random));
  for (const MachineSpec& any : machines) {
    MachineSpec machine = any;
    set_nodes(machine, std::min(machine.nodes, 2));
    const ModelSpec model = random_model(random);
    const Plan plan = random_plan(random, model, machine.ranks(), machine.gpus_per_node, 20);
    Simulation alone;
    try {
      const MachineCostModel cost(machine, plan.shard_ranks, plan.precision.weights);
      const Schedule schedule = lower(model, plan, Folding::none);
      const std::vector<Demand> asked = demands(schedule, cost);
      const auto run = [&] {
        return simulate(schedule, asked, machine, plan.shard_ranks, {SimulatedRanks::all, 0, true});
      };
      alone = run();
      std::vector<Simulation> results(4);
      std::vector<std::thread> threads;
      for (Simulation& result : results) threads.emplace_back([&] { result = run(); });
      for (std::thread& thread : threads) thread.join();
      for (const Simulation& result : results) {
        CHECK(result.step == alone.step);
        CHECK(result.events == alone.events);
        REQUIRE(result.trace.ops.size() == alone.trace.ops.size());
        for (std::size_t i = 0; i < alone.trace.ops.size(); ++i)
          CHECK(result.trace.ops[i].end == alone.trace.ops[i].end);
      }
    } catch (const InputError&) {
      continue;  // a GPU without this precision
    }
  }
}

TEST_CASE("attacked: shard groups that do not fill nodes evenly are refused, not played as others") {
  MachineSpec machine = node(8);
  machine.network.bandwidth = 100.0_GBps;
  machine.network.nics = 8;
  machine.network.kind = "InfiniBand";
  set_nodes(machine, 6);  // 48 ranks
  Script script;
  Collective collective;
  collective.elements = collective.padded = 1 << 20;
  for (const Group group : {Group::shard, Group::replica, Group::all}) {
    collective.group = group;
    script.op(Stream::gather, collective);
  }
  const Schedule schedule = script.finish();
  for (int shard_ranks = 1; shard_ranks <= 48; ++shard_ranks) {
    INFO(shard_ranks);
    const bool divides = 48 % shard_ranks == 0;
    const bool even = shard_ranks <= 8 ? 8 % shard_ranks == 0 : shard_ranks % 8 == 0;
    const auto run = [&](SimulatedRanks ranks) {
      return play(schedule, machine, {ranks, 0, true}, shard_ranks).simulation;
    };
    if (!divides || !even) {
      CHECK_THROWS_AS(run(SimulatedRanks::all), InputError);
      CHECK_THROWS_AS(run(SimulatedRanks::folded), InputError);
      continue;
    }
    const Simulation all = run(SimulatedRanks::all), folded = run(SimulatedRanks::folded);
    check_forward(all);
    CHECK_THAT(folded.step.base(), WithinRel(all.step.base(), 1e-12));
  }
}

TEST_CASE("attacked: odd shard groups on hundreds of nodes, messages of one element to a petabyte") {
  MachineSpec machine = node(3);
  machine.network.bandwidth = 12.5_GBps;
  machine.network.nics = 1;
  machine.network.kind = "100GbE TCP";
  set_nodes(machine, 340);  // 1,020 ranks
  for (const std::int64_t elements : {std::int64_t{1}, std::int64_t{1'000'003}, std::int64_t{500'000'000'000'000}}) {
    Script script;
    Collective collective;
    collective.elements = collective.padded = elements;
    for (const Group group : {Group::shard, Group::replica, Group::all}) {
      collective.group = group;
      for (const Stream stream : {Stream::gather, Stream::reduce}) script.op(stream, collective);
    }
    script.op(Stream::compute, Compute{-1, kZero, Pass::forward, Pointwise{Bytes(1e6)}});
    const Schedule schedule = script.finish();
    for (const int shard_ranks : {1, 3, 15, 51, 255, 1020}) {
      INFO(elements << " elements, groups of " << shard_ranks);
      const Simulation all = play(schedule, machine, {SimulatedRanks::all, 1019, true}, shard_ranks).simulation;
      const Simulation folded = play(schedule, machine, {SimulatedRanks::folded, 2, true}, shard_ranks).simulation;
      check_forward(all);
      CHECK_THAT(folded.step.base(), WithinRel(all.step.base(), 1e-9));
    }
  }
}

TEST_CASE("attacked: flows of every size that come and go keep rates positive and nothing above capacity") {
  Random random(11);
  for (int round = 0; round < 30; ++round) {
    FairSharing sharing;
    constexpr std::uint32_t kResources = 6, kFlows = 12;
    for (std::uint32_t r = 0; r < kResources; ++r) sharing.add_resource(std::pow(10.0, 8 * random.unit() - 4));
    for (std::uint32_t f = 0; f < kFlows; ++f) sharing.add_flow();
    for (int change = 0; change < 300; ++change) {
      const auto flow = static_cast<std::uint32_t>(random.between(0, kFlows - 1));
      if (sharing.active(flow)) {
        sharing.stop(flow);
      } else {
        std::vector<Use> uses;
        for (std::uint32_t r = 0; r < kResources; ++r)
          if (random.chance(40)) uses.push_back({r, std::pow(10.0, 160 * random.unit() - 80)});
        if (uses.empty()) uses.push_back({0, 1});
        sharing.start(flow, uses);
      }
      if (random.chance(80)) sharing.solve();
    }
    sharing.solve();
    for (std::uint32_t f = 0; f < kFlows; ++f) {
      if (!sharing.active(f)) continue;
      REQUIRE(std::isfinite(sharing.rate(f)));
      REQUIRE(sharing.rate(f) > 0);
    }
    for (std::uint32_t r = 0; r < kResources; ++r) REQUIRE(sharing.load(r) <= 1 + 1e-9);
  }
}

TEST_CASE("attacked: a flow that starts and stops before rates are worked out leaves nothing behind") {
  FairSharing sharing;
  sharing.add_resource(4);
  for (int f = 0; f < 3; ++f) sharing.add_flow();
  const std::vector<Use> uses{{0, 1}};
  sharing.start(0, uses);
  CHECK(sharing.solve().size() == 1);
  for (int i = 0; i < 5; ++i) {
    sharing.start(1, uses);
    sharing.stop(1);
  }
  CHECK(sharing.solve().empty());
  CHECK(sharing.rate(0) == 4);
  // Stopped and started again between two solves: a new flow.
  sharing.stop(0);
  sharing.start(0, uses);
  sharing.start(2, uses);
  sharing.solve();
  CHECK(sharing.rate(0) == 2);
  CHECK(sharing.rate(2) == 2);
  sharing.stop(0), sharing.stop(2);
  CHECK(sharing.solve().empty());
  CHECK(sharing.load(0) == 0);
}

TEST_CASE("attacked: random amounts of every size on random machines") {
  Random random(8);
  int played = 0;
  for (int i = 0; i < 150; ++i) {
    MachineSpec machine = random_machine(random);
    set_nodes(machine, std::min(machine.nodes, 3));
    const bool disks = machine.nvme.drives > 0;
    const double amount = std::pow(10.0, -30 + 60 * random.unit());
    INFO(machine.name << " " << amount);
    const Schedule schedule = everything(amount, disks);
    try {
      const Simulation a = play(schedule, machine, {SimulatedRanks::all, 0, true}).simulation;
      const Simulation b = play(schedule, machine, {SimulatedRanks::folded, 0, true}).simulation;
      check_forward(a);
      check_forward(b);
      CHECK_THAT(a.step.base(), WithinRel(b.step.base(), 1e-9));
      ++played;
    } catch (const InputError&) {
      continue;
    }
  }
  CHECK(played > 100);
}

}  // namespace zeroplan::tests
