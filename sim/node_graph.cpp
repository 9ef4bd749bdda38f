#include "sim/node_graph.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "models/error.h"
#include "sim/host_fractions.h"

namespace zeroplan {
namespace {

// NVLink-C2C: 350 of 450 GB/s in one direction (GB200, local memory). Both directions at once shared 346 GB/s (GB300,
// 175 + 171; links nvlink-c2c-gb200): together they carry what one carries alone.
constexpr double kC2cFraction = 350.0 / 450.0;

// NVLinks between the GPUs of a V100 hybrid cube mesh (DGX-1, p3.16xlarge, ND40rs_v2; nvidia-smi topo -m and the
// topology file in github.com/NVIDIA/nccl/issues/671). P100 has one link where V100 has one or two.
constexpr int kCubeSize = 8;
constexpr std::array<std::array<int, kCubeSize>, kCubeSize> kCubeLinks{{{0, 1, 1, 2, 2, 0, 0, 0},
                                                                        {1, 0, 2, 1, 0, 2, 0, 0},
                                                                        {1, 2, 0, 2, 0, 0, 1, 0},
                                                                        {2, 1, 2, 0, 0, 0, 0, 1},
                                                                        {2, 0, 0, 0, 0, 1, 1, 2},
                                                                        {0, 2, 0, 0, 1, 0, 2, 1},
                                                                        {0, 0, 1, 0, 1, 2, 0, 2},
                                                                        {0, 0, 0, 1, 2, 1, 2, 0}}};
constexpr int kPascalNvlink = 1;
constexpr int kVoltaNvlink = 2;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

/// A link of two directions: what each can carry and what both together can.
struct Duplex {
  std::optional<ResourceId> there, back, both;
  double width = std::numeric_limits<double>::infinity();
};

class Builder {
 public:
  explicit Builder(const MachineSpec& machine) : machine_(machine) {}

  NodeGraph build() {
    add_sockets();
    add_gpus();
    add_trees();
    add_fabric();
    add_nvme();
    add_nics();
    std::ranges::stable_sort(graph_.edges, {}, [](const NodeEdge& edge) { return std::pair(edge.from, edge.to); });
    return std::move(graph_);
  }

 private:
  ResourceId resource(std::string name, ResourceKind kind, double capacity) {
    graph_.resources.push_back({std::move(name), kind, capacity});
    return {static_cast<std::uint32_t>(graph_.resources.size() - 1)};
  }

  int vertex(std::string name, bool is_end = false, std::optional<ResourceId> memory = std::nullopt) {
    graph_.vertices.push_back({std::move(name), is_end, memory});
    return static_cast<int>(graph_.vertices.size()) - 1;
  }

  void edge(int from, int to, std::optional<ResourceId> link, std::optional<ResourceId> both, double width,
            bool nvlink = false) {
    if (width > 0) graph_.edges.push_back({from, to, link, both, width, nvlink});
  }
  void connect(int a, int b, const Duplex& link) {
    edge(a, b, link.there, link.both, link.width);
    edge(b, a, link.back, link.both, link.width);
  }

  /// A wire of the GPU's PCIe rate; `there` leads towards the host.
  Duplex pcie_link(const std::string& name) {
    const double nominal = machine_.gpu.pcie.base();
    const double fraction = pcie_duplex_fraction(machine_.gpu.pcie_generation);
    Duplex link;
    link.width = nominal * pcie_fraction(machine_.gpu.pcie_generation);
    link.there = resource(name + " to host", ResourceKind::pcie, link.width);
    link.back = resource(name + " from host", ResourceKind::pcie, link.width);
    link.both = resource(name + " both ways", ResourceKind::pcie_duplex, 2 * nominal * fraction);
    return link;
  }

  Duplex c2c_link(const std::string& name) {
    const double nominal = machine_.gpu.c2c.base();
    Duplex link;
    link.width = nominal * kC2cFraction;
    link.there = resource(name + " to host", ResourceKind::c2c, link.width);
    link.back = resource(name + " from host", ResourceKind::c2c, link.width);
    link.both = resource(name + " both ways", ResourceKind::c2c_duplex, link.width);
    return link;
  }

