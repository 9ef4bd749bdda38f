#include "sim/host_device_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "models/error.h"
#include "models/host_kernels.h"
#include "models/overloaded.h"
#include "sim/host_kernel_costs.h"

namespace zeroplan {

struct HostDeviceModel::Parts {
  Parts(const MachineSpec& m, int shard, DType type, const ModelSpec* model_or_null)
      : machine(m),
        host(*m.host_kernels),
        kernels(m, shard, type, model_or_null),
        ranks(m.gpus_per_node),
        shard_ranks(shard) {}

  MachineSpec machine;
  HostKernels host;
  HostKernelCosts kernels;
  int ranks, shard_ranks;

  /// The demand of work on threads of one rank, while all ranks of the node do the same.
  Demand on_threads(ResourceRole lane, Seconds elapsed, const KernelWork& work) const {
    Demand d;
    d[lane] = elapsed;
    d[ResourceRole::cpu] = static_cast<double>(ranks) / kernels.speedup(machine.physical_cores) * work.alone;
    d[ResourceRole::dram] = static_cast<double>(ranks) * (work.distant / machine.dram_bandwidth);
    return d;
  }

  Demand of_compute(const Compute& c) const {
    const KernelWork work = kernels.compute(c);
    const bool on_reduce_stream = c.graph_op == kAccumulate && !c.on_host;
    // Sums of gradients that stay on the device run beside the kernels, in one thread.
    if (on_reduce_stream) return woken(on_threads(ResourceRole::hbm, work.alone, work));
    if (c.on_host) return woken(on_threads(ResourceRole::hbm, kernels.in_pool(work), work));
    return on_threads(ResourceRole::sm, kernels.in_pool(work), work);
  }

  Demand of_adam(const AdamStep& a) const {
    const KernelWork work = kernels.adam(a);
    if (a.where == UpdateOn::device) return on_threads(ResourceRole::sm, kernels.in_pool(work), work);
    return woken(on_threads(ResourceRole::hbm, kernels.in_pool(work), work));
  }

  Demand of_copy(const Copy& c) const {
    if (c.from == Memory::nvme || c.to == Memory::nvme) return of_disk(c);
    const KernelWork work = kernels.copy(c.bytes);
    return woken(on_threads(c.to == Memory::hbm ? ResourceRole::h2d : ResourceRole::d2h, work.alone, work));
  }

  /// The first block as a lone transfer, the rest at the best rate.
  Demand of_disk(const Copy& c) const {
    const bool read = c.from == Memory::nvme;
    const BytesPerSecond best = read ? machine.nvme.read : machine.nvme.write;
    Demand d;
    for (const HostDiskRate& rate : host.disk) {
      if (rate.direction != (read ? "read" : "write") || rate.depth != 1) continue;
      d.latency = std::max(Seconds(), rate.block / rate.rate - rate.block / best);
      break;  // the smallest block stands first
    }
    d[read ? ResourceRole::nvme_read : ResourceRole::nvme_write] = static_cast<double>(ranks) * (c.bytes / best);
    d[ResourceRole::dram] = static_cast<double>(ranks) * (c.bytes / machine.dram_bandwidth);
    return woken(d);
  }

  int group_size(Group group) const {
    return group == Group::all ? ranks : group == Group::shard ? shard_ranks : ranks / shard_ranks;
  }

  /// Half of the message's time at the smallest size measured, at most, shares nothing: threads wake each other.
  Demand of_collective(const Collective& c) const {
    Demand d;
    const int members = group_size(c.group);
    if (members < 2 || c.padded == 0) return d;
    const Seconds whole = collective_time(c, members, c.message());
    d.latency = std::min(collective_time(c, members, Bytes()), 0.5 * whole);
    const Seconds moving = whole - d.latency;
    d[ResourceRole::links] = moving;
    // All groups of the node at once; in the measurement one group had all cores.
    const double busy = std::min(1.0, static_cast<double>(members) / machine.physical_cores);
    d[ResourceRole::cpu] = busy * (static_cast<double>(ranks) / members) * moving;
    return woken(d);
  }

