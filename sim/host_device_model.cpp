#include "sim/host_device_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

#include "models/error.h"
#include "models/host_kernels.h"
#include "models/host_ranks.h"
#include "models/overloaded.h"

namespace zeroplan {
namespace {

/// One kernel's work: what a single thread takes, into how many ranges a pool may cut it, and what comes from DRAM.
struct KernelWork {
  Seconds alone;
  std::int64_t ranges = 1;
  Bytes distant;
  std::int64_t column_ranges = 0;  // of the part that sums over rows (kColumnPart); 0: there is none
};

/// Of a norm's backward, the gradient of its weight: as many passes over the same elements as the other part.
constexpr double kColumnPart = 0.5;
/// Columns of a range of such a sum (runtime/kernels/loops.h, column_sums).
constexpr std::int64_t kColumnsPerRange = 64;

/// Elements of one range of a loop over rows or elements (runtime/kernels: for_rows, for_elements).
constexpr std::int64_t kElementsPerRange = 1 << 14;
/// Queries of a range of attention (runtime/kernels/attention.cpp).
constexpr std::int64_t kQueriesPerRange = 128;
/// A weight from the cores' shared cache costs about half of one from DRAM. From one machine: forward products of a 3 M
/// parameter Llama whose weights fit its shared cache took 2.9 ms, 2.4 with weights nearby and 3.3 from DRAM
/// (docs/cost-model.md section 7).
constexpr double kSharedCost = 0.5;
/// Ranges that a ThreadPool cuts a loop into, for each thread.
constexpr std::int64_t kRangesPerThread = 4;

constexpr std::int64_t divide_up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

/// "silu", ...: as the probe calls the function that a graph op is named by.
std::string activation_name(const GraphOp& op) {
  const std::string name = op.name.substr(op.name.rfind(' ') + 1);
  std::string function = name;
  if (name == "swish") function = "silu";
  if (name == "gelu") function = "gelu_erf";
  if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") function = "gelu_tanh";
  return function + (op.in_features == 2 * op.out_features ? " gated" : "");
}

bool backward(Pass pass) { return pass != Pass::forward && pass != Pass::recompute; }

std::string with_pass(std::string_view kernel, Pass pass) {
  return fmt::format("{} {}", kernel, backward(pass) ? "backward" : "forward");
}

}  // namespace

struct HostDeviceModel::Parts {
  Parts(const MachineSpec& m, int shard, DType t, const ModelSpec* model_or_null)
      : machine(m), host(*m.host_kernels), type(t), ranks(m.gpus_per_node), shard_ranks(shard) {
    threads = host_threads_per_rank(m.physical_cores, ranks);
    if (model_or_null != nullptr) {
      kinds = model_or_null->kinds;
      parameters = static_cast<double>(model_or_null->parameters());
    }
  }

  MachineSpec machine;
  HostKernels host;
  DType type;
  int ranks, shard_ranks;
  int threads = 1;  // of a rank's pool
  std::vector<BlockKind> kinds;
  double parameters = 0;

  // --- threads -------------------------------------------------------------------------------------

  double speedup(int of_threads) const {
    double before = 1, at = 1;
    for (const HostSpeedup& s : host.speedups) {
      if (s.threads >= of_threads) {
        if (s.threads == of_threads) return s.compute;
        return before + (s.compute - before) * (of_threads - at) / (s.threads - at);
      }
      before = s.compute, at = s.threads;
    }
    return before;
  }

  BytesPerSecond memory_rate(int of_threads) const {
    BytesPerSecond rate = machine.dram_bandwidth;
    for (const HostMemoryRate& m : host.memory) {
      rate = m.rate;
      if (m.threads >= of_threads) break;
    }
    return rate;
  }

  /// How much slower a thread is than alone while every rank of the node has so many at work.
  double crowded(int threads_of_rank) const {
    const int active = std::min(machine.physical_cores, ranks * threads_of_rank);
    return active / speedup(active);
  }

  /// What a rank's pool takes for a loop of so many ranges. Threads that sleep begin late; until then the others work
  /// alone.
  Seconds in_pool(Seconds alone, std::int64_t ranges) const {
    const auto useful = static_cast<int>(std::min<std::int64_t>(threads, ranges));
    const Seconds by_one = crowded(1) * alone;
    if (useful <= 1 || alone <= host.pool_wake) return by_one;
    const double even = static_cast<double>(ranges) / useful;
    const double uneven = std::ceil(even) / even;
    return std::min(by_one, (alone + (useful - 1.0) * host.pool_wake) / useful * (crowded(useful) * uneven));
  }

