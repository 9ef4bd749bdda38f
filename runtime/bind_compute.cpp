// Kernels of block graphs and of the loss head.

#include <cstring>
#include <stdexcept>

#include "runtime/kernels/kernels.h"
#include "runtime/op_binding.h"
#include "runtime/op_operands.h"

namespace zeroplan {
namespace {

template <class Run>
Action action(Run run) {
  return [run = std::move(run)]() -> std::optional<TimePoint> {
    run();
    return {};
  };
}

/// Binds kernels with activations and weights stored as T. Gradients of weights are T or float.
template <class T>
class ComputeBinder {
 public:
  ComputeBinder(const RankContext& context, const Op& op, const Compute& work, BindPosition& position)
      : c_(context), op_(op), work_(work), position_(position) {}

  Action bind() {
    switch (work_.graph_op) {
      case kHeadLogits:
        return logits();
      case kHeadLoss:
        return loss();
      case kHeadData:
        return head_data();
      case kHeadWeight:
        return head_weight();
      case kGradientSum:
        return sum_of_gradients();
      default:
        break;
    }
    if (work_.graph_op < 0) throw std::logic_error("executor: no kernel for this op");
    const bool forward = work_.pass == Pass::forward || work_.pass == Pass::recompute;
    o_ = kernel_operands(c_.schedule, op_, !forward);
    return forward ? bind_forward() : bind_backward();
  }

 private:
  std::int64_t tokens() const { return c_.plan.micro_step().tokens(); }
  std::int64_t seq_len() const { return c_.plan.seq_len; }
  const BlockKind& kind() const { return c_.model.kinds[static_cast<std::size_t>(work_.kind)]; }
  const BlockKind& block_kind() const {
    return c_.model.kinds[static_cast<std::size_t>(c_.model.sequence[static_cast<std::size_t>(op_.block)])];
  }
  const GraphOp& graph_op() const { return kind().ops[static_cast<std::size_t>(work_.graph_op)]; }
  ThreadPool& pool() const { return c_.compute_pool; }

  // --- spans ---------------------------------------------------------------------------------------

  template <class E>
  std::span<E> elements(BufferId buffer, std::int64_t count) const {
    const auto bytes = c_.memory.bytes(buffer);
    if (static_cast<std::size_t>(count) * sizeof(E) > bytes.size()) {
      throw std::logic_error("executor: a kernel needs more than its buffer holds");
    }
    return {reinterpret_cast<E*>(bytes.data()), static_cast<std::size_t>(count)};
  }
  std::int64_t width(int value) const { return kind().values[static_cast<std::size_t>(value)].per_token; }
  /// The k-th activation operand, which holds value `value`.
  std::span<T> value(std::size_t k, int value) const { return elements<T>(o_.values.at(k), tokens() * width(value)); }
  std::span<Wide<T>> statistics(std::size_t k, int value) const {
    return elements<Wide<T>>(o_.values.at(k), tokens() * width(value));
  }
  std::span<const T> output_gradient(int value) const {
    return elements<T>(o_.gradient.value(), tokens() * width(value));
  }
  ValueGradient<T> target(std::size_t k, int value) const {
    const GradientTarget& t = o_.targets.at(k);
    const std::int64_t count = tokens() * width(value);
    ValueGradient<T> g{elements<T>(t.out, count), {}};
    if (t.base) g.base = elements<T>(*t.base, count);
    return g;
  }

