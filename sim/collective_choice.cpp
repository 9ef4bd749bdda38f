// NCCL's own cost model, which picks algorithm and protocol, and the measured times that replace its estimate.

#include <algorithm>
#include <cmath>

#include "sim/collective_model.h"
#include "sim/nccl_constants.h"

namespace zeroplan {

namespace {

constexpr Seconds microseconds(double value) { return Seconds(value * 1e-6); }

double tree_correction(Bytes message) {
  const double index = std::floor(std::log2(std::max(64.0, message.base())) - 6);  // 64 B is 2^6
  const auto last = nccl::kTreeSimpleCorrection.size() - 1;
  return nccl::kTreeSimpleCorrection[std::min(static_cast<std::size_t>(index), last)];
}

}  // namespace

Seconds CollectiveModel::ring_latency(Pattern pattern, RankGroup group, std::size_t protocol, const Path& path) const {
  const double n = group.ranks, nodes = group.nodes;
  const double steps = pattern == Pattern::reduce ? 2 * (n - 1) : pattern == Pattern::broadcast ? n : n - 1;
  const double between = nodes > 1 ? (pattern == Pattern::reduce ? 2 : 1) * (nodes - 1) : 0;
  const auto& inside = path.inside_link == LinkClass::nvlink ? nccl::kRingNvlink : nccl::kRingPcie;
  double latency =
      nccl::kRingBase[protocol] + (steps - between) * inside[protocol] + between * nccl::kRingNetwork[protocol];
  if (nodes > 1 && pattern == Pattern::reduce && protocol == nccl::kSimple)
    latency *= major_ >= 8 ? nccl::kRingPlateau : nccl::kRingPlateauOld;
  return microseconds(latency);
}

Seconds CollectiveModel::tree_latency(RankGroup group, std::size_t protocol, const Path& path) const {
  const auto& inside = path.inside_link == LinkClass::nvlink ? nccl::kTreeNvlink : nccl::kTreePcie;
  return microseconds(nccl::kTreeBase[protocol] +
                      2 * ((group.ranks_per_node - 1) * inside[protocol] +
                           std::log2(static_cast<double>(group.nodes)) * nccl::kTreeNetwork[protocol]));
}

/// The one-node tables: in-switch on Hopper and Blackwell, rings of (nearly) whole nodes before. Between nodes a table
/// stands for its own kind of network.
const CollectiveRamp* CollectiveModel::reduce_table(RankGroup group) const {
  const CollectiveRamp* ramp = ramp_for(group);
  if (ramp == nullptr || group.nodes > 1) return ramp;
  const bool whole = nvidia_ && family_ == "Ampere" && 2 * group.ranks > ramp->ranks;
  return whole || nvls_inside(group.ranks_per_node) ? ramp : nullptr;
}

CollectiveModel::Choice CollectiveModel::fastest_ring(Pattern pattern, Bytes wire, RankGroup group,
                                                      const Path& path) const {
  NvlinkRing ring{group.ranks, pattern == Pattern::reduce, nvlink_,
                  path.ring,   nccl::kTableRanks,          tables_->ring.channels};
  // A bridged pair's rate was measured on a pair; RCCL's channels are not known.
  if (interconnect_ == Interconnect::nvlink_pairs || !nvidia_) ring.asymptote_ranks = group.ranks;
  Choice best;
  for (const std::size_t protocol : {nccl::kSimple, nccl::kLL128, nccl::kLL}) {
    const RingTime time = ring_time(tables_->ring, ring, protocol, wire);
    if (!best.algorithm.empty() && time.total() >= best.time) continue;
    best = {"ring", nccl::kProtocolNames[protocol], time.latency, time.total(), false, false};
  }
  return best;
}

CollectiveModel::Choice CollectiveModel::choose(Pattern pattern, double factor, Bytes message, RankGroup group,
                                                const Path& path) const {
  if (by_ring_law(pattern, group, path)) return fastest_ring(pattern, message * factor, group, path);
  Choice best;
  Seconds best_time;
  const auto consider = [&](Choice candidate, BytesPerSecond bandwidth) {
    const Seconds time = candidate.latency + message * factor / bandwidth;
    if (best.algorithm.empty() || time < best_time) {
      best = candidate;
      best.time = best_time = time;
    }
  };
  const bool nvlink = path.inside_link == LinkClass::nvlink;
  const BytesPerSecond ll_max(1e9 * (major_ >= 10  ? nccl::kLLMaxBlackwell
                                     : major_ == 9 ? nccl::kLLMaxHopper
                                     : major_ == 8 ? nccl::kLLMaxAmpere
                                                   : nccl::kLLMaxVolta));
  for (const std::size_t protocol : {nccl::kSimple, nccl::kLL128, nccl::kLL}) {
    if (protocol == nccl::kLL128 && !nvlink) continue;
    const std::string_view name = nccl::kProtocolNames[protocol];
    BytesPerSecond ring = path.ring;
    if (protocol == nccl::kLL) ring = std::min(ll_max, ring * nccl::kLLFraction);
    if (protocol == nccl::kLL128) ring = ring * nccl::kLL128Fraction;
    consider({"ring", name, ring_latency(pattern, group, protocol, path), {}, false, false}, ring);
    if (pattern != Pattern::reduce) continue;
    BytesPerSecond tree = path.ring * (nccl::kTreeFraction * nccl::kTreePattern);
    if (protocol == nccl::kSimple) tree = tree * tree_correction(message);
    if (protocol == nccl::kLL) tree = std::min(ll_max, tree / nccl::kTreeLLDivisor);
    if (protocol == nccl::kLL128) tree = tree * (group.nodes == 1 ? nccl::kTreeLL128OneNode : nccl::kTreeLL128);
    consider({"tree", name, tree_latency(group, protocol, path), {}, true, false}, tree);
  }
  if (pattern == Pattern::reduce && nvls_inside(group.ranks_per_node)) {
    const BytesPerSecond rate = reduce_asymptote(path, group);
    const double hops = group.nodes > 1 ? 2 * std::log2(static_cast<double>(group.nodes)) : 0;
    consider({group.nodes > 1 ? "NVLSTree" : "NVLS",
              "Simple",
              microseconds(nccl::kNvlsUs + hops * nccl::kNvlsTreeNetworkUs),
              {},
              group.nodes > 1,
              true},
             rate);
  }
  if (pattern != Pattern::reduce && pattern != Pattern::broadcast && group.nodes > 1 && group.ranks_per_node == 1)
    consider({"PAT",
              "Simple",
              microseconds(nccl::kPatBaseUs + std::log2(static_cast<double>(group.nodes)) * nccl::kPatNetworkUs),
              {},
              false,
              false},
             path.ring * nccl::kPatFraction);
  return best;
}

const CollectiveRamp* CollectiveModel::ramp_for(RankGroup group) const {
  for (const CollectiveRamp& ramp : tables_->ramps)
    if (ramp.arch == family_ && (ramp.nodes > 1) == (group.nodes > 1) &&
        (group.nodes == 1 || ramp.network == network_kind_->name))
      return &ramp;
  return nullptr;
}

Seconds CollectiveModel::least_reduce_latency(RankGroup group, const Path& path) const {
  return std::min(ring_latency(Pattern::reduce, group, nccl::kSimple, path), tree_latency(group, nccl::kSimple, path));
}

Seconds CollectiveModel::network_latency(Pattern pattern, RankGroup group, const Path& path) const {
  if (pattern != Pattern::reduce)
    return ring_latency(pattern, group, nccl::kSimple, path) + network_kind_->step * (group.nodes - 1.0);
  const double steps = 2 * std::log2(static_cast<double>(group.nodes));
  Seconds least = least_reduce_latency(group, path);
  if (nvls_inside(group.ranks_per_node))
    least = std::min(least, microseconds(nccl::kNvlsUs + steps * nccl::kNvlsTreeNetworkUs));
  return least + network_kind_->step * steps;
}

Seconds CollectiveModel::table_time(const CollectiveRamp& ramp, double factor, Bytes message, RankGroup group,
                                    const Path& path) const {
  BytesPerSecond rate = reduce_asymptote(path, group);
  if (group.nodes == 1 && family_ == "Ampere") rate = rate * (ramp.asymptote / law_->bandwidth);
  const Seconds there = least_reduce_latency({ramp.ranks, ramp.nodes, ramp.ranks / ramp.nodes}, path);
  const Seconds extra = std::max(Seconds(), least_reduce_latency(group, path) - there);
  return message * factor / (rate * ramp.relative(message * (ramp.asymptote / rate))) + extra;
}

Seconds CollectiveModel::measured_time(Pattern pattern, double factor, Bytes message, RankGroup group, const Path& path,
                                       const Choice& choice) const {
  if (path.inside_link != LinkClass::nvlink) return choice.time;  // no measured sizes: NCCL's latencies and the link
  if (pattern == Pattern::reduce) {
    const CollectiveRamp* ramp = reduce_table(group);
    if (ramp != nullptr) return table_time(*ramp, factor, message, group, path);
  }
  const Bytes wire = message * factor;
  if (in_switch(pattern, group)) {
    const InSwitchLaw& law = tables_->in_switch;
    const PipelineLaw pipeline{law.fill, law.chunk * (static_cast<double>(in_switch_channels(group)) * group.ranks),
                               law.source};
    return microseconds(nccl::kNvlsUs) + pipeline_transfer(pipeline, message, wire, reduce_asymptote(path, group), 1);
  }
  if (group.nodes == 1) return choice.time;
  const bool reduce = pattern == Pattern::reduce;
  const BytesPerSecond rate = reduce ? reduce_asymptote(path, group) : path.ring;
  return network_latency(pattern, group, path) +
         pipeline_transfer(tables_->network, message, wire, rate, reduce ? 2 : 1);
}

}  // namespace zeroplan