  Seconds in_pool(const KernelWork& work) const {
    const Seconds columns = kColumnPart * work.alone;
    const Seconds threaded = work.column_ranges == 0
                                 ? in_pool(work.alone, work.ranges)
                                 : in_pool(work.alone - columns, work.ranges) + in_pool(columns, work.column_ranges);
    const int active = std::min(machine.physical_cores, ranks * threads);
    return std::max(threaded, static_cast<double>(ranks) * (work.distant / memory_rate(active)));
  }

  /// The demand of work on threads of one rank, while all ranks of the node do the same.
  Demand on_threads(ResourceRole lane, Seconds elapsed, const KernelWork& work) const {
    Demand d;
    d[lane] = elapsed;
    d[ResourceRole::cpu] = static_cast<double>(ranks) / speedup(machine.physical_cores) * work.alone;
    d[ResourceRole::dram] = static_cast<double>(ranks) * (work.distant / machine.dram_bandwidth);
    return d;
  }

  // --- kernels -------------------------------------------------------------------------------------

  const HostKernelTime& kernel(std::string_view name, DType of_type) const {
    const HostKernelTime* found = host.find(name, of_type);
    if (found == nullptr) {
      throw InputError(
          fmt::format("machine {}: host_kernels has no \"{}\" in {}; expected a machine that a newer "
                      "`zeroplan probe` wrote, or another model",
                      machine.name, name, to_string(of_type)));
    }
    return *found;
  }

  /// The part of a step's memory that is further away than `nearer` is large.
  double far_part(Bytes nearer) const {
    const Bytes passed = passed_in_a_step();
    return passed > nearer ? 1 - nearer / passed : 0;
  }

  Bytes beyond_shared(Bytes moved, Bytes footprint) const {
    if (!(footprint > host.shared_memory)) return {};
    return moved * (1 - host.shared_memory / footprint);
  }

  KernelWork elements(std::string_view name, DType of_type, std::int64_t count, Bytes moved, Bytes footprint) const {
    const HostCounts counts = elements_counts(host, count, footprint);
    return {host_time(kernel(name, of_type), counts), divide_up(count, kElementsPerRange),
            beyond_shared(moved, footprint)};
  }
  KernelWork elements(std::string_view name, std::int64_t count, Bytes moved) const {
    return elements(name, type, count, moved, moved);
  }
  KernelWork rows(std::string_view name, std::int64_t count, std::int64_t width, Bytes moved) const {
    return {host_time(kernel(name, type), rows_counts(host, count, width, moved)),
            divide_up(count * width, kElementsPerRange), beyond_shared(moved, moved)};
  }

  /// All of the node's ranks' states that are as many bytes a parameter: what passes between two uses of the same.
  Bytes all_states(double bytes_per_parameter) const {
    return Bytes(parameters * bytes_per_parameter * ranks / std::max(1, shard_ranks));
  }

  /// What every rank of the node touches between two uses of one weight, or of what forward kept for backward: all
  /// weights at least.
  Bytes passed_in_a_step() const { return Bytes(parameters * size_of(type) * ranks); }

  /// `weight_elements`: of the weight that is read, or of the gradient that is written; the rest was there just now.
  KernelWork product(std::string_view name, std::int64_t m, std::int64_t n, std::int64_t k, bool adds,
                     std::int64_t weight_elements) const {
    const double distant = static_cast<double>(weight_elements) * (far_part(host.near_memory) * kSharedCost +
                                                                   far_part(host.shared_memory) * (1 - kSharedCost));
    const HostCounts counts = matmul_counts(host, m, n, k, adds, threads, distant);
    constexpr std::int64_t kTaskRows = 960;  // runtime/kernels/gemm.cpp; columns are cut to give each thread two tasks
    const std::int64_t tasks = std::max<std::int64_t>(divide_up(m, kTaskRows), threads == 1 ? 1 : 2 * threads);
    return {host_time(kernel(name, type), counts), tasks, {}};
  }

  static void add_to(KernelWork& sum, const KernelWork& more) {
    sum.alone += more.alone;
    sum.ranges = std::max(sum.ranges, more.ranges);
    sum.distant += more.distant;
  }

