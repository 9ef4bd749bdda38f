// Floating-point operations, as transformer arithmetic counts them: one multiply-add is 2.

#include <algorithm>
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

/// Forward and backward of one op without what the kernel does twice; a frozen matrix gets no gradient.
double training_flops(const BlockKind& kind, const GraphOp& op, TokenShape shape, AttentionCount count) {
  if (op.kernel == Kernel::attention) {
    const double keys =
        count == AttentionCount::full ? static_cast<double>(shape.seq_len) : mean_keys(op.attention, shape.seq_len);
    return 3.0 * attention_flops(op.attention, keys, shape);
  }
  const double factor = 1.0 + (has_data_gradient(op) ? 1.0 : 0.0) + (trains_weights(kind, op) ? 1.0 : 0.0);
  return factor * forward_flops(op, shape).base();
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
  std::vector<double> each;
  for (const BlockKind& kind : model.kinds) {
    double sum = 0;
    for (const GraphOp& op : kind.ops) sum += training_flops(kind, op, shape, count);
    if (kind.role == BlockRole::head && kind.head_tensor >= 0) {
      const bool trains = kind.tensors[static_cast<std::size_t>(kind.head_tensor)].trainable;
      sum += (trains ? 3.0 : 2.0) * head_flops(kind, model.hidden, shape).base();
    }
    each.push_back(sum);
  }
  double total = 0;
  for (int index : model.sequence) total += each[static_cast<std::size_t>(index)];
  return Flops(total);
}

}  // namespace zeroplan
