#include "models/eager_attention.h"

#include <utility>

namespace zeroplan::eager {

RotaryEmbedding::RotaryEmbedding(Context& context, const std::string& path, const std::string& type, std::int64_t width)
    : context_(&context), module_(context.module(path, type)), width_(width) {}

RotaryTables RotaryEmbedding::operator()(Tensor x, const Tensor& positions) const {
  Tape& tape = context_->tape;
  tape.forward_pre(module_);
  const Element type = tape.own(module_, x).type();
  RotaryTables tables;
  {
    const NoGrad no_grad(tape);
    const std::int64_t length = positions.size(-1);
    const std::int64_t turns = single_ ? width_ : width_ / 2;
    Tensor frequencies = tape.external({1, turns, 1}, Element::fp32);
    Tensor wide = to(view(positions, {1, 1, length}), Element::fp32);
    Tensor angles = transpose(matmul(frequencies, wide), 1, 2);
    if (complex_) {
      Tensor ones = pointwise({&angles}, Element::fp32);
      Tensor polar = pointwise({&ones, &angles}, Element::fp64);  // two fp32 numbers
      ones.drop();
      tables.cos = mul_scalar(std::move(polar));
      drop(wide, angles);
      tape.forward_post(module_, {});
      return tables;
    }
    Tensor both = single_ ? angles : cat({angles, angles}, -1);
    Tensor cos = mul_scalar(pointwise({&both}, Element::fp32));
    Tensor sin = mul_scalar(pointwise({&both}, Element::fp32));
    tables = {to(cos, wide_ ? Element::fp32 : type), to(sin, wide_ ? Element::fp32 : type)};
    drop(wide, angles, both, cos, sin);
  }
  tape.forward_post(module_, {});
  return tables;
}

Tensor rotate_half(const Tensor& x) {
  const std::int64_t half = x.size(-1) / 2;
  const Tensor first = slice(x, -1, 0, half);
  Tensor second = slice(x, -1, half, x.size(-1) - half);
  Tensor negated = neg(std::move(second));
  return cat({std::move(negated), first}, -1);
}

Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  Tensor plain = mul(x, cos);
  Tensor turned = mul(rotate_half(x), sin);
  return add(std::move(plain), std::move(turned));
}

Tensor repeat_heads(Tensor x, std::int64_t groups) {
  if (groups == 1) return x;
  const std::int64_t batch = x.size(0), heads = x.size(1), length = x.size(2), width = x.size(3);
  Tensor wide = expand(unsqueeze(std::move(x), 2), {batch, heads, groups, length, width});
  return reshape(std::move(wide), {batch, heads * groups, length, width});
}

Tensor position_range(Tape& tape, std::int64_t length) {
  Tensor range = tape.allocate({length}, Element::i64);
  return add_scalar(std::move(range));
}

void rotate_part(Tensor& q, Tensor& k, const RotaryTables& tables) {
  const Tensor cos = unsqueeze(tables.cos, 1);
  const Tensor sin = unsqueeze(tables.sin, 1);
  const std::int64_t width = cos.size(-1), rest = q.size(-1) - width;
  const Tensor q_turns = slice(q, -1, 0, width), q_stays = slice(q, -1, width, rest);
  const Tensor k_turns = slice(k, -1, 0, width), k_stays = slice(k, -1, width, rest);
  Tensor turned_q = rotate(q_turns, cos, sin);
  Tensor turned_k = rotate(k_turns, cos, sin);
  turned_q = cat({turned_q, q_stays}, -1);
  turned_k = cat({turned_k, k_stays}, -1);
  q = std::move(turned_q);
  k = std::move(turned_k);
}

std::int64_t rotary_width(const Context& context, std::int64_t head_dim, std::string_view key, double fallback) {
  const double part = context.number("rope_parameters/partial_rotary_factor",
                                     context.number("partial_rotary_factor", context.number(key, fallback)));
  return static_cast<std::int64_t>(static_cast<double>(head_dim) * part);
}

namespace {

/// and_masks() of transformers: ones & first & second.
class MaskProduct {
 public:
  explicit MaskProduct(Tape& tape) : product_(tape.allocate({}, Element::boolean)) {}
  void multiply(Tensor mask) {
    Tensor next = pointwise({&product_, &mask}, Element::boolean);
    mask.drop();
    product_ = std::move(next);
  }
  Tensor take() { return std::move(product_); }