  /// Linears whose weights lie side by side are several products, but for the gradient of their input.
  KernelWork linear(const GraphOp* op, const std::vector<TensorSpec>* tensors, Pass pass, const Gemm& g) const {
    if (pass == Pass::backward_data) return product("linear backward data", g.m, g.n, g.k, g.accumulate, g.k * g.n);
    const bool gradient = pass == Pass::backward_weight || pass == Pass::backward;
    const std::string_view name = gradient ? "linear backward weight" : "linear forward";
    if (op == nullptr) return whole_linear(name, gradient, g);
    KernelWork sum;
    sum.alone = Seconds();
    for (const int index : op->tensors) {
      const TensorSpec& tensor = (*tensors)[static_cast<std::size_t>(index)];
      const std::int64_t out = tensor.shape[0];
      if (tensor.shape.size() == 2) {
        add_to(sum, gradient ? product(name, out, g.n, g.k, g.accumulate, out * g.n)
                             : product(name, g.m, out, g.k, false, g.k * out));
      } else if (gradient) {
        add_to(sum, elements("bias backward", g.k * out, bytes_of(g.k * out, type)));
      }
    }
    return sum;
  }
  KernelWork whole_linear(std::string_view name, bool gradient, const Gemm& g) const {
    return product(name, g.m, g.n, g.k, gradient && g.accumulate, gradient ? g.m * g.n : g.k * g.n);
  }

  KernelWork attention(const AttentionWork& a) const {
    const HostCounts counts = attention_counts(host, a.shape, a.tokens);
    const std::int64_t tasks = a.backward
                                   ? a.tokens.batch * a.shape.kv_heads
                                   : a.tokens.batch * a.shape.heads * divide_up(a.tokens.seq_len, kQueriesPerRange);
    return {host_time(kernel(a.backward ? "attention backward" : "attention forward", a.type), counts), tasks, {}};
  }

  /// An embedding's backward goes by columns.
  static KernelWork in_columns(KernelWork work, Pass pass, const GraphOp& op) {
    if (backward(pass)) work.ranges = divide_up(op.out_features, kColumnsPerRange);
    return work;
  }

  /// Backward reads what forward kept: not near any more. It is one operand of several: not counted as from DRAM.
  Bytes with_kept(Bytes moved, Pass pass) const {
    if (!backward(pass)) return moved;
    return std::max(moved, std::min(passed_in_a_step(), host.shared_memory));
  }

  KernelWork pointwise(const BlockKind& kind, const GraphOp& op, Pass pass, const Pointwise& w) const {
    const auto width = [&](int value) { return kind.values[static_cast<std::size_t>(value)].per_token; };
    switch (op.kernel) {
      case Kernel::embedding:
        return in_columns(rows(with_pass("embedding", pass), w.count, op.out_features, w.traffic), pass, op);
      case Kernel::norm: {
        const bool rms = op.outputs.size() > 1 && width(op.outputs[1]) == 1;
        const std::int64_t parts = width(op.outputs[0]) / op.out_features;  // heads of a norm of q and k
        KernelWork work = rows(with_pass(rms ? "norm rms" : "norm layer", pass), w.count * parts, op.out_features,
                               with_kept(w.traffic, pass));
        if (backward(pass)) work.column_ranges = divide_up(op.out_features, kColumnsPerRange);
        return work;
      }
      case Kernel::rotary:
        return rows(with_pass("rotary", pass), w.count, width(op.outputs[0]), w.traffic);
      case Kernel::activation:
        return elements(with_pass(activation_name(op), pass), w.count * op.out_features, with_kept(w.traffic, pass));
      case Kernel::add: {
        const auto sums = static_cast<std::int64_t>(op.inputs.size()) - 1;
        return elements("add", std::max<std::int64_t>(1, sums) * w.count * width(op.outputs[0]), w.traffic);
      }
      case Kernel::linear:
      case Kernel::grouped_linear:
      case Kernel::attention:
      case Kernel::router:
      case Kernel::permute:
      case Kernel::combine:
        break;
    }
    throw InputError(fmt::format("machine {}: the host runtime has no kernel for \"{}\" ({})", machine.name, op.name,
                                 to_string(op.kernel)));
  }

