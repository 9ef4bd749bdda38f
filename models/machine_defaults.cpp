// What node_defaults.json says where a node is silent. Each value taken is an assumption of the machine.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "models/catalog.h"
#include "models/machine_catalog.h"

namespace zeroplan {
namespace {

constexpr int kFullLanes = 16;
constexpr Bytes kSmallestReserve = 8_GiB;  // operating system, page cache floor (spec section 3)
constexpr double kReservedFraction = 0.05;

/// Whole bytes and bytes per second: texts stay short and exact.
template <class Q>
Q whole(Q value) {
  return Q(std::round(value.base()));
}

int divided_up(int count, int parts) { return (count + parts - 1) / parts; }

bool contains(const JsonValue& array, std::string_view text) {
  return std::ranges::any_of(array.items(), [&](const JsonValue& item) { return item.as_string() == text; });
}

class Completion {
 public:
  Completion(MachineSpec& machine, const CatalogGpu& gpu, const PartialNode& node, const JsonValue& defaults)
      : machine_(machine), gpu_(gpu), node_(node), defaults_(defaults) {}

  void run() {
    if (gpu_.memory) machine_.assumptions.push_back(*gpu_.memory);
    set_sockets();
    set_cores();
    set_dram();
    set_dram_bandwidth();
    set_pcie();
    set_tree();
    set_nvme();
  }

 private:
  const JsonValue& section(std::string_view key) const { return defaults_.at(key); }

  void assume(std::string_view what, std::string value, std::string_view basis) {
    machine_.assumptions.push_back({std::string(what), std::move(value), fmt::format("default: {}", basis)});
  }
  void assume(std::string_view what, std::string value, const JsonValue& from) {
    assume(what, std::move(value), from.at("source").as_string());
  }

  void set_sockets() {
    const JsonValue& rule = section("sockets");
    if (node_.sockets) {
      machine_.sockets = *node_.sockets;
    } else if (machine_.gpu.c2c.base() > 0) {
      machine_.sockets = divided_up(machine_.gpus_per_node, machine_.gpu.gpus_per_c2c);
      assume("CPU sockets", fmt::format("{}", machine_.sockets), "one CPU in each superchip");
    } else {
      machine_.sockets = machine_.gpus_per_node <= rule.at("gpus_on_one_socket").as_int(1, 1024) ? 1 : 2;
      assume("CPU sockets", fmt::format("{}", machine_.sockets), rule);
    }
    if (machine_.cpu.empty() && machine_.gpu.c2c.base() > 0) machine_.cpu = "NVIDIA Grace";  // no other CPU has C2C
    if (machine_.sockets > 1) set_socket_link();
  }

  void set_socket_link() {
    const JsonValue& rule = section("socket_link");
    machine_.socket_link = rule.at("other").as_rate();
    for (const JsonValue& pair : rule.at("by_cpu").items()) {
      if (machine_.cpu.find(pair.items()[0].as_string()) == std::string::npos) continue;
      machine_.socket_link = pair.items()[1].as_rate();
      break;
    }
    assume("link between CPU sockets", format_rate(machine_.socket_link), rule);
  }

  void set_cores() {
    const JsonValue& rule = section("cores");
    if (node_.physical_cores) {
      machine_.physical_cores = *node_.physical_cores;
      return;
    }
    const int threads = machine_.gpu.c2c.base() > 0 ? 1 : static_cast<int>(rule.at("threads_per_core").as_int(1, 8));
    if (node_.vcpus) {
      machine_.physical_cores = std::max(1, *node_.vcpus / threads);
      assume("CPU cores", fmt::format("{}", machine_.physical_cores),
             fmt::format("{} vCPUs, {} a core", *node_.vcpus, threads));
    } else {
      machine_.physical_cores = machine_.gpus_per_node * static_cast<int>(rule.at("per_gpu").as_int(1, 1024));
      assume("CPU cores", fmt::format("{}", machine_.physical_cores), rule);
    }
  }

  void set_dram() {
    if (node_.dram) {
      machine_.dram = *node_.dram;
      return;
    }
    const JsonValue& rule = section("dram");
    const double times = rule.at("times_gpu_memory").as_real(0, 100);
    // The label, not what is left of it: 2 x 8 x 80 GiB.
    const Bytes per_gpu = Bytes(static_cast<double>(gpu_.label) * kGiB);
    machine_.dram = std::max(rule.at("least").as_bytes(), times * machine_.gpus_per_node * per_gpu);
    assume("host memory", format_gib(machine_.dram),
           fmt::format("{} x the GPU memory of the node, at least {}; {}", times, rule.at("least").as_string(),
                       rule.at("source").as_string()));
  }

