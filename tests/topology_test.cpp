#include "sim/topology.h"

#include <string>
#include <vector>

#include "models/error.h"
#include "tests/catch.h"
#include "tests/processor_time.h"

using namespace zeroplan;
using zeroplan::tests::HasText;
using zeroplan::tests::WithinRel;

namespace {

/// A box of `count` GPUs with Gen4 links (31.5 GB/s, 25.9875 achievable), 100 GB/s of host memory and no fabric.
MachineSpec box(int count) {
  MachineSpec machine;
  machine.name = "box";
  machine.gpu.name = "G";
  machine.gpu.memory = 80_GiB;
  machine.gpu.memory_bandwidth = 2000_GBps;
  machine.gpu.peak_bf16 = 300.0_TFLOPS;
  machine.gpu.pcie_generation = 4;
  machine.gpu.pcie = 31.5_GBps;
  machine.gpu.p2p_over_pcie = true;
  machine.gpus_per_node = count;
  machine.interconnect = count == 1 ? Interconnect::single : Interconnect::root_complex;
  machine.gpus_per_root_complex = count;
  machine.physical_cores = 32;
  machine.dram = 512_GiB;
  machine.dram_bandwidth = 100_GBps;
  return machine;
}

using Names = std::vector<std::string>;

Names names(const Topology& topology, Endpoint from, Endpoint to) {
  Names result;
  for (const ResourceId id : topology.route(from, to)) result.push_back(topology.resource(id).name);
  return result;
}

double rate(const Topology& topology, Endpoint from, Endpoint to) {
  return topology.width(topology.route(from, to)).base() / 1e9;
}

}  // namespace

TEST_CASE("Two GPUs behind one PCIe switch share its uplink") {
  //  host memory -- socket -- root complex == switch == GPU 0
  //                                               `== GPU 1
  MachineSpec machine = box(2);
  machine.interconnect = Interconnect::pcie_switch;
  machine.gpus_per_pcie_switch = 2;
  const Topology topology = Topology::build(machine);
  CHECK(names(topology, topology.gpu(0), topology.host_of(0)) ==
        Names{"node 0 gpu 0 hbm", "node 0 gpu 0 pcie to host", "node 0 gpu 0 pcie both ways",
              "node 0 pcie switch 0 to host", "node 0 pcie switch 0 both ways", "node 0 host memory 0"});
  CHECK(names(topology, topology.host_of(1), topology.gpu(1)) ==
        Names{"node 0 host memory 0", "node 0 pcie switch 0 from host", "node 0 pcie switch 0 both ways",
              "node 0 gpu 1 pcie from host", "node 0 gpu 1 pcie both ways", "node 0 gpu 1 hbm"});
  // 0.825 x 31.5
  CHECK_THAT(rate(topology, topology.gpu(0), topology.host_of(0)), WithinRel(25.9875, 1e-12));
  // Peers talk below the switch: the uplink stays free.
  CHECK(names(topology, topology.gpu(0), topology.gpu(1)) ==
        Names{"node 0 gpu 0 hbm", "node 0 gpu 0 pcie to host", "node 0 gpu 0 pcie both ways",
              "node 0 gpu 1 pcie from host", "node 0 gpu 1 pcie both ways", "node 0 gpu 1 hbm"});
}

TEST_CASE("Both directions of a PCIe link together carry less than twice one") {
  const Topology gen4 = Topology::build(box(1));
  MachineSpec machine = box(1);
  machine.gpu.pcie_generation = 5;
  machine.gpu.pcie = 63_GBps;
  const Topology gen5 = Topology::build(machine);
  const auto both = [](const Topology& topology) {
    for (const Resource& resource : topology.resources()) {
      if (resource.kind == ResourceKind::pcie_duplex) return resource.capacity / 1e9;
    }
    return 0.0;
  };
  CHECK_THAT(both(gen4), WithinRel(2 * 0.605 * 31.5, 1e-12));
  CHECK_THAT(both(gen5), WithinRel(2 * 0.806 * 63, 1e-12));
}

TEST_CASE("Without peer access GPUs exchange through host memory, which is used twice") {
  MachineSpec machine = box(2);
  machine.gpu.p2p_over_pcie = false;
  machine.dram_bandwidth = 40_GBps;
  const Topology topology = Topology::build(machine);
  CHECK(names(topology, topology.gpu(0), topology.gpu(1)) ==
        Names{"node 0 gpu 0 hbm", "node 0 gpu 0 pcie to host", "node 0 gpu 0 pcie both ways", "node 0 host memory 0",
              "node 0 host memory 0", "node 0 gpu 1 pcie from host", "node 0 gpu 1 pcie both ways",
              "node 0 gpu 1 hbm"});
  CHECK_THAT(rate(topology, topology.gpu(0), topology.gpu(1)), WithinRel(20.0, 1e-12));  // 40 / 2 < 25.9875
  machine.gpu.p2p_over_pcie = std::nullopt;                                              // not known counts as no
  CHECK_THAT(rate(Topology::build(machine), topology.gpu(0), topology.gpu(1)), WithinRel(20.0, 1e-12));
}

