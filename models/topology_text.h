#pragma once
// The wiring of one node as its owner can print it: `nvidia-smi topo -m` (drivers 384 to 570 and what looks like them)
// or the XML that NCCL writes to NCCL_TOPO_DUMP_FILE and reads from NCCL_TOPO_FILE. Both become one NodeTopology.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/assumption.h"
#include "models/units.h"

namespace zeroplan {

/// The nearest thing that joins two devices, nearest first, in the words of nvidia-smi's legend.
enum class Connection : std::uint8_t {
  self,    // X
  nvlink,  // NV#
  pix,     // at most one PCIe bridge: one switch
  pxb,     // several PCIe bridges, no host bridge: one tree of switches
  phb,     // one PCIe host bridge
  node,    // several host bridges of one NUMA node
  sys,     // two NUMA nodes
};

struct TopologyLink {
  Connection kind = Connection::self;
  int nvlinks = 0;  // only with Connection::nvlink
  friend bool operator==(const TopologyLink&, const TopologyLink&) = default;
};
/// "X", "NV12", "SYS".
std::string to_string(const TopologyLink& link);

/// A PCIe link as the file states it; 0: not stated.
struct PcieLink {
  int generation = 0;
  int lanes = 0;
  friend bool operator==(const PcieLink&, const PcieLink&) = default;
};

struct TopologyDevice {
  std::string name;                // "GPU0", "NIC0", "mlx5_0": how the matrix calls it
  std::string device;              // what the name stands for: "mlx5_3", a GPU's bus id; empty: not stated
  std::string cpus;                // CPU affinity as written; empty: not stated
  std::vector<int> numa;           // NUMA nodes near it, ascending; empty: not stated
  std::optional<int> memory_node;  // GPU memory is a NUMA node of its own: a superchip
  PcieLink pcie;                   // XML
  int bridge = -1;                 // XML: index into NodeTopology::bridges; -1: straight on the root complex
  int nvlinks = 0;                 // XML, GPU: links in use, towards GPUs and NVSwitches
  int sm = 0;                      // XML, GPU: compute capability times 10
  BytesPerSecond speed;            // XML, NIC
  std::optional<bool> gpudirect;   // XML, NIC
};

/// A PCIe bridge with devices below (XML): a switch. Its parent has a smaller index.
struct TopologyBridge {
  std::string name;  // bus id
  int parent = -1;   // -1: the root complex
  PcieLink uplink;
};

enum class TopologyFormat : std::uint8_t { nvidia_smi, nccl };

struct NodeTopology {
  std::string file;
  TopologyFormat format = TopologyFormat::nvidia_smi;
  std::vector<TopologyDevice> gpus;
  std::vector<TopologyDevice> nics;
  std::vector<TopologyLink> links;              // [devices, devices], symmetric; devices: GPUs, then NICs
  std::vector<std::optional<Connection>> pcie;  // [gpus, gpus]: the way without NVLink; nothing where NVLink hides it
  bool nvswitch = false;                        // XML: links lead to NVSwitches
  bool superchip = false;                       // GPUs hang on their CPU by C2C
  std::vector<TopologyBridge> bridges;
  std::vector<Assumption> notes;  // what was read but has no meaning here

  std::size_t num_devices() const { return gpus.size() + nics.size(); }
  const TopologyDevice& device(std::size_t index) const {
    return index < gpus.size() ? gpus[index] : nics[index - gpus.size()];
  }
  const TopologyLink& link(std::size_t a, std::size_t b) const { return links[a * num_devices() + b]; }
  std::optional<Connection> pcie_between(std::size_t a, std::size_t b) const { return pcie[a * gpus.size() + b]; }
};

/// Reads either format: XML when the first character that is not blank is '<'. `file` is how errors call it.
/// Throws InputError "file:line: expected X, found Y": a missing, surplus or misspelt column or row, an unknown
/// connection (with the nearest), an asymmetric matrix, repeated names, a truncated or empty file, XML that is not well
/// formed or not NCCL's.
NodeTopology read_topology(std::string_view text, const std::string& file);

}  // namespace zeroplan
