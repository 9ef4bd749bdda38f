#pragma once
// One node of a machine as vertices, directed edges and resources. Topology finds routes in it.

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "models/machine_spec.h"
#include "sim/topology.h"

namespace zeroplan {

struct NodeVertex {
  std::string name;                  // "GPU 3", "PCIe switch 1", "socket 0", "host memory 0", "NVMe", "NIC 2"
  bool is_end = false;               // transfers begin or end here, none passes through
  std::optional<ResourceId> memory;  // what a transfer that begins or ends here uses
};

struct NodeEdge {
  int from = 0;
  int to = 0;
  std::optional<ResourceId> link;                          // nothing: never the limit
  std::optional<ResourceId> duplex;                        // both directions of the link together
  double width = std::numeric_limits<double>::infinity();  // bytes/s of the link
  bool nvlink = false;
};

struct NodeGraph {
  std::vector<NodeVertex> vertices;
  std::vector<NodeEdge> edges;                // out of a vertex in ascending order of ids
  std::vector<Resource> resources;            // names without the node
  std::vector<int> gpus, drams, nvmes, nics;  // vertices
  std::vector<ResourceId> sms, cpus, nic_out, nic_in;
  std::vector<int> socket_of_gpu, complex_of_gpu, nic_of_gpu, nic_of_socket;
  ResourceId nvme_read, nvme_write;
};

/// Throws InputError when the GPU has no peak rate.
NodeGraph build_node_graph(const MachineSpec& machine);

}  // namespace zeroplan
