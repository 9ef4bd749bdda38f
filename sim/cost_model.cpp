#include "sim/cost_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>

#include "models/error.h"
#include "models/overloaded.h"
#include "sim/collective_model.h"
#include "sim/gpu_model.h"
#include "sim/host_device_model.h"
#include "sim/host_fractions.h"
#include "sim/host_model.h"
#include "sim/topology.h"

namespace zeroplan {
namespace {

/// Seconds that one byte of every rank of a node takes on what the ranks share, all at once.
struct HostLinks {
  double h2d = 0, d2h = 0, dram = 0, nvme_read = 0, nvme_write = 0;  // seconds per byte and rank
};

/// Longest of uses / capacity over one transfer kind of all ranks together; memories at the ends apart.
double shared_seconds_per_byte(const Topology& topology, int ranks, bool to_gpu) {
  std::map<std::uint32_t, int> uses;
  const auto route_of = [&](int rank) {
    const Endpoint host = topology.host_of(rank), gpu = topology.gpu(rank);
    return to_gpu ? topology.route(host, gpu) : topology.route(gpu, host);
  };
  const auto is_memory = [&](ResourceId id) {
    const ResourceKind kind = topology.resource(id).kind;
    return kind == ResourceKind::dram || kind == ResourceKind::hbm;
  };
  for (int rank = 0; rank < ranks; ++rank) {
    for (ResourceId id : route_of(rank)) ++uses[id.index];
  }
  double worst = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    for (ResourceId id : route_of(rank)) {
      if (!is_memory(id)) worst = std::max(worst, uses[id.index] / topology.resource(id).capacity);
    }
  }
  return worst;
}

HostLinks host_links(const MachineSpec& machine) {
  HostLinks links;
  const int ranks = machine.gpus_per_node;
  const auto per_byte = [&](BytesPerSecond rate) { return rate.base() > 0 ? ranks / rate.base() : 0.0; };
  links.dram = per_byte(machine.dram_bandwidth);
  links.nvme_read = per_byte(kDiskFraction * machine.nvme.read);
  links.nvme_write = per_byte(kDiskFraction * machine.nvme.write);
  if (machine.host_device) return links;  // "device" memory is host memory: a copy only reads and writes DRAM
  MachineSpec node = machine;
  node.nodes = 1;
  const Topology topology = Topology::build(node);
  links.h2d = shared_seconds_per_byte(topology, ranks, true);
  links.d2h = shared_seconds_per_byte(topology, ranks, false);
  return links;
}

}  // namespace

Seconds Demand::alone() const { return latency + *std::max_element(busy.begin(), busy.end()); }

ResourceRole Demand::limit() const {
  return static_cast<ResourceRole>(std::max_element(busy.begin(), busy.end()) - busy.begin());
}

std::string_view to_string(ResourceRole role) {
  static constexpr std::array<std::string_view, kNumRoles> names{"sm",  "hbm",  "links", "network",   "h2d",
                                                                 "d2h", "dram", "cpu",   "nvme_read", "nvme_write"};
  return names[static_cast<std::size_t>(role)];
}

namespace {

/// Where the host is the device (sim/host_device_model.h).
std::string host_role_name(ResourceRole role) {
  switch (role) {
    case ResourceRole::sm:
      return "a rank's compute threads";
    case ResourceRole::hbm:
      return "a rank's threads for sums and the host's Adam";
    case ResourceRole::links:
    case ResourceRole::network:
      return "collectives";
    case ResourceRole::h2d:
      return "copies to the device's memory";
    case ResourceRole::d2h:
      return "copies from the device's memory";
    case ResourceRole::dram:
      return "memory bandwidth";
    case ResourceRole::cpu:
      return "cores";
    case ResourceRole::nvme_read:
      return "disk read";
    case ResourceRole::nvme_write:
      return "disk write";
  }
  return "";
}

}  // namespace

std::string role_name(ResourceRole role, const MachineSpec& machine) {
  if (machine.host_kernels) return host_role_name(role);
  switch (role) {
    case ResourceRole::sm:
      return "GPU arithmetic";
    case ResourceRole::hbm:
      return "GPU memory bandwidth";
    case ResourceRole::links:
      return machine.nvlink.base() > 0 ? "NVLink" : "PCIe between GPUs";
    case ResourceRole::network:
      return "network";
    case ResourceRole::h2d:
      return "PCIe to the GPU";
    case ResourceRole::d2h:
      return "PCIe from the GPU";
    case ResourceRole::dram:
      return "host memory bandwidth";
    case ResourceRole::cpu:
      return "host cores";
    case ResourceRole::nvme_read:
      return "NVMe read";
    case ResourceRole::nvme_write:
      return "NVMe write";
  }
  return "";
}

struct MachineCostModel::Parts {
  Parts(const MachineSpec& m, int shard, DType type, const ModelSpec* model)
      : machine(m),
        gpu(m.gpu),
        collectives(m, CollectiveSetting::in_step),
        host(m),
        links(host_links(m)),
        shard_ranks(shard) {
    require_matmuls(m.gpu, type);
    require_even_groups(m.ranks(), m.gpus_per_node, shard);
    scale.fill(1);
    if (m.host_kernels) host_device.emplace(m, shard, type, model);
  }