TEST_CASE("NVSwitch joins all pairs at the rate of one GPU's links") {
  MachineSpec machine = box(8);
  machine.interconnect = Interconnect::nvswitch;
  machine.nvlink = 300_GBps;
  machine.sockets = 2;
  machine.socket_link = 16_GBps;
  machine.gpus_per_root_complex = 4;
  machine.gpus_per_pcie_switch = 2;
  const Topology topology = Topology::build(machine);
  for (int from = 0; from < 8; ++from) {
    for (int to = 0; to < 8; ++to) {
      if (from == to) continue;
      CHECK(names(topology, topology.gpu(from), topology.gpu(to)) ==
            Names{"node 0 gpu " + std::to_string(from) + " hbm", "node 0 gpu " + std::to_string(from) + " nvlink out",
                  "node 0 gpu " + std::to_string(to) + " nvlink in", "node 0 gpu " + std::to_string(to) + " hbm"});
      CHECK_THAT(rate(topology, topology.gpu(from), topology.gpu(to)), WithinRel(300.0, 1e-12));
    }
  }
  // A copy to the host never leaves over another GPU's links.
  CHECK_THAT(rate(topology, topology.gpu(5), topology.host_of(5)), WithinRel(25.9875, 1e-12));
}

TEST_CASE("A mesh splits each GPU's links over its peers") {
  MachineSpec machine = box(4);
  machine.interconnect = Interconnect::nvlink_mesh;
  machine.nvlink = 300_GBps;
  machine.gpu.nvlink = 300_GBps;
  machine.gpu.nvlink_generation = 3;
  machine.gpu.nvlink_links = 12;
  const Topology topology = Topology::build(machine);
  CHECK(names(topology, topology.gpu(1), topology.gpu(3)) ==
        Names{"node 0 gpu 1 hbm", "node 0 nvlink 1 to 3", "node 0 gpu 3 hbm"});
  CHECK_THAT(rate(topology, topology.gpu(1), topology.gpu(3)), WithinRel(100.0, 1e-12));
}

TEST_CASE("A V100 hybrid cube mesh has double, single and no links; no GPU forwards for others") {
  const Topology topology = Topology::build(find_machine("DGX-1-V100"));
  const auto pair = [&](int from, int to) { return rate(topology, topology.gpu(from), topology.gpu(to)); };
  CHECK_THAT(pair(0, 1), WithinRel(25.0, 1e-12));
  CHECK_THAT(pair(0, 3), WithinRel(50.0, 1e-12));
  CHECK_THAT(pair(0, 4), WithinRel(50.0, 1e-12));
  // GPU 0 and 5 have no link and hang on two sockets (Broadwell: 6 GB/s between them).
  CHECK_THAT(pair(0, 5), WithinRel(6.0, 1e-12));
  for (int gpu = 0; gpu < 8; ++gpu) {  // 6 links of 25 GB/s each
    double links = 0;
    for (const Resource& resource : topology.resources()) {
      if (resource.name.starts_with("node 0 nvlink " + std::to_string(gpu) + " ")) links += resource.capacity;
    }
    CHECK_THAT(links, WithinRel(150e9, 1e-12));
  }
}

TEST_CASE("Bridges join pairs, the other GPUs meet over PCIe") {
  //  GPU 0 ==bridge== GPU 1   GPU 2 ==bridge== GPU 3   and all four under one root complex
  MachineSpec machine = box(4);
  machine.interconnect = Interconnect::nvlink_pairs;
  machine.nvlink = 300_GBps;
  const Topology topology = Topology::build(machine);
  CHECK_THAT(rate(topology, topology.gpu(0), topology.gpu(1)), WithinRel(300.0, 1e-12));
  CHECK_THAT(rate(topology, topology.gpu(3), topology.gpu(2)), WithinRel(300.0, 1e-12));
  CHECK_THAT(rate(topology, topology.gpu(1), topology.gpu(2)), WithinRel(25.9875, 1e-12));
  CHECK(names(topology, topology.gpu(0), topology.gpu(2)).size() == 6);  // not over the bridge
}

