#pragma once
// What a NodeTopology means for a machine: which GPUs share what, which NIC each uses, and the MachineSpec nearest to
// it.

#include <optional>
#include <string>
#include <vector>

#include "models/machine_catalog.h"
#include "models/machine_spec.h"
#include "models/topology_text.h"

namespace zeroplan {

/// Groups are lists of indices, each ascending, ordered by their lowest GPU.
struct NodeForm {
  Interconnect interconnect = Interconnect::single;
  int nvlinks = 0;                           // of one GPU, as this node wires it; 0: none
  std::vector<std::vector<int>> trees;       // GPUs below one root port (PIX, PXB): they share its link to the host
  std::vector<std::vector<int>> complexes;   // GPUs of one host bridge (PHB and nearer)
  std::vector<std::vector<int>> sockets;     // GPUs of one CPU
  std::vector<std::vector<int>> numa_nodes;  // NUMA nodes near those GPUs, one list a socket
  bool trees_known = true;                   // false: NVLink hides how GPUs of one NUMA node meet on PCIe
  std::vector<int> nic_of_gpu;               // -1: no NIC
  std::vector<Assumption> assumptions;       // what the file does not say, and what a machine of equal GPUs cannot
};

/// The GPU that `--gpu` names, by any name of the catalog. Throws InputError with the nearest names, and when the file
/// states another compute capability.
CatalogGpu gpu_of_topology(const std::string& name, const NodeTopology& topology);

/// `gpu` is null when nobody named it: then a switch is told from a mesh by link counts alone.
NodeForm node_form(const NodeTopology& topology, const CatalogGpu* gpu);

/// The node as a machine. What a topology cannot say (host memory, cores, rates of NICs) comes from
/// node_defaults.json, as assumptions. Without `gpu` it has PCIe rates and groups, and no compute, memory or NVLink
/// rate.
MachineSpec machine_from(const NodeTopology& topology, const NodeForm& form, const CatalogGpu* gpu);

/// One direction of a PCIe link, nominal.
BytesPerSecond pcie_rate(PcieLink link);

}  // namespace zeroplan
