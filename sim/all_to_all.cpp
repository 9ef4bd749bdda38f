#include "sim/all_to_all.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "sim/topology.h"

namespace zeroplan {
namespace {

/// Groups of consecutive GPUs of one node.
class NodeGroups {
 public:
  NodeGroups(const MachineSpec& node, int inside)
      : topology_(Topology::build(node)), gpus_(node.gpus_per_node), inside_(inside) {}

  /// Seconds of the fullest link when every GPU sends each other one of its group a part of 1 / inside bytes.
  double all_to_all() const {
    std::vector<double> seconds(topology_.resources().size());
    for (int from = 0; from < inside_; ++from)
      for (int to = 0; to < inside_; ++to)
        if (from != to) send(seconds, from, to, 1.0 / inside_);
    return *std::ranges::max_element(seconds);
  }
  /// The same when each sends 1 - 1 / inside bytes to the next one of a ring.
  double ring(const std::vector<int>& order) const {
    std::vector<double> seconds(topology_.resources().size());
    for (std::size_t i = 0; i < order.size(); ++i)
      send(seconds, order[i], order[(i + 1) % order.size()], 1 - 1.0 / inside_);
    return *std::ranges::max_element(seconds);
  }

 private:
  void send(std::vector<double>& seconds, int from, int to, double bytes) const {
    for (int first = 0; first + inside_ <= gpus_; first += inside_)
      for (const ResourceId id : topology_.route(topology_.gpu(first + from), topology_.gpu(first + to)))
        seconds[id.index] += bytes / topology_.resource(id).capacity;
  }

  Topology topology_;
  int gpus_, inside_;
};

/// The ring whose fullest link is least full. Meshes have at most eight GPUs, of which few orders keep to their links;
/// elsewhere neighbours in number are neighbours on the board.
double best_ring(const NodeGroups& groups, int inside, bool mesh) {
  constexpr int kMostOrdered = 8;
  std::vector<int> order(static_cast<std::size_t>(inside));
  std::iota(order.begin(), order.end(), 0);
  double best = groups.ring(order);
  if (!mesh || inside > kMostOrdered) return best;
  while (std::next_permutation(order.begin() + 1, order.end())) best = std::min(best, groups.ring(order));
  return best;
}

}  // namespace

SecondsPerByte all_to_all_beyond_ring(const MachineSpec& machine, int inside) {
  // A switch of all GPUs: a rank's own port carries (inside - 1) / inside of its bytes either way.
  if (inside < 2 || machine.interconnect == Interconnect::nvswitch) return {};
  MachineSpec node = machine;
  node.nodes = 1;
  const NodeGroups groups(node, inside);
  const bool mesh = machine.interconnect == Interconnect::nvlink_mesh;
  return Seconds(std::max(0.0, groups.all_to_all() - best_ring(groups, inside, mesh))) / Bytes(1);
}

}  // namespace zeroplan