TEST_CASE("GPUs of different sockets meet through host memory and the socket link") {
  //  GPU 0 - socket 0 --10 GB/s-- socket 1 - GPU 1
  MachineSpec machine = box(2);
  machine.gpus_per_root_complex = 1;
  machine.sockets = 2;
  machine.socket_link = 10_GBps;
  const Topology topology = Topology::build(machine);
  CHECK(names(topology, topology.gpu(0), topology.gpu(1)) ==
        Names{"node 0 gpu 0 hbm", "node 0 gpu 0 pcie to host", "node 0 gpu 0 pcie both ways", "node 0 host memory 0",
              "node 0 host memory 0", "node 0 socket 0 to 1", "node 0 gpu 1 pcie from host",
              "node 0 gpu 1 pcie both ways", "node 0 gpu 1 hbm"});
  CHECK_THAT(rate(topology, topology.gpu(0), topology.gpu(1)), WithinRel(10.0, 1e-12));
  CHECK(topology.host_of(1) == Endpoint{EndpointKind::dram, 0, 1});
  CHECK(topology.resource(topology.dram(0, 1)).capacity == 50e9);  // each socket has half
  CHECK(topology.resource(topology.cpu(0, 1)).capacity == 16);
}

TEST_CASE("Nodes meet over their NICs: directly with GPUDirect, else through host memory") {
  MachineSpec machine = box(2);
  machine.nodes = 3;
  machine.network = {2, 25_GBps, "InfiniBand", true};
  const Topology direct = Topology::build(machine);
  REQUIRE(direct.num_ranks() == 6);
  CHECK(names(direct, direct.gpu(1), direct.gpu(4)) ==
        Names{"node 0 gpu 1 hbm", "node 0 gpu 1 pcie to host", "node 0 gpu 1 pcie both ways", "node 0 nic 1 out",
              "node 2 nic 0 in", "node 2 gpu 0 pcie from host", "node 2 gpu 0 pcie both ways", "node 2 gpu 0 hbm"});
  CHECK_THAT(rate(direct, direct.gpu(1), direct.gpu(4)), WithinRel(12.5, 1e-12));  // one of two NICs

  machine.network = {1, 1.25_GBps, "Ethernet", false};
  const Topology bounced = Topology::build(machine);
  CHECK(names(bounced, bounced.gpu(0), bounced.gpu(3)) ==
        Names{"node 0 gpu 0 hbm", "node 0 gpu 0 pcie to host", "node 0 gpu 0 pcie both ways", "node 0 host memory 0",
              "node 0 host memory 0", "node 0 nic 0 out", "node 1 nic 0 in", "node 1 host memory 0",
              "node 1 host memory 0", "node 1 gpu 1 pcie from host", "node 1 gpu 1 pcie both ways",
              "node 1 gpu 1 hbm"});
  CHECK(bounced.nic_groups() == 1);
  CHECK(bounced.nic_of(1) == bounced.nic_of(0));  // shared
}

TEST_CASE("NICs and GPUs behind one switch meet there") {
  const Topology topology = Topology::build([] {
    MachineSpec machine = find_machine("DGX-A100-640GB");
    set_nodes(machine, 2);
    return machine;
  }());
  for (const std::string& name : names(topology, topology.gpu(1), topology.gpu(9))) {
    CHECK_THAT(name, !HasText("switch"));
    CHECK_THAT(name, !HasText("host memory"));
  }
  CHECK_THAT(rate(topology, topology.gpu(1), topology.gpu(9)), WithinRel(25.0, 1e-12));
}

TEST_CASE("NVMe is read and written at its own rates") {
  MachineSpec machine = box(2);
  machine.nvme = {4, Bytes(8e12), 8_GBps, 4_GBps};
  const Topology topology = Topology::build(machine);
  CHECK(names(topology, topology.nvme(0), topology.host_of(0)) == Names{"node 0 nvme read", "node 0 host memory 0"});
  CHECK(names(topology, topology.host_of(0), topology.nvme(0)) == Names{"node 0 host memory 0", "node 0 nvme write"});
  CHECK_THAT(rate(topology, topology.nvme(0), topology.gpu(1)),
             WithinRel(0.90 * 8.0, 1e-12));  // 0.90 of the given rates
  CHECK_THAT(rate(topology, topology.gpu(1), topology.nvme(0)), WithinRel(0.90 * 4.0, 1e-12));
  CHECK_THAT(topology.resource(topology.nvme_read(0)).capacity, WithinRel(0.90 * 8e9, 1e-12));
  CHECK_THROWS_WITH(Topology::build(box(2)).nvme_read(0), HasText("NVMe"));
}

