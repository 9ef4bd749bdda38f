#pragma once
// Rates on a topology that was read: between each two GPUs, and to host memory when all GPUs copy at once. The
// simulator's Topology is asked about two GPUs that meet as the file says, so both always agree.

#include <string>
#include <vector>

#include "models/topology_form.h"

namespace zeroplan {

/// One stream between two GPUs of the node.
struct GpuRoute {
  int from = 0;
  int to = 0;           // > from; the way back is the same
  std::string way;      // "NVSwitch, 12 links", "PCIe below one switch", "host memory, across sockets"
  BytesPerSecond rate;  // 0: not known (NVLinks of an unknown GPU)
};
/// Every pair, ordered by `from`, then `to`. `machine` is machine_from() of the same topology and form.
std::vector<GpuRoute> gpu_routes(const NodeTopology& topology, const NodeForm& form, const MachineSpec& machine);

/// Copies in one direction between a GPU and the memory of its socket.
struct HostCopy {
  int gpu = 0;
  BytesPerSecond alone;
  BytesPerSecond together;       // while every GPU of the node copies, shared max-min fair
  std::string limit;             // what limits it then: "its own link", "PCIe switch 0", "memory of socket 1"
  std::vector<int> shared_with;  // the GPUs that the limit serves, this one included
};
/// One entry a GPU; none for superchips whose GPU nobody named: the rate of their C2C is not in the file.
std::vector<HostCopy> host_copies(const NodeTopology& topology, const NodeForm& form, const MachineSpec& machine);

}  // namespace zeroplan
