#pragma once
// Time of a collective over a group of ranks: NCCL's choice of algorithm and protocol, corrected by measured rates.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "models/assumption.h"
#include "models/machine_spec.h"
#include "models/schedule.h"
#include "models/units.h"
#include "sim/collective_tables.h"
#include "sim/network_kinds.h"

namespace zeroplan {

/// Ranks of one communicator, evenly spread: ranks == nodes x ranks_per_node. A group that takes fewer ranks of a node
/// than the node has stands for all its siblings working at the same time (SPMD), so it gets their share of the NICs.
struct RankGroup {
  int ranks = 1;
  int nodes = 1;
  int ranks_per_node = 1;
  friend bool operator==(const RankGroup&, const RankGroup&) = default;
};

/// What limits a transfer.
enum class LinkClass : std::uint8_t { none, nvlink, pcie, host_memory, network };
std::string_view to_string(LinkClass value);

struct CollectiveCost {
  std::string_view algorithm;  // "ring", "tree", "NVLS", "NVLSTree", "PAT"; "none" for one rank
  std::string_view protocol;   // "LL", "LL128", "Simple"
  LinkClass link = LinkClass::none;
  Seconds latency;               // shares nothing
  Bytes wire_bytes_per_rank;     // message x ring factor: 2(n-1)/n, (n-1)/n, or 1 (nccl.md section 4)
  BytesPerSecond bus_bandwidth;  // while transferring
  Bytes network_bytes_per_node;  // what a node's NICs send, all siblings of the group together; 0 on one node
  int sms = 0;                   // taken while it runs: one a channel
  Seconds alone() const {
    return wire_bytes_per_rank > Bytes() ? latency + wire_bytes_per_rank / bus_bandwidth : latency;
  }
  /// Bus bandwidth over the whole time, as nccl-tests prints it.
  BytesPerSecond effective_bandwidth() const { return wire_bytes_per_rank / alone(); }
};

/// How calls follow each other, which decides how evenly the ranks arrive.
enum class CollectiveSetting : std::uint8_t {
  queued,    // back to back, as nccl-tests times them: ranks arrive together
  isolated,  // the host waits for each, as ml-engineering's all_reduce_bench.py does
  in_step,   // in a training step: 2.3 times the ring's latency on top (step-time.md section 2)
};

class CollectiveModel {
 public:
  explicit CollectiveModel(const MachineSpec& machine, CollectiveSetting setting = CollectiveSetting::isolated,
                           const CollectiveTables& tables = builtin_collective_tables());

  /// `message` is the full tensor: the gathered output, the input of a reduce-scatter. A group of one costs nothing.
  /// Throws std::logic_error on a group that the machine does not hold. Does not allocate.
  CollectiveCost cost(CollectiveKind kind, Bytes message, RankGroup group) const;
  /// One rank's tensor to all others, pipelined along the ring.
  CollectiveCost broadcast(Bytes message, RankGroup group) const;

  /// All ranks of the machine as one group.
  RankGroup all() const;

  /// Fractions and tables used for groups on this machine.
  std::vector<Assumption> assumptions() const;

 private:
  enum class Pattern : std::uint8_t { gather, scatter, reduce, broadcast };
  /// The ring that a group forms.
  struct Path {
    LinkClass link = LinkClass::none;  // the slowest piece
    BytesPerSecond inside;             // inside a node, large messages; 0: one rank a node
    BytesPerSecond network;            // the group's share of a node's NICs, achievable; 0: one node
    BytesPerSecond ring;               // the smaller one
    LinkClass inside_link = LinkClass::none;
  };
  /// What NCCL's own model takes.
  struct Choice {
    std::string_view algorithm, protocol;
    Seconds latency;
    Seconds time;            // latency + transfer: NCCL's formulas, or the ring law
    bool tree_like = false;  // network bytes of a tree over the nodes
    bool in_switch = false;  // NVLS
  };

  CollectiveCost evaluate(Pattern pattern, Bytes message, RankGroup group) const;
  Path path(Pattern pattern, RankGroup group) const;
  BytesPerSecond nvlink_ring(int ranks) const;
  Path pcie_path(Pattern pattern, int ranks) const;
  bool nvls_inside(int ranks_per_node) const;
  double nvls_gain(int ranks_per_node) const;
  BytesPerSecond reduce_asymptote(const Path& path, RankGroup group) const;
  Choice choose(Pattern pattern, double factor, Bytes message, RankGroup group, const Path& path) const;
  Seconds ring_latency(Pattern pattern, RankGroup group, std::size_t protocol, const Path& path) const;
  Seconds tree_latency(RankGroup group, std::size_t protocol, const Path& path) const;
  Seconds least_reduce_latency(RankGroup group, const Path& path) const;
  /// Latency of an all-reduce between nodes or of a gather's ring, with what this network takes longer than NCCL says.
  Seconds network_latency(Pattern pattern, RankGroup group, const Path& path) const;
  const CollectiveRamp* ramp_for(RankGroup group) const;
  /// The measured all-reduce table that stands for the group, or none.
  const CollectiveRamp* reduce_table(RankGroup group) const;
  /// A ring over NVLink inside a node: the protocol that ring_time() finds fastest.
  Choice fastest_ring(Pattern pattern, Bytes wire, RankGroup group, const Path& path) const;
  /// Of ranks that arrive together, but for a table: that is as it was measured.
  Seconds measured_time(Pattern pattern, double factor, Bytes message, RankGroup group, const Path& path,
                        const Choice& choice) const;
  Seconds table_time(const CollectiveRamp& ramp, double factor, Bytes message, RankGroup group, const Path& path) const;
  bool in_switch(Pattern pattern, RankGroup group) const;
  bool by_ring_law(Pattern pattern, RankGroup group, const Path& path) const;
  /// How much later than the others the last rank arrives if the host waits for each call.
  Seconds arrival(Pattern pattern, RankGroup group, const Path& path) const;
  /// What the setting adds to measured_time().
  Seconds waiting(Pattern pattern, RankGroup group, const Path& path) const;
  Seconds step_latency(Pattern pattern, RankGroup group, const Path& path) const;
  int channels(const Choice& choice, const Path& path, RankGroup group) const;
  int in_switch_channels(RankGroup group) const;

  const CollectiveTables* tables_;  // outlives the model: the built-in ones are static
  CollectiveSetting setting_;
  Interconnect interconnect_;
  int nodes_, gpus_per_node_, gpus_per_pcie_switch_, ranks_per_socket_;
  BytesPerSecond nvlink_, pcie_, dram_bandwidth_, network_;
  const NetworkKind* network_kind_ = nullptr;
  bool host_device_ = false;  // ranks are threads of the host: their tensors live in its memory
  bool peer_access_ = false;  // GPU to GPU over PCIe
  bool nvidia_ = false;
  int major_ = 0;            // compute capability
  std::string_view family_;  // "Ampere", "Hopper", "Blackwell": tables of the nearest architecture
  double bridge_ = 0;        // of the NVLink rate, for bridged pairs
  const CollectiveLaw* law_ = nullptr;
};

/// GPU memory that NCCL takes for one communicator of the group (nccl.md sections 7 and 9), and the reason for it.
struct CommunicatorMemory {
  Bytes bytes;
  Assumption assumption;
};
CommunicatorMemory communicator_memory(const MachineSpec& machine, RankGroup group);

}  // namespace zeroplan
