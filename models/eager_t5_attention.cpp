#include "models/eager_t5_attention.h"

namespace zeroplan::eager {
namespace {

/// _relative_position_bucket: integers [length, length].
Tensor buckets(Tensor relative, bool bidirectional) {
  const auto next = [](Tensor x, Element type) { return pointwise({&x}, type); };
  Tensor bucket;
  if (bidirectional) {
    Tensor later = next(relative, Element::boolean);
    Tensor wide = to(std::move(later), Element::i64);
    later = add_scalar(std::move(wide));
    bucket = add_scalar(std::move(later));
    relative = next(relative, Element::i64);
  } else {
    Tensor zeros = next(relative, Element::i64);
    Tensor least = pointwise({&relative, &zeros}, Element::i64);
    zeros.drop();
    relative = add_scalar(std::move(least));
  }
  Tensor is_small = next(relative, Element::boolean);
  Tensor large = to(relative, Element::fp32);
  for (int step = 0; step < 4; ++step) large = add_scalar(std::move(large));  // / max, log, / log, * rest
  large = add_scalar(to(std::move(large), Element::i64));
  Tensor limit = next(large, Element::i64);
  Tensor least = pointwise({&large, &limit}, Element::i64);
  limit.drop();
  large = std::move(least);
  Tensor chosen = pointwise({&is_small, &relative, &large}, Element::i64);
  if (!bidirectional) bucket = add_scalar(chosen);
  drop(chosen);
  drop(relative, is_small, large);
  return bucket;
}

/// torch.where(rows >= columns, bias, lowest).
Tensor causal_bias(const Tensor& bias, std::int64_t length) {
  Tape& tape = bias.tape();
  Tensor rows = tape.allocate({length}, Element::i64);
  Tensor columns = tape.allocate({length}, Element::i64);
  Tensor mask = tape.allocate({1, 1, length, length}, Element::boolean);
  tape.pointwise_kernel(mask.bytes());
  drop(rows, columns);
  return where_scalar(std::move(mask), bias);
}

}  // namespace

T5Attention::T5Attention(Context& context, const std::string& path, bool decoder, bool cross, bool has_bias)
    : context_(&context), decoder_(decoder), cross_(cross), has_bias_(has_bias) {
  const Architecture& a = context.sizes;
  const std::int64_t inner = a.heads * a.head_dim;
  module_ = context.module(path, "T5Attention");
  q_ = Linear(context, path + ".q", a.hidden, inner, false);
  k_ = Linear(context, path + ".k", a.hidden, inner, false);
  v_ = Linear(context, path + ".v", a.hidden, inner, false);
  out_ = Linear(context, path + ".o", inner, a.hidden, false);
  if (has_bias) table_ = Embedding(context, path + ".relative_attention_bias", a.relative_buckets, a.heads);
  dropout_ = context.number("dropout_rate", 0.1);
}

T5AttentionResult T5Attention::operator()(const Tensor& x, const Tensor& mask, const Tensor& states,
                                          const Tensor& bias) const {
  Tape& tape = context_->tape;
  tape.forward_pre(module_);
  const Tensor own = tape.own(module_, x);
  const Tensor own_states = tape.own(module_, states);
  const Tensor own_bias = tape.own(module_, bias);
  T5AttentionResult result = forward(own, mask, cross_ ? own_states : own, own_bias);
  tape.forward_post(module_, {&result.output, &result.bias, &result.weights});
  return result;
}

Tensor T5Attention::heads(Tensor x) const {
  const std::int64_t batch = x.size(0), length = x.size(1);
  return transpose(view(std::move(x), {batch, length, -1, context_->sizes.head_dim}), 1, 2);
}

Tensor T5Attention::relative_bias(std::int64_t length) const {
  Tape& tape = context_->tape;
  Tensor rows = unsqueeze(position_range(tape, length), 1);
  Tensor columns = unsqueeze(tape.allocate({length}, Element::i64), 0);
  Tensor relative = pointwise({&columns, &rows}, Element::i64);
  Tensor bucket = buckets(relative, !decoder_);
  Tensor values = table_(bucket);
  values = unsqueeze(permute(std::move(values), {2, 0, 1}), 0);
  drop(rows, columns, relative, bucket);
  return values;
}

Tensor T5Attention::zero_bias(std::int64_t rows, std::int64_t columns) const {
  Tensor bias = context_->tape.allocate({1, context_->sizes.heads, rows, columns}, context_->type);
  if (context_->options.checkpointing) bias.impl().requires_grad = true;
  return bias;
}

T5AttentionResult T5Attention::forward(const Tensor& x, const Tensor& mask, const Tensor& states, Tensor bias) const {
  const std::int64_t batch = x.size(0), length = x.size(1);
  Tensor q = heads(q_(x));
  Tensor k = heads(k_(states));
  Tensor v = heads(v_(states));
  if (!bias) bias = has_bias_ ? relative_bias(length) : zero_bias(length, k.size(2));
  T5AttentionResult result;
  if (context_->options.attention == EagerAttention::eager) {
    result = eager(q, k, v, mask, bias);
  } else {
    SdpaOptions options;
    options.dropout = dropout_;
    options.causal = false;
    Tensor added = decoder_ && !cross_ ? causal_bias(bias, length) : bias;
    Tensor attended = sdpa(q, k, v, added, options);
    result.output = contiguous(transpose(std::move(attended), 1, 2));
  }
  result.output = contiguous(reshape(std::move(result.output), {batch, length, -1}));
  result.output = out_(result.output);
  drop(q, k, v);
  result.bias = std::move(bias);
  return result;
}

T5AttentionResult T5Attention::eager(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                                     const Tensor& bias) const {
  Tensor weights = mul_scalar(matmul(q, transpose(k, 2, 3)));
  weights = add(weights, bias);
  if (mask) weights = add(weights, mask);
  weights = softmax(weights);
  weights = dropout(weights, dropout_);
  Tensor output = matmul(weights, v);
  output = contiguous(transpose(output, 1, 2));
  return {std::move(weights), {}, std::move(output)};
}

}  // namespace zeroplan::eager
