// The collective model against measured bus bandwidths (tests/data/collectives.csv) and its own laws.

#include "sim/collective_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "models/error.h"
#include "tests/catch.h"
#include "tests/sim_machines.h"

namespace zeroplan::tests {
namespace {

struct Measured {
  std::string machine, collective, source;
  RankGroup group;
  Bytes size;
  double gigabytes_per_second = 0;
  bool fitted = false;  // the model's tables or fractions were made from this row
};

std::vector<Measured> measured_rows() {
  std::ifstream in(std::string(ZEROPLAN_TESTS_DIR) + "/data/collectives.csv");
  REQUIRE(in.good());
  std::string line;
  std::getline(in, line);
  std::vector<Measured> rows;
  while (std::getline(in, line)) {
    std::stringstream cells(line);
    std::string ranks, nodes, bytes, rate;
    Measured row;
    std::getline(cells, row.machine, ',');
    std::getline(cells, ranks, ',');
    std::getline(cells, nodes, ',');
    std::getline(cells, row.collective, ',');
    std::getline(cells, bytes, ',');
    std::getline(cells, rate, ',');
    std::getline(cells, row.source);
    row.fitted = row.source.back() != ',';
    row.group = {std::stoi(ranks), std::stoi(nodes), std::stoi(ranks) / std::stoi(nodes)};
    row.size = Bytes(std::stod(bytes));
    row.gigabytes_per_second = std::stod(rate);
    rows.push_back(row);
  }
  return rows;
}

/// Ring all-reduces with NVLS off are compared with the all-gather's ring: equal bus bandwidth.
double predicted(const Measured& row) {
  const CollectiveModel model(measured_machine(row.machine));
  const CollectiveKind kind = row.collective == "all_reduce"       ? CollectiveKind::all_reduce
                              : row.collective == "reduce_scatter" ? CollectiveKind::reduce_scatter
                                                                   : CollectiveKind::all_gather;
  return model.cost(kind, row.size, row.group).effective_bandwidth().base() / 1e9;
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
  for (const Measured& row : measured_rows()) {
    const double ratio = predicted(row) / row.gigabytes_per_second;
    const bool large = row.size >= Bytes(256 * kMiB);
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
  // Outside among the fitted: 2 x H200's scatter at 256 MiB (12 % fast), its gather and scatter at 1 MiB (26 % fast,
  // where the host's launches decide).
  CHECK(by_class["fitted large"].outside <= 1);
  CHECK(by_class["fitted middle"].outside <= 2);
  CHECK(by_class["fitted large"].bias() < 0.05);
  CHECK(by_class["fitted middle"].bias() < 0.05);
  // Held out: other clouds' networks, SimuMax's B200 fit, RTX PRO 6000 boxes, single figures. Outside are PRO 6000
  // (twice) and 8 x H200 at 4 MB, where two sources differ by a third (docs/cost-model.md).
  CHECK(by_class["held out large"].outside <= 2);
  CHECK(by_class["held out middle"].outside <= 1);
  CHECK(by_class["held out large"].abs_sum / by_class["held out large"].rows < 0.07);
  CHECK(by_class["held out large"].bias() < 0.05);
  CHECK(by_class["held out middle"].bias() < 0.10);
}

namespace {

/// The tables without what was measured on one machine: its all-reduce table is another's.
CollectiveTables with_table_of(std::string_view arch, int nodes, std::string_view other) {
  CollectiveTables tables = builtin_collective_tables();
  const auto find = [&](std::string_view name) {
    return std::ranges::find_if(
        tables.ramps, [&](const CollectiveRamp& r) { return r.arch == name && (r.nodes > 1) == (nodes > 1); });
  };
  const auto lost = find(arch);
  const std::string name = lost->arch;
  *lost = *find(other);
  lost->arch = name;
  return tables;
}

}  // namespace

TEST_CASE("collectives: a machine's all-reduces with another machine's table") {
  // Whole machines held out: what a machine without a measured table of its own is told.
  struct Case {
    const char *machine, *arch, *other;
    double middle, large;  // mean errors, today's: no goal is met in the middle, which is why tables are measured
  };
  for (const Case& c :
       {Case{"h200-8", "Hopper", "Blackwell", 0.28, 0.06}, Case{"b200-8", "Blackwell", "Hopper", 0.32, 0.08},
        Case{"p5-2", "Hopper", "Ampere", 0.38, 0.14}, Case{"p5-2", "Hopper", "Blackwell", 0.40, 0.05},
        Case{"p6-b200-4", "Blackwell", "Hopper", 0.60, 0.07}, Case{"p4de-2", "Ampere", "Hopper", 0.44, 0.03}}) {
    const MachineSpec machine = measured_machine(c.machine);
    const CollectiveTables tables = with_table_of(c.arch, machine.nodes, c.other);
    const CollectiveModel model(machine, CollectiveSetting::isolated, tables);
    Errors middle, large;
    for (const Measured& row : measured_rows()) {
      if (row.machine != c.machine || row.collective != "all_reduce" || row.group.ranks != model.all().ranks) continue;
      if (row.size < Bytes(kMiB)) continue;
      const double value =
          model.cost(CollectiveKind::all_reduce, row.size, row.group).effective_bandwidth().base() / 1e9;
      const bool is_large = row.size >= Bytes(256 * kMiB);
      (is_large ? large : middle).add(value / row.gigabytes_per_second, is_large ? 0.10 : 0.25);
    }
    const auto told = [](const Errors& e) {
      return fmt::format("n {} MAPE {:.1f} % bias {:+.1f} % worst {:.1f} % outside {}", e.rows,
                         100 * e.abs_sum / e.rows, 100 * (std::exp(e.log_sum / e.rows) - 1), 100 * e.worst, e.outside);
    };
    const std::string text =
        fmt::format("{} by {}'s table: middle {}; large {}", c.machine, c.other, told(middle), told(large));
    if (std::getenv("ZEROPLAN_PRINT_TABLES") != nullptr) fmt::print("{}\n", text);
    INFO(text);
    CHECK(middle.abs_sum / middle.rows < c.middle);
    CHECK(large.abs_sum / large.rows < c.large);
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
  for (const Measured& row : measured_rows()) {
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
  const Seconds alone = CollectiveModel(machine).cost(CollectiveKind::all_gather, size, group).alone();
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
      read_collective_tables(R"({"schema": 1, "laws": [], "nvls": [], "ramps": [{"arch": "A", "ranks": 8, "nodes": 1,
        "asymptote": "2 GB/s", "points": [[8, 1], [4, 2]], "source": "s"}]})"),
      HasText("fits/collectives.json:2"));
}

}  // namespace zeroplan::tests
