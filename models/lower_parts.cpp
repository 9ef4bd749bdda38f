#include "models/lower_parts.h"

#include <stdexcept>

namespace zeroplan {

FlatLayout flat_layout(const BlockKind& kind, DType type, int shard_ranks) {
  const std::int64_t unit = kBufferAlignment / size_of(type);
  const auto round_up = [](std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; };
  FlatLayout layout;
  for (const TensorSpec& tensor : kind.tensors) {
    if (tensor.tied) continue;
    const std::int64_t each = tensor.elements() / tensor.copies;
    layout.parameters += tensor.elements();
    layout.padded += round_up(each, unit) * tensor.copies;
  }
  layout.padded = round_up(layout.padded, unit * shard_ranks);
  layout.shard = layout.padded / shard_ranks;
  return layout;
}

Bytes slot_bytes(const BlockKind& kind, const ProgramSlot& slot, const WorkSizes& sizes) {
  const Value& value = kind.values[static_cast<std::size_t>(slot.value)];
  DType type = sizes.type;
  if (slot.role == BufferRole::value) {
    if (value.type == ValueType::fp32) type = DType::fp32;
    if (value.type == ValueType::byte) type = DType::u8;
  }
  return bytes_of(value.per_token * sizes.tokens.tokens(), type);
}

namespace {

Bytes operand_traffic(const BlockKind& kind, const BlockProgram& program, const ProgramStep& step,
                      const WorkSizes& sizes) {
  Bytes total;
  for (const ProgramOperand& operand : step.operands) {
    const Bytes size = slot_bytes(kind, program.slots[static_cast<std::size_t>(operand.slot)], sizes);
    total += operand.access == Access::read_write ? 2.0 * size : size;
  }
  return total;
}

Gemm linear_gemm(const GraphOp& op, const ProgramStep& step, const WorkSizes& sizes) {
  const std::int64_t all_rows = sizes.tokens.tokens() * op.rows_per_token;
  const std::int64_t rows = (all_rows + op.groups - 1) / op.groups;
  Gemm gemm;
  gemm.groups = op.groups;
  gemm.type = sizes.type;
  switch (step.pass) {
    case Pass::forward:
    case Pass::recompute:
      gemm.m = rows, gemm.n = op.out_features, gemm.k = op.in_features;
      return gemm;
    case Pass::backward_data:
      gemm.m = rows, gemm.n = op.in_features, gemm.k = op.out_features;
      gemm.accumulate = step.accumulate;
      return gemm;
    case Pass::backward:  // a linear without an input value (patches of an image)
    case Pass::backward_weight:
      gemm.m = op.out_features, gemm.n = op.in_features, gemm.k = rows;
      gemm.fp32_output = sizes.gradient_type == DType::fp32;
      gemm.accumulate = sizes.accumulate_gradients;
      return gemm;
  }
  throw std::logic_error("linear: unknown pass");
}

}  // namespace

Compute work_of(const BlockKind& kind, int kind_index, const BlockProgram& program, const ProgramStep& step,
                const WorkSizes& sizes) {
  Compute work;
  work.kind = static_cast<std::int16_t>(kind_index);
  work.graph_op = step.graph_op < 0 ? kGradientSum : static_cast<std::int16_t>(step.graph_op);
  work.pass = step.pass;
  Pointwise pointwise{operand_traffic(kind, program, step, sizes), sizes.tokens.tokens()};
  if (step.graph_op < 0) {
    work.kernel = pointwise;
    return work;
  }
  const GraphOp& op = kind.ops[static_cast<std::size_t>(step.graph_op)];
  switch (op.kernel) {
    case Kernel::linear:
    case Kernel::grouped_linear:
      work.kernel = linear_gemm(op, step, sizes);
      return work;
    case Kernel::attention:
      work.kernel = AttentionWork{op.attention, sizes.tokens, sizes.type,
                                  step.pass != Pass::forward && step.pass != Pass::recompute};
      return work;
    case Kernel::embedding: {
      // Rows read beside the rows written; in backward rows of the gradient table are read and written.
      const Bytes rows =
          bytes_of(kind.values[static_cast<std::size_t>(op.outputs[0])].per_token * sizes.tokens.tokens(),
                   step.pass == Pass::forward ? sizes.type : sizes.gradient_type);
      pointwise.traffic += step.pass == Pass::forward ? rows : 2.0 * rows;
      work.kernel = pointwise;
      return work;
    }
    case Kernel::norm:
    case Kernel::rotary:
    case Kernel::activation:
    case Kernel::add:
    case Kernel::router:
    case Kernel::permute:
    case Kernel::combine:
      work.kernel = pointwise;
      return work;
  }
  throw std::logic_error("work_of: unknown kernel");
}

}  // namespace zeroplan