  void add_sockets() {
    const int sockets = machine_.sockets;
    // Unknown cores: one a GPU, the least that drives it.
    const double cores = machine_.physical_cores > 0 ? machine_.physical_cores : machine_.gpus_per_node;
    for (int i = 0; i < sockets; ++i) {
      const auto dram =
          resource(fmt::format("host memory {}", i), ResourceKind::dram, machine_.dram_bandwidth.base() / sockets);
      graph_.cpus.push_back(resource(fmt::format("cpu {}", i), ResourceKind::cpu, cores / sockets));
      sockets_.push_back(vertex(fmt::format("socket {}", i)));
      graph_.drams.push_back(vertex(fmt::format("host memory {}", i), true, dram));
      connect(sockets_.back(), graph_.drams.back(), {});
    }
    const double width = machine_.socket_link.base();
    for (int i = 0; i < sockets; ++i) {
      for (int j = 0; j < sockets; ++j) {
        if (i == j || width <= 0) continue;
        const auto link = resource(fmt::format("socket {} to {}", i, j), ResourceKind::socket_link, width);
        edge(sockets_[at(i)], sockets_[at(j)], link, std::nullopt, width);
      }
    }
  }

  double peak() const {
    const GpuSpec& gpu = machine_.gpu;
    double rate = 0;
    if (gpu.peak_bf16) rate = gpu.peak_bf16->base();
    if (gpu.peak_fp16) rate = std::max(rate, gpu.peak_fp16->base());
    if (rate == 0 && gpu.peak_fp32) rate = gpu.peak_fp32->base();
    if (rate > 0) return rate;
    throw InputError(
        fmt::format("machine {}: GPU {} needs peak_bf16, peak_fp16 or peak_fp32", machine_.name, gpu.name));
  }

  void add_gpus() {
    const double rate = peak();
    for (int i = 0; i < machine_.gpus_per_node; ++i) {
      graph_.sms.push_back(resource(fmt::format("gpu {} sm", i), ResourceKind::sm, rate));
      const auto hbm = resource(fmt::format("gpu {} hbm", i), ResourceKind::hbm, machine_.gpu.memory_bandwidth.base());
      graph_.gpus.push_back(vertex(fmt::format("GPU {}", i), true, hbm));
      graph_.socket_of_gpu.push_back(i * machine_.sockets / machine_.gpus_per_node);
    }
  }

  /// GPUs of one socket fill its root complexes, and those their switches, in order.
  void add_trees() {
    int local = 0;  // GPU within its socket
    for (int i = 0; i < machine_.gpus_per_node; ++i) {
      const bool new_socket = i == 0 || graph_.socket_of_gpu[at(i)] != graph_.socket_of_gpu[at(i - 1)];
      if (new_socket) local = 0;
      const int in_complex = local % std::max(1, machine_.gpus_per_root_complex);
      if (in_complex == 0) add_complex(graph_.socket_of_gpu[at(i)]);
      if (in_complex % std::max(1, machine_.gpus_per_pcie_switch) == 0) {
        add_switch(members(i, in_complex));
      }
      graph_.complex_of_gpu.push_back(num_complexes_ - 1);
      switch_of_gpu_.push_back(switch_);
      attach(i);
      ++local;
    }
  }

  /// GPUs that will hang on the switch whose first GPU is `first`.
  int members(int first, int in_complex) const {
    int count = 1;
    while (count < machine_.gpus_per_pcie_switch && in_complex + count < machine_.gpus_per_root_complex &&
           first + count < machine_.gpus_per_node &&
           graph_.socket_of_gpu[at(first + count)] == graph_.socket_of_gpu[at(first)]) {
      ++count;
    }
    return count;
  }

  void add_complex(int socket) {
    complex_ = vertex(fmt::format("root complex {}", num_complexes_++));
    connect(complex_, sockets_[at(socket)], {});
  }

  /// The uplink is one x16 link for all GPUs below; with a single GPU below it is that GPU's own link.
  void add_switch(int count) {
    if (machine_.gpu.c2c.base() > 0 || machine_.host_device) return;
    switch_ = vertex(fmt::format("PCIe switch {}", num_switches_));
    const std::string name = fmt::format("pcie switch {}", num_switches_++);
    connect(switch_, complex_, count > 1 ? pcie_link(name) : Duplex{});
  }

  void attach(int i) {
    const int gpu = graph_.gpus[at(i)];
    const int socket = sockets_[at(graph_.socket_of_gpu[at(i)])];
    if (machine_.host_device) {
      connect(gpu, socket, {});
    } else if (machine_.gpu.c2c.base() > 0) {
      const int share = std::max(1, machine_.gpu.gpus_per_c2c);
      if (i % share == 0) c2c_ = c2c_link(fmt::format("superchip {} c2c", i / share));
      connect(gpu, socket, c2c_);
    } else {
      connect(gpu, switch_, pcie_link(fmt::format("gpu {} pcie", i)));
    }
  }

  void add_fabric() {
    switch (machine_.interconnect) {
      case Interconnect::nvswitch:
        return add_nvswitch();
      case Interconnect::nvlink_mesh:
        return add_mesh();
      case Interconnect::nvlink_pairs:
        for (int i = 0; i + 1 < machine_.gpus_per_node; i += 2) add_pair(i, i + 1, machine_.nvlink.base());
        return;
      case Interconnect::pcie_switch:
      case Interconnect::root_complex:
      case Interconnect::single:
        return;
    }
  }

