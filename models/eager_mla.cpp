#include "models/eager_mla.h"

namespace zeroplan::eager {
namespace {

// A complex number of two fp32 is counted as one element of 8 bytes.
constexpr Element kComplex = Element::fp64;

Tensor as_complex(const Tensor& x) {
  Dims sizes = x.sizes(), strides = x.strides();
  sizes.erase(sizes.size() - 1);
  strides.erase(strides.size() - 1);
  for (int i = 0; i < strides.size(); ++i) strides[i] /= 2;
  Tensor out = x.tape().alias(x, sizes, strides);
  out.impl().type = kComplex;
  return out;
}

Tensor as_real(const Tensor& x) {
  Dims sizes = x.sizes(), strides = x.strides();
  for (int i = 0; i < strides.size(); ++i) strides[i] *= 2;
  sizes.push_back(2);
  strides.push_back(1);
  Tensor out = x.tape().alias(x, sizes, strides);
  out.impl().type = Element::fp32;
  return out;
}

Tensor view_as_complex(const Tensor& x) {
  const Ref<Node> node = x.tape().make_node([](BackwardCall& call) { call.results[0] = as_real(call.grads[0]); }, {&x});
  Tensor out = as_complex(x);
  x.tape().attach(out, node);
  return out;
}

Tensor view_as_real(const Tensor& x) {
  const Ref<Node> node =
      x.tape().make_node([](BackwardCall& call) { call.results[0] = as_complex(contiguous(call.grads[0])); }, {&x});
  Tensor out = as_real(x);
  x.tape().attach(out, node);
  return out;
}

/// x times a table; the gradient is multiplied by the table's conjugate, written out for it.
Tensor complex_mul(const Tensor& x, const Tensor& table) {
  const Ref<Node> node = x.tape().make_node(
      [](BackwardCall& call) {
        const Tensor conjugate = pointwise({&call.saved[0]}, kComplex);
        call.results[0] = pointwise({&call.grads[0], &conjugate}, kComplex);
      },
      {&x});
  if (node) x.tape().save(*node, table);
  Tensor out = pointwise({&x, &table}, kComplex);
  x.tape().attach(out, node);
  return out;
}

Tensor paired(const Tensor& wide) {
  Dims sizes = wide.sizes();
  sizes[-1] /= 2;
  sizes.push_back(2);
  return view_as_complex(reshape(wide, sizes));
}

/// apply_rotary_emb of DeepSeek V2: complex multiplication in fp32.
void rotate_complex(Tensor& q, Tensor& k, const Tensor& table) {
  const Element type = q.type();
  const Dims q_sizes = q.sizes(), k_sizes = k.sizes();
  Tensor pairs_q = paired(to(q, Element::fp32));
  Tensor pairs_k = paired(to(k, Element::fp32));
  const Tensor factors = unsqueeze(table, 1);
  q = to(view(view_as_real(complex_mul(pairs_q, factors)), q_sizes), type);
  k = to(view(view_as_real(complex_mul(pairs_k, factors)), k_sizes), type);
  drop(pairs_q, pairs_k);
}

/// cat([x1 cos - x2 sin, x2 cos + x1 sin]) of even and odd columns.
Tensor rotate_pairs(const Tensor& even, const Tensor& odd, const Tensor& cos, const Tensor& sin) {
  Tensor a = mul(even, cos);
  Tensor b = mul(odd, sin);
  Tensor first = sub(std::move(a), std::move(b));
  a = mul(odd, cos);
  b = mul(even, sin);
  Tensor second = add(std::move(a), std::move(b));
  return cat({std::move(first), std::move(second)}, -1);
}

void rotate_interleaved(Tensor& q, Tensor& k, const RotaryTables& tables) {
  const std::int64_t half = tables.cos.size(-1) / 2;
  const Tensor cos = unsqueeze(slice(tables.cos, -1, 0, half), 1);
  const Tensor sin = unsqueeze(slice(tables.sin, -1, 0, half), 1);
  const auto pairs = [&](const Tensor& x, std::int64_t first) { return slice(x, -1, first, half, 2); };
  const Tensor q_even = pairs(q, 0), q_odd = pairs(q, 1);
  const Tensor k_even = pairs(k, 0), k_odd = pairs(k, 1);
  Tensor turned_q = rotate_pairs(q_even, q_odd, cos, sin);
  Tensor turned_k = rotate_pairs(k_even, k_odd, cos, sin);
  q = std::move(turned_q);
  k = std::move(turned_k);
}

/// base[..., start:] .copy_(part): CopySlices of torch/csrc/autograd. The base's gradient loses the part in a copy.
Tensor copy_columns(const Tensor& base, const Tensor& part, std::int64_t start) {
  Tape& tape = base.tape();
  const Ref<Node> node = tape.make_node(
      [](BackwardCall& call) {
        const Tensor& grad = call.grads[0];
        Tensor rest = call.tape.allocate(grad.sizes(), grad.strides(), grad.type());
        Dims sizes = grad.sizes();
        sizes[-1] = call.node.numbers[0];
        call.results[1] = call.tape.allocate(sizes, grad.type());
        call.tape.pointwise_kernel(2 * rest.bytes() + 2 * call.results[1].bytes());
        if (call.node.needs(0)) {
          const Tensor zeros = call.tape.allocate(sizes, grad.type());
          call.results[0] = std::move(rest);
        }
      },
      {&base, &part});
  if (node) node->numbers[0] = part.size(-1);
  tape.pointwise_kernel(2 * part.bytes());
  (void)start;
  Tensor out = detach(base);
  tape.attach(out, node);
  return out;
}

struct KeysValues {
  Tensor keys, values;
};

}  // namespace

MlaAttention::MlaAttention(Context& context, const DecoderStyle& style, const std::string& path)
    : context_(&context), style_(&style) {
  const Architecture& a = context.sizes;
  const MlaDims& m = a.mla;
  const bool bias = a.family.biases.qkv;
  const std::int64_t q_width = a.heads * (m.nope_dim + m.rope_dim);
  const auto norm = [&](const std::string& name, std::int64_t width) {
    return Norm(context, path + name, norm_class(style), style.norm, {width}, false);
  };
  module_ = context.module(path, class_name(style, "Attention"));
  if (m.q_rank == 0) {
    q_ = Linear(context, path + ".q_proj", a.hidden, q_width, false);
  } else {
    q_down_ = Linear(context, path + ".q_a_proj", a.hidden, m.q_rank, bias);
    q_norm_ = norm(".q_a_layernorm", m.q_rank);
    q_up_ = Linear(context, path + ".q_b_proj", m.q_rank, q_width, false);
  }
  kv_down_ = Linear(context, path + ".kv_a_proj_with_mqa", a.hidden, m.kv_rank + m.rope_dim, bias);
  kv_norm_ = norm(".kv_a_layernorm", m.kv_rank);
  kv_up_ = Linear(context, path + ".kv_b_proj", m.kv_rank, a.heads * (m.nope_dim + m.v_dim), false);
  out_ = Linear(context, path + ".o_proj", a.heads * m.v_dim, a.hidden, a.family.biases.out);
  dropout_ = context.number("attention_dropout", 0);
  interleaved_ = context.config.flag("rope_interleave", true);
}

AttentionResult MlaAttention::operator()(const Tensor& x, const BlockArguments& arguments) const {
  return framed(context_->tape, module_, x, [&](const Tensor& own) { return forward(own, arguments); });
}

Tensor MlaAttention::queries(const Tensor& x) const {
  return context_->sizes.mla.q_rank == 0 ? q_(x) : q_up_(q_norm_(q_down_(x)));
}

AttentionResult MlaAttention::forward(const Tensor& x, const BlockArguments& arguments) const {
  const Architecture& a = context_->sizes;
  const MlaDims& m = a.mla;
  const std::int64_t batch = x.size(0), length = x.size(1);
  Tensor q = queries(x);
  q = transpose(view(std::move(q), {batch, length, -1, m.nope_dim + m.rope_dim}), 1, 2);
  Tensors q_parts = split(q, {m.nope_dim, m.rope_dim}, -1);
  Tensor compressed = kv_down_(x);
  Tensors kv_parts = split(compressed, {m.kv_rank, m.rope_dim}, -1);
  Tensor latent = view(kv_norm_(std::move(kv_parts[0])), {batch, 1, length, m.kv_rank});
  Tensor k_turns = view(std::move(kv_parts[1]), {batch, 1, length, m.rope_dim});
  Tensor q_turns = std::move(q_parts[1]);
  if (style_->complex_tables) {
    rotate_complex(q_turns, k_turns, arguments.rotary.cos);
  } else if (interleaved_) {
    rotate_interleaved(q_turns, k_turns, arguments.rotary);
  } else {
    const Tensor cos = unsqueeze(arguments.rotary.cos, 1), sin = unsqueeze(arguments.rotary.sin, 1);
    Tensor turned_q = rotate(q_turns, cos, sin);
    Tensor turned_k = rotate(k_turns, cos, sin);
    q_turns = std::move(turned_q);
    k_turns = std::move(turned_k);
  }
  Tensor query = cat({q_parts[0], q_turns}, -1);
  KeysValues kv;
  {
    Tensor wide = transpose(view(kv_up_(latent), {batch, length, -1, m.nope_dim + m.v_dim}), 1, 2);
    Tensors parts = split(wide, {m.nope_dim, m.v_dim}, -1);
    const Tensor spread = expand(k_turns, {batch, a.heads, length, m.rope_dim});
    kv.values = std::move(parts[1]);
    kv.keys = x.tape().allocate({batch, a.heads, length, m.nope_dim + m.rope_dim}, x.type());
    kv.keys = copy_columns(kv.keys, parts[0], 0);
    kv.keys = copy_columns(kv.keys, spread, m.nope_dim);
  }
  AttentionCall call;
  call.dropout = dropout_;
  AttentionResult result = attention(*context_, query, kv.keys, kv.values, arguments.mask, call);
  result.output = contiguous(reshape(std::move(result.output), {batch, length, -1}));
  result.output = out_(result.output);
  q_parts.clear();
  drop(q, q_turns, compressed);
  if (style_->complex_tables) k_turns.drop();  // V2 names it before the latent
  drop(latent, k_turns, query, kv.keys, kv.values);
  return result;
}

}  // namespace zeroplan::eager
