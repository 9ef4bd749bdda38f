#include "models/schedule.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <stdexcept>

#include "models/op_label.h"
#include "models/overloaded.h"

namespace zeroplan {

std::vector<std::int64_t> Schedule::multiplicities() const {
  std::vector<std::int64_t> times(ops_.size(), 1);
  for (const Repeat& repeat : repeats_) {
    for (std::uint32_t i = repeat.begin; i < repeat.end; ++i) times[i] *= repeat.count;
  }
  return times;
}

void ScheduleBuilder::reserve(std::size_t ops) {
  schedule_.ops_.reserve(ops);
  schedule_.edges_.reserve(ops);
  schedule_.operands_.reserve(3 * ops);
  schedule_.buffers_.reserve(ops);
}

BufferId ScheduleBuilder::declare(Buffer buffer) {
  const auto unit = static_cast<double>(kBufferAlignment);
  buffer.size = Bytes(std::ceil(buffer.size.base() / unit) * unit);
  schedule_.buffers_.push_back(buffer);
  return {static_cast<std::uint32_t>(schedule_.buffers_.size() - 1)};
}

WorkId ScheduleBuilder::work(Work work) {
  schedule_.works_.push_back(work);
  return {static_cast<std::uint32_t>(schedule_.works_.size() - 1)};
}

OpRef ScheduleBuilder::add(Stream stream, Phase phase, int block, WorkId work, std::span<const OpRef> after,
                           std::span<const Operand> operands) {
  Op op;
  op.work = work;
  op.stream = stream;
  op.phase = phase;
  op.block = static_cast<std::int16_t>(block);
  op.first_edge = static_cast<std::uint32_t>(schedule_.edges_.size());
  op.first_operand = static_cast<std::uint32_t>(schedule_.operands_.size());
  for (OpRef ref : after) {
    if (ref.none()) continue;
    const std::size_t limit = ref.carried() ? schedule_.carried_.size() : schedule_.ops_.size();
    if (ref.index() >= limit) throw std::logic_error("schedule: an edge from a later op");
    schedule_.edges_.push_back(ref);
    ++op.num_edges;
  }
  for (const Operand& operand : operands) {
    if (operand.buffer.index >= schedule_.buffers_.size())
      throw std::logic_error("schedule: an operand that was not declared");
  }
  schedule_.operands_.insert(schedule_.operands_.end(), operands.begin(), operands.end());
  op.num_operands = static_cast<std::uint16_t>(operands.size());
  schedule_.ops_.push_back(op);
  return {static_cast<std::uint32_t>(schedule_.ops_.size() - 1)};
}

void ScheduleBuilder::begin_repeat(std::int64_t count) {
  Repeat repeat;
  repeat.begin = static_cast<std::uint32_t>(schedule_.ops_.size());
  repeat.count = count;
  repeat.first_carried = static_cast<std::uint32_t>(schedule_.carried_.size());
  schedule_.repeats_.push_back(repeat);
  open_.push_back(static_cast<std::uint32_t>(schedule_.repeats_.size() - 1));
}

OpRef ScheduleBuilder::carry(OpRef first) {
  Repeat& repeat = schedule_.repeats_[open_.back()];
  if (repeat.first_carried + repeat.num_carried != schedule_.carried_.size() || repeat.begin != schedule_.ops_.size()) {
    throw std::logic_error("schedule: carry() must come before the ops of its block");
  }
  schedule_.carried_.push_back({first, {}});
  ++repeat.num_carried;
  return {static_cast<std::uint32_t>(schedule_.carried_.size() - 1) | OpRef::kCarriedBit};
}

void ScheduleBuilder::set_next(OpRef carried, OpRef next) { schedule_.carried_.at(carried.index()).next = next; }

void ScheduleBuilder::end_repeat() {
  Repeat& repeat = schedule_.repeats_[open_.back()];
  repeat.end = static_cast<std::uint32_t>(schedule_.ops_.size());
  if (repeat.end == repeat.begin) throw std::logic_error("schedule: an empty repeated block");
  open_.pop_back();
}

Schedule ScheduleBuilder::finish() {
  if (!open_.empty()) throw std::logic_error("schedule: a repeated block was not closed");
  return std::move(schedule_);
}

// --- text -------------------------------------------------------------------------------------------

std::string_view to_string(Memory memory) {
  static constexpr std::array<std::string_view, kNumMemories> names{"gpu", "pinned", "host", "nvme"};
  return names[static_cast<std::size_t>(memory)];
}

std::string_view to_string(Owner owner) {
  static constexpr std::array<std::string_view, kNumOwners> names{"parameters",  "gradients", "optimizer",
                                                                  "activations", "buffers",   "logits"};
  return names[static_cast<std::size_t>(owner)];
}

std::string_view to_string(Stream stream) {
  static constexpr std::array<std::string_view, kNumStreams> names{"compute", "all-gather", "reduce",     "h2d",
                                                                   "d2h",     "nvme read",  "nvme write", "host"};
  return names[static_cast<std::size_t>(stream)];
}

std::string_view to_string(Phase phase) {
  static constexpr std::array<std::string_view, 3> names{"forward", "backward", "optimizer"};
  return names[static_cast<std::size_t>(phase)];
}

std::string_view to_string(Pass pass) {
  static constexpr std::array<std::string_view, 5> names{"forward", "recompute", "backward", "data gradient",
                                                         "weight gradient"};
  return names[static_cast<std::size_t>(pass)];
}

std::string_view to_string(CollectiveKind kind) {
  static constexpr std::array<std::string_view, 3> names{"all-gather", "reduce-scatter", "all-reduce"};
  return names[static_cast<std::size_t>(kind)];
}

std::string_view to_string(BufferRole role) {
  switch (role) {
    case BufferRole::weight_shard:
      return "weight shard";
    case BufferRole::weights:
      return "weights";
    case BufferRole::weight_staging:
      return "weight staging";
    case BufferRole::gradient:
      return "gradient";
    case BufferRole::gradient_staging:
      return "gradient staging";
    case BufferRole::gradient_shard:
      return "gradient shard";
    case BufferRole::master:
      return "master weights";
    case BufferRole::moments:
      return "Adam moments";
    case BufferRole::state_slot:
      return "optimizer state slot";
    case BufferRole::value:
      return "activation";
    case BufferRole::value_gradient:
      return "activation gradient";
    case BufferRole::logits:
      return "logits";
    case BufferRole::token_ids:
      return "token ids";
    case BufferRole::scalars:
      return "scalars";
    case BufferRole::norm:
      return "gradient norm";
    case BufferRole::workspace:
      return "workspace";
  }
  return "";
}

std::string block_label(const ModelSpec& model, int block) {
  if (block < 0) return "step";
  const auto kind_of = [&](int b) -> const BlockKind& {
    return model.kinds[static_cast<std::size_t>(model.sequence[static_cast<std::size_t>(b)])];
  };
  const BlockKind& kind = kind_of(block);
  if (kind.role != BlockRole::layer) return kind.name;
  int layer = 0;
  for (int b = 0; b < block; ++b) layer += kind_of(b).role == BlockRole::layer ? 1 : 0;
  return fmt::format("layer {}", layer);
}

std::string label(const Buffer& buffer, const ModelSpec& model) {
  std::string what(to_string(buffer.role));
  if (buffer.value >= 0 && buffer.block >= 0) {
    const auto& kind = model.kinds[static_cast<std::size_t>(model.sequence[static_cast<std::size_t>(buffer.block)])];
    what = kind.values[static_cast<std::size_t>(buffer.value)].name;
    if (buffer.role == BufferRole::value_gradient) what += " gradient";
  }
  return buffer.block < 0 ? what : block_label(model, buffer.block) + ": " + what;
}

namespace {

std::string eager_name(const Compute& c) {
  const std::string_view what = std::visit(overloaded{
                                               [](const Gemm&) { return "matrix product"; },
                                               [](const AttentionWork&) { return "attention"; },
                                               [](const Pointwise&) { return "elementwise"; },
                                           },
                                           c.kernel);
  return c.pass == Pass::forward ? std::string(what) : fmt::format("{} {}", what, to_string(c.pass));
}

std::string compute_name(const Compute& c, const ModelSpec& model) {
  switch (c.graph_op) {
    case kEagerOp:
      return eager_name(c);
    case kHeadLogits:
      return "logits";
    case kHeadLoss:
      return "loss";
    case kHeadData:
      return "logits data gradient";
    case kHeadWeight:
      return "logits weight gradient";
    case kGradientSum:
      return "gradient sum";
    case kAccumulate:
      return "accumulate gradient";
    case kGradientNorm:
      return "gradient norm";
    case kZero:
      return "clear gradients";
    case kHostPass:
      return "pass over staged states";
    case kNormSum:
      return "add the host's gradient norm";
    default:
      break;
  }
  const GraphOp& op = model.kinds[static_cast<std::size_t>(c.kind)].ops[static_cast<std::size_t>(c.graph_op)];
  if (c.pass == Pass::forward) return op.name;
  return fmt::format("{} {}", op.name, to_string(c.pass));
}

std::string copy_name(const Copy& c) {
  if (c.from == Memory::nvme) return "read from NVMe";
  if (c.to == Memory::nvme) return "write to NVMe";
  return c.to == Memory::hbm ? "copy to device" : "copy to host";
}

}  // namespace

std::string work_name(const Work& work, const ModelSpec& model) {
  return std::visit(overloaded{
                        [](const Alloc&) { return std::string("allocate"); },
                        [](const Free&) { return std::string("free"); },
                        [&](const Compute& c) { return compute_name(c, model); },
                        [](const Collective& c) { return std::string(to_string(c.kind)); },
                        [](const Copy& c) { return copy_name(c); },
                        [](const AdamStep&) { return std::string("Adam"); },
                        [](const Join&) { return std::string("wait"); },
                    },
                    work);
}

Flops work_flops(const Compute& compute) {
  return std::visit(overloaded{
                        [](const Gemm& g) {
                          return Flops(2.0 * static_cast<double>(g.m) * static_cast<double>(g.n) *
                                       static_cast<double>(g.k) * static_cast<double>(g.groups));
                        },
                        [](const AttentionWork& a) {
                          GraphOp op;
                          op.kernel = Kernel::attention;
                          op.attention = a.shape;
                          return a.backward ? backward_flops(op, a.tokens) : forward_flops(op, a.tokens);
                        },
                        [](const Pointwise&) { return Flops(0); },
                    },
                    compute.kernel);
}

std::string label(const Schedule& schedule, const Op& op, const ModelSpec& model) {
  return fmt::format("{} {}: {}", block_label(model, op.block), to_string(op.phase),
                     work_name(schedule.work(op), model));
}

}  // namespace zeroplan