  /// Works that name themselves.
  KernelWork coded(std::int16_t code, const Pointwise& w) const {
    const auto each = w.count > 0 ? w.traffic.base() / static_cast<double>(w.count) : 0;  // bytes an element
    const Bytes of_all = std::max(w.traffic, all_states(each));
    switch (code) {
      case kHeadLoss:
        return loss(w);
      case kGradientSum:
        return elements("add", w.count > 0 ? w.count : added(w), w.traffic);
      case kAccumulate:
        return elements("accumulate", type, w.count, w.traffic, of_all);
      case kGradientNorm: {
        const DType sum = each > size_of(type) ? DType::fp32 : type;
        return elements("gradient norm", sum, w.count, w.traffic, of_all);
      }
      case kEagerOp:  // of PyTorch, whose kernels were not measured: what it moves
      case kHostPass: {
        const auto half = static_cast<std::int64_t>(w.traffic.base() / 2);  // as much written as read
        return elements("copy", DType::u8, half, w.traffic, std::max(w.traffic, passed_in_a_step()));
      }
      case kNormSum:
        return elements("gradient norm", DType::fp32, 1, w.traffic, w.traffic);
      case kZero:
        return elements("clear", DType::u8, static_cast<std::int64_t>(w.traffic.base()), w.traffic,
                        std::max(w.traffic, all_states(size_of(type))));
      default:
        throw std::logic_error("host device: unknown op code");
    }
  }

  /// Elements of a sum that reads two operands and writes one.
  std::int64_t added(const Pointwise& w) const {
    return static_cast<std::int64_t>(w.traffic.base()) / (3 * size_of(type));
  }

  /// Logits of a token are as many as the model's vocabulary.
  KernelWork loss(const Pointwise& w) const {
    std::int64_t vocab = 0;
    for (const BlockKind& kind : kinds) vocab = std::max(vocab, kind.vocab);
    if (vocab <= 0) {
      throw InputError(fmt::format("machine {}: the host runtime has no loss without a vocabulary", machine.name));
    }
    return rows("loss", w.count / vocab, vocab, w.traffic);
  }

  KernelWork work_of(const Compute& c) const {
    const BlockKind* kind = nullptr;
    const GraphOp* op = nullptr;
    if (c.graph_op >= 0) {
      if (static_cast<std::size_t>(c.kind) >= kinds.size()) {
        throw std::logic_error("host device: an op of a graph needs the model");
      }
      kind = &kinds[static_cast<std::size_t>(c.kind)];
      op = &kind->ops.at(static_cast<std::size_t>(c.graph_op));
    }
    return std::visit(
        overloaded{
            [&](const Gemm& g) {
              if (g.groups != 1) return pointwise(*kind, *op, c.pass, {});
              return linear(op, kind == nullptr ? nullptr : &kind->tensors, c.pass, g);
            },
            [&](const AttentionWork& a) { return attention(a); },
            [&](const Pointwise& w) { return op == nullptr ? coded(c.graph_op, w) : pointwise(*kind, *op, c.pass, w); },
        },
        c.kernel);
  }

  // --- ops -----------------------------------------------------------------------------------------

  Demand of_compute(const Compute& c) const {
    const KernelWork work = work_of(c);
    const bool on_reduce_stream = c.graph_op == kAccumulate && !c.on_host;
    // Sums of gradients that stay on the device run beside the kernels, in one thread.
    if (on_reduce_stream) return woken(on_threads(ResourceRole::hbm, work.alone, work));
    if (c.on_host) return woken(on_threads(ResourceRole::hbm, in_pool(work), work));
    return on_threads(ResourceRole::sm, in_pool(work), work);
  }

  Demand of_adam(const AdamStep& a) const {
    const double each = a.parameters > 0 ? a.traffic.base() / static_cast<double>(a.parameters) : 0;
    const KernelWork work = elements("adam", type, static_cast<std::int64_t>(a.traffic.base()), a.traffic,
                                     std::max(a.traffic, all_states(each)));
    if (a.where == UpdateOn::device) return on_threads(ResourceRole::sm, in_pool(work), work);
    return woken(on_threads(ResourceRole::hbm, in_pool(work), work));
  }

  Demand of_copy(const Copy& c) const {
    const Bytes moved = 2.0 * c.bytes;
    constexpr double kWeightBytes = 4;  // of 16-bit weights, read and written: what all copies of a step pass at least
    KernelWork work = elements("copy", DType::u8, static_cast<std::int64_t>(c.bytes.base()), moved,
                               std::max(moved, all_states(kWeightBytes)));
    if (c.from == Memory::nvme || c.to == Memory::nvme) return of_disk(c);
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
          {"threads of a rank", fmt::format("{} of {} cores", p.threads, p.machine.physical_cores),
           "cores shared evenly, at least one each"}};
}

}  // namespace zeroplan
