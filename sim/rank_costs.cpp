#include "sim/rank_costs.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "sim/host_fractions.h"

namespace zeroplan {
namespace {

/// SMs where the catalog does not say: as GpuModel assumes (B200).
constexpr double kAssumedSms = 148;
/// A ring reads and writes each byte it forwards (nccl.md section 8).
constexpr double kHbmPassesPerWireByte = 2;
/// The most that one collective, and one copy, takes of the GPU's memory bandwidth. Two collectives and two copies at
/// once leave a tenth to kernels. Rings on known GPUs take 0.14 to 0.25, copies under 0.1.
constexpr double kMostHbmOfCollective = 0.35, kMostHbmOfCopy = 0.1;

MachineSpec with_few_nodes(MachineSpec machine) {
  machine.nodes = std::min(machine.nodes, 2);
  return machine;
}

double busy(const Demand& demand, ResourceRole role) { return demand[role].base(); }

double most(const std::vector<double>& values) { return *std::ranges::max_element(values); }

/// Parts of what is at least kLeastSeconds, and still not denormal.
constexpr double kLeastUse = 1e-200;

std::vector<Use> uses_of(const std::vector<double>& seconds, double factor = 1) {
  std::vector<Use> uses;
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    const double amount = seconds[i] * factor;
    if (amount > kLeastUse) uses.push_back({static_cast<std::uint32_t>(i), amount});
  }
  return uses;
}

}  // namespace

RankCosts::RankCosts(const MachineSpec& machine)
    : topology_(Topology::build(with_few_nodes(machine))),
      collectives_(machine, CollectiveSetting::in_step),
      gpu_(machine.gpu),
      gpus_(machine.gpus_per_node),
      nodes_(machine.nodes),
      sockets_(topology_.sockets()),
      num_sms_(static_cast<double>(machine.gpu.num_sms.value_or(0))),
      host_device_(machine.host_device) {
  if (num_sms_ <= 0) num_sms_ = kAssumedSms;
  const auto all = topology_.resources();
  const std::size_t per_node = all.size() / static_cast<std::size_t>(std::min(nodes_, 2));
  resources_.assign(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(per_node));
  for (Resource& resource : resources_) resource.name.erase(0, resource.name.find(' ', 5) + 1);  // "node 0 "
  drives_ = static_cast<std::uint32_t>(per_node);
  resources_.push_back({"nvme both ways", ResourceKind::nvme_read, kDiskFraction * machine.nvme.read.base()});
  if (machine.host_kernels) add_lanes();
  if (host_device_) return;
  for (const bool to_gpu : {true, false}) {
    auto& by_rank = pcie_[to_gpu ? 0 : 1];
    std::vector<double> together(resources_.size());
    std::vector<std::vector<double>> alone;
    for (int rank = 0; rank < gpus_; ++rank) {
      const Endpoint host = topology_.host_of(rank), gpu = topology_.gpu(rank);
      std::vector<double>& seconds = alone.emplace_back(resources_.size());
      add_route(seconds, to_gpu ? topology_.route(host, gpu) : topology_.route(gpu, host), 1);
      // The demand has a role of its own for host memory.
      for (int socket = 0; socket < sockets_; ++socket) seconds[topology_.dram(0, socket).index] = 0;
      for (std::size_t i = 0; i < seconds.size(); ++i) together[i] += seconds[i];
    }
    // A demand's busy time is that of the fullest link with all ranks at it.
    for (const auto& seconds : alone) by_rank.push_back(uses_of(seconds, 1 / most(together)));
  }
}

std::uint32_t RankCosts::lane(int rank, Lane which) const {
  return *lanes_ + static_cast<std::uint32_t>(rank) * kNumLanes + static_cast<std::uint32_t>(which);
}

void RankCosts::add_lanes() {
  static constexpr std::array<std::string_view, kNumLanes> kNames{"compute threads",      "threads for sums",
                                                                  "copies to the device", "copies from the device",
                                                                  "gathering threads",    "reducing threads"};
  lanes_ = static_cast<std::uint32_t>(resources_.size());
  for (int rank = 0; rank < gpus_; ++rank) {
    for (const std::string_view name : kNames) {
      resources_.push_back({fmt::format("rank {} {}", rank, name), ResourceKind::cpu, 1});
    }
  }
}