  /// Nominal rate of one socket, and its basis.
  std::pair<BytesPerSecond, std::string> socket_bandwidth(const JsonValue& rule) const {
    for (const JsonValue& row : rule.at("by_cpu").items()) {
      const auto cells = row.items();
      if (machine_.cpu.find(cells[0].as_string()) == std::string::npos) continue;
      return {cells[1].as_rate(), cells[2].as_string()};
    }
    const bool ddr5 = contains(rule.at("ddr5_archs"), machine_.gpu.arch);
    return {rule.at(ddr5 ? "ddr5_per_socket" : "ddr4_per_socket").as_rate(),
            fmt::format("{}, {}", ddr5 ? "DDR5" : "DDR4", rule.at("source").as_string())};
  }

  void set_dram_bandwidth() {
    const JsonValue& rule = section("dram_bandwidth");
    const double fraction = rule.at("achievable_fraction").as_real(0, 1);
    std::string basis;
    BytesPerSecond nominal;
    if (node_.dram_bandwidth) {
      nominal = *node_.dram_bandwidth;
      basis = fmt::format("{} of {} theoretical", fraction, format_rate(nominal));
    } else {
      const auto [per_socket, why] = socket_bandwidth(rule);
      nominal = per_socket * machine_.sockets;
      basis = fmt::format("{} of {} x {} a socket ({})", fraction, machine_.sockets, format_rate(per_socket), why);
    }
    machine_.dram_bandwidth = whole(nominal * fraction);
    assume("host memory bandwidth", format_rate(machine_.dram_bandwidth),
           fmt::format("{}: {}", basis, rule.at("achievable_source").as_string()));
  }

  void set_pcie() {
    GpuSpec& gpu = machine_.gpu;
    const int lanes = node_.pcie_lanes.value_or(kFullLanes);
    if (!node_.pcie_generation && gpu.c2c.base() == 0) {
      assume("PCIe generation", fmt::format("{}", gpu.pcie_generation), "what the GPU can do");
    }
    const int generation = std::min(gpu.pcie_generation, node_.pcie_generation.value_or(gpu.pcie_generation));
    if (generation == gpu.pcie_generation && lanes == kFullLanes) return;
    gpu.pcie_generation = generation;
    gpu.pcie = section("pcie_x16").at(fmt::format("{}", generation)).as_rate() * lanes / kFullLanes;
  }

  void set_tree() {
    const int count = machine_.gpus_per_node;
    const int per_socket = divided_up(count, machine_.sockets);
    const JsonValue& complexes = section("gpus_per_root_complex");
    machine_.gpus_per_root_complex = node_.gpus_per_root_complex.value_or(0);
    if (machine_.gpus_per_root_complex == 0) {
      const bool all = count <= complexes.at("all_up_to").as_int(1, 1024);
      machine_.gpus_per_root_complex = std::min(all ? count : divided_up(count, 2), per_socket);
      if (count > 1) assume("GPUs per root complex", fmt::format("{}", machine_.gpus_per_root_complex), complexes);
    }
    const JsonValue& switches = section("gpus_per_pcie_switch");
    machine_.gpus_per_pcie_switch = node_.gpus_per_pcie_switch.value_or(0);
    if (machine_.gpus_per_pcie_switch == 0) {
      const auto usual = switches.at(to_string(machine_.interconnect)).as_int(1, 1024);
      machine_.gpus_per_pcie_switch = std::min(static_cast<int>(usual), machine_.gpus_per_root_complex);
      if (count > 1) assume("GPUs per PCIe switch", fmt::format("{}", machine_.gpus_per_pcie_switch), switches);
    }
    machine_.gpus_per_root_complex = std::max(machine_.gpus_per_root_complex, machine_.gpus_per_pcie_switch);
  }

