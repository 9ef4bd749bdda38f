#include "sim/host_kernel_costs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "models/error.h"
#include "models/gemm_tasks.h"
#include "models/host_ranks.h"
#include "models/overloaded.h"

namespace zeroplan {
namespace {

/// Elements of one range of a loop over rows or elements (runtime/kernels: for_rows, for_elements).
constexpr std::int64_t kElementsPerRange = 1 << 14;
/// Queries of a range of attention (runtime/kernels/attention.cpp).
constexpr std::int64_t kQueriesPerRange = 128;
/// Columns of a range of a sum over rows (runtime/kernels/loops.h, column_sums).
constexpr std::int64_t kColumnsPerRange = 64;
/// Of a norm's backward, the gradient of its weight: as many passes over the same elements as the other part.
constexpr double kColumnPart = 0.5;
/// A weight from the cores' shared cache costs about half of one from DRAM. From one machine: forward products of a 3 M
/// parameter Llama whose weights fit its shared cache took 2.9 ms, 2.4 with weights nearby and 3.3 from DRAM
/// (docs/cost-model.md section 7).
constexpr double kSharedCost = 0.5;

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

void add_to(KernelWork& sum, const KernelWork& more) {
  sum.alone += more.alone;
  sum.ranges = std::max(sum.ranges, more.ranges);
  sum.distant += more.distant;
}

/// An embedding's backward goes by columns.
KernelWork in_columns(KernelWork work, Pass pass, const GraphOp& op) {
  if (backward(pass)) work.ranges = divide_up(op.out_features, kColumnsPerRange);
  return work;
}

}  // namespace

HostKernelCosts::HostKernelCosts(const MachineSpec& machine, int shard_ranks, DType type,
                                 const ModelSpec* model_or_null)
    : machine_(machine),
      host_(*machine.host_kernels),
      type_(type),
      ranks_(machine.gpus_per_node),
      shard_ranks_(shard_ranks),
      threads_(host_threads_per_rank(machine.physical_cores, machine.gpus_per_node)) {
  if (model_or_null == nullptr) return;
  kinds_ = model_or_null->kinds;
  parameters_ = static_cast<double>(model_or_null->parameters());
}

// --- threads -------------------------------------------------------------------------------------

double HostKernelCosts::speedup(int of_threads) const {
  double before = 1, at = 1;
  for (const HostSpeedup& s : host_.speedups) {
    if (s.threads >= of_threads) {
      if (s.threads == of_threads) return s.compute;
      return before + (s.compute - before) * (of_threads - at) / (s.threads - at);
    }
    before = s.compute, at = s.threads;
  }
  return before;
}

BytesPerSecond HostKernelCosts::memory_rate(int of_threads) const {
  BytesPerSecond rate = machine_.dram_bandwidth;
  for (const HostMemoryRate& m : host_.memory) {
    rate = m.rate;
    if (m.threads >= of_threads) break;
  }
  return rate;
}

/// How much slower a thread is than alone while every rank of the node has so many at work.
double HostKernelCosts::crowded(int threads_of_rank) const {
  const int active = std::min(machine_.physical_cores, ranks_ * threads_of_rank);
  return active / speedup(active);
}

/// What a rank's pool takes for a loop of so many ranges. Threads that sleep begin late; until then the others work
/// alone.
Seconds HostKernelCosts::in_pool(Seconds alone, std::int64_t ranges) const {
  const auto useful = static_cast<int>(std::min<std::int64_t>(threads_, ranges));
  const Seconds by_one = crowded(1) * alone;
  if (useful <= 1 || alone <= host_.pool_wake) return by_one;
  const double even = static_cast<double>(ranges) / useful;
  const double uneven = std::ceil(even) / even;
  return std::min(by_one, (alone + (useful - 1.0) * host_.pool_wake) / useful * (crowded(useful) * uneven));
}

Seconds HostKernelCosts::in_pool(const KernelWork& work) const {
  const Seconds columns = kColumnPart * work.alone;
  const Seconds threaded = work.column_ranges == 0
                               ? in_pool(work.alone, work.ranges)
                               : in_pool(work.alone - columns, work.ranges) + in_pool(columns, work.column_ranges);
  const int active = std::min(machine_.physical_cores, ranks_ * threads_);
  return std::max(threaded, static_cast<double>(ranks_) * (work.distant / memory_rate(active)));
}

// --- kernels -------------------------------------------------------------------------------------

const HostKernelTime& HostKernelCosts::kernel(std::string_view name, DType of_type) const {
  const HostKernelTime* found = host_.find(name, of_type);
  if (found == nullptr) {
    throw InputError(
        fmt::format("machine {}: host_kernels has no \"{}\" in {}; expected a machine that a newer "
                    "`zeroplan probe` wrote, or another model",
                    machine_.name, name, to_string(of_type)));
  }
  return *found;
}

/// The part of a step's memory that is further away than `nearer` is large.
double HostKernelCosts::far_part(Bytes nearer) const {
  const Bytes passed = passed_in_a_step();
  return passed > nearer ? 1 - nearer / passed : 0;
}

Bytes HostKernelCosts::beyond_shared(Bytes moved, Bytes footprint) const {
  if (!(footprint > host_.shared_memory)) return {};
  return moved * (1 - host_.shared_memory / footprint);
}

KernelWork HostKernelCosts::elements(std::string_view name, DType of_type, std::int64_t count, Bytes moved,
                                     Bytes footprint) const {
  const HostCounts counts = elements_counts(host_, count, footprint);
  return {host_time(kernel(name, of_type), counts), divide_up(count, kElementsPerRange),
          beyond_shared(moved, footprint)};
}
KernelWork HostKernelCosts::elements(std::string_view name, std::int64_t count, Bytes moved) const {
  return elements(name, type_, count, moved, moved);
}
KernelWork HostKernelCosts::rows(std::string_view name, std::int64_t count, std::int64_t width, Bytes moved) const {
  return {host_time(kernel(name, type_), rows_counts(host_, count, width, moved)),
          divide_up(count * width, kElementsPerRange), beyond_shared(moved, moved)};
}

/// All of the node's ranks' states that are as many bytes a parameter: what passes between two uses of the same.
Bytes HostKernelCosts::all_states(double bytes_per_parameter) const {
  return Bytes(parameters_ * bytes_per_parameter * ranks_ / std::max(1, shard_ranks_));
}

/// What every rank of the node touches between two uses of one weight, or of what forward kept for backward: all
/// weights at least.
Bytes HostKernelCosts::passed_in_a_step() const { return Bytes(parameters_ * size_of(type_) * ranks_); }

/// `weight_elements`: of the weight that is read, or of the gradient that is written; the rest was there just now.
KernelWork HostKernelCosts::product(std::string_view name, std::int64_t m, std::int64_t n, std::int64_t k, bool adds,
                                    std::int64_t weight_elements) const {
  const double distant = static_cast<double>(weight_elements) * (far_part(host_.near_memory) * kSharedCost +
                                                                 far_part(host_.shared_memory) * (1 - kSharedCost));
  const HostCounts counts = matmul_counts(host_, m, n, k, adds, threads_, distant);
  const GemmTasks cut = gemm_tasks(m, n, threads_);
  const std::int64_t tasks = cut.row_tasks * cut.column_tasks;
  return {host_time(kernel(name, type_), counts), tasks, {}};
}

/// Linears whose weights lie side by side are several products, but for the gradient of their input.
KernelWork HostKernelCosts::linear(const GraphOp* op, const std::vector<TensorSpec>* tensors, Pass pass,
                                   const Gemm& g) const {
  if (pass == Pass::backward_data) return product("linear backward data", g.m, g.n, g.k, g.accumulate, g.k * g.n);
  const bool gradient = pass == Pass::backward_weight || pass == Pass::backward;
  const std::string_view name = gradient ? "linear backward weight" : "linear forward";
  if (op == nullptr) return product(name, g.m, g.n, g.k, gradient && g.accumulate, gradient ? g.m * g.n : g.k * g.n);
  KernelWork sum;
  sum.alone = Seconds();
  for (const int index : op->tensors) {
    const TensorSpec& tensor = (*tensors)[static_cast<std::size_t>(index)];
    const std::int64_t out = tensor.shape[0];
    if (tensor.shape.size() == 2) {
      add_to(sum, gradient ? product(name, out, g.n, g.k, g.accumulate, out * g.n)
                           : product(name, g.m, out, g.k, false, g.k * out));
    } else if (gradient) {
      add_to(sum, elements("bias backward", g.k * out, bytes_of(g.k * out, type_)));
    }
  }
  return sum;
}

KernelWork HostKernelCosts::attention(const AttentionWork& a) const {
  const HostCounts counts = attention_counts(host_, a.shape, a.tokens);
  const std::int64_t tasks = a.backward
                                 ? a.tokens.batch * a.shape.kv_heads
                                 : a.tokens.batch * a.shape.heads * divide_up(a.tokens.seq_len, kQueriesPerRange);
  return {host_time(kernel(a.backward ? "attention backward" : "attention forward", a.type), counts), tasks, {}};
}

/// Backward reads what forward kept: not near any more. It is one operand of several: not counted as from DRAM.
Bytes HostKernelCosts::with_kept(Bytes moved, Pass pass) const {
  if (!backward(pass)) return moved;
  return std::max(moved, std::min(passed_in_a_step(), host_.shared_memory));
}

KernelWork HostKernelCosts::norm(const BlockKind& kind, const GraphOp& op, Pass pass, const Pointwise& w) const {
  const auto width = [&](int value) { return kind.values[static_cast<std::size_t>(value)].per_token; };
  const bool rms = op.outputs.size() > 1 && width(op.outputs[1]) == 1;
  const std::int64_t parts = width(op.outputs[0]) / op.out_features;  // heads of a norm of q and k
  KernelWork work = rows(with_pass(rms ? "norm rms" : "norm layer", pass), w.count * parts, op.out_features,
                         with_kept(w.traffic, pass));
  if (backward(pass)) work.column_ranges = divide_up(op.out_features, kColumnsPerRange);
  return work;
}

KernelWork HostKernelCosts::pointwise(const BlockKind& kind, const GraphOp& op, Pass pass, const Pointwise& w) const {
  const auto width = [&](int value) { return kind.values[static_cast<std::size_t>(value)].per_token; };
  switch (op.kernel) {
    case Kernel::embedding:
      return in_columns(rows(with_pass("embedding", pass), w.count, op.out_features, w.traffic), pass, op);
    case Kernel::norm:
      return norm(kind, op, pass, w);
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
  throw InputError(fmt::format("machine {}: the host runtime has no kernel for \"{}\" ({})", machine_.name, op.name,
                               to_string(op.kernel)));
}

/// Works that name themselves.
KernelWork HostKernelCosts::coded(std::int16_t code, const Pointwise& w) const {
  const auto each = w.count > 0 ? w.traffic.base() / static_cast<double>(w.count) : 0;  // bytes an element
  const Bytes of_all = std::max(w.traffic, all_states(each));
  switch (code) {
    case kHeadLoss:
      return loss(w);
    case kGradientSum:
      return elements("add", w.count > 0 ? w.count : static_cast<std::int64_t>(w.traffic.base()) / (3 * size_of(type_)),
                      w.traffic);
    case kAccumulate:
      return elements("accumulate", type_, w.count, w.traffic, of_all);
    case kGradientNorm: {
      const DType sum = each > size_of(type_) ? DType::fp32 : type_;
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
                      std::max(w.traffic, all_states(size_of(type_))));
    default:
      throw std::logic_error("host device: unknown op code");
  }
}

/// Logits of a token are as many as the model's vocabulary.
KernelWork HostKernelCosts::loss(const Pointwise& w) const {
  std::int64_t vocab = 0;
  for (const BlockKind& kind : kinds_) vocab = std::max(vocab, kind.vocab);
  if (vocab <= 0) {
    throw InputError(fmt::format("machine {}: the host runtime has no loss without a vocabulary", machine_.name));
  }
  return rows("loss", w.count / vocab, vocab, w.traffic);
}

KernelWork HostKernelCosts::compute(const Compute& c) const {
  const BlockKind* kind = nullptr;
  const GraphOp* op = nullptr;
  if (c.graph_op >= 0) {
    if (static_cast<std::size_t>(c.kind) >= kinds_.size()) {
      throw std::logic_error("host device: an op of a graph needs the model");
    }
    kind = &kinds_[static_cast<std::size_t>(c.kind)];
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

KernelWork HostKernelCosts::adam(const AdamStep& a) const {
  const double each = a.parameters > 0 ? a.traffic.base() / static_cast<double>(a.parameters) : 0;
  return elements("adam", type_, static_cast<std::int64_t>(a.traffic.base()), a.traffic,
                  std::max(a.traffic, all_states(each)));
}

KernelWork HostKernelCosts::copy(Bytes bytes) const {
  constexpr double kWeightBytes = 4;  // of 16-bit weights, read and written: what all copies of a step pass at least
  return elements("copy", DType::u8, static_cast<std::int64_t>(bytes.base()), 2.0 * bytes,
                  std::max(2.0 * bytes, all_states(kWeightBytes)));
}

}  // namespace zeroplan
