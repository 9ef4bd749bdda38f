// BLOOM: eager attention only, ALiBi added inside the product of queries and keys, a GELU with its own backward.

#include <bit>

#include "models/eager_gpt.h"

namespace zeroplan::eager {
namespace {

/// GeLUFunction.backward (modeling_bloom.py): every product in a tensor of its own.
void backward_bloom_gelu(BackwardCall& call) {
  const Tensor& x = call.saved[0];
  const auto one = [&](const Tensor& a) { return pointwise({&a}, a.type()); };
  const auto two = [&](Tensor a, Tensor b) {
    Tensor out = pointwise({&a, &b}, a.type());
    drop(a, b);
    return out;
  };
  const auto next = [](Tensor a) { return mul_scalar(std::move(a)); };
  Tensor scaled = one(x);
  Tensor inner = one(x);
  inner = next(two(std::move(inner), x));
  Tensor hyperbolic = next(two(std::move(scaled), std::move(inner)));
  Tensor half = one(x);
  Tensor rest = next(pointwise({&hyperbolic, &hyperbolic}, x.type()));
  Tensor slope = one(x);
  slope = next(two(std::move(slope), x));
  Tensor bend = two(std::move(rest), std::move(slope));
  Tensor left = two(std::move(half), std::move(bend));
  Tensor right = next(one(hyperbolic));
  Tensor factor = two(std::move(left), std::move(right));
  call.results[0] = pointwise({&factor, &call.grads[0]}, x.type());
  drop(hyperbolic, factor);
}

Tensor bloom_gelu(Tensor x) {
  Tape& tape = x.tape();
  const Ref<Node> node = tape.make_node(backward_bloom_gelu, {&x});
  if (node) tape.save(*node, x);
  Tensor out;
  {
    const NoGrad no_grad(tape);
    Tensor half = mul_scalar(x);
    Tensor scaled = mul_scalar(x);
    Tensor inner = add_scalar(mul(mul_scalar(x), x));
    Tensor gate = activate(mul(std::move(scaled), std::move(inner)), Activation::tanh);
    gate = add_scalar(std::move(gate));
    out = mul(std::move(half), std::move(gate));
  }
  tape.attach(out, node);
  x.drop();
  return out;
}

class BloomAttention {
 public:
  BloomAttention() = default;
  BloomAttention(Context& context, const std::string& path) : context_(&context) {
    const std::int64_t hidden = context.sizes.hidden;
    module_ = context.module(path, "BloomAttention");
    qkv_ = Linear(context, path + ".query_key_value", hidden, 3 * hidden, true);
    out_ = Linear(context, path + ".dense", hidden, hidden, true);
    attention_dropout_ = Dropout(context, path + ".attention_dropout", context.number("attention_dropout", 0));
    dropout_ = context.number("hidden_dropout", 0);
  }

  AttentionResult operator()(const Tensor& x, const Tensor& residual, const Tensor& mask, const Tensor& alibi) const {
    Tape& tape = context_->tape;
    tape.forward_pre(module_);
    const Tensor own = tape.own(module_, x);
    const Tensor own_residual = tape.own(module_, residual);
    AttentionResult result = forward(own, own_residual, mask, alibi);
    tape.forward_post(module_, {&result.output, &result.weights});
    return result;
  }

 private:
  AttentionResult forward(const Tensor& x, const Tensor& residual, const Tensor& mask, const Tensor& alibi) const {
    const Architecture& a = context_->sizes;
    const std::int64_t batch = x.size(0), length = x.size(1), rows = batch * a.heads;
    Tensor fused = qkv_(x);
    Tensor q, k, v;
    {
      const Tensor parts = view(fused, {batch, length, a.heads, 3, a.head_dim});
      for (Tensor* part : {&q, &k, &v}) *part = transpose(select(parts, 3), 1, 2);
    }
    q = reshape(q, {rows, -1, a.head_dim});
    k = transpose(reshape(k, {rows, -1, a.head_dim}), -1, -2);
    v = reshape(v, {rows, -1, a.head_dim});
    Tensor scores = baddbmm(alibi, q, k);
    Tensor weights = view(scores, {batch, a.heads, length, -1});
    weights = add(weights, mask);
    Tensor probabilities = to(softmax(to(weights, Element::fp32)), q.type());
    probabilities = attention_dropout_(probabilities);
    Tensor context = bmm(view(probabilities, {rows, length, -1}), v);
    context = view(context, {batch, a.heads, length, a.head_dim});
    context = reshape(permute(std::move(context), {0, 2, 1, 3}), {batch, length, a.hidden});
    Tensor output = out_(context);
    output = add(residual, dropout(output, dropout_));
    drop(fused, q, k, v, scores, weights);
    return {std::move(output), std::move(probabilities)};
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  Linear qkv_, out_;
  Dropout attention_dropout_;
  double dropout_ = 0;
};

class BloomBlock {
 public:
  BloomBlock(Context& context, const std::string& path) : context_(&context) {
    const Architecture& a = context.sizes;
    module_ = context.module(path, "BloomBlock", true);
    norm1_ = Norm(context, path + ".input_layernorm", "LayerNorm", NormStyle::layer, {a.hidden}, true);
    attention_ = BloomAttention(context, path + ".self_attention");
    norm2_ = Norm(context, path + ".post_attention_layernorm", "LayerNorm", NormStyle::layer, {a.hidden}, true);
    mlp_ = context.module(path + ".mlp", "BloomMLP");
    up_ = Linear(context, path + ".mlp.dense_h_to_4h", a.hidden, a.width, true);
    gelu_ = context.module(path + ".mlp.gelu_impl", "BloomGelu");
    down_ = Linear(context, path + ".mlp.dense_4h_to_h", a.width, a.hidden, true);
    dropout_ = context.number("hidden_dropout", 0);
    after_norm_ = context.config.flag("apply_residual_connection_post_layernorm", false);
  }