  /// Tensor `index` of the op's block in `flat`, the block's weights or gradient.
  template <class E>
  std::span<E> tensor_in(const BlockKind& owner, int index, BufferId flat) const {
    const auto offsets = tensor_offsets(owner, c_.plan.precision.weights);
    const TensorSpec& spec = owner.tensors[static_cast<std::size_t>(index)];
    const std::int64_t offset = offsets[static_cast<std::size_t>(index)];
    return elements<E>(flat, offset + spec.elements()).subspan(static_cast<std::size_t>(offset));
  }
  const BlockKind& embedding_kind() const { return c_.model.kinds[static_cast<std::size_t>(c_.model.sequence[0])]; }
  /// The input embedding's table, which tied tensors stand for.
  int table() const {
    const auto& tensors = embedding_kind().tensors;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      if (tensors[t].kind == TensorKind::embedding) return static_cast<int>(t);
    }
    throw std::logic_error("executor: the embedding has no table");
  }
  template <class E>
  std::span<E> tensor_of(const BlockKind& owner, int index, BufferId own, BufferId tied) const {
    if (owner.tensors[static_cast<std::size_t>(index)].tied) return tensor_in<E>(embedding_kind(), table(), tied);
    return tensor_in<E>(owner, index, own);
  }
  std::span<const T> weight(const BlockKind& owner, int index) const {
    return tensor_of<const T>(owner, index, o_.weights.front(), o_.weights.back());
  }
  std::span<const T> weight_or_none(std::size_t k) const {
    const auto& tensors = graph_op().tensors;
    return k < tensors.size() ? weight(kind(), tensors[k]) : std::span<const T>{};
  }
  bool matrix(int index) const { return kind().tensors[static_cast<std::size_t>(index)].shape.size() == 2; }

  /// Calls use.template operator()<G>() with the element type of the gradient of weights.
  template <class Use>
  Action with_gradient_type(Use use) const {
    const Buffer& buffer = c_.schedule.buffer(o_.weight_gradients.front().buffer);
    if constexpr (!std::is_same_v<T, float>) {
      if (gradient_type(c_.plan, buffer) == DType::fp32) return use(Storage<float>{});
    }
    return use(Storage<T>{});
  }
  template <class G>
  WeightGradient<G> weight_gradient(const BlockKind& owner, int index) const {
    const auto& tied = o_.weight_gradients.back();
    const auto& own = o_.weight_gradients.front();
    const bool is_tied = owner.tensors[static_cast<std::size_t>(index)].tied;
    return {tensor_of<G>(owner, index, own.buffer, tied.buffer), is_tied ? tied.adds : own.adds};
  }
  template <class G>
  WeightGradient<G> weight_gradient_or_none(std::size_t k) const {
    const auto& tensors = graph_op().tensors;
    return k < tensors.size() ? weight_gradient<G>(kind(), tensors[k]) : WeightGradient<G>{};
  }

  std::vector<LinearPart<T>> parts() const {
    std::vector<LinearPart<T>> result;
    for (const int t : graph_op().tensors) {
      if (matrix(t)) {
        result.push_back({weight(kind(), t), {}});
      } else {
        result.back().bias = weight(kind(), t);
      }
    }
    return result;
  }
  template <class G>
  std::vector<LinearPartGradient<G>> part_gradients() const {
    std::vector<LinearPartGradient<G>> result;
    for (const int t : graph_op().tensors) {
      if (matrix(t)) {
        result.push_back({weight_gradient<G>(kind(), t), {}});
      } else {
        result.back().bias = weight_gradient<G>(kind(), t);
      }
    }
    return result;
  }
  NormShape norm_shape() const {
    const GraphOp& op = graph_op();
    const bool rms = width(op.outputs[1]) == 1;
    return {rms ? NormFunction::rms : NormFunction::layer, op.out_features, c_.constants.norm_epsilon};
  }
  const AttentionShape& attention_shape() const {
    for (const GraphOp& op : kind().ops) {
      if (op.kernel == Kernel::attention) return op.attention;
    }
    throw std::logic_error("executor: rotary positions without attention");
  }

  // --- graphs --------------------------------------------------------------------------------------

