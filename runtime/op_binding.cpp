#include "runtime/op_binding.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "models/overloaded.h"

namespace zeroplan {

DType gradient_type(const Plan& plan, const Buffer& buffer) {
  const bool sum = buffer.role == BufferRole::gradient_shard || buffer.lifetime == Lifetime::resident;
  return sum ? plan.precision.accumulation : plan.precision.gradients;
}

std::span<std::byte> RankContext::part(BufferId buffer, std::int64_t bytes) const {
  const std::span<std::byte> all = memory.bytes(buffer);
  const auto count = static_cast<std::size_t>(bytes);
  const BufferRole role = schedule.buffer(buffer).role;
  const bool whole_block = role == BufferRole::weights || role == BufferRole::gradient;
  if (count > all.size()) throw std::logic_error("executor: an op is larger than its buffer");
  if (!whole_block || count == all.size()) return all.first(count);
  return all.subspan(static_cast<std::size_t>(shard_index()) * count, count);
}

void clear_padding(const RankContext& context, BufferId gradient) {
  const Buffer& buffer = context.schedule.buffer(gradient);
  const auto& model = context.model;
  const BlockKind& kind = model.kinds[static_cast<std::size_t>(model.sequence[static_cast<std::size_t>(buffer.block)])];
  const auto size = static_cast<std::size_t>(size_of(gradient_type(context.plan, buffer)));
  const std::span<std::byte> bytes = context.memory.bytes(gradient);
  const auto offsets = tensor_offsets(kind, context.plan.precision.weights);
  std::size_t end = 0;
  const auto clear_to = [&](std::size_t next) { std::memset(bytes.data() + end, 0, next - end); };
  for (std::size_t t = 0; t < offsets.size(); ++t) {
    if (offsets[t] < 0) continue;
    clear_to(static_cast<std::size_t>(offsets[t]) * size);
    end = static_cast<std::size_t>(offsets[t] + kind.tensors[t].elements()) * size;
  }
  clear_to(bytes.size());
}

namespace {

Action bind_alloc(const RankContext& context, const Op& op) {
  return [&context, operands = context.schedule.operands(op)]() -> std::optional<TimePoint> {
    for (const Operand& operand : operands) {
      context.memory.born(operand.buffer);
      if (context.schedule.buffer(operand.buffer).role == BufferRole::gradient) clear_padding(context, operand.buffer);
    }
    return {};
  };
}

Action bind_free(const RankContext& context, const Op& op) {
  return [&context, operands = context.schedule.operands(op)]() -> std::optional<TimePoint> {
    for (const Operand& operand : operands) context.memory.dead(operand.buffer);
    return {};
  };
}

}  // namespace

std::vector<Action> bind_ops(const RankContext& context) {
  std::vector<Action> actions;
  BindPosition position;
  for (const Op& op : context.schedule.ops()) {
    actions.push_back(
        std::visit(overloaded{
                       [&](const Alloc&) { return bind_alloc(context, op); },
                       [&](const Free&) { return bind_free(context, op); },
                       [&](const Compute& work) { return bind_compute(context, op, work, position); },
                       [&](const Collective& work) { return bind_collective(context, op, work); },
                       [&](const Copy& work) { return bind_copy(context, op, work); },
                       [&](const AdamStep& work) { return bind_adam(context, op, work); },
                       [&](const Join&) { return Action([]() -> std::optional<TimePoint> { return {}; }); },
                   },
                   context.schedule.work(op)));
  }
  return actions;
}

}  // namespace zeroplan
