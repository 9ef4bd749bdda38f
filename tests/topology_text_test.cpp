#include "models/topology_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "models/error.h"
#include "models/topology_form.h"
#include "sim/topology.h"
#include "sim/topology_routes.h"
#include "tests/catch.h"

using namespace zeroplan;
using zeroplan::tests::HasText;
using zeroplan::tests::WithinRel;

namespace {

const std::string kFolder = std::string(ZEROPLAN_TESTS_DIR) + "/data/topology/";

std::string sample(const std::string& name) {
  std::ifstream stream(kFolder + name, std::ios::binary);
  REQUIRE(stream);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// Everything that is worked out from one file.
struct Node {
  NodeTopology topology;
  NodeForm form;
  MachineSpec machine;
  std::vector<GpuRoute> routes;
  std::vector<HostCopy> copies;
};

Node node_of(const std::string& text, const std::string& gpu_name = "", const std::string& file = "t") {
  Node node;
  node.topology = read_topology(text, file);
  std::optional<CatalogGpu> gpu;
  if (!gpu_name.empty()) gpu = gpu_of_topology(gpu_name, node.topology);
  node.form = node_form(node.topology, gpu ? &*gpu : nullptr);
  node.machine = machine_from(node.topology, node.form, gpu ? &*gpu : nullptr);
  node.routes = gpu_routes(node.topology, node.form, node.machine);
  node.copies = host_copies(node.topology, node.form, node.machine);
  return node;
}

std::string error_of(const std::string& text, const std::string& gpu = "") {
  try {
    node_of(text, gpu);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

std::string replaced(std::string text, const std::string& from, const std::string& to, int nth = 1) {
  std::size_t at = text.find(from);
  for (int i = 1; i < nth && at != std::string::npos; ++i) at = text.find(from, at + 1);
  INFO(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

std::string word(const NodeTopology& topology, std::size_t a, std::size_t b) { return to_string(topology.link(a, b)); }

bool assumes(const std::vector<Assumption>& assumptions, const std::string& what) {
  return std::ranges::any_of(assumptions, [&](const Assumption& one) { return one.what == what; });
}

using Groups = std::vector<std::vector<int>>;

// Three GPUs and a NIC: line 1 is the header, 2 to 5 the rows, 7 the legend, 11 the names of NICs.
const std::string kSmall =
    "\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV4\tSYS\tPIX\t0-15\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tSYS\tPIX\t0-15\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tSYS\t16-31\t1\t\tN/A\n"
    "NIC0\tPIX\tPIX\tSYS\t X \t\n"
    "\n"
    "Legend:\n"
    "\n"
    "  X    = Self\n"
    "\n"
    "NIC Legend:\n"
    "\n"
    "  NIC0: mlx5_0\n";

}  // namespace

TEST_CASE("DGX A100: switch, trees seen through NICs, NPS4 NUMA nodes as two sockets") {
  const Node node = node_of(sample("dgx-a100.txt"), "A100");
  const NodeTopology& topology = node.topology;
  REQUIRE(topology.gpus.size() == 8);
  REQUIRE(topology.nics.size() == 10);
  CHECK(word(topology, 0, 7) == "NV12");
  CHECK(word(topology, 8, 9) == "PXB");
  CHECK(topology.gpus[0].numa == std::vector<int>{3});
  CHECK(topology.gpus[4].cpus == "112-127,240-255");
  CHECK(topology.nics[9].device == "mlx5_9");
  CHECK(node.form.trees == Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}});
  CHECK(node.form.sockets == Groups{{0, 1, 2, 3}, {4, 5, 6, 7}});
  CHECK(node.form.numa_nodes == Groups{{1, 3}, {5, 7}});
  CHECK(node.form.nic_of_gpu == std::vector<int>{0, 1, 2, 3, 5, 6, 7, 8});  // 4 and 9 are for storage
  CHECK(node.machine.interconnect == Interconnect::nvswitch);
  CHECK(node.machine.nvlink == 300_GBps);
  CHECK(node.machine.gpus_per_pcie_switch == 2);
  CHECK(node.machine.gpus_per_root_complex == 2);
  CHECK(node.machine.sockets == 2);
  CHECK(node.machine.network.nics == 8);
  CHECK(node.machine.network.gpudirect);
  CHECK(assumes(node.form.assumptions, "CPU sockets"));
  // 0.825 x 31.5 through an uplink for two
  CHECK_THAT(node.copies[0].together.base() / 1e9, WithinRel(25.9875 / 2, 1e-12));
  CHECK(node.copies[3].limit == "uplink of PCIe switch 1");
  CHECK(node.copies[3].shared_with == std::vector<int>{2, 3});
  CHECK(node.routes.size() == 28);
  CHECK(node.routes[0].way == "NVSwitch, 12 links");
  CHECK(node.routes[0].rate == 300_GBps);
}

TEST_CASE("HGX H100: one switch a GPU, host memory is what all GPUs share") {
  const Node text = node_of(sample("hgx-h100.txt"), "H100");
  CHECK(text.machine.interconnect == Interconnect::nvswitch);
  CHECK(text.machine.gpus_per_pcie_switch == 1);
  CHECK(text.machine.gpus_per_root_complex == 1);  // NODE: several host bridges
  CHECK(text.form.sockets == Groups{{0, 1, 2, 3}, {4, 5, 6, 7}});
  CHECK(text.form.nic_of_gpu == std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(text.copies[0].limit == "memory of socket 0");
  CHECK_THAT(text.copies[0].alone.base() / 1e9, WithinRel(0.88 * 63, 1e-12));

  const Node xml = node_of(sample("hgx-h100.xml"), "H100");
  CHECK(xml.topology.nvswitch);
  CHECK(xml.topology.gpus[5].nvlinks == 18);
  CHECK(word(xml.topology, 0, 1) == "NV18");
  CHECK(word(xml.topology, 0, 8) == "PIX");
  CHECK(word(xml.topology, 0, 9) == "PHB");
  CHECK(word(xml.topology, 0, 12) == "SYS");
  CHECK(xml.topology.gpus[0].pcie == PcieLink{5, 16});
  CHECK(xml.topology.nics[3].speed == 50_GBps);
  CHECK(xml.machine.interconnect == Interconnect::nvswitch);
  CHECK(xml.machine.nvlink == 450_GBps);
  CHECK(xml.machine.gpus_per_root_complex == 4);
  CHECK(xml.machine.network.bandwidth == 400_GBps);
  CHECK(xml.machine.network.gpudirect);
  CHECK(xml.topology.notes.empty());
  CHECK_THAT(
      error_of(sample("hgx-h100.xml"), "A100"),
      HasText("--gpu: expected a GPU of compute capability 9.0 as t says of GPU0, found A100-SXM4-80GB with 8.0"));
}

TEST_CASE("Four A100 that meet by four links each are a mesh, in both formats") {
  const Node text = node_of(sample("a100-mesh.txt"), "a100-80g");
  CHECK(text.topology.nics[0].name == "mlx5_0");
  CHECK(text.machine.interconnect == Interconnect::nvlink_mesh);
  CHECK(text.form.nvlinks == 12);
  CHECK(text.machine.nvlink == 300_GBps);
  CHECK(text.routes[0].rate == 100_GBps);
  const Node xml = node_of(sample("a100-mesh.xml"), "a100-80g");
  CHECK(xml.machine.interconnect == Interconnect::nvlink_mesh);
  CHECK(xml.machine.nvlink == 300_GBps);
  CHECK(xml.form.trees.size() == 4);
  CHECK(xml.form.complexes == Groups{{0, 1}, {2, 3}});
  CHECK(xml.topology.device(4).speed == 25_GBps);
}

TEST_CASE("Two 3090 with a bridge and without") {
  const Node bridge = node_of(sample("3090-bridge.txt"), "3090");
  CHECK(bridge.machine.interconnect == Interconnect::nvlink_pairs);
  CHECK(bridge.machine.nvlink == 56.25_GBps);
  CHECK_FALSE(bridge.form.trees_known);
  CHECK(bridge.copies[0].limit == "uplink of assumed PCIe switch 0");
  CHECK(assumes(bridge.machine.assumptions, "GPUs per PCIe switch"));
  const Node none = node_of(sample("3090-no-bridge.txt"), "3090");
  CHECK(none.machine.interconnect == Interconnect::root_complex);
  CHECK(none.machine.gpus_per_root_complex == 2);
  CHECK(none.routes[0].way == "host memory");  // GeForce has no peer access
  CHECK(none.copies[0].limit == "its own link");
  CHECK(assumes(none.form.assumptions, "NVLink"));
}

TEST_CASE("Eight L40S on two sockets: a tree of switches each") {
  for (const char* name : {"l40s-two-sockets.txt", "l40s-bare.xml"}) {
    INFO(name);
    const Node node = node_of(sample(name), "L40S");
    CHECK(node.machine.interconnect == Interconnect::pcie_switch);
    CHECK(node.form.trees == Groups{{0, 1, 2, 3}, {4, 5, 6, 7}});
    CHECK(node.machine.gpus_per_pcie_switch == 4);
    CHECK(node.machine.sockets == 2);
    CHECK(word(node.topology, 0, 1) == "PIX");
    CHECK(word(node.topology, 0, 2) == "PXB");
    CHECK(word(node.topology, 0, 4) == "SYS");
    CHECK(node.form.nic_of_gpu == std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1});
    CHECK_THAT(node.copies[7].together.base() / 1e9, WithinRel(25.9875 / 4, 1e-12));
    CHECK(node.routes[0].way == "PCIe, below one switch");
    CHECK_THAT(node.routes[0].rate.base() / 1e9, WithinRel(25.9875, 1e-12));
    CHECK(node.routes[3].way == "host memory, across NUMA nodes");
    CHECK(node.routes[3].rate == 16_GBps);
  }
}

TEST_CASE("A single GPU, a virtual machine, WSL 2") {
  const Node single = node_of(sample("single.txt"), "H100-PCIe-80GB");
  CHECK(single.machine.interconnect == Interconnect::single);
  CHECK(single.routes.empty());
  CHECK(single.form.nic_of_gpu == std::vector<int>{0});
  const Node vm = node_of(sample("vm-phb.txt"), "T4");
  CHECK(vm.machine.interconnect == Interconnect::root_complex);
  CHECK(vm.machine.gpus_per_root_complex == 4);
  CHECK(vm.machine.sockets == 1);
  CHECK(vm.topology.gpus[0].numa.empty());
  CHECK(vm.topology.gpus[0].cpus == "0-47");
  CHECK(node_of(sample("wsl.txt")).machine.interconnect == Interconnect::single);
}

TEST_CASE("Old drivers: SOC is SYS, one title, bridged pairs; the cube mesh of eight V100") {
  const Node pairs = node_of(sample("v100-pairs-384.txt"), "V100-SXM2-16GB");
  CHECK(word(pairs.topology, 0, 2) == "SYS");
  CHECK(pairs.machine.interconnect == Interconnect::nvlink_pairs);
  CHECK(pairs.machine.nvlink == 50_GBps);
  CHECK(pairs.form.sockets == Groups{{0, 1}, {2, 3}});
  const Node cube = node_of(sample("dgx-1-v100.txt"), "V100-SXM2-32GB");
  CHECK(cube.machine.interconnect == Interconnect::nvlink_mesh);
  CHECK(cube.machine.nvlink == 150_GBps);
  CHECK(cube.machine.gpus_per_pcie_switch == 2);
  CHECK(cube.machine.gpus_per_root_complex == 4);
}

TEST_CASE("Superchips: GPU memory is a NUMA node, copies take C2C") {
  const Node node = node_of(sample("gb200-tray.txt"), "GB200");
  CHECK(node.topology.superchip);
  CHECK(node.topology.gpus[3].memory_node == 26);
  CHECK(node.machine.sockets == 2);
  CHECK(node.copies[0].limit == "C2C of superchip 0");
  CHECK(node.copies[0].shared_with == std::vector<int>{0, 1});
  CHECK(node_of(sample("gb200-tray.txt")).copies.empty());
}

TEST_CASE("PCIe widths of the XML: a narrow slot, a narrow uplink, what is not read is named") {
  const Node slot = node_of(sample("3090-x4.xml"), "3090");
  CHECK(slot.topology.gpus[0].device == "0000:0a:00.0");
  CHECK(slot.topology.gpus[0].numa.empty());
  CHECK(slot.topology.gpus[1].pcie == PcieLink{3, 4});
  CHECK_THAT(slot.copies[0].alone.base() / 1e9, WithinRel(0.825 * 31.5, 1e-12));
  CHECK_THAT(slot.copies[1].alone.base() / 1e9, WithinRel(0.825 * 15.75 / 4, 1e-12));
  CHECK(slot.machine.gpu.pcie == BytesPerSecond(15.75e9 / 4));  // equal GPUs: the slower
  const Node uplink = node_of(sample("x8-uplink.xml"), "A100-PCIe-80GB");
  CHECK(uplink.copies[0].limit == "uplink of 0000:a0:00.0");
  CHECK_THAT(uplink.copies[0].together.base() / 1e9, WithinRel(0.825 * 31.5 / 2 / 2, 1e-12));
  CHECK(uplink.topology.nics[0].pcie == PcieLink{});
  CHECK_FALSE(uplink.machine.network.gpudirect);
  REQUIRE(uplink.topology.notes.size() == 1);
  CHECK(uplink.topology.notes[0].value == "railId of <net>");
}

TEST_CASE("Routes are those of the simulator where a machine of equal GPUs can say the same") {
  const std::vector<std::pair<std::string, std::string>> samples{{"dgx-a100.txt", "A100"},
                                                                 {"hgx-h100.txt", "H100"},
                                                                 {"hgx-h100.xml", "H100"},
                                                                 {"a100-mesh.xml", "A100"},
                                                                 {"3090-bridge.txt", "3090"},
                                                                 {"3090-no-bridge.txt", "3090"},
                                                                 {"l40s-two-sockets.txt", "L40S"},
                                                                 {"l40s-bare.xml", "L40S"},
                                                                 {"vm-phb.txt", "T4"},
                                                                 {"vm-phb.txt", "L4"},
                                                                 {"dgx-1-v100.txt", "V100-SXM2-16GB"}};
  for (const auto& [name, gpu] : samples) {
    INFO(name);
    const Node node = node_of(sample(name), gpu);
    const Topology topology = Topology::build(node.machine);
    for (const GpuRoute& route : node.routes) {
      INFO(route.from << " to " << route.to << ": " << route.way);
      const auto ids = topology.route(topology.gpu(route.from), topology.gpu(route.to));
      CHECK_THAT(topology.width(ids).base(), WithinRel(route.rate.base(), 1e-12));
    }
    for (const HostCopy& copy : node.copies) {
      const auto ids = topology.route(topology.gpu(copy.gpu), topology.host_of(copy.gpu));
      CHECK_THAT(topology.width(ids).base(), WithinRel(copy.alone.base(), 1e-12));
      CHECK(copy.together <= copy.alone);
    }
  }
}

TEST_CASE("Every sample's machine is written and read back, and is the same twice") {
  const std::vector<std::pair<std::string, std::string>> samples{
      {"dgx-a100.txt", "A100"},    {"hgx-h100.xml", "H100"},      {"a100-mesh.txt", "A100"},   {"3090-x4.xml", "3090"},
      {"3090-bridge.txt", "3090"}, {"l40s-bare.xml", "L40S"},     {"gb200-tray.txt", "GB200"}, {"single.txt", "H100"},
      {"x8-uplink.xml", "A100"},   {"v100-pairs-384.txt", "V100"}};
  for (const auto& [name, gpu] : samples) {
    INFO(name);
    const MachineSpec machine = node_of(sample(name), gpu == "V100" ? "V100-SXM2-16GB" : gpu).machine;
    CHECK(read_machine(write_machine(machine), "m.json") == machine);
    CHECK(node_of(sample(name), gpu == "V100" ? "V100-SXM2-16GB" : gpu).machine == machine);
  }
}

TEST_CASE("Tabs, blanks, line ends and escapes do not matter") {
  const NodeTopology plain = read_topology(kSmall, "t");
  std::string blanks = kSmall, crlf;
  std::ranges::replace(blanks, '\t', ' ');
  for (const char c : kSmall) crlf += c == '\n' ? "\r\n" : std::string(1, c);
  const std::string ansi = "\x1b[4m" + replaced(kSmall, "GPU NUMA ID", "GPU NUMA ID\x1b[0m");
  for (const std::string& text : {blanks, crlf, ansi, "\xEF\xBB\xBF" + kSmall, "\n\n" + kSmall,
                                  kSmall.substr(0, kSmall.size() - 1), kSmall.substr(0, kSmall.find("\nLegend"))}) {
    const NodeTopology other = read_topology(text, "t");
    CHECK(other.links == plain.links);
    CHECK(other.pcie == plain.pcie);
    CHECK(other.gpus[2].numa == std::vector<int>{1});
  }
  CHECK(plain.pcie_between(0, 1) == Connection::pxb);  // both below the switch of NIC0
  CHECK(node_of(kSmall).machine.interconnect == Interconnect::pcie_switch);
  CHECK(assumes(node_of(kSmall).form.assumptions, "NVLink"));  // one GPU has none
}

TEST_CASE("Counts decide between a switch and a mesh; --gpu helps where they cannot") {
  const auto full = [](int gpus, const std::string& link) {
    std::string text = " ";
    for (int i = 0; i < gpus; ++i) text += fmt::format("GPU{} ", i);
    text += "CPU Affinity\n";
    for (int i = 0; i < gpus; ++i) {
      text += fmt::format("GPU{} ", i);
      for (int j = 0; j < gpus; ++j) text += (i == j ? "X" : link) + " ";
      text += "0-7\n";
    }
    return text;
  };
  CHECK(node_of(full(4, "NV6")).machine.interconnect == Interconnect::nvlink_mesh);
  CHECK(node_of(full(4, "NV6"), "V100-SXM2-32GB").machine.interconnect == Interconnect::nvswitch);
  CHECK(node_of(full(3, "NV12")).machine.interconnect == Interconnect::nvswitch);
  CHECK(node_of(full(2, "NV18"), "H100").machine.interconnect == Interconnect::nvswitch);
  CHECK(node_of(full(2, "NV12"), "A100-PCIe-80GB").machine.interconnect == Interconnect::nvlink_pairs);
  CHECK_THAT(error_of(full(8, "NV18"), "A100"), HasText("--gpu: expected a GPU with 18 NVLinks as t has them, found"));
  CHECK_THAT(error_of(full(2, "NV4"), "309O"), HasText("--gpu: unknown GPU \"309O\": did you mean 3090"));
}

TEST_CASE("Malformed matrices are refused with line, expected and found") {
  struct Case {
    std::string text, error;
  };
  const auto small = [](const std::string& from, const std::string& to, int nth = 1) {
    return replaced(kSmall, from, to, nth);
  };
  const std::vector<Case> cases{
      {"", "t:1: expected the output of `nvidia-smi topo -m` or NCCL's topology XML, found an empty file"},
      {" \n\t\r\n", "t:1: expected the output"},
      {"\x1b[4m\x1b[0m\n", "t:1: expected a header"},
      {"Failed to initialize NVML: Driver/library version mismatch\n", "t:1: expected a header that begins with GPU0"},
      {"# nvidia-smi topo -m\n" + kSmall,
       "t:1: expected a header that begins with GPU0, found \"# nvidia-smi topo -m\""},
      {"GPU0\n", "t:1: expected the column \"CPU Affinity\" behind GPU0, found the end of the line"},
      {"CPU Affinity\n", "t:1: expected a header that begins with GPU0"},
      {"NIC0 CPU Affinity\n", "t:1: expected a header that begins with GPU0"},
      {"GPU CPU Affinity\n", "t:1: expected a header that begins with GPU0"},
      {std::string("\tGPU0\0\n", 7), "t:1: expected text, found a NUL character"},
      {small("CPU Affinity", "CPU Afinity"), "t:1: expected the column \"CPU Affinity\", found \"Afinity\""},
      {small("CPU Affinity\t", ""), "t:1: expected the column \"CPU Affinity\", found \"NUMA\""},
      {small("NUMA Affinity", "NUMA"), "t:1: expected the column \"NUMA Affinity\", found \"GPU\""},
      {small("GPU NUMA ID", "GPU NUMA"), "t:1: expected the column \"GPU NUMA ID\", found nothing"},
      {small("GPU NUMA ID", "GPU NUMA ID MIG"), "t:1: expected the end of the header, found \"MIG\""},
      {small("GPU1", "GPU0"), "t:1: expected each device once, found the column GPU0 twice"},
      {small("NIC0", "GPU_"),
       "t:1: expected a device such as GPU0, NIC0 or mlx5_0, or \"CPU Affinity\", found \"GPU_\""},
      {small("GPU2\tNIC0", "NIC0\tGPU2"), "t:1: expected the GPUs before the NICs, found GPU2 behind NIC0"},
      {small("NV4", "NV0"), "t:2: row GPU0, column GPU1: expected NV1 to NV72, found \"NV0\""},
      {small("NV4", "NV73"), "t:2: row GPU0, column GPU1: expected NV1 to NV72"},
      {small("NV4", "NV99999999999"), "t:2: row GPU0, column GPU1: expected NV1 to NV72"},
      {small("NV4", "NV"), "expected X, PIX, PXB, PHB, NODE, SYS or NV#, found \"NV\": did you mean NV1"},
      {small("NV4", "NV#"), "t:2: row GPU0, column GPU1: expected X"},
      {small("SYS", "SYSS"), "found \"SYSS\": did you mean SYS?"},
      {small("PIX", "PX1"), "t:2: row GPU0, column NIC0: expected X"},
      {small("SYS", "sys"), "found \"sys\": did you mean SYS?"},
      {small("SYS", "\x01"), "found \"?\""},
      {small(" X ", "SYS"), "t:2: row GPU0, column GPU0: expected X (self), found SYS"},
      {small("SYS", "X"), "t:2: row GPU0, column GPU2: expected a connection to another device, found X"},
      {small("NV4", "NV2"), "t:3: row GPU1, column GPU0: expected NV2 as line 2 says of the same two, found NV4"},
      {small("SYS", "NODE"), "t:4: row GPU2, column GPU0: expected NODE as line 2 says of the same two, found SYS"},
      {small("PIX", "PXB", 3), "t:5: row NIC0, column GPU0: expected PIX as line 2 says of the same two, found PXB"},
      {small("PIX", "NV4"), "t:2: row GPU0, column NIC0: expected a PCIe connection of the NIC, found NV4"},
      {small("NV4\tSYS\tPIX\t0-15\t0\t\tN/A", "NV4"), "t:2: row GPU0: expected 4 connections, one a device, found 2"},
      {small("NIC0\tPIX\tPIX\tSYS\t X \t\n", "NIC0\tPIX\tPIX\n"), "t:5: row NIC0: expected 4 connections"},
      {small("0\t\tN/A", ""),
       "t:2: row GPU0: expected \"NUMA Affinity\" in the last columns, found the end of the line"},
      {small("\tN/A", ""), "t:2: row GPU0: expected \"GPU NUMA ID\" in the last columns"},
      {small("N/A", "N/A 7"), "t:2: row GPU0: expected 4 connections and 3 columns behind them, found more: \"7\""},
      {small("SYS\tPIX\t0-15", "SYS\tPIX\tSYS\t0-15"), "t:2: row GPU0: expected 4 connections and 3 columns"},
      {small("0-15", "0-"), "t:2: row GPU0: CPU Affinity: expected a list such as 0-15,32-47 or N/A, found \"0-\""},
      {small("0-15", "15-0"), "t:2: row GPU0: CPU Affinity: expected a list"},
      {small("0-15", "0-15,3"), "t:2: row GPU0: CPU Affinity: expected a list"},
      {small("0-15", "0-99999999999"), "t:2: row GPU0: CPU Affinity: expected a list"},
      {small("16-31\t1", "16-31\tone"), "t:4: row GPU2: NUMA Affinity: expected a list"},
      {small("16-31\t1", "16-31\t-1"), "t:4: row GPU2: NUMA Affinity: expected a list"},
      {small("N/A", "1-2"), "t:2: row GPU0: GPU NUMA ID: expected one number or N/A, found \"1-2\""},
      {small("X \t\n", "X \tSYS\n"), "t:5: row NIC0: expected 4 connections, found more: \"SYS\""},
      {small("\nGPU1", "\nGPU0"), "t:3: expected the row of GPU1, found GPU0 again (first in line 2)"},
      {small("\nGPU1", "\nGPU2"), "t:3: expected the row of GPU1, found \"GPU2\""},
      {small("\nGPU1", "\nGPX1"), "t:3: expected the row of GPU1, found \"GPX1\""},
      {small("NIC0\tPIX\tPIX\tSYS\t X \t\n", ""), "t:6: expected the row of NIC0, found \"Legend:\""},
      {small("\nLegend:", "NIC1\tPIX\nLegend:"), "t:6: expected the end of the table or \"Legend:\" after 4 rows"},
      {kSmall.substr(0, kSmall.find("GPU2\tSYS")), "t:3: expected the row of GPU2 (3 of 4), found the end of the file"},
      {kSmall.substr(0, kSmall.find("\nGPU0") + 1),
       "t:1: expected the row of GPU0 (1 of 4), found the end of the file"},
      {small("Legend:", "Legende:"), "t:7: expected the end of the table or \"Legend:\""},
      {small("  X    = Self", "$ ls"), "t:9: expected a line of the legend"},
      {small("NIC0: mlx5_0", "NIC1: mlx5_0"), "t:13: expected a NIC of the table, found \"NIC1\": did you mean NIC0?"},
      {small("NIC0: mlx5_0", "NIC0 mlx5_0"), "t:13: expected a NIC and its device such as"},
      {small("NIC0: mlx5_0", "NIC0:"), "t:13: expected a NIC and its device such as"},
      {small("  NIC0: mlx5_0", ""), "t:13: expected NIC0 in the NIC legend, found the end of the file"},
      {kSmall + "  NIC0: mlx5_1\n", "t:14: expected each NIC once in the legend, found NIC0 again"},
  };
  CHECK(cases.size() >= 60);
  for (const Case& one : cases) {
    INFO(one.text);
    CHECK_THAT(error_of(one.text), HasText(one.error));
  }
}

TEST_CASE("Malformed XML is refused with line, expected and found") {
  const std::string good =
      "<system version=\"1\">\n"
      " <cpu numaid=\"0\" affinity=\"f\">\n"
      "  <pci busid=\"0:1\" class=\"0x030200\" link_speed=\"16.0 GT/s PCIe\" link_width=\"16\">\n"
      "   <gpu dev=\"0\" sm=\"80\">\n"
      "    <nvlink target=\"0:2\" count=\"4\" tclass=\"0x030200\"/>\n"
      "   </gpu></pci>\n"
      "  <pci busid=\"0:2\" class=\"0x030200\" link_speed=\"16.0 GT/s PCIe\" link_width=\"16\">\n"
      "   <gpu dev=\"1\" sm=\"80\"><nvlink target=\"0:1\" count=\"4\" tclass=\"0x030200\"/></gpu></pci>\n"
      "  <pci busid=\"0:3\" class=\"0x020700\"><nic>\n"
      "   <net name=\"mlx5_0\" dev=\"0\" speed=\"200000\" port=\"1\" gdr=\"1\"/></nic></pci>\n"
      " </cpu>\n"
      "</system>\n";
  REQUIRE(error_of(good) == "no error");
  struct Case {
    std::string from, to, error;
  };
  const std::vector<Case> cases{
      {"<system version=\"1\">", "<sistem version=\"1\">", "t:12: expected well-formed XML"},
      {"version=\"1\"", "version=\"9\"", "t:1: <system>: version: expected a number from 1 to 2, found \"9\""},
      {" version=\"1\"", "", "t:1: <system>: expected the attribute version, found none"},
      {"</system>\n", "", "expected well-formed XML"},
      {"</system>\n", "</system>\n<system/>", "t:13: expected the end of the file after </system>, found \"system\""},
      {"</system>\n", "</system>\n</cpu>", "t:13: expected well-formed XML"},
      {" <cpu numaid", " text <cpu numaid", "t:2: expected an element inside <system>, found the text \"text"},
      {"<nic>", "<nick>", "expected well-formed XML"},
      {"numaid=\"0\"", "numaid=\"x\"", "t:2: <cpu>: numaid: expected a number from -1 to 65535, found \"x\""},
      {"numaid=\"0\" ", "", "t:2: <cpu>: expected the attribute numaid, found none"},
      {"affinity=\"f\"", "numaid=\"0\"", "t:2: <cpu>: expected each attribute once, found numaid again"},
      {"affinity=\"f\"", "affinity=f", "t:2: expected well-formed XML"},
      {"busid=\"0:2\"", "busid=\"0:1\"", "t:7: <pci>: expected each bus id once, found 0:1 again (first in line 3)"},
      {"busid=\"0:2\"", "", "t:7: <pci>: expected the attribute busid, found none"},
      {"16.0 GT/s PCIe", "17 GT/s", "t:3: <pci>: link_speed: expected 2.5, 5, 8, 16, 32 or 64 GT/s, found \"17 GT/s\""},
      {"16.0 GT/s PCIe", "16.0 GB/s", "t:3: <pci>: link_speed: expected"},
      {"link_width=\"16\"", "link_width=\"3\"",
       "t:3: <pci>: link_width: expected 1, 2, 4, 8, 12, 16 or 32 lanes, found 3"},
      {"link_width=\"16\"", "link_width=\"-1\"", "t:3: <pci>: link_width: expected a number from 0 to 255"},
      {"dev=\"1\"", "dev=\"0\"", "t:8: <gpu>: dev: expected each GPU once, found 0 again"},
      {"dev=\"1\"", "dev=\"99999\"", "t:8: <gpu>: dev: expected a number from 0 to 511"},
      {"dev=\"1\"", "", "t:8: <gpu>: expected the attribute dev, found none"},
      {"sm=\"80\"", "sm=\"8.0\"", "t:4: <gpu>: sm: expected a number from 0 to 1000, found \"8.0\""},
      {"<nvlink", "<nvlnk", "t:5: <nvlnk>: expected <nvlink>, <c2c> inside <gpu>, found <nvlnk>: did you mean nvlink"},
      {"<nvlink", "<xgmi", "t:5: <xgmi>: expected <nvlink>, <c2c> inside <gpu>, found <xgmi>"},
      {"count=\"4\"", "count=\"3\"", "t:8: <gpu>: expected as many NVLinks from GPU0 to GPU1 as back, found 3 and 4"},
      {"count=\"4\"", "count=\"0\"", "t:5: <nvlink>: count: expected a number from 1 to 1024, found \"0\""},
      {"tclass=\"0x030200\"", "tclass=\"0x010000\"", "t:5: <nvlink>: tclass: expected a GPU (0x0302..)"},
      {"tclass=\"0x030200\"", "", "t:5: <nvlink>: expected the attribute tclass, found none"},
      {"target=\"0:2\" ", "", "t:5: <nvlink>: expected the attribute target, found none"},
      {"speed=\"200000\"", "speed=\"fast\"",
       "t:10: <net>: speed: expected a number from 1 to 100000000, found \"fast\""},
      {"speed=\"200000\"", "speed=\"nan\"", "t:10: <net>: speed: expected a number"},
      {"name=\"mlx5_0\"", "name=\"m&#27;[2J\"", "t:10: <net>: name: expected printable ASCII, found \"m?[2J\""},
      {"name=\"mlx5_0\"", "name=\"\"", "t:10: <net>: name: expected the name of a device, found nothing"},
      {"name=\"mlx5_0\"", "", "t:10: <net>: expected the attribute name, found none"},
      {"gdr=\"1\"/>", "gdr=\"2\"/>", "t:10: <net>: gdr: expected a number from 0 to 1"},
      {"</nic>", "<net name=\"mlx5_0\" speed=\"1\"/></nic>",
       "<net>: expected each network device once, found \"mlx5_0\" again"},
      {"<nic>", "<nic><gpu/>", "t:9: <gpu>: expected <net> inside <nic>, found <gpu>"},
      {"</cpu>", "</cpu><cpu numaid=\"0\"/>", "t:11: <cpu>: expected each NUMA node once, found numaid 0 again"},
      {"</cpu>", "</cpu><cpu numaid=\"1\" host_hash=\"0x2\"/>",
       "t:11: <cpu>: host_hash: expected the CPUs of one node"},
      {"</cpu>", "</cpu><pci/>", "t:11: <pci>: expected <cpu> inside <system>, found <pci>"},
  };
  for (const Case& one : cases) {
    INFO(one.from << " -> " << one.to);
    CHECK_THAT(error_of(replaced(good, one.from, one.to)), HasText(one.error));
  }
  CHECK_THAT(error_of("<system version=\"1\"></system>"),
             HasText("t:1: <system>: expected at least one GPU, found none"));
  CHECK_THAT(error_of("<!-- nothing -->"), HasText("t:1: expected well-formed XML: No document element found"));
  CHECK_THAT(error_of("<topology/>"), HasText("t:1: expected <system>, found <topology>"));
  std::string deep = "<system version=\"1\"><cpu numaid=\"0\">";
  for (int i = 0; i < 5000; ++i) deep += fmt::format("<pci busid=\"{}\">", i);
  for (int i = 0; i < 5000; ++i) deep += "</pci>";
  CHECK_THAT(error_of(deep + "</cpu></system>"), HasText("expected at most 64 bridges in a row"));
}

TEST_CASE("5,000 mutations of the samples are read or refused with InputError") {
  std::vector<std::string> texts{kSmall};
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  CHECK(names.size() >= 16);
  for (const std::string& name : names) texts.push_back(sample(name));
  const std::vector<std::string> pieces{"NV12",   "X",           "SYS",   "GPU0", "NIC0", "\t",    "\n",
                                        "\"",     "<",           ">",     "/>",   "-1",   "65535", "0x0680",
                                        "<gpu/>", "99999999999", "\x1b[", "&",    "N/A"};
  std::mt19937 random(20261130);
  const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(random()) % bound; };
  int refused = 0;
  for (int i = 0; i < 5000; ++i) {
    std::string text = texts[below(texts.size())];
    for (std::size_t changes = 1 + below(3); changes > 0; --changes) {
      const std::size_t at = below(text.size());
      const std::size_t kind = below(5);
      if (kind == 0) text[at] = static_cast<char>(below(256));
      if (kind == 1) text.erase(at, 1 + below(30));
      if (kind == 2) text.insert(at, pieces[below(pieces.size())]);
      if (kind == 3 && below(4) == 0) text.resize(std::max<std::size_t>(at, 1));
      if (kind == 4) text.insert(at, text.substr(below(text.size()), 1 + below(60)));
      if (text.empty()) text = "x";
    }
    try {
      const Node node = node_of(text, i % 3 == 0 ? "A100" : "");
      CHECK(node.machine.gpus_per_node == static_cast<int>(node.topology.gpus.size()));
      for (const HostCopy& copy : node.copies) CHECK(copy.together.base() > 0);
    } catch (const InputError& error) {
      ++refused;
      CHECK(std::string(error.what()).find('\n') == std::string::npos);
    }
  }
  CHECK(refused > 1000);
}

TEST_CASE("The examples are read") {
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(ZEROPLAN_SOURCE_DIR) + "/examples/topology")) {
    INFO(entry.path());
    std::ifstream stream(entry.path(), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    CHECK(node_of(text).topology.gpus.size() >= 2);
    ++files;
  }
  CHECK(files == 4);
}
