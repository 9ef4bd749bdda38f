// A topology as a machine: rates, and what a topology cannot say.

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "models/topology_form.h"

namespace zeroplan {
namespace {

constexpr int kLanes = 16;
constexpr int kAssumedGeneration = 4;  // Ampere and Ada cards; stated as an assumption
constexpr int kFirstListedGeneration = 3;
// Generations 1 and 2, a lane in one direction: 2.5 and 5 GT/s with 8 data bits in 10 (PCIe base specification).
constexpr double kLaneGen1 = 250e6, kLaneGen2 = 500e6;
constexpr int kHopperSm = 90, kBlackwellSm = 100;

std::size_t at(int index) { return static_cast<std::size_t>(index); }
int count_of(const auto& values) { return static_cast<int>(values.size()); }

int largest(const std::vector<std::vector<int>>& groups) {
  std::size_t most = 1;
  for (const auto& group : groups) most = std::max(most, group.size());
  return static_cast<int>(most);
}

/// A stand-in for a GPU that nobody named: links as the file or the assumption says, nothing else.
CatalogGpu unnamed_gpu(const NodeTopology& topology) {
  CatalogGpu gpu;
  const int sm = topology.gpus.front().sm;
  if (sm >= kHopperSm) gpu.spec.arch = sm >= kBlackwellSm ? "Blackwell" : "Hopper";  // says which host memory is usual
  gpu.spec.name = "unknown GPU";
  gpu.spec.pcie_generation = kAssumedGeneration;
  gpu.spec.pcie = pcie_rate({kAssumedGeneration, kLanes});
  return gpu;
}

/// The narrowest GPU link that the file states.
PcieLink gpu_link(const NodeTopology& topology) {
  PcieLink narrowest;
  for (const TopologyDevice& gpu : topology.gpus) {
    if (gpu.pcie.generation == 0) return {};
    const PcieLink link{gpu.pcie.generation, gpu.pcie.lanes == 0 ? kLanes : gpu.pcie.lanes};
    if (narrowest.generation == 0 || pcie_rate(link) < pcie_rate(narrowest)) narrowest = link;
  }
  return narrowest;
}

/// Without a GPU there is no machine to plan for: only what rates of routes depend on is worth saying.
void forget_unneeded(MachineSpec& machine) {
  std::erase_if(machine.assumptions, [](const Assumption& assumption) {
    return assumption.what == "host memory" || assumption.what == "CPU cores" || assumption.what.starts_with("NVMe");
  });
}

/// Two GPUs have no NVLink between them.
bool uses_pcie(const NodeTopology& topology) {
  for (std::size_t i = 0; i < topology.gpus.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (topology.link(i, j).nvlinks == 0) return true;
    }
  }
  return false;
}

void set_pcie(MachineSpec& machine, const NodeTopology& topology, bool gpu_known) {
  const PcieLink stated = gpu_link(topology);
  if (stated.generation > 0) {
    machine.gpu.pcie_generation = stated.generation;
    machine.gpu.pcie = pcie_rate(stated);
  } else if (!gpu_known && !topology.superchip) {
    machine.assumptions.push_back({"PCIe of a GPU", fmt::format("Gen{} x{}", kAssumedGeneration, kLanes),
                                   "default: neither the file nor --gpu says"});
  }
}

BytesPerSecond default_nic_rate(const CatalogGpu* gpu, std::string& source) {
  const JsonDocument defaults = read_catalog("node_defaults.json");
  const JsonValue& rule = defaults.root().at("network");
  source = rule.at("source").as_string();
  if (gpu && gpu->segment != "data centre") return rule.at(gpu->segment).as_rate();
  bool ddr5 = false;
  for (const JsonValue& arch : defaults.root().at("dram_bandwidth").at("ddr5_archs").items()) {
    if (gpu && arch.as_string() == gpu->spec.arch) ddr5 = true;
  }
  return rule.at(ddr5 ? "data_centre_ddr5" : "data_centre").as_rate();
}

void set_network(MachineSpec& machine, const NodeTopology& topology, const NodeForm& form, const CatalogGpu* gpu) {
  const std::set<int> used(form.nic_of_gpu.begin(), form.nic_of_gpu.end());
  if (used.contains(-1)) return;
  machine.network.nics = count_of(used);
  machine.network.kind = "as listed";
  bool stated = true, direct = true, direct_stated = true;
  for (const int nic : used) {
    const TopologyDevice& device = topology.nics[at(nic)];
    machine.network.bandwidth += device.speed;
    stated = stated && device.speed.base() > 0;
    direct = direct && device.gpudirect.value_or(true);
    direct_stated = direct_stated && device.gpudirect;
  }
  if (used.size() < topology.nics.size()) {
    machine.assumptions.push_back({"NICs", fmt::format("{} of {}", used.size(), topology.nics.size()),
                                   "only those nearest to a GPU are taken to carry its traffic"});
  }
  if (!stated) {
    std::string source;
    const BytesPerSecond rate = default_nic_rate(gpu, source);
    machine.network.bandwidth = rate * machine.network.nics;
    machine.assumptions.push_back({"rate of a NIC", format_rate(rate), "default: " + source});
  }
  if (!direct_stated) {
    for (int i = 0; i < count_of(topology.gpus); ++i) {
      const auto near = topology.link(at(i), at(count_of(topology.gpus) + form.nic_of_gpu[at(i)])).kind;
      direct = direct && near <= Connection::pxb && gpu && gpu->segment != "consumer";
    }
    machine.assumptions.push_back(
        {"GPUDirect", direct ? "yes" : "no",
         "NCCL's default: a NIC below the GPU's own switches; not on consumer GPUs, nor on unknown ones"});
  }
  machine.network.gpudirect = direct;
}

/// One direction, all links of a GPU as wired.
BytesPerSecond nvlink_rate(const NodeForm& form, const GpuSpec& gpu) {
  return gpu.nvlink_links > 0 ? gpu.nvlink * form.nvlinks / gpu.nvlink_links : BytesPerSecond(0);
}

}  // namespace