WorkClass RankCosts::classify(const Work& work, const Demand& demand, int members) {
  if (std::holds_alternative<Collective>(work)) return members > 1 ? WorkClass::collective : WorkClass::none;
  if (!(demand.alone().base() > kLeastSeconds)) return WorkClass::none;
  const double on_gpu = std::max(busy(demand, ResourceRole::sm), busy(demand, ResourceRole::hbm));
  for (std::size_t role = 0; role < kNumRoles; ++role) {
    const auto r = static_cast<ResourceRole>(role);
    if (r == ResourceRole::sm || r == ResourceRole::hbm || !(demand[r].base() > kLeastSeconds)) continue;
    // On a probed host kernels take cores, beside the lane that keeps a rank's kernels apart.
    const bool on_cores = demand[ResourceRole::cpu] > Seconds();
    if (on_gpu > 0 && !on_cores) throw std::logic_error("simulate: a work that needs the GPU and the host at once");
    return WorkClass::transfer;
  }
  return WorkClass::kernel;
}

bool RankCosts::carries(std::uint32_t resource) const {
  const ResourceKind kind = resources_[resource].kind;
  return kind != ResourceKind::sm && kind != ResourceKind::hbm;
}

/// Resources of other nodes count for the same ones of this node: nodes are equal and all do the same.
void RankCosts::add_route(std::vector<double>& seconds, std::span<const ResourceId> route, double bytes) const {
  for (const ResourceId id : route) {
    const std::uint32_t local = id.index % drives_;
    if (carries(local) && resources_[local].capacity > 0) seconds[local] += bytes / resources_[local].capacity;
  }
}

/// What of a host resource a rank takes: its own socket's part, or parts of several sockets when there are fewer ranks.
void RankCosts::add_shared(std::vector<double>& seconds, int rank, ResourceRole role, double time) const {
  const auto at = [&](int socket) {
    return (role == ResourceRole::dram ? topology_.dram(0, socket) : topology_.cpu(0, socket)).index;
  };
  if (gpus_ >= sockets_) {
    seconds[at(topology_.host_of(rank).index)] += time * sockets_ / gpus_;
  } else {
    for (int socket = 0; socket < sockets_; ++socket) seconds[at(socket)] += time / gpus_;
  }
}

std::vector<Use> RankCosts::transfer(const Demand& demand, int rank) const {
  std::vector<double> seconds(resources_.size());
  for (const ResourceRole role : {ResourceRole::h2d, ResourceRole::d2h}) {
    const double time = busy(demand, role);
    if (!(time > 0)) continue;
    if (lanes_) {
      seconds[lane(rank, role == ResourceRole::h2d ? Lane::h2d : Lane::d2h)] += time;
      continue;
    }
    if (host_device_) throw std::logic_error("simulate: a PCIe copy on a machine whose device is the host");
    for (const Use& use : pcie_[role == ResourceRole::h2d ? 0 : 1][static_cast<std::size_t>(rank)]) {
      seconds[use.resource] += time * use.amount;
    }
  }
  if (lanes_) {
    seconds[lane(rank, Lane::kernels)] += busy(demand, ResourceRole::sm);
    seconds[lane(rank, Lane::sums)] += busy(demand, ResourceRole::hbm);
  }
  for (const ResourceRole role : {ResourceRole::dram, ResourceRole::cpu}) {
    if (busy(demand, role) > 0) add_shared(seconds, rank, role, busy(demand, role));
  }
  const double read = busy(demand, ResourceRole::nvme_read), write = busy(demand, ResourceRole::nvme_write);
  if (read + write > 0) {
    seconds[topology_.nvme_read(0).index] += read / gpus_;
    seconds[topology_.nvme_write(0).index] += write / gpus_;
    seconds[drives_] += (read + write) / gpus_;  // one drive does one thing at a time
  }
  if (busy(demand, ResourceRole::links) > 0 || busy(demand, ResourceRole::network) > 0) {
    throw std::logic_error("simulate: a work between ranks that is no collective");
  }
  return uses_of(seconds);
}

/// Between the GPUs of a node: all NVLinks among the members alike, or the PCIe ring.
void RankCosts::add_inside(std::vector<double>& seconds, const NodeMembers& members, double bytes,
                           double nvlink_seconds) const {
  const auto gpu = [&](std::size_t k) { return topology_.gpu(members.ranks[k % members.ranks.size()]); };
  const std::size_t count = members.ranks.size();
  if (nvlink_seconds <= 0) {
    for (std::size_t k = 0; k < count; ++k) add_route(seconds, topology_.route(gpu(k), gpu(k + 1)), bytes);
    return;
  }
  for (std::size_t k = 0; k < count; ++k) {
    for (std::size_t j = 0; j < count; ++j) {
      if (j == k) continue;
      for (const ResourceId id : topology_.route(gpu(k), gpu(j))) {
        if (resources_[id.index].kind == ResourceKind::nvlink) seconds[id.index] = nvlink_seconds;
      }
    }
  }
}