  Action bind_forward() {
    const GraphOp& op = graph_op();
    switch (op.kernel) {
      case Kernel::embedding:
        return embed();
      case Kernel::norm:
        return action([=, s = norm_shape(), x = value(0, op.inputs[0]), y = value(1, op.outputs[0]),
                       saved = statistics(2, op.outputs[1]), w = weight_or_none(0), b = weight_or_none(1),
                       p = &pool()] { norm_forward<T>(s, x, w, b, y, saved, *p); });
      case Kernel::linear:
        return action([=, parts = parts(), x = value(0, op.inputs[0]), y = value(1, op.outputs[0]), in = op.in_features,
                       p = &pool()] { linear_forward<T>(x, parts, in, y, *p); });
      case Kernel::rotary:
        return action([=, s = attention_shape(), n = seq_len(), table = &c_.rotary, x = value(0, op.inputs[0]),
                       p = &pool()] { rotary_forward<T>(s, n, *table, x, *p); });
      case Kernel::attention:
        return action([=, s = op.attention, n = seq_len(), qkv = value(0, op.inputs[0]), y = value(1, op.outputs[0]),
                       saved = statistics(2, op.outputs[1]),
                       p = &pool()] { attention_forward<T>(s, n, qkv, y, saved, *p); });
      case Kernel::activation:
        return action([=, s = activation_shape(op), x = value(0, op.inputs[0]), y = value(1, op.outputs[0]),
                       p = &pool()] { activation_forward<T>(s, x, y, *p); });
      case Kernel::add:
        return add();
      case Kernel::router:
      case Kernel::permute:
      case Kernel::grouped_linear:
      case Kernel::combine:
        break;
    }
    throw std::logic_error("executor: no kernel for this op");
  }

  // A micro-step begins: its tokens are put where kernels read them.
  Action embed() {
    const GraphOp& op = graph_op();
    ++position_.micro_step;
    position_.loss_row = 0;
    const auto ids = elements<std::int32_t>(o_.token_ids.value(), 2 * tokens());
    const auto first = static_cast<std::size_t>(position_.micro_step * tokens());
    return action([=, input = &c_.input, n = seq_len(), hidden = op.out_features, table = weight_or_none(0),
                   positions = weight_or_none(1), y = value(0, op.outputs[0]), p = &pool()] {
      const std::size_t count = ids.size() / 2;
      std::memcpy(ids.data(), input->inputs.subspan(first, count).data(), count * sizeof(std::int32_t));
      std::memcpy(ids.data() + count, input->targets.subspan(first, count).data(), count * sizeof(std::int32_t));
      embedding_forward<T>(ids.first(count), n, hidden, table, positions, y, *p);
    });
  }

  Action add() {
    const GraphOp& op = graph_op();
    std::vector<std::span<const T>> terms;
    for (std::size_t k = 0; k < op.inputs.size(); ++k) terms.push_back(value(k, op.inputs[k]));
    const std::size_t out = op.in_place >= 0 ? static_cast<std::size_t>(op.in_place) : op.inputs.size();
    return action([terms, y = value(out, op.outputs[0]), p = &pool()] { add_forward<T>(terms, y, *p); });
  }

  Action bind_backward() {
    const GraphOp& op = graph_op();
    const auto dy = output_gradient(op.outputs[0]);
    switch (op.kernel) {
      case Kernel::embedding:
        return with_gradient_type([&]<class G>(Storage<G>) {
          // Ids were put there by this micro-step's forward.
          const auto ids = elements<const std::int32_t>(token_ids(), tokens());
          return action([=, n = seq_len(), hidden = op.out_features, table = weight_gradient_or_none<G>(0),
                         positions = weight_gradient_or_none<G>(1),
                         p = &pool()] { embedding_backward<T, G>(ids, n, hidden, dy, table, positions, *p); });
        });
      case Kernel::norm:
        return with_gradient_type([&]<class G>(Storage<G>) {
          return action([=, s = norm_shape(), x = value(0, op.inputs[0]), saved = statistics(1, op.outputs[1]),
                         w = weight_or_none(0), dx = target(0, op.inputs[0]), dw = weight_gradient_or_none<G>(0),
                         db = weight_gradient_or_none<G>(1),
                         p = &pool()] { norm_backward<T, G>(s, dy, x, w, saved, dx, dw, db, *p); });
        });
      case Kernel::linear:
        return work_.pass == Pass::backward_weight ? linear_weight(dy) : linear_data(dy);
      case Kernel::rotary:
        return rotary(dy);
      case Kernel::attention:
        return action([=, s = op.attention, n = seq_len(), qkv = value(0, op.inputs[0]), y = value(1, op.outputs[0]),
                       saved = statistics(2, op.outputs[1]), dx = target(0, op.inputs[0]),
                       p = &pool()] { attention_backward<T>(s, n, dy, qkv, y, saved, dx, *p); });
      case Kernel::activation:
        return action([=, s = activation_shape(op), x = value(0, op.inputs[0]), dx = target(0, op.inputs[0]),
                       p = &pool()] { activation_backward<T>(s, dy, x, dx, *p); });
      case Kernel::add:
      case Kernel::router:
      case Kernel::permute:
      case Kernel::grouped_linear:
      case Kernel::combine:
        break;
    }
    throw std::logic_error("executor: no kernel for this op");
  }