BytesPerSecond pcie_rate(PcieLink link) {
  const int lanes = link.lanes == 0 ? kLanes : link.lanes;
  if (link.generation < kFirstListedGeneration) {
    return BytesPerSecond((link.generation <= 1 ? kLaneGen1 : kLaneGen2) * lanes);
  }
  const JsonDocument defaults = read_catalog("node_defaults.json");
  return defaults.root().at("pcie_x16").at(fmt::format("{}", link.generation)).as_rate() * lanes / kLanes;
}

MachineSpec machine_from(const NodeTopology& topology, const NodeForm& form, const CatalogGpu* gpu) {
  const CatalogGpu& used = gpu ? *gpu : unnamed_gpu(topology);
  MachineSpec machine;
  machine.gpu = used.spec;
  machine.gpus_per_node = count_of(topology.gpus);
  machine.name = fmt::format("{}x{}", machine.gpus_per_node, machine.gpu.name);
  machine.provider = "user";
  machine.kind = "topology";
  machine.interconnect = form.interconnect;
  machine.nvlink = nvlink_rate(form, machine.gpu);
  machine.sources = {topology.file};
  machine.assumptions = form.assumptions;
  PartialNode node;
  node.sockets = count_of(form.sockets);
  node.pcie_generation = machine.gpu.pcie_generation;
  if (form.trees_known) {
    node.gpus_per_pcie_switch = largest(form.trees);
    node.gpus_per_root_complex = std::max(largest(form.trees), largest(form.complexes));
  }
  complete_node(machine, used, node);
  if (!gpu) forget_unneeded(machine);
  if (!gpu && uses_pcie(topology)) {
    machine.assumptions.push_back({"peer access over PCIe", "no", "default: not known without --gpu"});
  }
  set_pcie(machine, topology, gpu != nullptr);
  set_network(machine, topology, form, gpu);
  return machine;
}

}  // namespace zeroplan
