// The simulator: cases worked out by hand, and the usual remedies.

#include "sim/simulate.h"

#include <algorithm>
#include <cmath>

#include "models/error.h"
#include "models/lower.h"
#include "sim/collective_model.h"
#include "sim/estimate.h"
#include "tests/catch.h"
#include "tests/random_plan.h"
#include "tests/sim_machines.h"
#include "tests/simulate_support.h"

namespace zeroplan::tests {
namespace {

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
double lone_copy(double bytes, const MachineSpec& machine) { return bytes / (machine.gpu.pcie.base() * 0.825); }

double utilisation(const Simulation& s, const std::string& resource) {
  const auto at = std::ranges::find(s.resources, resource, &ResourceUse::name);
  REQUIRE(at != s.resources.end());
  return at->utilisation;
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
  CHECK_THAT(both.estimate.step.base(), WithinRel(1e9 / (31.5e9 * 0.825), kAgreement));
  CHECK_THAT(both.simulation.step.base(), WithinRel(1e9 / (31.5e9 * 0.605), kAgreement));
}

TEST_CASE("A shorter copy leaves its part of the link to the other") {
  // Gen4: both at 19.06 GB/s until the shorter is done, then 25.9875 GB/s.
  Script script;
  script.op(Stream::h2d, to_gpu(2e9));
  script.op(Stream::d2h, to_host(1e9));
  const double shared = 31.5e9 * 0.605, alone = 31.5e9 * 0.825;
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
  // 0.9 of the drives' rates.
  CHECK_THAT(both.longest_path().base(), WithinRel(1.0 / 0.9, kAgreement));
  CHECK_THAT(both.simulation.step.base(), WithinRel(2.0 / 0.9, kAgreement));
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
  CHECK_THAT(fast.trace.ops[0].end.base(), WithinRel(3e9 / (31.5e9 * 0.825), kAgreement));
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
  CHECK(both.simulation.step.base() > 2 * both.longest_path().base() - latency);
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

TEST_CASE("A step too long to write out is refused at once") {
  ScheduleBuilder builder;
  builder.begin_repeat(std::int64_t{1} << 40);
  builder.add(Stream::h2d, Phase::forward, -1, builder.work(to_gpu(1e9)), {}, {});
  builder.end_repeat();
  const Schedule schedule = builder.finish();
  CHECK_THROWS_WITH(play(schedule, behind_one_switch(1)), HasText("1,099,511,627,776 timed ops"));
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

}  // namespace zeroplan::tests
