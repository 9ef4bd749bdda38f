#pragma once
// Where the demands of a rank's works fall on the resources of its node.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "models/machine_spec.h"
#include "models/schedule.h"
#include "sim/collective_model.h"
#include "sim/cost_model.h"
#include "sim/gpu_model.h"
#include "sim/sharing.h"
#include "sim/topology.h"

namespace zeroplan {

/// How a work runs.
enum class WorkClass : std::uint8_t {
  none,        // takes no time
  kernel,      // on the SMs and memory of its GPU
  transfer,    // on links, host memory, cores or disks
  collective,  // a transfer of all ranks of a group together
};

/// What a work takes besides the resources that are shared evenly: a running transfer comes first on its GPU.
struct GpuTake {
  double sms = 0;       // part of the SMs, as long as the op stands on its stream
  double hbm_time = 0;  // seconds of the memory's whole bandwidth, spread over the transfer
  friend bool operator==(const GpuTake&, const GpuTake&) = default;
};

/// Ranks of a node that belong to one group, in ascending order, and whether the group has ranks on other nodes.
struct NodeMembers {
  std::vector<int> ranks;
  bool several_nodes = false;
  friend auto operator<=>(const NodeMembers&, const NodeMembers&) = default;
};

/// A work that needs less of a resource needs nothing of it: the inverse of a denormal, a rate, is not finite.
inline constexpr double kLeastSeconds = 1e-100;

/// Maps works to resources of one node. Resources have capacity 1 and amounts are the seconds that the whole resource
/// would take. The indices are those of Topology for node 0, and one more for the drives that reads and writes share.
class RankCosts {
 public:
  explicit RankCosts(const MachineSpec& machine);

  int gpus_per_node() const { return gpus_; }
  int num_nodes() const { return nodes_; }
  const std::vector<Resource>& resources() const { return resources_; }
  std::uint32_t sm(int rank) const { return topology_.sm(rank).index; }
  std::uint32_t hbm(int rank) const { return topology_.hbm(rank).index; }

  /// `members`: the size of the work's group if it is a collective.
  static WorkClass classify(const Work& work, const Demand& demand, int members);

  /// Amounts of a transfer of `rank` (of the node). At least one.
  std::vector<Use> transfer(const Demand& demand, int rank) const;
  /// Amounts of a collective on a node with these members; the largest is its transfer time unless siblings share it.
  std::vector<Use> collective(const Collective& work, const Demand& demand, const NodeMembers& members,
                              RankGroup group) const;

  GpuTake take(const Work& work, const Demand& demand, RankGroup group) const;

 private:
  void add_route(std::vector<double>& seconds, std::span<const ResourceId> route, double bytes) const;
  void add_inside(std::vector<double>& seconds, const NodeMembers& members, double bytes, double nvlink_seconds) const;
  std::vector<double> network_route(int rank, double bytes) const;
  void add_shared(std::vector<double>& seconds, int rank, ResourceRole role, double busy) const;
  bool carries(std::uint32_t resource) const;

  Topology topology_;  // two nodes at most
  CollectiveModel collectives_;
  GpuModel gpu_;
  int gpus_, nodes_, sockets_;
  double num_sms_;
  bool host_device_;
  std::uint32_t drives_ = 0;  // what disk reads and writes share
  /// A probed host: what runs in threads of its own on a rank, one thing at a time. Resources lanes_, lanes_ + 1, ...
  enum class Lane : std::uint8_t { kernels, sums, h2d, d2h, gather, reduce };
  static constexpr std::uint32_t kNumLanes = 6;
  std::uint32_t lane(int rank, Lane which) const;
  void add_lanes();
  std::vector<Use> threads_collective(const Collective& work, const Demand& demand, const NodeMembers& members) const;
  std::optional<std::uint32_t> lanes_;
  std::vector<Resource> resources_;
  std::array<std::vector<std::vector<Use>>, 2> pcie_;  // h2d, d2h: by rank, seconds for a busy second of the role
};

}  // namespace zeroplan