  /// inputs: hidden, mask, ALiBi. Outputs: hidden and the attention's weights.
  Tensors operator()(const Tensors& inputs) const {
    return framed(context_->tape, module_, inputs[0],
                  [&](Tensor own) { return forward(std::move(own), inputs[1], inputs[2]); });
  }

 private:
  Tensor mlp(const Tensor& x, const Tensor& residual) const {
    Tape& tape = context_->tape;
    tape.forward_pre(mlp_);
    Tensor hidden = tape.own(mlp_, x);
    const Tensor own_residual = tape.own(mlp_, residual);
    hidden = call(tape, gelu_, up_(hidden), [](Tensor own) { return bloom_gelu(std::move(own)); });
    Tensor fed = down_(hidden);
    Tensor out = add(own_residual, dropout(fed, dropout_));
    drop(hidden, fed);
    tape.forward_post(mlp_, {&out});
    return out;
  }

  Tensors forward(Tensor hidden, const Tensor& mask, const Tensor& alibi) const {
    Tensor normed = norm1_(hidden);
    Tensor residual = after_norm_ ? normed : hidden;
    AttentionResult attended = attention_(normed, residual, mask, alibi);
    normed = norm2_(attended.output);
    residual = after_norm_ ? normed : attended.output;
    Tensor out = mlp(normed, residual);
    drop(hidden, normed, residual, attended.output);
    return {std::move(out), std::move(attended.weights)};
  }

  const Context* context_ = nullptr;
  int module_ = -1, mlp_ = -1, gelu_ = -1;
  Norm norm1_, norm2_;
  BloomAttention attention_;
  Linear up_, down_;
  double dropout_ = 0;
  bool after_norm_ = false;
};

class Bloom : public CausalModel {
 public:
  explicit Bloom(Context& context) : CausalModel(context, "BloomForCausalLM") {
    const Architecture& a = context.sizes;
    const auto norm = [&](const std::string& name) {
      return Norm(context, name, "LayerNorm", NormStyle::layer, {a.hidden}, true);
    };
    model_ = context.module("transformer", "BloomModel");
    tokens_ = Embedding(context, "transformer.word_embeddings", a.vocab, a.hidden).as_input();
    embedding_norm_ = norm("transformer.word_embeddings_layernorm");
    layers_ = make_layers<BloomBlock>(context, "transformer.h");
    norm_ = norm("transformer.ln_f");
    head_ = Head(context, a.tied ? tokens_.weight() : -1, false);
  }

 private:
  /// Slopes of the heads: powers of a base, and of a second base where the heads are no power of two.
  Tensor slopes(Tensor& base, Tensor& powers, Tensor& extra_base, Tensor& extra_powers) const {
    Tape& tape = context_->tape;
    const std::int64_t heads = context_->sizes.heads;
    const auto closest = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(heads)));
    base = tape.allocate({}, Element::fp32);
    powers = tape.allocate({closest}, Element::i32);
    Tensor out = pointwise({&base, &powers}, Element::fp32);
    if (closest == heads) return out;
    extra_base = tape.allocate({}, Element::fp32);
    extra_powers = tape.allocate({std::min(closest, heads - closest)}, Element::i32);
    Tensor extra = pointwise({&extra_base, &extra_powers}, Element::fp32);
    return cat({out, std::move(extra)}, 0);
  }

  /// build_alibi_tensor: [batch x heads, 1, length].
  Tensor alibi(const Tensor& ones) const {
    const std::int64_t batch = ones.size(0), length = ones.size(1), heads = context_->sizes.heads;
    Tensor base, powers, extra_base, extra_powers;
    Tensor factors = slopes(base, powers, extra_base, extra_powers);
    Tensor places = add_scalar(pointwise({&ones}, Element::fp32));
    places = pointwise({&places, &ones}, Element::fp32);
    places = unsqueeze(std::move(places), 1);
    Tensor bias = mul(view(factors, {heads, 1}), places);
    Tensor out = to(view(bias, {batch * heads, 1, length}), context_->type);
    drop(base, powers, factors, extra_base, extra_powers, places, bias);
    return out;
  }

  Tensor base(const Tensor& ids) override {
    Tape& tape = context_->tape;
    tape.forward_pre(model_);
    Tensor embedded = tokens_(ids);
    Tensor hidden = embedding_norm_(embedded);
    Tensor ones = tape.allocate(ids.sizes(), Element::fp32);
    Tensor bias = alibi(ones);
    Tensor mask;
    {
      Tensor given = to(ones, Element::boolean);
      MaskOptions options;
      options.additive = true;
      options.padded = true;
      mask = causal_mask(*context_, options);
    }
    Tensors outputs;
    for (const BloomBlock& layer : layers_) {
      outputs = call_layer(*context_, layer, {hidden, mask, bias}, 1);
      hidden = outputs[0];
    }
    Tensor out = norm_(hidden);
    hidden = out;
    drop(ones, embedded, hidden, bias, mask);
    while (!outputs.empty()) outputs.pop_back();
    tape.forward_post(model_, {&out});
    return out;
  }

  int model_ = -1;
  Embedding tokens_;
  Norm embedding_norm_, norm_;
  std::vector<BloomBlock> layers_;
};

}  // namespace

std::unique_ptr<EagerModel> make_bloom(Context& context) { return std::make_unique<Bloom>(context); }

}  // namespace zeroplan::eager