TEST_CASE("Superchips copy over C2C, which their GPUs share") {
  const Topology topology = Topology::build(find_machine("GB200-NVL72-tray"));
  const Names first = names(topology, topology.host_of(0), topology.gpu(0));
  const Names second = names(topology, topology.host_of(1), topology.gpu(1));
  CHECK(first[1] == "node 0 superchip 0 c2c from host");
  CHECK(second[1] == first[1]);
  CHECK(names(topology, topology.host_of(2), topology.gpu(2))[1] == "node 0 superchip 1 c2c from host");
  CHECK_THAT(rate(topology, topology.host_of(0), topology.gpu(0)), WithinRel(350.0, 1e-9));
}

TEST_CASE("Ranks that compute on the host copy through its memory alone") {
  MachineSpec machine = box(2);
  machine.host_device = true;
  machine.gpu.pcie = {};
  const Topology topology = Topology::build(machine);
  CHECK(names(topology, topology.gpu(0), topology.host_of(0)) == Names{"node 0 gpu 0 hbm", "node 0 host memory 0"});
}

TEST_CASE("A rank that cannot be reached is refused, with its number") {
  MachineSpec machine = box(4);
  machine.nodes = 2;
  CHECK_THROWS_WITH(Topology::build(machine), HasText("rank 4") && HasText("network"));
  machine.nodes = 1;
  machine.gpu.pcie = {};
  CHECK_THROWS_WITH(Topology::build(machine), HasText("rank 0") && HasText("gpu.pcie"));
  machine = box(4);
  machine.sockets = 2;  // and no link between them
  CHECK_THROWS_WITH(Topology::build(machine), HasText("rank 0") && HasText("socket_link"));
  machine = box(1);
  machine.gpu.peak_bf16 = std::nullopt;
  CHECK_THROWS_WITH(Topology::build(machine), HasText("peak_bf16"));
}

TEST_CASE("Every catalog node has routes between all ranks, to the host and across two nodes") {
  for (const std::string& name : machine_names()) {
    INFO(name);
    MachineSpec machine = find_machine(name);
    set_nodes(machine, 2);
    const Topology topology = Topology::build(machine);
    for (int from = 0; from < topology.num_ranks(); ++from) {
      CHECK(rate(topology, topology.gpu(from), topology.host_of(from)) > 0);
      CHECK(rate(topology, topology.host_of(from), topology.gpu(from)) > 0);
      for (int to = 0; to < topology.num_ranks(); ++to) {
        if (from != to) CHECK(rate(topology, topology.gpu(from), topology.gpu(to)) > 0);
      }
    }
    CHECK(topology.route(topology.gpu(0), topology.gpu(0)).empty());
  }
}

TEST_CASE("Equal machines give equal resources and routes, and a span stays valid") {
  MachineSpec machine = find_machine("p3.16xlarge");
  set_nodes(machine, 4);
  const Topology first = Topology::build(machine);
  const Topology second = Topology::build(machine);
  const auto kept = first.route(first.gpu(0), first.gpu(9));
  const std::vector<ResourceId> copy(kept.begin(), kept.end());
  for (int from = 31; from >= 0; --from) {
    for (int to = 0; to < 32; ++to) second.route(second.gpu(from), second.gpu(to));
  }
  for (int from = 0; from < 32; ++from) {
    for (int to = 0; to < 32; ++to) {
      const auto a = first.route(first.gpu(from), first.gpu(to));
      const auto b = second.route(second.gpu(from), second.gpu(to));
      CHECK(std::equal(a.begin(), a.end(), b.begin(), b.end()));
    }
  }
  CHECK(std::equal(kept.begin(), kept.end(), copy.begin(), copy.end()));
}

TEST_CASE("Building a topology is quick for one node and for 1,024 GPUs") {
  const auto milliseconds = [](const MachineSpec& machine) {
    const double begin = tests::processor_seconds();
    const Topology topology = Topology::build(machine);
    for (int rank = 0; rank < topology.num_ranks(); ++rank) {
      topology.route(topology.gpu(rank), topology.host_of(rank));
      topology.route(topology.gpu(rank), topology.gpu((rank + 1) % topology.num_ranks()));
    }
    return 1e3 * (tests::processor_seconds() - begin);
  };
  MachineSpec machine = find_machine("DGX-H100");
  const double one = milliseconds(machine);
  set_nodes(machine, 128);
  const double many = milliseconds(machine);
  WARN("8 GPUs: " << one << " ms, 1,024 GPUs: " << many << " ms");
  CHECK(one < 50);  // 0.03 and 1.3 ms in Release here; sanitizers are slow
  CHECK(many < 1000);
}
