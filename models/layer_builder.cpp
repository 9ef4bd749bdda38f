#include "models/layer_builder.h"

#include <utility>

namespace zeroplan {

LayerBuilder::LayerBuilder(const Architecture& architecture, const TensorNames& names, const LayerPlace& place,
                           std::string name)
    : a_(architecture),
      family_(architecture.family),
      names_(names),
      place_(place),
      block_(std::move(name), BlockRole::layer) {}

BlockKind LayerBuilder::build() {
  int x = block_.input(a_.hidden);
  if (place_.decoder_stack) block_.memory(a_.hidden);
  x = residual_layer(x);
  if (place_.last_encoder) {
    x = block_.norm("final norm", x, family_.norm, names_.final_norm, TensorKind::final);
    block_.kind().ends_encoder = true;
  }
  return block_.finish(x);
}

std::string LayerBuilder::full(std::string_view name) const { return std::string(names_.layer).append(name); }

int LayerBuilder::norm(std::string name, std::string_view tensor, int x) {
  return block_.norm(std::move(name), x, family_.norm, full(tensor), TensorKind::layer);
}

/// A sublayer's result as one value.
int LayerBuilder::one(const std::vector<int>& terms) {
  if (terms.size() == 1) return terms.front();
  return block_.add("expert sum", terms.front(), {terms.begin() + 1, terms.end()});
}

int LayerBuilder::residual_layer(int x) {
  const auto join = [](int first, std::vector<int> rest) {
    rest.insert(rest.begin(), first);
    return rest;
  };
  switch (family_.residual) {
    case Residual::pre_norm: {
      int u = block_.add("add 1", x, {attention(norm("norm 1", names_.norm1, x))});
      if (place_.decoder_stack) {
        u = block_.add("add cross", u, {cross_attention(norm("norm cross", names_.cross_norm, u))});
      }
      return block_.add("add 2", u, mlp(norm("norm 2", names_.norm2, u)));
    }
    case Residual::sandwich: {
      const int attended = attention(norm("norm 1", names_.norm1, x));
      const int u = block_.add("add 1", x, {norm("norm 2", names_.norm2, attended)});
      const int fed = one(mlp(norm("norm 3", names_.norm3, u)));
      return block_.add("add 2", u, {norm("norm 4", names_.norm4, fed)});
    }
    case Residual::post_sublayer: {
      const int u = block_.add("add 1", x, {norm("norm 1", names_.norm1, attention(x))});
      return block_.add("add 2", u, {norm("norm 2", names_.norm2, one(mlp(u)))});
    }
    case Residual::post_add: {
      const int u = norm("norm 1", names_.norm1, block_.add("add 1", x, {attention(x)}));
      return norm("norm 2", names_.norm2, block_.add("add 2", u, mlp(u)));
    }
    case Residual::parallel_one_norm: {
      const int n = norm("norm 1", names_.norm1, x);
      const int attended = attention(n);
      return block_.add("add", x, join(attended, mlp(n)));
    }
    case Residual::parallel_two_norms: {
      const int attended = attention(norm("norm 1", names_.norm1, x));
      return block_.add("add", x, join(attended, mlp(norm("norm 2", names_.norm2, x))));
    }
  }
  return x;
}

// --- attention ------------------------------------------------------------------------------------

int LayerBuilder::attention(int x) {
  if (family_.mla) return mla_attention(x);
  const std::int64_t q_width = a_.heads * a_.head_dim;
  const std::int64_t kv_width = a_.kv_heads * a_.head_dim;
  const bool bias = family_.biases.qkv;
  std::vector<WeightSpec> weights;
  if (!names_.qkv.empty()) {
    weights = {{full(names_.qkv), q_width + 2 * kv_width, bias}};
  } else {
    weights = {{full(names_.q), q_width, bias}, {full(names_.k), kv_width, bias}, {full(names_.v), kv_width, bias}};
  }
  const int qkv = block_.linear("qkv", x, weights);
  AttentionShape shape;
  shape.heads = a_.heads;
  shape.kv_heads = a_.kv_heads;
  shape.qk_dim = shape.v_dim = a_.head_dim;
  shape.causal = family_.stack == Stack::decoder || place_.decoder_stack;
  shape.window = place_.traits.window;
  shape.chunked = place_.traits.chunked;
  const std::vector<int> inputs = score_inputs(qkv);
  return out_projection(block_.attention("attention", inputs, shape, attention_tensors()), names_.out);
}

int LayerBuilder::out_projection(int attention_output, std::string_view tensor) {
  return block_.linear("out", attention_output, {{full(tensor), a_.hidden, family_.biases.out}});
}

/// The packed q, k, v ready for scores; with a QK-norm the normed q and k, then the buffer that still holds v.
std::vector<int> LayerBuilder::score_inputs(int qkv) {
  const bool rotary = family_.positions == Positions::rotary;
  if (family_.qk_norm == QkNorm::none) return {rotary ? block_.rotary(qkv) : qkv};
  const int qk = qk_norm(qkv);
  return {rotary ? block_.rotary(qk) : qk, qkv};
}

int LayerBuilder::qk_norm(int qkv) {
  const std::int64_t d = a_.head_dim;
  BlockBuilder::NormSpec spec;
  spec.kind = family_.qk_norm_kind;
  spec.out = (a_.heads + a_.kv_heads) * d;
  spec.statistics = family_.qk_norm == QkNorm::per_projection ? 2 : a_.heads + a_.kv_heads;
  const auto weights = [&](std::string_view name, std::int64_t heads) {
    std::vector<std::int64_t> shape;
    switch (family_.qk_norm) {
      case QkNorm::none:
      case QkNorm::no_weights:
        return;
      case QkNorm::per_head:
        shape = {d};
        break;
      case QkNorm::head_weights:
        shape = {heads, d};
        break;
      case QkNorm::per_projection:
        shape = {heads * d};
        break;
    }
    spec.tensors.push_back(block_.tensor(full(name) + ".weight", shape, TensorKind::layer));
    if (spec.kind == NormKind::layer) {
      spec.tensors.push_back(block_.tensor(full(name) + ".bias", shape, TensorKind::layer));
    }
  };
  weights(names_.q_norm, a_.heads);
  weights(names_.k_norm, a_.kv_heads);
  return block_.norm("qk norm", qkv, std::move(spec));
}

/// What the attention kernel itself reads: sink logits, a relative bias table.
std::vector<int> LayerBuilder::attention_tensors() {
  std::vector<int> tensors;
  if (!names_.sinks.empty()) tensors.push_back(block_.tensor(full(names_.sinks), {a_.heads}, TensorKind::layer));
  if (!names_.relative_bias.empty() && place_.first) {
    tensors.push_back(block_.tensor(full(names_.relative_bias), {a_.relative_buckets, a_.heads}, TensorKind::layer));
  }
  return tensors;
}

int LayerBuilder::cross_attention(int x) {
  const std::int64_t q_width = a_.heads * a_.head_dim;
  const std::int64_t kv_width = a_.kv_heads * a_.head_dim;
  const bool bias = family_.biases.qkv;
  const int q = block_.linear("cross q", x, {{full(names_.cross_q), q_width, bias}});
  const int kv = block_.linear("cross kv", block_.kind().memory,
                               {{full(names_.cross_k), kv_width, bias}, {full(names_.cross_v), kv_width, bias}});
  AttentionShape shape;
  shape.heads = a_.heads;
  shape.kv_heads = a_.kv_heads;
  shape.qk_dim = shape.v_dim = a_.head_dim;
  shape.causal = false;
  shape.cross = true;
  return out_projection(block_.attention("cross attention", {q, kv}, shape, {}), names_.cross_out);
}

// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434; shapes: transformer-math 1.4). v stays inside the kv_b
// output, k is put together from that and the shared rotary part.
int LayerBuilder::mla_attention(int x) {
  const MlaDims& m = a_.mla;
  const std::int64_t qk_dim = m.nope_dim + m.rope_dim;
  const bool bias = family_.biases.qkv;
  int q = x;
  std::string_view q_name = "self_attn.q_proj";
  std::string op_name = "q";
  if (m.q_rank > 0) {
    q = block_.linear("q_a", x, {{full("self_attn.q_a_proj"), m.q_rank, bias}});
    q = norm("q_a norm", "self_attn.q_a_layernorm", q);
    q_name = "self_attn.q_b_proj";
    op_name = "q_b";
  }
  q = block_.rotary(block_.linear(op_name, q, {{full(q_name), a_.heads * qk_dim, false}}));
  const int kv_a = block_.linear("kv_a", x, {{full("self_attn.kv_a_proj_with_mqa"), m.kv_rank + m.rope_dim, bias}});
  BlockBuilder::NormSpec spec;
  spec.kind = family_.norm;
  spec.out = m.kv_rank;
  spec.tensors = {block_.tensor(full("self_attn.kv_a_layernorm.weight"), {m.kv_rank}, TensorKind::layer)};
  const int latent = block_.norm("kv_a norm", kv_a, std::move(spec));
  const int kv_b =
      block_.linear("kv_b", latent, {{full("self_attn.kv_b_proj"), a_.heads * (m.nope_dim + m.v_dim), false}});
  const int k = block_.assemble("keys", {kv_b, kv_a}, a_.heads * qk_dim);
  AttentionShape shape;
  shape.heads = shape.kv_heads = a_.heads;
  shape.qk_dim = qk_dim;
  shape.v_dim = m.v_dim;
  shape.window = place_.traits.window;
  return out_projection(block_.attention("attention", {q, k, kv_b}, shape, {}), names_.out);
}

// --- MLP and experts --------------------------------------------------------------------------------

std::vector<int> LayerBuilder::mlp(int x) {
  if (place_.traits.moe) return experts(x);
  return {dense(x, "", a_.width, names_)};
}

/// An MLP of `width`; `prefix` goes before the names of its ops.
int LayerBuilder::dense(int x, std::string_view prefix, std::int64_t width, const TensorNames& names) {
  const bool bias = family_.biases.mlp;
  const std::string before(prefix);
  std::vector<WeightSpec> weights;
  if (!family_.gated) {
    weights = {{full(names.up), width, bias}};
  } else if (!names.gate_up.empty()) {
    weights = {{full(names.gate_up), 2 * width, bias}};
  } else {
    weights = {{full(names.gate), width, bias}, {full(names.up), width, bias}};
  }
  const int inner = block_.linear(before + (family_.gated ? "gate_up" : "up"), x, weights);
  const int act = block_.activation(before + "activation " + a_.activation, inner, block_.width(inner), width);
  return block_.linear(before + "down", act, {{full(names.down), a_.hidden, bias}});
}

std::vector<int> LayerBuilder::experts(int x) {
  const std::int64_t h = a_.hidden;
  const std::int64_t f = a_.expert_width;
  const std::int64_t count = a_.experts;
  const auto expert = [&](std::string_view name, std::vector<std::int64_t> shape) {
    return block_.tensor(full(name), std::move(shape), TensorKind::expert, count);
  };
  const auto expert_bias = [&](std::vector<int>& tensors, std::string_view name, std::int64_t width) {
    if (family_.expert_bias) tensors.push_back(expert(std::string(name) + "_bias", {width}));
  };
  std::vector<int> router = {block_.tensor(full(names_.router) + ".weight", {count, h}, TensorKind::router)};
  if (family_.router_bias) router.push_back(block_.tensor(full(names_.router) + ".bias", {count}, TensorKind::router));
  if (!names_.router_correction.empty()) {
    router.push_back(block_.tensor(full(names_.router_correction), {count}, TensorKind::router));
  }
  const BlockBuilder::Routing routing = block_.route(x, std::move(router), count, a_.experts_per_token);

  std::vector<int> gate_up;
  if (!names_.expert_gate_up.empty()) {
    gate_up = {expert(names_.expert_gate_up, {h, 2 * f})};
  } else {
    gate_up = {expert(names_.expert_gate, {f, h}), expert(names_.expert_up, {f, h})};
  }
  expert_bias(gate_up, names_.expert_gate_up, 2 * f);
  const std::int64_t k = a_.experts_per_token;
  const int inner = block_.grouped_linear("expert gate_up", routing.rows, gate_up, count, k, h, 2 * f);
  const int act = block_.activation("expert activation " + a_.activation, inner, 2 * f, f, k);
  std::vector<int> down = {expert(names_.expert_down, family_.expert_in_out ? std::vector{f, h} : std::vector{h, f})};
  expert_bias(down, names_.expert_down, h);
  const int rows = block_.grouped_linear("expert down", act, down, count, k, f, h);
  std::vector<int> terms = {block_.combine(rows, routing, h)};
  if (a_.shared_width > 0) {
    TensorNames shared = names_;
    shared.gate = names_.shared_gate;
    shared.up = names_.shared_up;
    shared.down = names_.shared_down;
    terms.push_back(dense(x, "shared ", a_.shared_width, shared));
  }
  return terms;
}

}  // namespace zeroplan