  void add_nvswitch() {
    const double width = machine_.nvlink.base();
    const int fabric = vertex("NVSwitch");
    for (int i = 0; i < machine_.gpus_per_node; ++i) {
      const auto out = resource(fmt::format("gpu {} nvlink out", i), ResourceKind::nvlink, width);
      const auto in = resource(fmt::format("gpu {} nvlink in", i), ResourceKind::nvlink, width);
      edge(graph_.gpus[at(i)], fabric, out, std::nullopt, width, true);
      edge(fabric, graph_.gpus[at(i)], in, std::nullopt, width, true);
    }
  }

  /// Every pair has equal links, except in the cube of the first two NVLink generations.
  void add_mesh() {
    const int count = machine_.gpus_per_node;
    const int generation = machine_.gpu.nvlink_generation;
    const bool cube = count <= kCubeSize && machine_.gpu.nvlink_links > 0 &&
                      (generation == kPascalNvlink || generation == kVoltaNvlink);
    for (int i = 0; i < count; ++i) {
      for (int j = i + 1; j < count; ++j) {
        if (!cube) {
          add_pair(i, j, machine_.nvlink.base() / (count - 1));
          continue;
        }
        const int wired = kCubeLinks[at(i)][at(j)];
        const int links = generation == kPascalNvlink ? std::min(wired, 1) : wired;
        add_pair(i, j, links * machine_.gpu.nvlink.base() / machine_.gpu.nvlink_links);
      }
    }
  }

  void add_pair(int i, int j, double width) {
    if (width <= 0) return;
    const auto there = resource(fmt::format("nvlink {} to {}", i, j), ResourceKind::nvlink, width);
    const auto back = resource(fmt::format("nvlink {} to {}", j, i), ResourceKind::nvlink, width);
    edge(graph_.gpus[at(i)], graph_.gpus[at(j)], there, std::nullopt, width, true);
    edge(graph_.gpus[at(j)], graph_.gpus[at(i)], back, std::nullopt, width, true);
  }

  /// Drives are spread over the sockets; their own PCIe links are wider than they are.
  void add_nvme() {
    if (machine_.nvme.drives == 0) return;
    const double read = kDiskFraction * machine_.nvme.read.base();
    const double write = kDiskFraction * machine_.nvme.write.base();
    graph_.nvme_read = resource("nvme read", ResourceKind::nvme_read, read);
    graph_.nvme_write = resource("nvme write", ResourceKind::nvme_write, write);
    graph_.nvmes.push_back(vertex("NVMe", true));
    for (const int socket : sockets_) {
      edge(graph_.nvmes.back(), socket, graph_.nvme_read, std::nullopt, read);
      edge(socket, graph_.nvmes.back(), graph_.nvme_write, std::nullopt, write);
    }
  }

  /// One group of NICs a GPU, or one NIC for several GPUs. With GPUDirect it sits beside its first GPU's switch.
  void add_nics() {
    const int nics = machine_.network.nics;
    if (nics == 0) return;
    const int gpus = machine_.gpus_per_node;
    const int groups = std::min(nics, gpus);
    const double width = machine_.network.bandwidth.base() / groups;
    graph_.nic_of_socket.assign(sockets_.size(), 0);
    for (int i = 0; i < gpus; ++i) {
      const int group = i * groups / gpus;
      const int socket = graph_.socket_of_gpu[at(i)];
      graph_.nic_of_gpu.push_back(group);
      if (i == 0 || socket != graph_.socket_of_gpu[at(i - 1)]) graph_.nic_of_socket[at(socket)] = group;
      if (group < static_cast<int>(graph_.nics.size())) continue;
      graph_.nic_out.push_back(resource(fmt::format("nic {} out", group), ResourceKind::nic, width));
      graph_.nic_in.push_back(resource(fmt::format("nic {} in", group), ResourceKind::nic, width));
      graph_.nics.push_back(vertex(fmt::format("NIC {}", group), true));
      const bool beside_gpu = machine_.network.gpudirect && machine_.gpu.c2c.base() == 0 && !machine_.host_device;
      connect(graph_.nics.back(), beside_gpu ? switch_of_gpu_[at(i)] : sockets_[at(socket)], {});
    }
  }

  const MachineSpec& machine_;
  NodeGraph graph_;
  std::vector<int> sockets_, switch_of_gpu_;
  int complex_ = 0, switch_ = 0;
  int num_complexes_ = 0, num_switches_ = 0;
  Duplex c2c_;
};

}  // namespace

NodeGraph build_node_graph(const MachineSpec& machine) { return Builder(machine).build(); }

}  // namespace zeroplan
