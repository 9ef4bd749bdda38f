// The collective model against measured bus bandwidths (tests/data/collectives.csv) and its own laws.

#include "sim/collective_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "models/error.h"
#include "tests/catch.h"
#include "tests/collective_rows.h"
#include "tests/sim_machines.h"

namespace zeroplan::tests {
namespace {

std::vector<Measured> rows_in(const std::string& file) {
  return measured_rows(std::string(ZEROPLAN_TESTS_DIR) + "/data/" + file);
}

struct Errors {
  double log_sum = 0, worst = 0, abs_sum = 0;
  int rows = 0, outside = 0;
  void add(double ratio, double limit) {
    const double error = std::abs(ratio - 1);
    log_sum += std::log(ratio);
    abs_sum += error;
    worst = std::max(worst, error);
    ++rows;
    outside += error > limit;
  }
  double bias() const { return std::abs(std::exp(log_sum / rows) - 1); }
};

CollectiveModel model_of(const char* key) { return CollectiveModel(measured_machine(key)); }

}  // namespace

TEST_CASE("collectives: bus bandwidth is near what was measured") {
  // From 256 MiB within 10 %, from 1 MiB within 25 %; below, latency noise decides and nothing is claimed.
  std::map<std::string, Errors> by_class;
  for (const Measured& row : rows_in("collectives.csv")) {
    const double ratio = predicted(row) / row.gigabytes_per_second;
    const bool large = row.large();
    if (std::getenv("ZEROPLAN_PRINT_TABLES") != nullptr)
      fmt::print("{},{},{},{},{:.4g},{:.4g},{:+.1f},{}\n", row.machine, row.group.ranks, row.group.nodes,
                 row.collective, row.size.base() / kMiB, row.gigabytes_per_second, 100 * (ratio - 1),
                 row.fitted ? "fitted" : "held out");
    if (row.size < Bytes(kMiB)) continue;
    by_class[std::string(row.fitted ? "fitted" : "held out") + (large ? " large" : " middle")].add(ratio,
                                                                                                   large ? 0.10 : 0.25);
  }
  if (std::getenv("ZEROPLAN_PRINT_TABLES") != nullptr)
    for (const auto& [name, e] : by_class)
      fmt::print("{}: n {} MAPE {:.1f} % bias {:+.1f} % worst {:.1f} % outside {}\n", name, e.rows,
                 100 * e.abs_sum / e.rows, 100 * (std::exp(e.log_sum / e.rows) - 1), 100 * e.worst, e.outside);
  // Outside among the fitted: 2 x H200's scatter at 256 MiB (12 % fast).
  CHECK(by_class["fitted large"].outside <= 1);
  CHECK(by_class["fitted middle"].outside == 0);
  CHECK(by_class["fitted large"].bias() < 0.05);
  CHECK(by_class["fitted middle"].bias() < 0.05);
  // Held out: other clouds' networks, SimuMax's B200 fit, RTX PRO 6000 boxes, single figures. Outside are two of PRO
  // 6000 (docs/cost-model.md).
  CHECK(by_class["held out large"].outside <= 2);
  CHECK(by_class["held out middle"].outside == 0);
  CHECK(by_class["held out large"].abs_sum / by_class["held out large"].rows < 0.07);
  CHECK(by_class["held out large"].bias() < 0.05);
  CHECK(by_class["held out middle"].bias() < 0.05);
}

namespace {

/// Mean errors of the rows of one machine, and how many are outside 25 % (10 % from 256 MiB on).
struct Told {
  Errors middle, large;
  void add(const Measured& row, const CollectiveTables& tables) {
    (row.large() ? large : middle).add(predicted(row, tables) / row.gigabytes_per_second, row.large() ? 0.10 : 0.25);
  }
  std::string text() const {
    const auto line = [](const Errors& e) {
      return fmt::format("n {} MAPE {:.1f} % bias {:+.1f} % worst {:.1f} % outside {}", e.rows,
                         100 * e.abs_sum / e.rows, 100 * (std::exp(e.log_sum / e.rows) - 1), 100 * e.worst, e.outside);
    };
    return fmt::format("middle {}; large {}", line(middle), line(large));
  }
};

}  // namespace

TEST_CASE("collectives: all-reduces of a machine without a table, by laws fitted without it") {
  // The numbers are what tests/tools/fit_pipelines.cpp prints with the machine left out.
  struct Case {
    const char* machine;
    double fill, pipe_mb, arrival_us;
    double middle, large;  // mean errors, today's
    int outside;           // rows outside 25 % and 10 %
  };
  for (const Case& c :
       {Case{"p4de-2", 0.572, 43.3, 0, 0.13, 0.05, 0}, Case{"p5-2", 0.723, 21.2, 0, 0.13, 0.05, 0},
        Case{"p6-b200-4", 0.809, 28.7, 0, 0.10, 0.05, 1}, Case{"h200-8", 1.595, 0, 23.9, 0.22, 0.02, 2},
        // Its own sweep stays at 741 GB/s to 4 GiB where another table says 838, and has a hump at 4 and 8 MiB.
        Case{"b200-8", 0.646, 0, 17.0, 0.32, 0.09, 8}}) {
    CollectiveTables tables = without_ramps();
    if (c.pipe_mb > 0) tables.network = {c.fill, Bytes(c.pipe_mb * 1e6), ""};
    if (c.arrival_us > 0) {
      tables.in_switch.fill = c.fill;
      tables.in_switch.arrival = Seconds(c.arrival_us * 1e-6);
    }
    Told told;
    for (const Measured& row : rows_in("collectives.csv")) {
      if (row.machine != c.machine || row.collective != "all_reduce" || row.size < Bytes(kMiB)) continue;
      if (row.group != CollectiveModel(measured_machine(c.machine)).all()) continue;
      if (row.source.find("not stated") == std::string::npos) told.add(row, tables);
    }
    const std::string text = fmt::format("{} left out: {}", c.machine, told.text());
    if (std::getenv("ZEROPLAN_PRINT_TABLES") != nullptr) fmt::print("{}\n", text);
    INFO(text);
    CHECK(told.middle.abs_sum / told.middle.rows < c.middle);
    CHECK(told.large.abs_sum / told.large.rows < c.large);
    CHECK(told.middle.outside + told.large.outside <= c.outside);
  }
}

TEST_CASE("collectives: machines of which nothing was fitted") {
  // Public reports that are in no fit but one: A3 Mega's network step. Mean errors, today's.
  const std::map<std::string, std::pair<double, double>> limits = {
      {"a100-roce-2 all_reduce", {0.25, 0.12}}, {"a3mega-2 all_gather", {0.13, 0.02}},
      {"a3mega-2 all_reduce", {0.72, 0.13}},    {"a3ultra-2 all_gather", {0.11, 0.02}},
      {"h100-4 all_reduce", {0.11, 0.05}},      {"h100-8 all_gather", {0.06, 0.01}},
      {"h100-8 all_reduce", {0.11, 0.04}},      {"h100-8 reduce_scatter", {0.06, 0.01}},
      {"h100-ib-2 all_reduce", {0.13, 0.02}},   {"h200-roce-2 all_reduce", {0.10, 0.03}},
      {"mi300x-8 all_reduce", {0.09, 0.03}},    {"p5-2 all_reduce", {0.11, 0.05}}};
  std::map<std::string, Told> by_machine;
  for (const Measured& row : rows_in("collectives_held_out.csv")) {
    if (std::getenv("ZEROPLAN_PRINT_TABLES") != nullptr)
      fmt::print("{},{},{},{},{:.4g},{:.4g},{:+.1f},other\n", row.machine, row.group.ranks, row.group.nodes,
                 row.collective, row.size.base() / kMiB, row.gigabytes_per_second,
                 100 * (predicted(row) / row.gigabytes_per_second - 1));
    // One of the 8 x H100 hosts takes 44 to 59 us for every call up to 8 MiB: its launches decide, not NCCL.
    if (row.source.find("get_bws") != std::string::npos && row.size <= Bytes(8 * kMiB)) continue;
    by_machine[row.machine + " " + row.collective].add(row, builtin_collective_tables());
  }
  for (const auto& [name, told] : by_machine) {
    if (std::getenv("ZEROPLAN_PRINT_TABLES") != nullptr) fmt::print("{}: {}\n", name, told.text());
    INFO(name << ": " << told.text());
    CHECK(told.middle.abs_sum / told.middle.rows < limits.at(name).first);
    CHECK(told.large.abs_sum / told.large.rows < limits.at(name).second);
  }
}

TEST_CASE("collectives: a pipe costs its fill once, and more bytes never take less time") {
  const PipelineLaw law{0.5, Bytes(1e6), ""};
  const auto time = [&](double bytes, int passes) {
    return pipeline_transfer(law, Bytes(bytes), Bytes(bytes), BytesPerSecond(1e9), passes).base();
  };
  CHECK_THAT(time(1e5, 1), WithinRel(1.5e-4, 1e-12));
  CHECK_THAT(time(1e5, 2), WithinRel(2e-4, 1e-12));
  CHECK_THAT(time(1e7, 1), WithinRel(1e-2 + 0.5e-3, 1e-12));
  CHECK(time(0, 2) == 0);
  for (double bytes = 1; bytes < 1e9; bytes *= 1.3) CHECK(time(bytes * 1.3, 2) > time(bytes, 2));
}

TEST_CASE("collectives: calls back to back do not wait for the last rank") {
  for (const char* key : {"h200-8", "b200-8", "p5-2", "p6-b200-4", "h100-ib-2", "a100-sxm-8"}) {
    const MachineSpec machine = measured_machine(key);
    const CollectiveModel queued(machine, CollectiveSetting::queued), isolated(machine),
        step(machine, CollectiveSetting::in_step);
    for (const CollectiveKind kind : {CollectiveKind::all_gather, CollectiveKind::all_reduce})
      for (double bytes = 4096; bytes < 1e11; bytes *= 7) {
        INFO(key << " " << bytes);
        const auto alone = [&](const CollectiveModel& m) { return m.cost(kind, Bytes(bytes), m.all()).alone(); };
        CHECK(alone(queued) > Seconds());
        CHECK(alone(queued) < alone(isolated));
        CHECK(alone(queued) < alone(step));
      }
  }
}

TEST_CASE("collectives: what ranks wait for is the group's, whatever group a table was measured with") {
  // All-reduces between B200 nodes stand for 4 nodes of which the host waited for each call.
  for (const int nodes : {2, 4, 16}) {
    MachineSpec machine = measured_machine("p6-b200-4");
    machine.nodes = nodes;
    const CollectiveModel queued(machine, CollectiveSetting::queued), isolated(machine);
    const double skew = builtin_collective_tables().ring.skew.base();
    for (double bytes = 4096; bytes < 1e11; bytes *= 7) {
      INFO(nodes << " " << bytes);
      const auto time = [&](const CollectiveModel& m) {
        return m.cost(CollectiveKind::all_reduce, Bytes(bytes), m.all()).alone().base();
      };
      CHECK_THAT(time(isolated) - time(queued), WithinRel(skew * (8 * nodes - 2), 1e-9));
      // Two nodes take 57 us for 512 B (sim/network_kinds.cpp): none less for ranks that only the table waited for.
      CHECK(time(queued) > 50e-6);
    }
  }
}

TEST_CASE("collectives: a ring of two copies its own half, of eight an eighth") {
  // Each byte on the wire is copied n / (n - 1) times by a gather and (2n - 1) / 2(n - 1) times by an all-reduce.
  const CollectiveModel model = model_of("h200-8");
  const auto rate = [&](CollectiveKind kind, RankGroup group) {
    return model.cost(kind, Bytes(4096 * kMiB), group).effective_bandwidth().base() / 1e9;
  };
  CHECK_THAT(rate(CollectiveKind::all_gather, {2, 1, 2}), WithinRel(304.5, 0.12));
  CHECK_THAT(rate(CollectiveKind::all_gather, {8, 1, 8}), WithinRel(361.4, 0.03));
  CHECK(rate(CollectiveKind::all_gather, {2, 1, 2}) < rate(CollectiveKind::all_gather, {4, 1, 4}));
  CHECK(rate(CollectiveKind::all_gather, {2, 1, 2}) < rate(CollectiveKind::all_reduce, {2, 1, 2}));
  // The channels alone: half as many copy half as fast, and never faster than the links.
  const RingLaw& law = builtin_collective_tables().ring;
  NvlinkRing ring{2, false, 450.0_GBps, 367.0_GBps, 8, 1};
  const auto transfer = [&](int channels) {
    ring.channels = channels;
    return ring_time(law, ring, 2, Bytes(128 * kMiB)).transfer;
  };
  CHECK_THAT(transfer(1) / transfer(2), WithinRel(2.0, 0.05));
  CHECK(transfer(16) / transfer(32) < 1.5);
}

TEST_CASE("collectives: protocols change as NCCL's do") {
  // 2 x H200, NCCL 2.28.9: its log says LL up to 64 KiB; its printed table and the times of forced protocols say that
  // LL is left between 1 and 4 MiB (docs/measurements/h200x2).
  const CollectiveModel model = model_of("h200-8");
  for (const CollectiveKind kind : {CollectiveKind::all_gather, CollectiveKind::reduce_scatter}) {
    CHECK(model.cost(kind, Bytes(65536), {2, 1, 2}).protocol == "LL");
    CHECK(model.cost(kind, Bytes(kMiB), {2, 1, 2}).protocol == "LL");
    CHECK(model.cost(kind, Bytes(16 * kMiB), {2, 1, 2}).protocol == "Simple");
  }
  CHECK(model.cost(CollectiveKind::all_reduce, Bytes(65536), {2, 1, 2}).protocol == "LL");
  CHECK(model.cost(CollectiveKind::all_reduce, Bytes(16 * kMiB), {2, 1, 2}).protocol == "Simple");
}

TEST_CASE("collectives: the size law alone predicts large all-reduces") {
  // Without the one-node ramps the A100's is predicted by the size law of the gathers alone.
  CollectiveTables without = builtin_collective_tables();
  std::erase_if(without.ramps, [](const CollectiveRamp& ramp) { return ramp.nodes == 1; });
  Errors large;
  for (const Measured& row : rows_in("collectives.csv")) {
    if (row.group.nodes > 1 || row.collective != "all_reduce" || row.size < Bytes(256 * kMiB)) continue;
    if (row.machine != "a100-sxm-8") continue;  // a ring; the others' ramps are in-switch
    const CollectiveModel model(measured_machine(row.machine), CollectiveSetting::isolated, without);
    const double value = model.cost(CollectiveKind::all_reduce, row.size, row.group).effective_bandwidth().base() / 1e9;
    large.add(value / row.gigabytes_per_second, 0.10);
  }
  CHECK(large.abs_sum / large.rows < 0.08);
}

TEST_CASE("collectives: a group of one is free and a foreign group is our bug") {
  const CollectiveModel model = model_of("h200-8");
  const CollectiveCost nothing = model.cost(CollectiveKind::all_reduce, Bytes(1e9), {1, 1, 1});
  CHECK(nothing.alone() == Seconds());
  CHECK(nothing.wire_bytes_per_rank == Bytes());
  CHECK(nothing.sms == 0);
  CHECK(model.cost(CollectiveKind::all_gather, Bytes(), model.all()).alone() == Seconds());
  CHECK_THROWS_AS(model.cost(CollectiveKind::all_gather, Bytes(1e9), {16, 2, 8}), std::logic_error);
  CHECK_THROWS_AS(model.cost(CollectiveKind::all_gather, Bytes(1e9), {4, 1, 8}), std::logic_error);
}

TEST_CASE("collectives: a gather and a scatter never get the in-switch rate") {
  const CollectiveModel model = model_of("h200-8");
  const Bytes size(4 * 1024 * kMiB);
  const CollectiveCost gather = model.cost(CollectiveKind::all_gather, size, model.all());
  const CollectiveCost reduce = model.cost(CollectiveKind::all_reduce, size, model.all());
  CHECK(gather.algorithm == "ring");
  CHECK(gather.protocol == "Simple");
  CHECK(gather.link == LinkClass::nvlink);
  CHECK(reduce.algorithm == "NVLS");
  CHECK(reduce.sms == 16);
  CHECK(reduce.effective_bandwidth() > gather.effective_bandwidth() * 1.2);
  const CollectiveCost four = model.cost(CollectiveKind::all_reduce, size, {4, 1, 4});
  CHECK(four.algorithm == "ring");
  CHECK_THAT(four.effective_bandwidth().base() / 1e9, WithinRel(363.3, 0.05));
}

TEST_CASE("collectives: ring factors and network bytes are exact") {
  const CollectiveModel model = model_of("p5en-4");
  const Bytes size(1e9);
  const CollectiveCost gather = model.cost(CollectiveKind::all_gather, size, model.all());
  CHECK_THAT(gather.wire_bytes_per_rank.base(), WithinRel(1e9 * 31 / 32, 1e-12));
  CHECK_THAT(gather.network_bytes_per_node.base(), WithinRel(1e9 * 31 / 32, 1e-12));
  CHECK_THAT(model.cost(CollectiveKind::all_reduce, size, model.all()).wire_bytes_per_rank.base(),
             WithinRel(2e9 * 31 / 32, 1e-12));
  CHECK(model.broadcast(size, model.all()).wire_bytes_per_rank == size);
  // Eight replica groups of one rank a node share the NICs: each node sends eight times as much.
  const CollectiveCost replica = model.cost(CollectiveKind::reduce_scatter, size, {4, 4, 1});
  CHECK(replica.link == LinkClass::network);
  CHECK_THAT(replica.network_bytes_per_node.base(), WithinRel(8 * 1e9 * 3 / 4, 1e-12));
  CHECK(model.cost(CollectiveKind::all_gather, size, {8, 1, 8}).network_bytes_per_node == Bytes());
}

TEST_CASE("collectives: more bytes never take less time") {
  for (const char* key : {"a100-sxm-8", "h200-8", "b200-8", "p4de-2", "p6-b200-4", "a100-pcie-8", "rtx5090-4"}) {
    const CollectiveModel model = model_of(key);
    for (const CollectiveKind kind :
         {CollectiveKind::all_gather, CollectiveKind::reduce_scatter, CollectiveKind::all_reduce}) {
      Seconds before;
      for (double bytes = 4096; bytes < 2e10; bytes *= 1.37) {
        const Seconds now = model.cost(kind, Bytes(bytes), model.all()).alone();
        INFO(key << " " << bytes);
        CHECK(now.base() >= before.base() * (1 - 1e-9));
        before = now;
      }
    }
  }
}

TEST_CASE("collectives: the slow piece of the path decides") {
  const Bytes size(512 * kMiB);
  const auto rate = [&](const MachineSpec& machine, RankGroup group) {
    return CollectiveModel(machine).cost(CollectiveKind::all_gather, size, group).effective_bandwidth().base() / 1e9;
  };
  const MachineSpec bridged = measured_machine("a100-pcie-bridged");
  CHECK_THAT(rate(bridged, {2, 1, 2}), WithinRel(208.0, 0.25));
  CHECK_THAT(rate(bridged, {3, 1, 3}), WithinRel(20.0, 0.10));
  const MachineSpec consumer = node_of("RTX-3090", 2, Interconnect::root_complex);
  CHECK(CollectiveModel(consumer).cost(CollectiveKind::all_gather, size, {2, 1, 2}).link == LinkClass::host_memory);
  CHECK(rate(consumer, {2, 1, 2}) < 18);
  CHECK(rate(node_of("RTX-3090", 2, Interconnect::nvlink_pairs), {2, 1, 2}) > 2 * rate(consumer, {2, 1, 2}));
  MachineSpec starved = consumer;
  starved.dram_bandwidth = 40.0_GBps;  // two cards, each byte in and out of memory: 10 GB/s
  CHECK_THAT(rate(starved, {2, 1, 2}), WithinRel(10.0, 0.02));
  CHECK_THAT(rate(measured_machine("a100-pcie-8"), {4, 1, 4}), WithinRel(20.7, 0.02));
  CHECK_THAT(rate(measured_machine("a100-pcie-8"), {8, 1, 8}), WithinRel(13.5, 0.02));
}

TEST_CASE("collectives: a step adds the latency of uneven arrival") {
  const MachineSpec machine = measured_machine("p5en-4");
  const Bytes size(64 * kMiB);
  const RankGroup group{32, 4, 8};
  const Seconds alone =
      CollectiveModel(machine, CollectiveSetting::queued).cost(CollectiveKind::all_gather, size, group).alone();
  const Seconds step =
      CollectiveModel(machine, CollectiveSetting::in_step).cost(CollectiveKind::all_gather, size, group).alone();
  CHECK_THAT((step - alone).base(), WithinRel(2.3e-6 * (28 * 3.4 + 3 * 20 + 9), 1e-9));
}

TEST_CASE("collectives: several nodes without a network rate are refused") {
  MachineSpec machine = measured_machine("h200-8");
  machine.nodes = 2;
  CHECK_THROWS_AS(CollectiveModel(machine), InputError);
  CHECK_THROWS_WITH(CollectiveModel(machine), HasText("network"));
}

TEST_CASE("collectives: threads of one host go through its memory") {
  MachineSpec host = node_of("A100-PCIe-80GB", 2, Interconnect::single);
  host.host_device = true;
  host.gpu.pcie = BytesPerSecond();
  host.dram_bandwidth = 40.0_GBps;
  const CollectiveCost cost = CollectiveModel(host).cost(CollectiveKind::all_gather, Bytes(1e9), {2, 1, 2});
  CHECK(cost.link == LinkClass::host_memory);
  CHECK_THAT(cost.effective_bandwidth().base() / 1e9, WithinRel(10.0, 0.01));
  host.dram_bandwidth = BytesPerSecond();
  CHECK_THROWS_WITH(CollectiveModel(host), HasText("dram_bandwidth"));
}

TEST_CASE("collectives: memory of a communicator follows topology and provider") {
  CHECK(communicator_memory(measured_machine("a100-sxm-8"), {8, 1, 8}).bytes == Bytes(0.3e9));
  CHECK(communicator_memory(measured_machine("h200-8"), {8, 1, 8}).bytes == Bytes(1e9));
  CHECK(communicator_memory(measured_machine("h200-8"), {4, 1, 4}).bytes == Bytes(0.3e9));
  CHECK(communicator_memory(measured_machine("p4de-2"), {16, 2, 8}).bytes == Bytes(1e9));
  MachineSpec p5 = measured_machine("p5-2");
  p5.provider = "AWS";
  CHECK(communicator_memory(p5, {16, 2, 8}).bytes == Bytes(2e9));
  CHECK(communicator_memory(p5, {1, 1, 1}).bytes == Bytes());
  CHECK_THAT(communicator_memory(p5, {16, 2, 8}).assumption.source, HasText("AWS"));
}

TEST_CASE("collectives: tables with unknown keys or falling sizes are refused with their place") {
  CHECK_THROWS_AS(read_collective_tables(R"({"schema": 1, "ramps": [], "laws": [], "nvls": [], "extra": 1})"),
                  InputError);
  CHECK_THROWS_WITH(
      read_collective_tables(
          R"({"schema": 1, "laws": [], "nvls": [], "ramps": [{"arch": "A", "ranks": 8, "nodes": 1, "calls": "queued",
        "asymptote": "2 GB/s", "points": [[8, 1], [4, 2]], "source": "s"}]})"),
      HasText("fits/collectives.json:2"));
}

}  // namespace zeroplan::tests
