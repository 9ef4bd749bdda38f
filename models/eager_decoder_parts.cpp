#include "models/eager_decoder_parts.h"

#include <fmt/format.h>

namespace zeroplan::eager {
namespace {

double probability(const Context& context, std::string_view key) { return key.empty() ? 0 : context.number(key, 0); }

/// Last name of "mlp.c_fc" under the MLP's own path.
std::string leaf(const std::string& path, std::string_view name) {
  return fmt::format("{}.{}", path, name.substr(name.rfind('.') + 1));
}

/// Pairs of even and odd columns: stack([-x2, x1], -1).flatten(-2).
Tensor rotate_pairs(const Tensor& x) {
  const std::int64_t half = x.size(-1) / 2;
  Tensor even = slice(x, -1, 0, half, 2);
  Tensor odd = slice(x, -1, 1, half, 2);
  Tensor negated = neg(odd);
  Dims sizes = x.sizes();
  Tensor out = view(stack_last(negated, even), sizes);
  negated.drop();
  return out;
}

Tensor rotate_paired(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  Tensor plain = mul(x, cos);
  Tensor turned = mul(rotate_pairs(x), sin);
  return add(std::move(plain), std::move(turned));
}

/// cat(x1 cos - x2 sin, x2 cos + x1 sin) of a head's halves.
Tensor rotate_halves(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const std::int64_t half = x.size(-1) / 2;
  const Tensors parts = split(x, {half, half}, -1);
  Tensor a = mul(parts[0], cos);
  Tensor b = mul(parts[1], sin);
  Tensor first = sub(std::move(a), std::move(b));
  a = mul(parts[1], cos);
  b = mul(parts[0], sin);
  Tensor second = add(std::move(a), std::move(b));
  Tensor out = cat({first, second}, -1);
  drop(first, second);
  return out;
}

/// cos[..., : half].repeat_interleave(2, -1)
Tensor doubled(const Tensor& table) {
  const std::int64_t half = table.size(-1) / 2;
  Dims sizes = table.sizes();
  Tensor first = unsqueeze(slice(table, -1, 0, half), -1);
  Dims wide = first.sizes();
  wide[-1] = 2;
  return view(contiguous(expand(std::move(first), wide)), sizes);
}

}  // namespace

// --- MLP ------------------------------------------------------------------------------------------

DecoderMlp::DecoderMlp(Context& context, const DecoderStyle& style, const std::string& path, std::int64_t width)
    : context_(&context), style_(&style) {
  const Architecture& a = context.sizes;
  const TensorNames& names = a.family.names;
  const bool bias = a.family.biases.mlp;
  module_ = context.module(path, class_name(style, "MLP"));
  switch (style.mlp) {
    case MlpKind::gated:
      gate_ = Linear(context, path + ".gate_proj", a.hidden, width, bias);
      up_ = Linear(context, path + ".up_proj", a.hidden, width, bias);
      down_ = Linear(context, path + ".down_proj", width, a.hidden, bias);
      activation_ = ActivationModule(context, path + ".act_fn", a.activation);
      break;
    case MlpKind::fused_gated:
      up_ = Linear(context, path + ".gate_up_proj", a.hidden, 2 * width, bias);
      down_ = Linear(context, path + ".down_proj", width, a.hidden, bias);
      activation_ = ActivationModule(context, path + ".activation_fn", a.activation);
      break;
    case MlpKind::plain: {
      const bool first = style.family == "phi";  // Phi registers the function before the linears
      if (first) activation_ = ActivationModule(context, path + ".activation_fn", a.activation);
      up_ = Linear(context, leaf(path, names.up), a.hidden, width, bias);
      down_ = Linear(context, leaf(path, names.down), width, a.hidden, bias);
      if (!first) activation_ = ActivationModule(context, path + ".act", a.activation);
      break;
    }
  }
  if (!style.dropout_modules) dropout_ = probability(context, style.residual_dropout);
}

Tensor DecoderMlp::forward(Tensor x) const {
  switch (style_->mlp) {
    case MlpKind::gated: {
      Tensor gate = activation_(gate_(x));
      Tensor up = up_(x);
      return down_(mul(std::move(gate), std::move(up)));
    }
    case MlpKind::fused_gated: {
      Tensor up = up_(x);
      const std::int64_t half = up.size(-1) / 2;
      Tensors parts = split(up, {half, half}, -1);
      Tensor gate = std::move(parts[0]);
      up = std::move(parts[1]);
      up = mul(up, activation_(gate));
      Tensor out = down_(up);
      drop(up, gate);
      return out;
    }
    case MlpKind::plain:
      x = up_(x);
      x = activation_(x);
      x = down_(x);
      if (dropout_ > 0) x = dropout(x, dropout_);
      return x;
  }
  return {};
}

Tensor DecoderMlp::operator()(Tensor x) const {
  return call(context_->tape, module_, std::move(x), [&](Tensor own) { return forward(std::move(own)); });
}

// --- attention ------------------------------------------------------------------------------------

DecoderAttention::DecoderAttention(Context& context, const DecoderStyle& style, const std::string& path)
    : context_(&context), style_(&style) {
  const Architecture& a = context.sizes;
  const Biases& bias = a.family.biases;
  const std::int64_t q_width = a.heads * a.head_dim, kv_width = a.kv_heads * a.head_dim;
  module_ = context.module(path, class_name(style, "Attention"));
  if (style.sinks) sinks_ = context.parameter(module_, "sinks", {a.heads});
  if (style.fused_qkv) {
    out_ = Linear(context, path + ".o_proj", q_width, a.hidden, bias.out);
    qkv_ = Linear(context, path + ".qkv_proj", a.hidden, q_width + 2 * kv_width, bias.qkv);
  } else {
    q_ = Linear(context, path + ".q_proj", a.hidden, q_width, bias.qkv);
    k_ = Linear(context, path + ".k_proj", a.hidden, kv_width, bias.qkv);
    v_ = Linear(context, path + ".v_proj", a.hidden, kv_width, bias.qkv);
    out_ = Linear(context, leaf(path, a.family.names.out), q_width, a.hidden, bias.out);
  }
  const auto norm = [&](std::string_view name, std::int64_t heads) {
    Dims width = {a.head_dim};
    if (a.family.qk_norm == QkNorm::per_projection) width = {heads * a.head_dim};
    if (a.family.qk_norm == QkNorm::head_weights) width = {heads, a.head_dim};
    return Norm(context, leaf(path, name), norm_class(style), style.norm, width,
                a.family.qk_norm_kind == NormKind::layer);
  };
  if (a.family.qk_norm != QkNorm::none) {
    q_norm_ = norm(a.family.names.q_norm, a.heads);
    k_norm_ = norm(a.family.names.k_norm, a.kv_heads);
  }
  dropout_ = context.number("attention_dropout", 0);
  if (!style.dropout_modules) residual_dropout_ = probability(context, style.residual_dropout);
  softcap_ = context.number("attn_logit_softcapping", style.attention_softcap);
}

AttentionResult DecoderAttention::operator()(const Tensor& x, const BlockArguments& arguments) const {
  return framed(context_->tape, module_, x, [&](const Tensor& own) { return forward(own, arguments); });
}

DecoderAttention::Heads DecoderAttention::project(const Tensor& x) const {
  const Architecture& a = context_->sizes;
  const Dims sizes = {x.size(0), x.size(1), -1, a.head_dim};
  Heads heads;
  const bool normed = q_norm_.module() >= 0;
  const bool projection = a.family.qk_norm == QkNorm::per_projection;
  if (normed && projection) {
    heads.q = q_norm_(q_(x));
    heads.k = k_norm_(k_(x));
    heads.v = v_(x);
    for (Tensor* part : {&heads.q, &heads.k, &heads.v}) *part = transpose(view(std::move(*part), sizes), 1, 2);
    return heads;
  }
  const bool early = normed && !style_->qk_norm_transposed && style_->norm == NormStyle::rms;
  if (early) {  // norm and transposition in one expression
    heads.q = transpose(q_norm_(view(q_(x), sizes)), 1, 2);
    heads.k = transpose(k_norm_(view(k_(x), sizes)), 1, 2);
    heads.v = transpose(view(v_(x), sizes), 1, 2);
    return heads;
  }
  heads.q = view(q_(x), sizes);
  if (style_->qk_norm_transposed || !normed) heads.q = transpose(std::move(heads.q), 1, 2);
  heads.k = view(k_(x), sizes);
  if (style_->qk_norm_transposed || !normed) heads.k = transpose(std::move(heads.k), 1, 2);
  heads.v = transpose(view(v_(x), sizes), 1, 2);
  if (!normed) return heads;
  heads.q = q_norm_(heads.q);
  heads.k = k_norm_(heads.k);
  if (!style_->qk_norm_transposed) {
    heads.q = transpose(std::move(heads.q), 1, 2);
    heads.k = transpose(std::move(heads.k), 1, 2);
  }
  return heads;
}

DecoderAttention::Heads DecoderAttention::project_fused(const Tensor& x) const {
  const Architecture& a = context_->sizes;
  const Dims sizes = {x.size(0), x.size(1), -1, a.head_dim};
  const std::int64_t q_width = a.heads * a.head_dim, kv_width = a.kv_heads * a.head_dim;
  Tensor qkv = qkv_(x);
  Heads heads;
  heads.q = slice(qkv, -1, 0, q_width);
  heads.k = slice(qkv, -1, q_width, kv_width);
  heads.v = slice(qkv, -1, q_width + kv_width, kv_width);
  for (Tensor* part : {&heads.q, &heads.k, &heads.v}) *part = transpose(view(std::move(*part), sizes), 1, 2);
  heads.kept = {qkv};
  return heads;
}

void DecoderAttention::turn(Heads& heads, const RotaryTables& tables) const {
  Tensor cos = unsqueeze(tables.cos, 1);
  Tensor sin = unsqueeze(tables.sin, 1);
  const Element type = heads.q.type();
  const std::int64_t width = cos.size(-1), rest = heads.q.size(-1) - width;
  const auto first = [&](const Tensor& x) { return slice(x, -1, 0, width); };
  const auto last = [&](const Tensor& x) { return slice(x, -1, width, rest); };
  Tensor q, k;
  switch (style_->rotary) {
    case RotaryKind::whole:
      q = rotate(heads.q, cos, sin);
      k = rotate(heads.k, cos, sin);
      break;
    case RotaryKind::halves:
      q = rotate_halves(heads.q, cos, sin);
      k = rotate_halves(heads.k, cos, sin);
      break;
    case RotaryKind::wide_tables: {
      Tensor wide_q = rotate(heads.q, cos, sin);
      Tensor wide_k = rotate(heads.k, cos, sin);
      q = to(wide_q, type);
      k = to(wide_k, type);
      drop(wide_q, wide_k);
      break;
    }
    case RotaryKind::wide_interleaved: {
      Tensor from_q = to(heads.q, Element::fp32);
      Tensor from_k = to(heads.k, Element::fp32);
      Tensor wide_q = rotate_paired(from_q, cos, sin);
      Tensor wide_k = rotate_paired(from_k, cos, sin);
      q = to(wide_q, type);
      k = to(wide_k, type);
      drop(from_q, from_k, wide_q, wide_k);
      break;
    }
    case RotaryKind::part_joined: {
      const Tensor q_turns = first(heads.q), q_stays = last(heads.q), k_turns = first(heads.k), k_stays = last(heads.k);
      q = cat({rotate(q_turns, cos, sin), q_stays}, -1);
      k = cat({rotate(k_turns, cos, sin), k_stays}, -1);
      break;
    }
    case RotaryKind::part_interleaved: {
      cos = doubled(cos);
      sin = doubled(sin);
      const Tensor q_turns = first(heads.q), q_stays = last(heads.q), k_turns = first(heads.k), k_stays = last(heads.k);
      q = rotate_paired(q_turns, cos, sin);
      k = rotate_paired(k_turns, cos, sin);
      q = cat({q, q_stays}, -1);
      k = cat({k, k_stays}, -1);
      drop(cos, sin);
      break;
    }
    case RotaryKind::part_kept: {
      Tensor q_turns = first(heads.q), q_stays = last(heads.q), k_turns = first(heads.k), k_stays = last(heads.k);
      Tensor turned_q = rotate(q_turns, cos, sin);
      Tensor turned_k = rotate(k_turns, cos, sin);
      q = cat({turned_q, q_stays}, -1);
      heads.q = std::move(q);
      k = cat({turned_k, k_stays}, -1);
      heads.k = std::move(k);
      heads.kept = {turned_q, q_stays, turned_k, k_stays};
      return;
    }
  }
  heads.q = std::move(q);
  heads.k = std::move(k);
}

AttentionResult DecoderAttention::forward(const Tensor& x, const BlockArguments& arguments) const {
  const Architecture& a = context_->sizes;
  Heads heads = style_->fused_qkv ? project_fused(x) : project(x);
  turn(heads, arguments.rotary);
  AttentionCall call;
  call.groups = a.heads / a.kv_heads;
  call.dropout = dropout_;
  call.softcap = softcap_;
  call.sinks = context_->value(sinks_);
  AttentionResult result = attention(*context_, heads.q, heads.k, heads.v, arguments.mask, call);
  const std::int64_t batch = x.size(0), length = x.size(1);
  result.output = contiguous(reshape(std::move(result.output), {batch, length, -1}));
  result.output = out_(result.output);
  if (residual_dropout_ > 0) result.output = dropout(result.output, residual_dropout_);
  if (style_->fused_qkv) heads.kept.clear();
  drop(heads.q, heads.k, heads.v);
  for (Tensor& kept : heads.kept) kept.drop();
  return result;
}

}  // namespace zeroplan::eager
