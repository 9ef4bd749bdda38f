#include "sim/topology_routes.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "sim/topology.h"

namespace zeroplan {
namespace {

// Rates of a GPU that nobody named never limit a route: far above any link.
constexpr double kNeverTheLimit = 1e18;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

/// A small machine of the same parts; its memory per socket is that of `machine`.
MachineSpec few_gpus(const MachineSpec& machine, int gpus, int sockets) {
  MachineSpec few = machine;
  few.gpus_per_node = gpus;
  few.nodes = 1;
  few.interconnect = gpus == 1 ? Interconnect::single : Interconnect::root_complex;
  few.nvlink = {};
  few.dram_bandwidth = machine.dram_bandwidth * sockets / machine.sockets;
  few.sockets = sockets;
  few.gpus_per_pcie_switch = 1;
  few.gpus_per_root_complex = 1;
  few.nvme = {};
  few.network = {};
  if (few.gpu.memory_bandwidth.base() <= 0) few.gpu.memory_bandwidth = BytesPerSecond(kNeverTheLimit);
  if (!few.gpu.peak_bf16 && !few.gpu.peak_fp16 && !few.gpu.peak_fp32) {
    few.gpu.peak_fp32 = FlopsPerSecond(kNeverTheLimit);
  }
  return few;
}

/// Two GPUs that meet in this way.
MachineSpec pair_of(const MachineSpec& machine, Connection met) {
  const bool apart = met == Connection::sys && machine.sockets > 1;
  MachineSpec pair = few_gpus(machine, 2, apart ? 2 : 1);
  if (met <= Connection::pxb) {
    pair.interconnect = Interconnect::pcie_switch;
    pair.gpus_per_pcie_switch = 2;
  }
  if (met <= Connection::phb) pair.gpus_per_root_complex = 2;
  return pair;
}

BytesPerSecond rate_between(const MachineSpec& pair) {
  const Topology topology = Topology::build(pair);
  return topology.width(topology.route(topology.gpu(0), topology.gpu(1)));
}

std::string pcie_way(Connection met, bool peers) {
  if (peers && met <= Connection::pxb) return "PCIe, below one switch";
  if (peers && met == Connection::phb) return "PCIe, through the root complex";
  return met == Connection::sys ? "host memory, across NUMA nodes" : "host memory";
}

/// What a copy uses: capacities shared by several GPUs.
struct Shared {
  std::string name;
  double capacity = 0;
  std::vector<int> gpus;
};

/// Max-min fair rates: the resource that gives its GPUs least is filled first, and they leave the others.
void share(const std::vector<Shared>& resources, std::vector<HostCopy>& copies) {
  std::vector<double> left;
  for (const Shared& resource : resources) left.push_back(resource.capacity);
  std::vector<bool> done(copies.size());
  const auto waiting = [&](const Shared& resource) {
    return std::ranges::count_if(resource.gpus, [&](int gpu) { return !done[at(gpu)]; });
  };
  while (true) {
    double least = std::numeric_limits<double>::infinity();
    std::size_t tightest = resources.size();
    for (std::size_t i = 0; i < resources.size(); ++i) {
      const auto users = waiting(resources[i]);
      if (users == 0 || left[i] / static_cast<double>(users) >= least) continue;
      least = left[i] / static_cast<double>(users);
      tightest = i;
    }
    if (tightest == resources.size()) return;
    for (const int gpu : resources[tightest].gpus) {
      if (done[at(gpu)]) continue;
      done[at(gpu)] = true;
      copies[at(gpu)].together = BytesPerSecond(least);
      copies[at(gpu)].limit = resources[tightest].name;
      copies[at(gpu)].shared_with = resources[tightest].gpus;
      for (std::size_t i = 0; i < resources.size(); ++i) {
        if (std::ranges::find(resources[i].gpus, gpu) != resources[i].gpus.end()) left[i] -= least;
      }
    }
  }
}

/// What a link of this nominal rate carries to the host, by the simulator.
double achievable(const MachineSpec& machine, BytesPerSecond nominal) {
  MachineSpec one = few_gpus(machine, 1, 1);
  one.gpu.pcie = nominal;
  one.gpu.memory_bandwidth = BytesPerSecond(kNeverTheLimit);
  one.dram_bandwidth = BytesPerSecond(kNeverTheLimit);
  const Topology topology = Topology::build(one);
  return topology.width(topology.route(topology.gpu(0), topology.host_of(0))).base();
}

/// The links that the file lists (XML): each GPU's own, and the uplink of each bridge above it.
void add_listed_bridges(const NodeTopology& topology, const MachineSpec& machine, std::vector<Shared>& resources) {
  std::vector<std::vector<int>> below(topology.bridges.size());
  for (int gpu = 0; gpu < static_cast<int>(topology.gpus.size()); ++gpu) {
    for (int up = topology.gpus[at(gpu)].bridge; up >= 0; up = topology.bridges[at(up)].parent) {
      below[at(up)].push_back(gpu);
    }
  }
  for (std::size_t i = 0; i < below.size(); ++i) {
    const PcieLink uplink = topology.bridges[i].uplink;
    if (below[i].empty()) continue;
    const BytesPerSecond nominal = uplink.generation > 0 ? pcie_rate(uplink) : machine.gpu.pcie;
    resources.push_back({"uplink of " + topology.bridges[i].name, achievable(machine, nominal), below[i]});
  }
}

/// Groups by the matrix, or by the machine's assumption where NVLink hides them.
std::vector<std::vector<int>> trees_of(const NodeForm& form, const MachineSpec& machine) {
  if (form.trees_known) return form.trees;
  std::vector<std::vector<int>> trees;
  for (const auto& socket : form.sockets) {
    for (std::size_t i = 0; i < socket.size(); ++i) {
      if (i % at(machine.gpus_per_pcie_switch) == 0) trees.emplace_back();
      trees.back().push_back(socket[i]);
    }
  }
  return trees;
}

void add_superchips(const MachineSpec& machine, int gpus, double width, std::vector<Shared>& resources) {
  const int together = std::max(1, machine.gpu.gpus_per_c2c);
  for (int gpu = 0; gpu < gpus; ++gpu) {
    if (gpu % together == 0) resources.push_back({fmt::format("C2C of superchip {}", gpu / together), width, {}});
    resources.back().gpus.push_back(gpu);
  }
}

void add_links(const NodeTopology& topology, const NodeForm& form, const MachineSpec& machine,
               std::vector<Shared>& resources) {
  const auto gpus = static_cast<int>(topology.gpus.size());
  const double width = achievable(machine, machine.gpu.pcie);
  if (machine.gpu.c2c.base() > 0) return add_superchips(machine, gpus, width, resources);
  for (int gpu = 0; gpu < gpus; ++gpu) {
    const PcieLink own = topology.gpus[at(gpu)].pcie;
    const double rate = own.generation > 0 ? achievable(machine, pcie_rate(own)) : width;
    resources.push_back({"its own link", rate, {gpu}});
  }
  if (topology.format == TopologyFormat::nccl) return add_listed_bridges(topology, machine, resources);
  int number = 0;
  for (const auto& tree : trees_of(form, machine)) {
    if (tree.size() > 1)
      resources.push_back(
          {fmt::format("uplink of {}PCIe switch {}", form.trees_known ? "" : "assumed ", number), width, tree});
    ++number;
  }
}

}  // namespace

std::vector<GpuRoute> gpu_routes(const NodeTopology& topology, const NodeForm& form, const MachineSpec& machine) {
  std::vector<GpuRoute> routes;
  std::vector<std::pair<Connection, BytesPerSecond>> known;
  const auto pcie_between = [&](Connection met) {
    for (const auto& [other, rate] : known) {
      if (other == met) return rate;
    }
    known.emplace_back(met, rate_between(pair_of(machine, met)));
    return known.back().second;
  };
  const bool peers = machine.gpu.p2p_over_pcie.value_or(false);
  const bool switched = form.interconnect == Interconnect::nvswitch;
  for (int i = 0; i < static_cast<int>(topology.gpus.size()); ++i) {
    for (int j = i + 1; j < static_cast<int>(topology.gpus.size()); ++j) {
      const TopologyLink& link = topology.link(at(i), at(j));
      GpuRoute route{i, j, {}, {}};
      if (link.nvlinks > 0) {
        route.way =
            fmt::format("{}, {} link{}", switched ? "NVSwitch" : "NVLink", link.nvlinks, link.nvlinks == 1 ? "" : "s");
        const GpuSpec& gpu = machine.gpu;
        if (gpu.nvlink_links > 0) route.rate = gpu.nvlink * link.nvlinks / gpu.nvlink_links;
      } else {
        route.way = pcie_way(link.kind, peers);
        route.rate = pcie_between(link.kind);
      }
      routes.push_back(std::move(route));
    }
  }
  return routes;
}

std::vector<HostCopy> host_copies(const NodeTopology& topology, const NodeForm& form, const MachineSpec& machine) {
  if (topology.superchip && machine.gpu.c2c.base() <= 0) return {};
  std::vector<HostCopy> copies(topology.gpus.size());
  std::vector<Shared> resources;
  add_links(topology, form, machine, resources);
  for (std::size_t socket = 0; socket < form.sockets.size(); ++socket) {
    resources.push_back({fmt::format("memory of socket {}", socket),
                         machine.dram_bandwidth.base() / static_cast<double>(form.sockets.size()),
                         form.sockets[socket]});
  }
  for (std::size_t gpu = 0; gpu < copies.size(); ++gpu) {
    copies[gpu].gpu = static_cast<int>(gpu);
    double alone = machine.gpu.memory_bandwidth.base() > 0 ? machine.gpu.memory_bandwidth.base() : kNeverTheLimit;
    for (const Shared& resource : resources) {
      const bool uses = std::ranges::find(resource.gpus, static_cast<int>(gpu)) != resource.gpus.end();
      if (uses) alone = std::min(alone, resource.capacity);
    }
    copies[gpu].alone = BytesPerSecond(alone);
  }
  share(resources, copies);
  return copies;
}

}  // namespace zeroplan