/// From a rank to its neighbour on the next node, which also is what arrives from the node before.
std::vector<double> RankCosts::network_route(int rank, double bytes) const {
  std::vector<double> seconds(resources_.size());
  add_route(seconds, topology_.route(topology_.gpu(rank), topology_.gpu(rank + gpus_)), bytes);
  return seconds;
}

std::vector<Use> RankCosts::collective(const Collective& work, const Demand& demand, const NodeMembers& members,
                                       RankGroup group) const {
  const double time = std::max(busy(demand, ResourceRole::links), busy(demand, ResourceRole::network));
  if (!(time > 0)) return {};
  if (lanes_) return threads_collective(work, demand, members);
  const CollectiveCost cost = collectives_.cost(work.kind, work.message(), group);
  const double wire = std::max(1.0, cost.wire_bytes_per_rank.base());
  std::vector<double> seconds(resources_.size());
  if (!members.several_nodes) {
    add_inside(seconds, members, wire, cost.link == LinkClass::nvlink ? time : 0);
    if (!(most(seconds) > 0)) add_inside(seconds, members, wire, 0);  // no link of its own between these GPUs
    return uses_of(seconds, time / most(seconds));
  }
  // The group's time is that of its share of the NICs, with its siblings on the node at the same op.
  const double crossing = std::max(1.0, cost.network_bytes_per_node.base()) / gpus_;
  std::vector<double> together(resources_.size());
  for (int rank = 0; rank < gpus_; ++rank) {
    const std::vector<double> route = network_route(rank, crossing);
    const bool member = std::ranges::find(members.ranks, rank) != members.ranks.end();
    for (std::size_t i = 0; i < route.size(); ++i) {
      together[i] += route[i];
      if (member) seconds[i] += route[i];
    }
  }
  const double factor = time / most(together);
  for (double& value : seconds) value *= factor;
  if (const int count = static_cast<int>(members.ranks.size()); count > 1) {
    const CollectiveCost inside = collectives_.cost(work.kind, work.message(), {count, 1, count});
    const double transfer = std::min(time, (inside.alone() - inside.latency).base());
    std::vector<double> ring(resources_.size());
    add_inside(ring, members, wire, inside.link == LinkClass::nvlink ? transfer : 0);
    const double scale = inside.link == LinkClass::nvlink ? 1 : transfer / most(ring);
    for (std::size_t i = 0; i < ring.size(); ++i) seconds[i] = std::min(time, seconds[i] + scale * ring[i]);
  }
  return uses_of(seconds);
}

/// One thread of each member, and their part of the cores.
std::vector<Use> RankCosts::threads_collective(const Collective& work, const Demand& demand,
                                               const NodeMembers& members) const {
  std::vector<double> seconds(resources_.size());
  const Lane which = work.kind == CollectiveKind::all_gather ? Lane::gather : Lane::reduce;
  const double part = static_cast<double>(members.ranks.size()) / gpus_;
  for (const int rank : members.ranks) seconds[lane(rank, which)] += busy(demand, ResourceRole::links);
  add_shared(seconds, members.ranks.front(), ResourceRole::cpu, busy(demand, ResourceRole::cpu) * part * gpus_);
  return uses_of(seconds);
}

GpuTake RankCosts::take(const Work& work, const Demand& demand, RankGroup group) const {
  if (host_device_) return {};  // memory and cores are resources of the host
  if (const auto* collective = std::get_if<Collective>(&work)) {
    const CollectiveCost cost = collectives_.cost(collective->kind, collective->message(), group);
    const double time = std::max(busy(demand, ResourceRole::links), busy(demand, ResourceRole::network));
    const double hbm = gpu_.memory_bound(kHbmPassesPerWireByte * cost.wire_bytes_per_rank).hbm_time.base();
    return {cost.sms / num_sms_, std::min(hbm, kMostHbmOfCollective * time)};
  }
  const auto* copy = std::get_if<Copy>(&work);
  if (copy == nullptr || (copy->from != Memory::hbm && copy->to != Memory::hbm)) return {};
  const double time = std::max(busy(demand, ResourceRole::h2d), busy(demand, ResourceRole::d2h));
  return {0, std::min(gpu_.memory_bound(copy->bytes).hbm_time.base(), kMostHbmOfCopy * time)};
}

}  // namespace zeroplan
