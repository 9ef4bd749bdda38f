#pragma once
// What moves bytes and computes in a machine, as resources with capacities, and which of them a transfer uses.
// Nodes are equal, so one of them is a graph (Boost.Graph, in the .cpp) and the others are its copies.

#include <compare>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "models/machine_spec.h"

namespace zeroplan {

enum class ResourceKind : std::uint8_t {
  sm,           // flops/s of one GPU: the 16-bit peak (fp32 where there is none)
  hbm,          // bytes/s of one GPU's memory
  nvlink,       // bytes/s, one direction: a GPU's port to the switch, or the links of one pair
  pcie,         // bytes/s, one direction, achievable: a GPU's link or the uplink of a switch
  pcie_duplex,  // bytes/s of both directions of such a link together
  c2c,          // bytes/s, one direction, achievable: CPU and GPUs of a superchip
  c2c_duplex,   // bytes/s of both directions together
  socket_link,  // bytes/s, one direction, between two sockets
  dram,         // bytes/s of one socket's memory, reads and writes together
  cpu,          // core-seconds a second of one socket: its cores
  nvme_read,    // bytes/s of all drives of a node
  nvme_write,
  nic,  // bytes/s, one direction, of the NICs that a GPU (or several) uses
};
std::string_view to_string(ResourceKind kind);

struct Resource {
  std::string name;  // "node 0 gpu 3 nvlink out"
  ResourceKind kind = ResourceKind::sm;
  double capacity = 0;  // in the unit of its kind
};

/// Index into Topology::resources(); equal machines give equal ids.
struct ResourceId {
  std::uint32_t index = 0;
  friend auto operator<=>(const ResourceId&, const ResourceId&) = default;
};

enum class EndpointKind : std::uint8_t { gpu, dram, nvme, nic };

/// Where a transfer begins or ends.
struct Endpoint {
  EndpointKind kind = EndpointKind::gpu;
  int node = 0;
  int index = 0;  // GPU of the node, socket, 0 for nvme, NIC group
  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

/// Immutable. Calls may come from several threads (routes are found on first use and kept).
///
///   const Topology topology = Topology::build(machine);
///   const auto ids = topology.route(topology.gpu(0), topology.host_of(0));   // a d2h copy of rank 0
///   const BytesPerSecond rate = topology.width(ids);
class Topology {
 public:
  /// Throws InputError on a rank that cannot reach the host or the other nodes, and on a GPU without a peak rate.
  static Topology build(const MachineSpec& machine);

  std::span<const Resource> resources() const;
  const Resource& resource(ResourceId id) const { return resources()[id.index]; }

  /// Resources that one stream of bytes uses, in order; the memories at both ends included. A resource that stands
  /// twice is used twice (a bounce through host memory writes and reads it). Empty when from == to. GPUs reach each
  /// other by NVLink if there is a link, else by PCIe under one root complex if the GPU allows peer access, else
  /// through the host memory of the sender; other nodes through the NIC group of each GPU, and through host memory
  /// unless the NICs have GPUDirect. Within a node the path is the widest, then the shortest, then the one of lowest
  /// ids. Throws InputError when the machine has no such endpoint or no path. The span lives as long as the topology.
  std::span<const ResourceId> route(Endpoint from, Endpoint to) const;
  /// What one stream gets alone: the least of capacity / uses.
  BytesPerSecond width(std::span<const ResourceId> route) const;

  int num_ranks() const;
  int gpus_per_node() const;
  int sockets() const;     // of a node
  int nic_groups() const;  // of a node; 0 without network
  /// Ranks are numbered node by node.
  Endpoint gpu(int rank) const;
  /// The memory of the socket that the rank's GPU hangs on.
  Endpoint host_of(int rank) const;
  Endpoint nvme(int node) const { return {EndpointKind::nvme, node, 0}; }
  Endpoint nic_of(int rank) const;

  ResourceId sm(int rank) const;
  ResourceId hbm(int rank) const;
  ResourceId dram(int node, int socket) const;
  ResourceId cpu(int node, int socket) const;
  ResourceId dram_of(int rank) const;
  ResourceId cpu_of(int rank) const;
  /// Only with NVMe; InputError without.
  ResourceId nvme_read(int node) const;
  ResourceId nvme_write(int node) const;

 private:
  struct Impl;
  explicit Topology(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

}  // namespace zeroplan
