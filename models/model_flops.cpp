// Floating-point operations, as transformer arithmetic counts them: one multiply-add is 2.

#include <algorithm>
#include <optional>
#include <vector>

#include "models/model_spec.h"

namespace zeroplan {
namespace {

/// Keys a query sees on average. Causal: (s + 1) / 2; a sliding window W < s: W - W (W - 1) / (2 s)
/// (transformer-math 2.1); chunks of W: every chunk is causal by itself, the last one may be short.
double mean_keys(const AttentionShape& attention, std::int64_t seq_len) {
  const auto s = static_cast<double>(seq_len);
  if (!attention.causal) return s;
  if (attention.window == 0 || attention.window >= seq_len) return (s + 1) / 2;
  const auto w = static_cast<double>(attention.window);
  if (!attention.chunked) return w - w * (w - 1) / (2 * s);
  const auto chunks = static_cast<double>(seq_len / attention.window);
  const auto rest = static_cast<double>(seq_len % attention.window);
  return (chunks * w * (w + 1) + rest * (rest + 1)) / (2 * s);
}

double attention_flops(const AttentionShape& a, double keys, TokenShape shape) {
  return 2.0 * keys * static_cast<double>(a.qk_dim + a.v_dim) * static_cast<double>(a.heads) *
         static_cast<double>(shape.tokens());
}

double matrix_flops(const GraphOp& op, TokenShape shape) {
  return 2.0 * static_cast<double>(op.in_features) * static_cast<double>(op.out_features) *
         static_cast<double>(op.rows_per_token) * static_cast<double>(shape.tokens());
}

/// A patch embedding's pixels need no gradient, so its backward is the weight gradient alone.
bool has_data_gradient(const GraphOp& op) { return op.kernel != Kernel::embedding; }

bool trains_weights(const BlockKind& kind, const GraphOp& op) {
  return std::ranges::any_of(op.tensors, [&](int t) { return kind.tensors[static_cast<std::size_t>(t)].trainable; });
}

/// Values of a block that gradients flow through: made from a trained tensor, or from such a value. In a network that
/// is trained as a whole all of them; adapters in frozen layers let none flow into what comes before the first of them.
std::vector<bool> carrying_gradients(const BlockKind& kind, bool input, bool memory) {
  std::vector<bool> carries(kind.values.size());
  const auto at = [](int value) { return static_cast<std::size_t>(value); };
  if (kind.input >= 0) carries[at(kind.input)] = input;
  if (kind.memory >= 0) carries[at(kind.memory)] = memory;
  for (const GraphOp& op : kind.ops) {
    const bool any =
        trains_weights(kind, op) || std::ranges::any_of(op.inputs, [&](int value) { return carries[at(value)]; });
    for (const int value : op.outputs) carries[at(value)] = any;
  }
  return carries;
}

/// Forward and backward of one op without what the kernel does twice: of a matrix that is frozen, or whose input needs
/// none, no gradient.
double training_flops(const BlockKind& kind, const GraphOp& op, const std::vector<bool>& carries, TokenShape shape,
                      AttentionCount count) {
  const bool data = std::ranges::any_of(op.inputs, [&](int value) { return carries[static_cast<std::size_t>(value)]; });
  if (op.kernel == Kernel::attention) {
    const double keys =
        count == AttentionCount::full ? static_cast<double>(shape.seq_len) : mean_keys(op.attention, shape.seq_len);
    return (data ? 3.0 : 1.0) * attention_flops(op.attention, keys, shape);
  }
  const double factor = 1.0 + (data && has_data_gradient(op) ? 1.0 : 0.0) + (trains_weights(kind, op) ? 1.0 : 0.0);
  return factor * forward_flops(op, shape).base();
}

struct BlockFlops {
  double flops = 0;
  bool output = false;  // gradients flow into it from the blocks behind
};

BlockFlops block_flops(const ModelSpec& model, const BlockKind& kind, bool input, bool memory, TokenShape shape,
                       AttentionCount count) {
  const std::vector<bool> carries = carrying_gradients(kind, input, memory);
  BlockFlops block;
  for (const GraphOp& op : kind.ops) block.flops += training_flops(kind, op, carries, shape, count);
  block.output = kind.output >= 0 ? carries[static_cast<std::size_t>(kind.output)] : input;
  if (kind.role == BlockRole::head && kind.head_tensor >= 0) {
    const bool trains = kind.tensors[static_cast<std::size_t>(kind.head_tensor)].trainable;
    const double factor = 1.0 + (block.output ? 1.0 : 0.0) + (trains ? 1.0 : 0.0);
    block.flops += factor * head_flops(kind, model.hidden, shape).base();
  }
  return block;
}

}  // namespace

Flops forward_flops(const GraphOp& op, TokenShape shape) {
  switch (op.kernel) {
    case Kernel::linear:
    case Kernel::grouped_linear:
    case Kernel::router:
    case Kernel::embedding:  // in_features is 0 for a look-up
      return Flops(matrix_flops(op, shape));
    case Kernel::attention:
      return Flops(attention_flops(op.attention, mean_keys(op.attention, shape.seq_len), shape));
    case Kernel::norm:
    case Kernel::rotary:
    case Kernel::activation:
    case Kernel::add:
    case Kernel::permute:
    case Kernel::combine:
      return Flops(0);
  }
  return Flops(0);
}

Flops backward_flops(const GraphOp& op, TokenShape shape) {
  constexpr double kFusedAttention = 2.5;  // five matmuls for the forward's two (transformer-math 2.3)
  const Flops forward = forward_flops(op, shape);
  if (op.kernel == Kernel::attention) return forward * kFusedAttention;
  return forward * (has_data_gradient(op) ? 2.0 : 1.0);
}

Flops head_flops(const BlockKind& head, std::int64_t hidden, TokenShape shape) {
  return Flops(2.0 * static_cast<double>(head.vocab) * static_cast<double>(hidden) *
               static_cast<double>(shape.tokens()));
}

Flops model_flops(const ModelSpec& model, TokenShape shape, AttentionCount count) {
  constexpr std::size_t kStates = 4;  // gradients flow into the input or not, into the encoder's output or not
  std::vector<std::optional<BlockFlops>> known(kStates * model.kinds.size());
  double total = 0;
  bool upstream = false, memory = false;
  for (const int index : model.sequence) {
    const BlockKind& kind = model.kinds[static_cast<std::size_t>(index)];
    auto& block = known[kStates * static_cast<std::size_t>(index) + (upstream ? 2 : 0) + (memory ? 1 : 0)];
    if (!block) block = block_flops(model, kind, upstream, memory, shape, count);
    total += block->flops;
    upstream = block->output;
    if (kind.ends_encoder) memory = upstream;
  }
  return Flops(total);
}

}  // namespace zeroplan
