// The simulator: cases worked out by hand, and laws on random schedules, plans and machines.

#include "sim/simulate.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "models/error.h"
#include "models/lower.h"
#include "sim/collective_model.h"
#include "sim/estimate.h"
#include "tests/catch.h"
#include "tests/random_plan.h"
#include "tests/sim_machines.h"

namespace zeroplan::tests {
namespace {

constexpr double kAgreement = 1e-12;  // relative
constexpr double kNanosecond = 1e-9;

/// A schedule of given works.
class Script {
 public:
  OpRef op(Stream stream, Work work, std::initializer_list<OpRef> after = {}) {
    return builder_.add(stream, Phase::forward, -1, builder_.work(work),
                        std::span<const OpRef>(after.begin(), after.size()), {});
  }
  Schedule finish() { return builder_.finish(); }

 private:
  ScheduleBuilder builder_;
};

struct Both {
  Estimate estimate;
  Simulation simulation;
  double slower() const { return simulation.step / estimate.step; }
};

Both play(const Schedule& schedule, const MachineSpec& machine, SimulateOptions options = {}, int shard_ranks = 0) {
  if (shard_ranks == 0) shard_ranks = machine.ranks();
  const MachineCostModel cost(machine, shard_ranks, machine.gpu.peak_bf16 ? DType::bf16 : DType::fp16);
  const auto asked = demands(schedule, cost);
  options.with_trace = !schedule.folded();
  return {Estimator().run(schedule, asked, options.with_trace),
          simulate(schedule, asked, machine, shard_ranks, options)};
}

Copy to_gpu(double bytes) { return {Memory::pinned, Memory::hbm, Bytes(bytes)}; }
Copy to_host(double bytes) { return {Memory::hbm, Memory::pinned, Bytes(bytes)}; }

/// GPUs of one socket behind one PCIe switch, enough DRAM.
MachineSpec behind_one_switch(int gpus) {
  MachineSpec machine = node_of("A100-PCIe-80GB", gpus, Interconnect::pcie_switch);
  machine.gpus_per_pcie_switch = machine.gpus_per_root_complex = gpus;
  machine.sockets = 1;
  machine.dram_bandwidth = 400.0_GBps;
  return machine;
}

/// As measured; the sockets need a link.
MachineSpec dgx_a100() {
  MachineSpec machine = measured_machine("a100-sxm-8");
  machine.socket_link = 20.0_GBps;
  return machine;
}

/// H2D of one GPU and nothing on the other: what a lone copy takes on that machine.
double lone_copy(double bytes, const MachineSpec& machine) { return bytes / (machine.gpu.pcie.base() * 0.86); }

double utilisation(const Simulation& s, const std::string& resource) {
  const auto at = std::ranges::find(s.resources, resource, &ResourceUse::name);
  REQUIRE(at != s.resources.end());
  return at->utilisation;
}

void require(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

}  // namespace

// --- by hand -----------------------------------------------------------------------------------------

//   GPU 0 --x16--+
//                +-- switch --x16-- host memory
//   GPU 1 --x16--+
TEST_CASE("Two GPUs behind one PCIe switch take twice as long to copy") {
  Script script;
  script.op(Stream::h2d, to_gpu(1e9));
  const Schedule schedule = script.finish();
  const double alone = lone_copy(1e9, behind_one_switch(1));
  CHECK_THAT(play(schedule, behind_one_switch(1)).simulation.step.base(), WithinRel(alone, kAgreement));
  CHECK_THAT(play(schedule, behind_one_switch(2)).simulation.step.base(), WithinRel(2 * alone, kAgreement));
  CHECK_THAT(play(schedule, behind_one_switch(4)).simulation.step.base(), WithinRel(4 * alone, kAgreement));
}

//   GPU <== x16, 27.1 GB/s each way, 37.8 GB/s both together ==> host memory
TEST_CASE("Copies up and down at once share what PCIe carries both ways") {
  Script script;
  script.op(Stream::h2d, to_gpu(1e9));
  script.op(Stream::d2h, to_host(1e9));
  const Both both = play(script.finish(), behind_one_switch(1));
  CHECK_THAT(both.estimate.step.base(), WithinRel(1e9 / (31.5e9 * 0.86), kAgreement));
  CHECK_THAT(both.simulation.step.base(), WithinRel(1e9 / (31.5e9 * 0.60), kAgreement));
}

TEST_CASE("A shorter copy leaves its part of the link to the other") {
  // Gen4: both at 18.9 GB/s until the shorter is done, then 27.09 GB/s.
  Script script;
  script.op(Stream::h2d, to_gpu(2e9));
  script.op(Stream::d2h, to_host(1e9));
  const double shared = 31.5e9 * 0.60, alone = 31.5e9 * 0.86;
  const Both both = play(script.finish(), behind_one_switch(1));
  CHECK_THAT(both.simulation.step.base(), WithinRel(1e9 / shared + 1e9 / alone, kAgreement));
  CHECK_THAT(both.simulation.trace.ops[1].end.base(), WithinRel(1e9 / shared, kAgreement));
}

//   cores --Adam--> DRAM (50 GB/s) <--copy-- PCIe (27.1 GB/s)
TEST_CASE("Adam on the host and a copy share DRAM") {
  MachineSpec machine = behind_one_switch(1);
  machine.dram_bandwidth = 50.0_GBps;
  machine.physical_cores = 32;
  Script script;
  script.op(Stream::host, AdamStep{1'000'000'000, UpdateOn::host, Bytes(30e9)});
  script.op(Stream::h2d, to_gpu(10e9));
  const Both both = play(script.finish(), machine);
  // Both can use half of DRAM: 25 GB/s each for 0.4 s; then Adam has all of it for its last 20 GB.
  CHECK_THAT(both.simulation.trace.ops[1].end.base(), WithinRel(10e9 / 25e9, kAgreement));
  CHECK_THAT(both.simulation.step.base(), WithinRel(0.4 + 20e9 / 50e9, kAgreement));
  CHECK_THAT(utilisation(both.simulation, "host memory 0"), WithinRel(1.0, kAgreement));
}

TEST_CASE("Reads and writes share the drives") {
  MachineSpec machine = behind_one_switch(1);
  machine.nvme = {4, Bytes(4e12), 10.0_GBps, 5.0_GBps};
  Script script;
  script.op(Stream::nvme_read, Copy{Memory::nvme, Memory::pinned, Bytes(10e9)});
  script.op(Stream::nvme_write, Copy{Memory::pinned, Memory::nvme, Bytes(5e9)});
  const Both both = play(script.finish(), machine);
  CHECK_THAT(both.estimate.step.base(), WithinRel(1.0, kAgreement));
  CHECK_THAT(both.simulation.step.base(), WithinRel(2.0, kAgreement));
}

TEST_CASE("An all-gather on 8 A100 takes the published time") {
  const MachineSpec machine = dgx_a100();
  Collective gather;
  gather.elements = gather.padded = std::int64_t{1} << 32;  // 8 GiB
  Script script;
  script.op(Stream::gather, gather);
  const Both both = play(script.finish(), machine);
  const double bus = gather.message().base() * 7 / 8 / both.simulation.step.base();
  // 230-235 GB/s: nccl.md section 5.
  CHECK(bus > 225e9);
  CHECK(bus < 240e9);
  CHECK_THAT(both.slower(), WithinRel(1.0, kAgreement));
}

//   node 0: 8 GPUs - NVSwitch          node 1: 8 GPUs - NVSwitch
//                \--- 1 NIC, 12.5 GB/s ---/
TEST_CASE("A ring across two nodes with one NIC runs at the NIC's rate") {
  MachineSpec machine = nodes_of(dgx_a100(), 2, "InfiniBand HDR", 12.5);
  machine.network.nics = 1;
  machine.network.gpudirect = true;
  Collective gather;
  gather.elements = gather.padded = std::int64_t{1} << 32;
  Script script;
  script.op(Stream::gather, gather);
  const Both both = play(script.finish(), machine);
  const double bus = gather.message().base() * 15 / 16 / both.simulation.step.base();
  CHECK(bus <= 12.5e9);
  CHECK(bus > 0.8 * 12.5e9);
  CHECK(utilisation(both.simulation, "nic 0 out") > 0.95);
  CHECK(utilisation(both.simulation, "gpu 0 nvlink out") < 0.1);
}

TEST_CASE("Two collectives at once share the links") {
  const MachineSpec machine = dgx_a100();
  Collective gather;
  gather.elements = gather.padded = std::int64_t{1} << 31;
  Collective reduce = gather;
  reduce.kind = CollectiveKind::reduce_scatter;
  Script script;
  script.op(Stream::gather, gather);
  script.op(Stream::reduce, reduce);
  const Both both = play(script.finish(), machine);
  CHECK(both.slower() > 1.99);
  CHECK(both.slower() < 2.001);
}

TEST_CASE("A collective takes SMs and memory bandwidth from kernels") {
  MachineSpec machine = dgx_a100();
  Collective gather;
  gather.elements = gather.padded = std::int64_t{1} << 33;
  const Compute gemm{-1, kHeadLogits, Pass::forward, Gemm{8192, 8192, 8192, 1, DType::bf16, false, false}};
  const Compute copy{-1, kZero, Pass::forward, Pointwise{Bytes(4e9)}};
  for (const auto& [kernel, slow] :
       {std::pair{gemm, 108.0 / (108 - 24)}, std::pair{copy, 1 / (1 - 2 * 230.0 / (0.9 * 2039))}}) {
    Script script;
    script.op(Stream::gather, gather);
    script.op(Stream::compute, kernel);
    const Both both = play(script.finish(), machine);
    const auto length = [](const Trace& t) { return (t.ops[1].end - t.ops[1].start).base(); };
    CHECK_THAT(length(both.simulation.trace) / length(both.estimate.trace), WithinRel(slow, 0.02));
    CHECK_THAT(both.simulation.trace.ops[0].end.base(), WithinRel(both.estimate.trace.ops[0].end.base(), kAgreement));
  }
}

TEST_CASE("A collective waits for its last member, and says how long") {
  // 3 GPUs on 2 sockets: socket 0 serves two of them, so their copies take longer than the third's.
  MachineSpec machine = behind_one_switch(3);
  machine.gpus_per_pcie_switch = machine.gpus_per_root_complex = 1;
  machine.sockets = 2;
  machine.socket_link = 20.0_GBps;
  machine.dram_bandwidth = 60.0_GBps;
  Script script;
  const OpRef copied = script.op(Stream::h2d, to_gpu(3e9));
  Collective gather;
  gather.elements = gather.padded = 1 << 20;
  script.op(Stream::gather, gather, {copied});
  const Schedule schedule = script.finish();
  const Simulation slow = play(schedule, machine, {SimulatedRanks::folded, 0, true}).simulation;
  const Simulation fast = play(schedule, machine, {SimulatedRanks::folded, 2, true}).simulation;
  const auto gather_stream = static_cast<std::size_t>(Stream::gather);
  CHECK_THAT(slow.trace.ops[0].end.base(), WithinRel(3e9 / 15e9, kAgreement));
  CHECK_THAT(fast.trace.ops[0].end.base(), WithinRel(3e9 / (31.5e9 * 0.86), kAgreement));
  CHECK(slow.streams[gather_stream].wait == Seconds());
  CHECK_THAT(fast.streams[gather_stream].wait.base(),
             WithinRel((slow.trace.ops[0].end - fast.trace.ops[0].end).base(), kAgreement));
  CHECK(slow.trace.ops[1].end == fast.trace.ops[1].end);
}

TEST_CASE("Kernels on two streams of one GPU share it") {
  const MachineSpec machine = behind_one_switch(1);
  const Compute kernel{-1, kZero, Pass::forward, Pointwise{Bytes(1e9)}};
  Script script;
  script.op(Stream::compute, kernel);
  script.op(Stream::reduce, kernel);
  const Both both = play(script.finish(), machine);
  const double latency = 5e-6;  // at most; paid once, not shared
  CHECK(both.slower() <= 2);
  CHECK(both.simulation.step.base() > 2 * both.estimate.step.base() - latency);
}

TEST_CASE("Ops that take no time are on the trace where they happen") {
  Script script;
  const OpRef born = script.op(Stream::compute, Alloc{});
  const OpRef copied = script.op(Stream::h2d, to_gpu(1e9), {born});
  const OpRef joined = script.op(Stream::compute, Join{}, {copied});
  script.op(Stream::d2h, to_host(1e9), {joined});
  const Simulation s = play(script.finish(), behind_one_switch(1)).simulation;
  CHECK(s.ops == 2);
  CHECK(s.trace.ops[0].end.base() == 0);
  CHECK(s.trace.ops[2].start == s.trace.ops[1].end);
  CHECK(s.trace.ops[3].start == s.trace.ops[1].end);
}

TEST_CASE("What cannot be simulated is refused") {
  Script script;
  script.op(Stream::h2d, to_gpu(1e9));
  const Schedule schedule = script.finish();
  const MachineSpec machine = behind_one_switch(2);
  CHECK_THROWS_AS(play(schedule, machine, {SimulatedRanks::folded, 2, true}), std::logic_error);
  CHECK_THROWS_AS(play(schedule, machine, {SimulatedRanks::folded, -1, true}), std::logic_error);
  ScheduleBuilder builder;
  builder.begin_repeat(3);
  builder.add(Stream::h2d, Phase::forward, -1, builder.work(to_gpu(1e9)), {}, {});
  builder.end_repeat();
  const Schedule folded = builder.finish();
  const auto asked = std::vector<Demand>(1);
  CHECK_THROWS_AS(simulate(folded, asked, machine, 2, {SimulatedRanks::folded, 0, true}), std::logic_error);
}

TEST_CASE("An empty schedule takes no time") {
  Script script;
  script.op(Stream::compute, Join{});
  const Simulation s = play(script.finish(), behind_one_switch(1)).simulation;
  CHECK(s.step == Seconds());
  CHECK(s.ops == 0);
  CHECK(s.breakdown.total() == Seconds());
}

// --- the usual remedies --------------------------------------------------------------------------------

namespace {

/// Llama-2-7B's first layers under ZeRO-3, simulated.
Simulation zero3(const MachineSpec& machine, int prefetch_layers, std::int64_t micro_batch) {
  Random random(1);
  const ModelSpec model = shortened(find_model("llama-2-7b"), 8, random);
  Plan plan;
  plan.ranks = plan.shard_ranks = machine.ranks();
  plan.zero_stage = 3;
  plan.seq_len = 2048;
  plan.micro_batch = micro_batch;
  plan.prefetch_layers = prefetch_layers;
  plan.optimizer = plan.parameters = Placement::all(Tier::hbm, static_cast<int>(model.sequence.size()));
  const Schedule schedule = lower(model, plan, Folding::layers);
  const MachineCostModel cost(machine, plan.shard_ranks, DType::bf16);
  return simulate(schedule, demands(schedule, cost), machine, plan.shard_ranks);
}

}  // namespace

TEST_CASE("Gathering a layer ahead hides the gathers behind compute") {
  const MachineSpec machine = dgx_a100();
  const Simulation none = zero3(machine, 0, 8), one = zero3(machine, 1, 8);
  CHECK(one.step < none.step);
  CHECK(one.breakdown.exposed_communication < 0.5 * none.breakdown.exposed_communication);
  // The same work: what is hidden slows the kernels it hides behind, but by less.
  CHECK(one.breakdown.compute > none.breakdown.compute);
}

TEST_CASE("Over PCIe the step waits for communication, over NVLink for arithmetic") {
  MachineSpec pcie = node_of("A100-PCIe-80GB", 8, Interconnect::root_complex);
  pcie.socket_link = 20.0_GBps;
  const Simulation slow = zero3(pcie, 1, 1), fast = zero3(dgx_a100(), 1, 8);
  CHECK(slow.breakdown.exposed_communication > 0.5 * slow.step);
  CHECK(fast.breakdown.compute > 0.5 * fast.step);
}

TEST_CASE("A larger micro-batch amortises the gathers") {
  const MachineSpec machine = dgx_a100();
  const Simulation small = zero3(machine, 1, 1), large = zero3(machine, 1, 8);
  CHECK(large.step < 8 * small.step);
  CHECK(large.breakdown.exposed_communication / large.step <
        0.8 * (small.breakdown.exposed_communication / small.step));
}

// --- laws --------------------------------------------------------------------------------------------

namespace {

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
  require(a.step == b.step && a.ops == b.ops && a.events == b.events, "a folded schedule takes another time");
  check_same(a, c, kNanosecond);
}

}  // namespace

TEST_CASE("A lone op takes what estimate() says") { check_cases(1, 60, check_lone_ops); }
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