  RankGroup group(Group which) const {
    const RankGroup all = collectives.all();
    if (which == Group::all) return all;
    const int g = machine.gpus_per_node;
    // Shard groups take neighbours: whole nodes, or part of one. Replicas are what is left.
    RankGroup shard;
    shard.ranks = shard_ranks;
    shard.ranks_per_node = std::min(shard_ranks, g);
    shard.nodes = shard_ranks / shard.ranks_per_node;
    if (which == Group::shard) return shard;
    RankGroup replica;
    replica.ranks = all.ranks / shard_ranks;
    replica.ranks_per_node = std::max(1, g / shard.ranks_per_node);
    replica.ranks_per_node = std::min(replica.ranks_per_node, replica.ranks);
    replica.nodes = replica.ranks / replica.ranks_per_node;
    return replica;
  }

  MachineSpec machine;
  GpuModel gpu;
  CollectiveModel collectives;
  HostModel host;
  HostLinks links;
  std::optional<HostDeviceModel> host_device;  // a probed host; then the models of the GPU and its links are not asked
  int shard_ranks;
  std::array<double, kNumRoles> scale{};
};

namespace {

using Parts = MachineCostModel::Parts;

Demand of_kernel(const KernelCost& cost) {
  Demand d;
  d.latency = cost.latency;
  d[ResourceRole::sm] = cost.sm_time;
  d[ResourceRole::hbm] = cost.hbm_time;
  return d;
}

GemmOutput output_of(const Gemm& gemm) {
  if (gemm.fp32_output) return gemm.accumulate ? GemmOutput::accumulate_fp32 : GemmOutput::fp32;
  return gemm.accumulate ? GemmOutput::accumulate : GemmOutput::same;
}

KernelCost attention(const GpuModel& gpu, const AttentionWork& a) {
  if (a.type != DType::fp32) {
    return a.backward ? gpu.attention_backward(a.shape, a.tokens.batch, a.tokens.seq_len, a.type)
                      : gpu.attention_forward(a.shape, a.tokens.batch, a.tokens.seq_len, a.type);
  }
  // Fused kernels are 16-bit only: in fp32 two products with the scores in between, all of them (no causal half);
  // backward is five products of the same size.
  const std::int64_t s = a.tokens.seq_len, groups = a.tokens.batch * a.shape.heads;
  const KernelCost scores = gpu.grouped_gemm(groups, s, s, a.shape.qk_dim, DType::fp32);
  const KernelCost values = gpu.grouped_gemm(groups, s, a.shape.v_dim, s, DType::fp32);
  const double times = a.backward ? 2.5 : 1;
  return {scores.latency + values.latency, times * (scores.sm_time + values.sm_time),
          times * (scores.hbm_time + values.hbm_time)};
}

}  // namespace

MachineCostModel::MachineCostModel(const MachineSpec& machine, int shard_ranks, DType type, const ModelSpec* model)
    : parts_(std::make_unique<Parts>(machine, shard_ranks, type, model)) {}
MachineCostModel::~MachineCostModel() = default;
MachineCostModel::MachineCostModel(MachineCostModel&&) noexcept = default;

void MachineCostModel::scale(ResourceRole role, double factor) {
  parts_->scale[static_cast<std::size_t>(role)] = factor;
}