  void set_nvme() {
    if (node_.nvme_stated && node_.drives == 0) return;
    // A template is a typical box: the drives it lists from memory are no fact about anybody's machine.
    const auto& recalled = machine_.recalled;
    if (machine_.kind == "on-prem template" && std::find(recalled.begin(), recalled.end(), "nvme") != recalled.end()) {
      assume("NVMe", "none", "the template's drives are only typical; --nvme states yours");
      return;
    }
    if (!node_.nvme_stated || (!node_.drives && !node_.nvme_capacity)) {
      assume("NVMe", "none", "none unless the node or --nvme states it");
      return;
    }
    const JsonValue& drive = section("nvme_drive");
    const double each = drive.at("capacity").as_bytes().base();
    NvmeSpec& nvme = machine_.nvme;
    if (node_.drives) {
      nvme.drives = *node_.drives;
    } else {
      nvme.drives = static_cast<int>(std::ceil(node_.nvme_capacity->base() / each));
      assume("NVMe drives", fmt::format("{}", nvme.drives),
             fmt::format("{} in drives of {}: {}", to_text(*node_.nvme_capacity), drive.at("capacity").as_string(),
                         drive.at("capacity_source").as_string()));
    }
    nvme.capacity = node_.nvme_capacity.value_or(Bytes(each) * nvme.drives);
    nvme.read = node_.nvme_read.value_or(drive.at("read").as_rate() * nvme.drives);
    nvme.write = node_.nvme_write.value_or(drive.at("write").as_rate() * nvme.drives);
    if (!node_.nvme_capacity) assume("NVMe capacity", to_text(nvme.capacity), drive.at("capacity_source").as_string());
    if (!node_.nvme_read) assume("NVMe read rate", format_rate(nvme.read), drive);
    if (!node_.nvme_write) assume("NVMe write rate", format_rate(nvme.write), drive);
  }

  MachineSpec& machine_;
  const CatalogGpu& gpu_;
  const PartialNode& node_;
  const JsonValue& defaults_;
};

}  // namespace

void complete_node(MachineSpec& machine, const CatalogGpu& gpu, const PartialNode& node) {
  const JsonDocument defaults = read_catalog("node_defaults.json");
  Completion(machine, gpu, node, defaults.root()).run();
}

void set_nodes(MachineSpec& machine, int nodes) {
  if (nodes < 1 || nodes > kMostNodes) {
    throw InputError(fmt::format("--nodes: expected 1 to {}, got {}", kMostNodes, nodes));
  }
  if (nodes > 1 && machine.host_kernels) {
    throw InputError(fmt::format("--nodes: {} is a probed host, whose network was not measured: expected 1, got {}",
                                 machine.name, nodes));
  }
  machine.nodes = nodes;
  if (nodes == 1 || machine.network.nics > 0) return;
  const JsonDocument defaults = read_catalog("node_defaults.json");
  const JsonValue& rule = defaults.root().at("network");
  const bool ddr5 = contains(defaults.root().at("dram_bandwidth").at("ddr5_archs"), machine.gpu.arch);
  const bool listed = find_catalog_file(fmt::format("gpus/{}.json", machine.gpu.name)) != nullptr;
  const std::string segment = listed ? load_gpu(machine.gpu.name).segment : "data centre";
  const std::string key = segment != "data centre" ? segment : (ddr5 ? "data_centre_ddr5" : "data_centre");
  machine.network = {1, rule.at(key).as_rate(), "not stated", false};
  machine.assumptions.push_back(
      {"network of a node", rule.at(key).as_string(), fmt::format("default: {}", rule.at("source").as_string())});
}

Bytes MachineSpec::usable_dram() const {
  if (!host_device) return dram - std::min(dram, std::max(kSmallestReserve, dram * kReservedFraction));
  constexpr double kMostReserved = 1.0 / 8;
  const Bytes reserve = std::max(dram * kReservedFraction, std::min(kSmallestReserve, dram * kMostReserved));
  const Bytes taken = reserve + static_cast<double>(gpus_per_node) * gpu.memory;
  return dram - std::min(dram, taken);
}

void set_host_ranks(MachineSpec& machine, int ranks) {
  if (!machine.host_device || ranks < 1) throw std::logic_error("set_host_ranks: not a host that computes");
  const double part = static_cast<double>(machine.gpus_per_node) / ranks;
  constexpr double kPage = 4096;
  GpuSpec& gpu = machine.gpu;
  gpu.memory = Bytes(std::floor(gpu.memory.base() * part / kPage) * kPage);
  gpu.memory_bandwidth = gpu.memory_bandwidth * part;
  for (auto* peak : {&gpu.peak_bf16, &gpu.peak_fp16, &gpu.peak_fp32, &gpu.measured_matmul}) {
    if (*peak) *peak = **peak * part;
  }
  machine.gpus_per_node = ranks;
  machine.interconnect = ranks == 1 ? Interconnect::single : Interconnect::root_complex;
}

}  // namespace zeroplan