  /// Of measured rank counts the two around `members`; beyond the largest, time grows with the ranks.
  Seconds collective_time(const Collective& c, int members, Bytes message) const {
    const HostCollectiveTime *below = nullptr, *above = nullptr;
    for (const HostCollectiveTime& t : host.collectives) {
      if (!is_for(t, c)) continue;
      if (t.ranks <= members && (below == nullptr || t.ranks > below->ranks)) below = &t;
      if (t.ranks >= members && (above == nullptr || t.ranks < above->ranks)) above = &t;
    }
    if (below == nullptr && above == nullptr) {
      throw InputError(
          fmt::format("machine {}: host_kernels has no {} in {}", machine.name, to_string(c.kind), to_string(c.type)));
    }
    if (below == nullptr) return at_size(*above, message);
    if (above == nullptr) return static_cast<double>(members) / below->ranks * at_size(*below, message);
    const Seconds low = at_size(*below, message), high = at_size(*above, message);
    if (above->ranks == below->ranks) return low;
    return low + static_cast<double>(members - below->ranks) / (above->ranks - below->ranks) * (high - low);
  }

  static bool is_for(const HostCollectiveTime& t, const Collective& c) {
    switch (c.kind) {
      case CollectiveKind::all_gather:
        return t.collective == "all-gather";
      case CollectiveKind::reduce_scatter:
        return t.collective == "reduce-scatter" && t.type == c.type;
      case CollectiveKind::all_reduce:
        return t.collective == "all-reduce" && t.type == c.type;
    }
    return false;
  }

  /// Between measured sizes in a straight line; beyond the last at its rate.
  static Seconds at_size(const HostCollectiveTime& t, Bytes message) {
    if (message <= t.messages[0]) return t.times[0];
    for (std::size_t i = 1; i < t.messages.size(); ++i) {
      if (message > t.messages[i]) continue;
      const double part = (message - t.messages[i - 1]) / (t.messages[i] - t.messages[i - 1]);
      return t.times[i - 1] + part * (t.times[i] - t.times[i - 1]);
    }
    return message / t.messages.back() * t.times.back();
  }

  Demand woken(Demand d) const {
    d.latency += 2 * host.stream_wake;
    return d;
  }
};

HostDeviceModel::HostDeviceModel(const MachineSpec& machine, int shard_ranks, DType type, const ModelSpec* model)
    : parts_(std::make_unique<Parts>(machine, shard_ranks, type, model)) {}
HostDeviceModel::~HostDeviceModel() = default;
HostDeviceModel::HostDeviceModel(HostDeviceModel&&) noexcept = default;

Demand HostDeviceModel::demand(const Work& work) const {
  const Parts& p = *parts_;
  return std::visit(overloaded{
                        [](const Alloc&) { return Demand{}; },
                        [](const Free&) { return Demand{}; },
                        [](const Join&) { return Demand{}; },
                        [&](const Compute& c) { return p.of_compute(c); },
                        [&](const Collective& c) { return p.of_collective(c); },
                        [&](const Copy& c) { return p.of_copy(c); },
                        [&](const AdamStep& a) { return p.of_adam(a); },
                    },
                    work);
}

Seconds HostDeviceModel::undisturbed(const Work& work) const {
  const Demand d = demand(work);
  Seconds longest;
  for (const ResourceRole role : {ResourceRole::sm, ResourceRole::hbm, ResourceRole::h2d, ResourceRole::d2h,
                                  ResourceRole::links, ResourceRole::nvme_read, ResourceRole::nvme_write}) {
    longest = std::max(longest, d[role]);
  }
  return d.latency - handoff(work) + longest;
}

Seconds HostDeviceModel::handoff(const Work& work) const {
  const auto* compute = std::get_if<Compute>(&work);
  const auto* adam = std::get_if<AdamStep>(&work);
  const bool on_compute_stream = (compute != nullptr && !compute->on_host && compute->graph_op != kAccumulate) ||
                                 (adam != nullptr && adam->where == UpdateOn::device);
  if (on_compute_stream || !(demand(work).alone() > Seconds())) return {};
  return 2 * parts_->host.stream_wake;
}

std::vector<Assumption> HostDeviceModel::assumptions() const {
  const Parts& p = *parts_;
  const std::string source = p.machine.sources.empty() ? "machine" : p.machine.sources.front();
  return {{"kernels, collectives, disk", fmt::format("as probed, {} instructions", p.host.instructions), source},
          {"threads of a rank", fmt::format("{} of {} cores", p.kernels.threads(), p.machine.physical_cores),
           "cores shared evenly, at least one each"}};
}

}  // namespace zeroplan