  BufferId token_ids() const {
    const auto buffers = c_.schedule.buffers();
    for (std::uint32_t i = 0; i < buffers.size(); ++i) {
      if (buffers[i].role == BufferRole::token_ids) return {i};
    }
    throw std::logic_error("executor: no token ids");
  }

  Action linear_weight(std::span<const T> dy) {
    const GraphOp& op = graph_op();
    return with_gradient_type([&]<class G>(Storage<G>) {
      return action([=, x = value(0, op.inputs[0]), parts = part_gradients<G>(), in = op.in_features, p = &pool()] {
        linear_backward_weight<T, G>(dy, x, parts, in, *p);
      });
    });
  }
  Action linear_data(std::span<const T> dy) {
    const GraphOp& op = graph_op();
    return action([=, parts = parts(), in = op.in_features, dx = target(0, op.inputs[0]), p = &pool()] {
      linear_backward_data<T>(dy, parts, in, dx, *p);
    });
  }
  Action rotary(std::span<const T> dy) {
    const GraphOp& op = graph_op();
    return action([=, s = attention_shape(), n = seq_len(), table = &c_.rotary, dx = target(0, op.inputs[0]),
                   p = &pool()] { rotary_backward<T>(s, n, *table, dy, dx, *p); });
  }

  Action sum_of_gradients() {
    o_ = kernel_operands(c_.schedule, op_, true);
    const auto count = static_cast<std::int64_t>(c_.memory.bytes(o_.gradient.value()).size() / sizeof(T));
    const GradientTarget& t = o_.targets.at(0);
    ValueGradient<T> dx{elements<T>(t.out, count), elements<T>(t.base.value(), count)};
    return action(
        [dy = std::span<const T>(elements<T>(*o_.gradient, count)), dx, p = &pool()] { gradient_sum<T>(dy, dx, *p); });
  }

  // --- loss head -----------------------------------------------------------------------------------

  const Gemm& gemm() const { return std::get<Gemm>(work_.kernel); }
  std::int64_t vocab() const { return block_kind().vocab; }
  std::int64_t hidden() const { return c_.model.hidden; }
  std::vector<LinearPart<T>> output_matrix() const { return {{weight(block_kind(), block_kind().head_tensor), {}}}; }
  /// Rows of this chunk, all but kHeadWeight's Gemm have them as m.
  std::span<T> rows_of(std::span<T> all, std::int64_t rows) const {
    return all.subspan(static_cast<std::size_t>(position_.loss_row * hidden()),
                       static_cast<std::size_t>(rows * hidden()));
  }

  Action logits() {
    o_ = kernel_operands(c_.schedule, op_, false);
    const std::int64_t rows = gemm().m;
    const auto x = rows_of(elements<T>(o_.values.at(0), tokens() * hidden()), rows);
    return action([x, matrix = output_matrix(), in = hidden(), y = elements<T>(o_.logits.value(), rows * vocab()),
                   p = &pool()] { linear_forward<T>(x, matrix, in, y, *p); });
  }

  Action loss() {
    o_ = kernel_operands(c_.schedule, op_, false);
    const auto bytes = static_cast<std::int64_t>(c_.memory.bytes(o_.logits.value()).size());
    // The buffer is rounded up to 256 bytes, less than a row or many short ones: the rows are the logits op's.
    const std::int64_t rows = std::min(c_.plan.loss_chunk_tokens, tokens() - position_.loss_row);
    if (rows * vocab() * static_cast<std::int64_t>(sizeof(T)) > bytes) throw std::logic_error("executor: loss rows");
    const auto ids = elements<const std::int32_t>(o_.token_ids.value(), 2 * tokens());
    const auto targets =
        ids.subspan(static_cast<std::size_t>(tokens() + position_.loss_row), static_cast<std::size_t>(rows));
    const auto sum = elements<double>(o_.scalars.value(), 1);
    const double all = static_cast<double>(c_.plan.global_batch()) * static_cast<double>(seq_len());
    return action([=, y = elements<T>(o_.logits.value(), rows * vocab()), v = vocab(), input = &c_.input,
                   output = &c_.output, m = static_cast<std::size_t>(position_.micro_step),
                   begins = position_.loss_row == 0, p = &pool()] {
      sum[0] = cross_entropy<T>(y, v, targets, input->loss_scale / all, begins ? 0.0 : sum[0], *p);
      output->losses[m] = sum[0];
    });
  }

