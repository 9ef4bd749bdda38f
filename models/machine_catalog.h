#pragma once
// The hardware half of models/catalog: index rows for look-up by name, entries completed to full descriptions.

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/json_reader.h"
#include "models/machine_spec.h"

namespace zeroplan {

/// A row of gpu_index.json.
struct GpuEntry {
  std::string name;
  int label = 0;                         // GB, as the vendor prints it
  std::vector<std::string> default_for;  // bare names that mean this GPU
  std::vector<std::string> aliases;
};

/// A row of node_index.json.
struct NodeEntry {
  std::string name;
  std::string provider;
  std::string kind;
  std::string gpu;
  int gpus_per_node = 1;
  std::string dram;         // empty: not stated
  double usd_per_hour = 0;  // on demand; 0: no such price
  std::vector<std::string> aliases;
};

/// All rows, sorted by name.
std::vector<GpuEntry> gpu_index();
std::vector<NodeEntry> node_index();

/// How a box of several such GPUs is usually joined; a generic node assumes it.
enum class Wiring : std::uint8_t { none, pairs, mesh, nvswitch_above_4, nvswitch_above_8, nvswitch };

/// A file of gpus/, completed.
struct CatalogGpu {
  GpuSpec spec;
  std::string segment;  // "consumer", "workstation", "data centre"
  int label = 0;        // GB
  Wiring wiring = Wiring::none;
  std::optional<Assumption> memory;  // how the capacity was worked out when nobody measured it
};

/// What a node states. Absent values are completed from node_defaults.json.
struct PartialNode {
  std::optional<int> gpus_per_pcie_switch, gpus_per_root_complex;
  std::optional<int> pcie_generation, pcie_lanes;
  std::optional<int> sockets, physical_cores, vcpus;
  std::optional<Bytes> dram;
  std::optional<BytesPerSecond> dram_bandwidth;  // theoretical
  bool nvme_stated = false;
  std::optional<int> drives;
  std::optional<Bytes> nvme_capacity;
  std::optional<BytesPerSecond> nvme_read, nvme_write;
};

/// The GPU of that canonical name. Throws InputError with the nearest names.
CatalogGpu load_gpu(const std::string& name);
/// The node of that canonical name, complete. `name` is one of node_index().
MachineSpec load_node(const std::string& name);
/// Fills what `node` leaves out, notes each value taken in machine.assumptions. machine.gpu, gpus_per_node,
/// interconnect and cpu are set before.
void complete_node(MachineSpec& machine, const CatalogGpu& gpu, const PartialNode& node);

/// The embedded file, parsed; errors call it "catalog/<path>".
JsonDocument read_catalog(std::string_view path);
/// Lower case without '-', '_', '.' and blanks: how names are compared.
std::string normalized(std::string_view name);

}  // namespace zeroplan
