#include "sim/collective_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "models/error.h"
#include "sim/nccl_constants.h"

namespace zeroplan {

namespace {

constexpr Seconds microseconds(double value) { return Seconds(value * 1e-6); }

int compute_major(const GpuSpec& gpu) {
  if (gpu.vendor != "NVIDIA") return 0;
  int major = 0;
  for (const char c : gpu.compute_capability) {
    if (c < '0' || c > '9') break;
    major = 10 * major + (c - '0');
  }
  return major;
}

std::string_view nearest_family(int major) { return major >= 10 ? "Blackwell" : major == 9 ? "Hopper" : "Ampere"; }

double bridge_fraction(const GpuSpec& gpu, int major) {
  if (major >= 9) return nccl::kBridgeHopper;
  return gpu.compute_capability == "8.6" ? nccl::kBridgeGa102 : nccl::kBridge;
}

}  // namespace

std::string_view to_string(LinkClass value) {
  switch (value) {
    case LinkClass::none:
      return "none";
    case LinkClass::nvlink:
      return "nvlink";
    case LinkClass::pcie:
      return "pcie";
    case LinkClass::host_memory:
      return "host memory";
    case LinkClass::network:
      return "network";
  }
  return "";
}

CollectiveModel::CollectiveModel(const MachineSpec& machine, CollectiveSetting setting, const CollectiveTables& tables)
    : tables_(&tables),
      setting_(setting),
      interconnect_(machine.interconnect),
      nodes_(machine.nodes),
      gpus_per_node_(machine.gpus_per_node),
      gpus_per_pcie_switch_(std::max(1, machine.gpus_per_pcie_switch)),
      ranks_per_socket_((machine.gpus_per_node + std::max(1, machine.sockets) - 1) / std::max(1, machine.sockets)),
      nvlink_(machine.nvlink),
      pcie_(machine.gpu.pcie),
      dram_bandwidth_(machine.dram_bandwidth),
      network_(machine.network.bandwidth),
      network_kind_(&network_kind(machine.network.kind)),
      host_device_(machine.host_device),
      peer_access_(machine.gpu.p2p_over_pcie.value_or(false)),
      nvidia_(machine.gpu.vendor == "NVIDIA"),
      major_(compute_major(machine.gpu)),
      family_(nearest_family(major_)),
      bridge_(bridge_fraction(machine.gpu, major_)) {
  const auto law = std::ranges::find(tables.laws, family_, &CollectiveLaw::arch);
  if (law == tables.laws.end()) throw std::logic_error("no collective law for " + std::string(family_));
  law_ = &*law;
  if (nodes_ > 1 && !(network_ > BytesPerSecond()))
    throw InputError(fmt::format("{}: {} nodes need a network bandwidth (network.bandwidth)", machine.name, nodes_));
  if (gpus_per_node_ > 1 && !(path(Pattern::gather, {gpus_per_node_, 1, gpus_per_node_}).ring > BytesPerSecond()))
    throw InputError(fmt::format("{}: {} GPUs a node need a rate between them (nvlink, gpu.pcie or dram_bandwidth)",
                                 machine.name, gpus_per_node_));
}

RankGroup CollectiveModel::all() const { return {nodes_ * gpus_per_node_, nodes_, gpus_per_node_}; }

bool CollectiveModel::nvls_inside(int ranks_per_node) const {
  if (!nvidia_ || (major_ != 9 && major_ != 10) || interconnect_ != Interconnect::nvswitch) return false;
  const auto first = std::ranges::find(tables_->nvls, family_, &NvlsGain::arch);
  return first != tables_->nvls.end() && ranks_per_node >= first->ranks;
}

double CollectiveModel::nvls_gain(int ranks_per_node) const {
  double gain = 1;
  for (const NvlsGain& entry : tables_->nvls)
    if (entry.arch == family_ && entry.ranks <= ranks_per_node) gain = entry.gain;
  return gain;
}

BytesPerSecond CollectiveModel::nvlink_ring(int ranks) const {
  switch (interconnect_) {
    case Interconnect::nvswitch:
      return law_->bandwidth * (nvlink_ / law_->link);
    case Interconnect::nvlink_mesh: {
      const int neighbours = nvidia_ ? std::min(gpus_per_node_ - 1, nccl::kMeshNeighbours) : gpus_per_node_ - 1;
      const double reached = std::min(1.0, static_cast<double>(ranks - 1) / std::max(1, neighbours));
      return nvlink_ * reached * (nvidia_ ? law_->bandwidth / law_->link : nccl::kXgmi);
    }
    case Interconnect::nvlink_pairs:
      return ranks == 2 ? nvlink_ * bridge_ : BytesPerSecond();
    case Interconnect::pcie_switch:
    case Interconnect::root_complex:
    case Interconnect::single:
      return {};
  }
  return {};
}

CollectiveModel::Path CollectiveModel::pcie_path(Pattern pattern, int ranks) const {
  if (host_device_) {
    const BytesPerSecond rate = dram_bandwidth_ / (nccl::kHostMemoryPasses * gpus_per_node_);
    return {LinkClass::host_memory, rate, {}, rate};
  }
  const bool two_sockets = ranks > ranks_per_socket_;
  if (!peer_access_) {
    const BytesPerSecond copies = pcie_ * nccl::kHostMemoryCopies;
    const MeasuredRing known = two_sockets ? MeasuredRing{pcie_ * nccl::kHostMemoryTwoSockets, 8, copies}
                                           : MeasuredRing{pcie_ * nccl::kHostMemory, 4, copies};
    BytesPerSecond rate = copy_limited_rate(known, copies, tables_->ring.corner, ranks, pattern == Pattern::reduce);
    if (dram_bandwidth_ > BytesPerSecond())
      rate = std::min(rate, dram_bandwidth_ / (nccl::kHostMemoryPasses * gpus_per_node_));
    return {LinkClass::host_memory, rate, {}, rate};
  }
  if (interconnect_ == Interconnect::pcie_switch && (!two_sockets || ranks <= gpus_per_pcie_switch_)) {
    const BytesPerSecond rate = pcie_ * nccl::kPcieSwitch;
    return {LinkClass::pcie, rate, {}, rate};
  }
  double fraction = two_sockets ? nccl::kPcieReduceTwoSockets : nccl::kPcieReduce;
  if (pattern == Pattern::gather || pattern == Pattern::broadcast)
    fraction = two_sockets ? nccl::kPcieGatherTwoSockets : nccl::kPcieGather;
  if (pattern == Pattern::scatter) fraction = two_sockets ? nccl::kPcieScatterTwoSockets : nccl::kPcieScatter;
  return {LinkClass::pcie, pcie_ * fraction, {}, pcie_ * fraction};
}

CollectiveModel::Path CollectiveModel::path(Pattern pattern, RankGroup group) const {
  Path found;
  if (group.ranks_per_node > 1) {
    const BytesPerSecond nvlink = nvlink_ring(group.ranks_per_node);
    found = nvlink > BytesPerSecond() ? Path{LinkClass::nvlink, nvlink, {}, nvlink}
                                      : pcie_path(pattern, group.ranks_per_node);
  }
  found.inside_link = found.link;
  if (group.nodes > 1) {
    found.network = network_ * (network_kind_->fraction * group.ranks_per_node / gpus_per_node_);
    if (group.ranks_per_node == 1 || found.network < found.inside) {
      found.link = LinkClass::network;
      found.ring = found.network;
    }
  }
  return found;
}

BytesPerSecond CollectiveModel::reduce_asymptote(const Path& path, RankGroup group) const {
  BytesPerSecond inside = path.inside;
  if (nvls_inside(group.ranks_per_node)) inside = inside * nvls_gain(group.ranks_per_node);
  if (group.nodes == 1) return inside;
  // A tree sends 2(k-1)/k of the tensor out of each of k nodes, a ring 2(n-1)/n. Seen on two nodes (EFA, NDR, RoCE,
  // TCPXO; not on HDR); 4 nodes everywhere reach the ring's limit (nccl.md section 4).
  const double tree = network_kind_->tree && group.nodes == 2 ? 2.0 * (group.ranks - 1) / group.ranks : 1.0;
  const BytesPerSecond network = path.network * tree;
  return group.ranks_per_node == 1 ? network : std::min(inside, network);
}

CollectiveCost CollectiveModel::cost(CollectiveKind kind, Bytes message, RankGroup group) const {
  switch (kind) {
    case CollectiveKind::all_gather:
      return evaluate(Pattern::gather, message, group);
    case CollectiveKind::reduce_scatter:
      return evaluate(Pattern::scatter, message, group);
    case CollectiveKind::all_reduce:
      return evaluate(Pattern::reduce, message, group);
  }
  throw std::logic_error("CollectiveModel: unknown collective");
}

CollectiveCost CollectiveModel::broadcast(Bytes message, RankGroup group) const {
  return evaluate(Pattern::broadcast, message, group);
}

bool CollectiveModel::in_switch(Pattern pattern, RankGroup group) const {
  return pattern == Pattern::reduce && group.nodes == 1 && nvls_inside(group.ranks_per_node);
}

bool CollectiveModel::by_ring_law(Pattern pattern, RankGroup group, const Path& path) const {
  if (path.inside_link != LinkClass::nvlink || group.nodes > 1 || in_switch(pattern, group)) return false;
  return pattern != Pattern::reduce || reduce_table(group) == nullptr;
}

Seconds CollectiveModel::arrival(Pattern pattern, RankGroup group, const Path& path) const {
  if (path.inside_link != LinkClass::nvlink) return {};
  if (in_switch(pattern, group)) return tables_->in_switch.arrival;
  return tables_->ring.skew * std::max(0.0, group.ranks - 2.0);
}

Seconds CollectiveModel::waiting(Pattern pattern, RankGroup group, const Path& path) const {
  if (setting_ == CollectiveSetting::in_step) return step_latency(pattern, group, path);
  const CollectiveRamp* ramp = pattern == Pattern::reduce ? reduce_table(group) : nullptr;
  const bool there = ramp != nullptr && !ramp->queued, wanted = setting_ == CollectiveSetting::isolated;
  Seconds extra;
  if (wanted) extra += arrival(pattern, group, path);
  if (there) extra -= arrival(pattern, {ramp->ranks, ramp->nodes, ramp->ranks / ramp->nodes}, path);
  return extra;
}

/// Beyond what isolated collectives wait: ranks of a step arrive still less evenly than those of a benchmark.
Seconds CollectiveModel::step_latency(Pattern pattern, RankGroup group, const Path& path) const {
  const Seconds all = microseconds(
      nccl::kStepLatencyFactor * (pattern == Pattern::reduce ? 2 : 1) *
      ((group.ranks - group.nodes) * nccl::kStepRankUs + (group.nodes - 1) * nccl::kStepNodeUs + nccl::kStepBaseUs));
  // The ring law's own waiting is part of the same thing.
  return by_ring_law(pattern, group, path) ? std::max(all, arrival(pattern, group, path)) : all;
}

CollectiveCost CollectiveModel::evaluate(Pattern pattern, Bytes message, RankGroup group) const {
  if (group.ranks != group.nodes * group.ranks_per_node || group.ranks < 1 || group.nodes > nodes_ ||
      group.ranks_per_node > gpus_per_node_)
    throw std::logic_error("CollectiveModel: a group that the machine does not hold");
  CollectiveCost cost{"none", "", LinkClass::none, {}, {}, {}, {}, 0};
  if (group.ranks == 1 || !(message > Bytes())) return cost;
  const double n = group.ranks;
  const double factor = pattern == Pattern::broadcast ? 1 : (n - 1) / n * (pattern == Pattern::reduce ? 2 : 1);
  const Path route = path(pattern, group);
  const Choice choice = choose(pattern, factor, message, group, route);
  Seconds total = measured_time(pattern, factor, message, group, route, choice) + waiting(pattern, group, route);
  if (setting_ != CollectiveSetting::in_step) total = std::max(total, microseconds(nccl::kCallUs));
  cost.algorithm = choice.algorithm;
  cost.protocol = choice.protocol;
  cost.link = route.link;
  // At least half of the time counts as transfer, so that a tiny message keeps a finite rate.
  const bool waits = setting_ != CollectiveSetting::queued && by_ring_law(pattern, group, route);
  cost.latency = std::min(choice.latency + (waits ? arrival(pattern, group, route) : Seconds()), total * 0.5);
  cost.wire_bytes_per_rank = message * factor;
  cost.bus_bandwidth = cost.wire_bytes_per_rank / (total - cost.latency);
  if (group.nodes > 1) {
    const double k = group.nodes;
    const double sent = choice.tree_like ? 2 * (k - 1) / k : factor;
    cost.network_bytes_per_node = message * (sent * (gpus_per_node_ / group.ranks_per_node));
  }
  cost.sms = channels(choice, route, group);
  return cost;
}

int CollectiveModel::in_switch_channels(RankGroup group) const {
  if (major_ < 10) return nccl::kNvlsHopper;
  return group.nodes > 1 ? nccl::kNvlsBlackwellNodes : nccl::kNvlsBlackwell;
}

int CollectiveModel::channels(const Choice& choice, const Path& path, RankGroup group) const {
  if (path.inside_link != LinkClass::nvlink) return nccl::kPcieChannels;
  if (choice.in_switch) return in_switch_channels(group);
  if (interconnect_ == Interconnect::nvlink_pairs) return nccl::kPcieChannels;
  return major_ == 7 ? nccl::kVoltaChannels : nccl::kRingChannels;
}

std::vector<Assumption> CollectiveModel::assumptions() const {
  std::vector<Assumption> list;
  if (gpus_per_node_ > 1) {
    const Path inside = path(Pattern::gather, {gpus_per_node_, 1, gpus_per_node_});
    list.push_back(
        {"collectives inside a node",
         fmt::format("{} ring at {:.4g} GB/s for large messages", to_string(inside.link), inside.ring.base() / 1e9),
         inside.link == LinkClass::nvlink && interconnect_ != Interconnect::nvlink_pairs
             ? fmt::format("ring law, {}, scaled by the link rate", law_->source)
             : "measured fractions of the link rate, docs/cost-model.md"});
  }
  if (nodes_ > 1)
    list.push_back(
        {"collectives between nodes",
         fmt::format("{:.2f} of the NICs' {:.4g} GB/s a node", network_kind_->fraction, network_.base() / 1e9),
         std::string(network_kind_->source)});
  if (setting_ == CollectiveSetting::in_step)
    list.push_back({"collective latency inside a step", fmt::format("{} x the ring's", nccl::kStepLatencyFactor),
                    "docs/cost-model.md, fitted to training steps"});
  return list;
}

}  // namespace zeroplan