namespace {

/// Every rank of the node does it at once: memory and cores are divided evenly.
Demand of_host(const Parts& p, const HostWork& work) {
  Demand d;
  d[ResourceRole::dram] = Seconds(work.dram.base() * p.links.dram);
  d[ResourceRole::cpu] = p.machine.gpus_per_node / p.host.cores() * work.core_time;
  return d;
}

/// Operands and result, each once.
Bytes traffic_of(const Gemm& g) {
  const auto m = static_cast<double>(g.m), n = static_cast<double>(g.n), k = static_cast<double>(g.k);
  return Bytes(static_cast<double>(g.groups) * (m * k + k * n + m * n) * size_of(g.type));
}

Demand of_compute(const Parts& p, const Compute& c, bool on_host) {
  return std::visit(overloaded{
                        [&](const Gemm& g) {
                          // A 16-bit model's products in fp32 (rotary tables, some routers) are small, and its GPU's
                          // rate for them may be unknown.
                          if (!p.gpu.supports(g.type)) return of_kernel(p.gpu.memory_bound(traffic_of(g)));
                          return of_kernel(g.groups == 1
                                               ? p.gpu.gemm(g.m, g.n, g.k, g.type, output_of(g))
                                               : p.gpu.grouped_gemm(g.groups, g.m, g.n, g.k, g.type, output_of(g)));
                        },
                        [&](const AttentionWork& a) { return of_kernel(attention(p.gpu, a)); },
                        [&](const Pointwise& w) {
                          if (!on_host) return of_kernel(p.gpu.memory_bound(w.traffic));
                          return of_host(p, p.host.stream(w.traffic));
                        },
                    },
                    c.kernel);
}

Demand of_collective(const Parts& p, const Collective& c) {
  Demand d;
  const CollectiveCost cost = p.collectives.cost(c.kind, c.message(), p.group(c.group));
  d.latency = cost.latency;
  const Seconds transfer = cost.alone() - cost.latency;
  d[cost.link == LinkClass::network ? ResourceRole::network : ResourceRole::links] = transfer;
  return d;
}

Demand of_copy(const Parts& p, const Copy& c) {
  Demand d;
  const double bytes = c.bytes.base();
  const auto add = [&](ResourceRole role, double seconds_per_byte) { d[role] += Seconds(bytes * seconds_per_byte); };
  if (c.from == Memory::nvme || c.to == Memory::nvme) {
    const bool read = c.from == Memory::nvme;
    add(read ? ResourceRole::nvme_read : ResourceRole::nvme_write, read ? p.links.nvme_read : p.links.nvme_write);
    add(ResourceRole::dram, p.links.dram);
    return d;
  }
  const bool up = c.to == Memory::hbm;
  add(up ? ResourceRole::h2d : ResourceRole::d2h, up ? p.links.h2d : p.links.d2h);
  add(ResourceRole::dram, p.machine.host_device ? 2 * p.links.dram : p.links.dram);
  const bool pageable = !p.machine.host_device && (c.from == Memory::dram || c.to == Memory::dram);
  if (!pageable) return d;
  // The thread that stages it sets the pace and shares nothing; the link only carries what it hands over.
  add(ResourceRole::dram, (kPageablePasses - 1) * p.links.dram);
  d.latency = std::max(Seconds(), Seconds(bytes / kPageableCopyRate) - d[up ? ResourceRole::h2d : ResourceRole::d2h]);
  return d;
}

Demand of_adam(const Parts& p, const AdamStep& a) {
  if (a.where == UpdateOn::device) {
    return of_kernel(p.gpu.adam(a.traffic));
  }
  HostWork work = p.host.adam(a.parameters, AdamTypes{});
  work.dram = a.traffic;
  return of_host(p, work);
}

}  // namespace

namespace {

Demand of_work(const Parts& p, const Work& work) {
  if (p.host_device) return p.host_device->demand(work);
  return std::visit(overloaded{
                        [](const Alloc&) { return Demand{}; },
                        [](const Free&) { return Demand{}; },
                        [&](const Compute& c) { return of_compute(p, c, c.on_host); },
                        [&](const Collective& c) { return of_collective(p, c); },
                        [&](const Copy& c) { return of_copy(p, c); },
                        [&](const AdamStep& a) { return of_adam(p, a); },
                        [](const Join&) { return Demand{}; },
                    },
                    work);
}

}  // namespace

Demand MachineCostModel::demand(const Work& work) const {
  Demand d = of_work(*parts_, work);
  for (std::size_t r = 0; r < kNumRoles; ++r) d.busy[r] = parts_->scale[r] * d.busy[r];
  return d;
}

std::optional<Seconds> MachineCostModel::undisturbed(const Work& work) const {
  if (!parts_->host_device) return std::nullopt;
  return parts_->host_device->undisturbed(work);
}

Seconds MachineCostModel::handoff(const Work& work) const {
  return parts_->host_device ? parts_->host_device->handoff(work) : Seconds();
}

std::vector<Assumption> MachineCostModel::assumptions() const {
  if (parts_->host_device) return parts_->host_device->assumptions();
  std::vector<Assumption> all = parts_->gpu.assumptions();
  for (const Assumption& a : parts_->host.assumptions()) all.push_back(a);
  const auto more = parts_->collectives.assumptions();
  if (parts_->machine.ranks() > 1) all.insert(all.end(), more.begin(), more.end());
  if (parts_->links.h2d > 0 && parts_->machine.gpus_per_node > 1) {
    all.push_back({"host copies, all GPUs of a node at once",
                   format_rate(BytesPerSecond(1 / parts_->links.h2d)) + " a GPU",
                   "the PCIe links and switch uplinks that they share"});
  }
  return all;
}

Bytes MachineCostModel::communicator_memory() const {
  const int ranks = parts_->machine.ranks(), shard = parts_->shard_ranks;
  if (ranks == 1 || parts_->machine.host_device) return {};
  const auto memory = [&](Group which) {
    return zeroplan::communicator_memory(parts_->machine, parts_->group(which)).bytes;
  };
  if (shard == 1 || shard == ranks) return memory(Group::all);
  return memory(Group::shard) + memory(Group::replica);
}

void require_even_groups(int ranks, int gpus_per_node, int shard_ranks) {
  const int g = std::max(1, gpus_per_node);
  const bool even =
      shard_ranks >= 1 && ranks % shard_ranks == 0 && (shard_ranks <= g ? g % shard_ranks == 0 : shard_ranks % g == 0);
  if (even) return;
  throw InputError(fmt::format(
      "shard_ranks: groups of {} ranks lie across nodes of {} in part; expected a divisor of {} or whole nodes that "
      "divide {} ranks",
      shard_ranks, g, g, ranks));
}

}  // namespace zeroplan