  Action head_data() {
    o_ = kernel_operands(c_.schedule, op_, false);
    const std::int64_t rows = gemm().m;
    const auto dx = rows_of(elements<T>(o_.targets.at(0).out, tokens() * hidden()), rows);
    return action([dx, dy = std::span<const T>(elements<T>(o_.logits.value(), rows * vocab())),
                   matrix = output_matrix(), in = hidden(), p = &pool()] {
      linear_backward_data<T>(dy, matrix, in, {dx, {}}, *p);
    });
  }

  Action head_weight() {
    o_ = kernel_operands(c_.schedule, op_, false);
    const std::int64_t rows = gemm().k;
    const auto x = rows_of(elements<T>(o_.values.at(0), tokens() * hidden()), rows);
    const auto dy = std::span<const T>(elements<T>(o_.logits.value(), rows * vocab()));
    const Action bound = with_gradient_type([&]<class G>(Storage<G>) {
      const std::vector<LinearPartGradient<G>> to = {{weight_gradient<G>(block_kind(), block_kind().head_tensor), {}}};
      return action([=, x = std::span<const T>(x), in = hidden(), p = &pool()] {
        linear_backward_weight<T, G>(dy, x, to, in, *p);
      });
    });
    position_.loss_row += rows;  // the chunk's last op
    return bound;
  }

  const RankContext& c_;
  const Op& op_;
  const Compute& work_;
  BindPosition& position_;
  KernelOperands o_;
};

// Sum += reduced gradient, or its first term.
Action bind_accumulate(const RankContext& context, const Op& op, const Compute& work) {
  const auto operands = context.schedule.operands(op);
  const auto from = context.memory.bytes(operands[0].buffer), to = context.memory.bytes(operands[1].buffer);
  const bool begins = operands[1].access == Access::write;
  ThreadPool* pool = work.on_host ? &context.host_pool : nullptr;
  return with_storage(context.plan.precision.gradients, [&]<class G>(Storage<G>) {
    return with_storage(context.plan.precision.accumulation, [&]<class Sum>(Storage<Sum>) -> Action {
      if constexpr (!std::is_same_v<G, Sum> && !std::is_same_v<Sum, float>) {
        throw std::logic_error("executor: gradients summed in a narrower type");
      } else {
        const std::size_t count = to.size() / sizeof(Sum);
        const std::span<const G> g(reinterpret_cast<const G*>(from.data()), count);
        const std::span<Sum> sum(reinterpret_cast<Sum*>(to.data()), count);
        return action([=] {
          ThreadPool alone(1);
          ThreadPool& p = pool != nullptr ? *pool : alone;
          if (!begins) {
            accumulate<G, Sum>(g, sum, p);
          } else if constexpr (std::is_same_v<G, Sum>) {
            std::memcpy(sum.data(), g.data(), g.size_bytes());
          } else {
            convert<G, Sum>(g, sum, p);
          }
        });
      }
    });
  });
}

}  // namespace

Action bind_compute(const RankContext& context, const Op& op, const Compute& work, BindPosition& position) {
  switch (work.graph_op) {
    case kAccumulate:
      return bind_accumulate(context, op, work);
    case kGradientNorm:
    case kNormSum:
      return bind_norm(context, op, work);
    case kZero: {
      const auto bytes = context.memory.bytes(context.schedule.operands(op)[0].buffer);
      return action([bytes] { std::memset(bytes.data(), 0, bytes.size()); });
    }
    default:
      break;
  }
  return with_storage(context.plan.precision.weights,
                      [&]<class T>(Storage<T>) { return ComputeBinder<T>(context, op, work, position).bind(); });
}

}  // namespace zeroplan