 private:
  Tensor product_;
};

/// key <= query; inside the window; not padding.
Tensor mask_values(const Context& context, const Tensor& queries, const Tensor& keys, const MaskOptions& options) {
  const std::int64_t length = queries.size(0);
  const Tensor rows = view(queries, {1, 1, length, 1});
  const Tensor columns = view(keys, {1, 1, 1, length});
  const auto causal = [&] { return pointwise({&columns, &rows}, Element::boolean); };
  if (options.window == 0 && !options.padded) return causal();
  const auto both = [&](auto first, auto second) {
    MaskProduct product(context.tape);
    product.multiply(first());
    product.multiply(second());
    return product.take();
  };
  const auto window = [&] {
    const Tensor first = pointwise({&rows}, Element::i64);
    return pointwise({&columns, &rows}, Element::boolean);
  };
  const auto windowed = [&] { return options.window > 0 ? both(window, causal) : causal(); };
  if (!options.padded) return windowed();
  return both(windowed, [&] {
    return view(context.tape.allocate({context.batch(), length}, Element::boolean), {context.batch(), 1, 1, length});
  });
}

}  // namespace

Tensor causal_mask(const Context& context, const MaskOptions& options) {
  Tape& tape = context.tape;
  const std::int64_t length = context.length();
  const bool windowed = options.window > 0 && length >= options.window;
  if (!options.additive && options.skip && !windowed) return {};
  Tensor batch = tape.allocate({context.batch()}, Element::i64);
  Tensor head = tape.allocate({1}, Element::i64);
  Tensor queries = position_range(tape, length);
  Tensor keys = position_range(tape, length);
  Tensor mask = mask_values(context, queries, keys, options);
  mask = expand(std::move(mask), {context.batch(), 1, length, length});
  drop(batch, head, queries, keys);
  if (!options.additive) return mask;
  Tensor zero = tape.allocate({}, context.type);
  Tensor lowest = tape.allocate({}, context.type);
  Tensor values = pointwise({&mask}, context.type);
  drop(lowest, zero);
  mask = std::move(values);
  return mask;
}

namespace {

/// Scores with a column for the sinks, softmax, and without the column again; the largest score is taken off first.
Tensor softmax_with_sinks(const Tensor& weights, const Tensor& sinks, Tensor& kept) {
  const std::int64_t keys = weights.size(-1);
  Tensor column = expand(view(sinks, {1, -1, 1, 1}), {weights.size(0), weights.size(1), weights.size(2), 1});
  Tensor combined = cat({weights, column}, -1);
  combined = sub(combined, max_values(combined));
  Tensor probabilities = softmax(combined);
  kept = std::move(combined);
  return slice(probabilities, -1, 0, keys);
}

}  // namespace

AttentionResult eager_attention(Tensor q, Tensor k, Tensor v, const Tensor& mask, const AttentionCall& call) {
  const Element type = q.type();
  Tensor keys = repeat_heads(k, call.groups);
  Tensor values = repeat_heads(v, call.groups);
  Tensor weights = mul_scalar(matmul(q, transpose(keys, 2, 3)));
  if (call.softcap > 0) {
    weights = div_scalar(std::move(weights));
    weights = activate(std::move(weights), Activation::tanh);
    weights = mul_scalar(std::move(weights));
  }
  if (mask) weights = add(weights, mask);
  Tensor combined;
  if (call.sinks) {
    weights = softmax_with_sinks(weights, call.sinks, combined);
  } else if (call.upcast) {
    weights = to(softmax(to(weights, Element::fp32)), type);
  } else {
    weights = softmax(weights);
  }
  weights = dropout(weights, call.dropout);
  Tensor output = matmul(weights, values);
  output = transpose(output, 1, 2);
  if (call.contiguous_output) output = contiguous(output);
  drop(q, k, v);
  drop(keys, values, combined);
  return {std::move(output), std::move(weights)};
}

AttentionResult sdpa_attention(Tensor q, Tensor k, Tensor v, const Tensor& mask, const AttentionCall& call) {
  SdpaOptions options;
  options.dropout = call.dropout;
  options.causal = call.causal && !mask;
  if (call.groups > 1) {
    if (mask || k.size(-1) != v.size(-1) || v.size(-1) > 256) {
      k = repeat_heads(std::move(k), call.groups);
      v = repeat_heads(std::move(v), call.groups);
    } else {
      options.grouped = true;
    }
  }
  Tensor output = sdpa(q, k, v, mask, options);
  output = contiguous(transpose(std::move(output), 1, 2));
  drop(q, k, v);
  return {std::move(output), Tensor()};
}

AttentionResult attention(const Context& context, Tensor q, Tensor k, Tensor v, const Tensor& mask,
                          const AttentionCall& call) {
  return context.options.attention == EagerAttention::eager
             ? eager_attention(std::move(q), std::move(k), std::move(v), mask, call)
             : sdpa_attention(std::move(q), std::move(k), std::move(v), mask, call);
}

}  // namespace zeroplan::eager
