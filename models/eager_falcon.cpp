// Falcon 7B (one key head) and the new architecture of 40B and 180B (grouped heads): parallel residuals, rotary.

#include "models/eager_gpt.h"
#include "models/error.h"

namespace zeroplan::eager {
namespace {

/// x[..., [i], :] of dimension `dim`: a copy; the index is a tensor of its own.
Tensor pick(const Tensor& x, int dim) {
  Tape& tape = x.tape();
  const Ref<Node> node = tape.make_node(
      [](BackwardCall& call) {
        const Tensor zeros = call.tape.allocate(call.node.dims, call.grads[0].type());
        call.results[0] = call.tape.allocate(call.node.dims, call.grads[0].type());
        call.tape.pointwise_kernel(2 * zeros.bytes());
      },
      {&x});
  const Tensor index = tape.allocate({1}, Element::i64);
  if (node) {
    node->dims = x.sizes();
    tape.save(*node, index);
  }
  Dims sizes = x.sizes();
  sizes[dim] = 1;
  Tensor out = tape.allocate(sizes, x.type());
  tape.pointwise_kernel(2 * out.bytes());
  tape.attach(out, node);
  return out;
}

class FalconAttention {
 public:
  FalconAttention() = default;
  FalconAttention(Context& context, const std::string& path) : context_(&context) {
    const Architecture& a = context.sizes;
    const bool bias = a.family.biases.qkv;
    grouped_ = context.config.flag("new_decoder_architecture", false);
    module_ = context.module(path, "FalconAttention");
    const std::int64_t width = (a.heads + 2 * a.kv_heads) * a.head_dim;
    qkv_ = Linear(context, path + ".query_key_value", a.hidden, width, bias, LinearKind::falcon);
    out_ = Linear(context, path + ".dense", a.hidden, a.hidden, bias, LinearKind::falcon);
    Dropout(context, path + ".attention_dropout", 0);
  }

  AttentionResult operator()(const Tensor& x, const Tensor& mask, const RotaryTables& rotary) const {
    return framed(context_->tape, module_, x, [&](const Tensor& own) { return forward(own, mask, rotary); });
  }

 private:
  struct Heads {
    Tensor q, k, v;
  };

  Heads split_heads(const Tensor& fused) const {
    const Architecture& a = context_->sizes;
    const std::int64_t batch = fused.size(0), length = fused.size(1);
    Heads heads;
    if (!grouped_) {
      const Tensor qkv = view(fused, {batch, length, a.heads + 2, a.head_dim});
      heads.q = slice(qkv, 2, 0, a.heads);
      heads.k = pick(qkv, 2);
      heads.v = pick(qkv, 2);
      return heads;
    }
    const std::int64_t groups = a.heads / a.kv_heads;
    const Tensor qkv = view(fused, {batch, length, -1, groups + 2, a.head_dim});
    Tensor q = slice(qkv, 3, 0, groups);
    Tensor k = pick(qkv, 3);
    Tensor v = pick(qkv, 3);
    Tensor wide_k = expand(k, q.sizes());
    Tensor wide_v = expand(v, q.sizes());
    const Dims flat = {batch, length, a.heads, a.head_dim};
    heads.q = reshape(q, flat);
    heads.k = reshape(wide_k, flat);
    heads.v = reshape(wide_v, flat);
    drop(q, wide_k, k, wide_v, v);
    return heads;
  }

  AttentionResult forward(const Tensor& x, const Tensor& mask, const RotaryTables& rotary) const {
    const Architecture& a = context_->sizes;
    const std::int64_t batch = x.size(0), length = x.size(1);
    Tensor fused = qkv_(x);
    Heads heads = split_heads(fused);
    for (Tensor* part : {&heads.q, &heads.k, &heads.v}) {
      const std::int64_t count = part->size(2);
      *part = reshape(transpose(std::move(*part), 1, 2), {batch, count, length, a.head_dim});
    }
    {
      const Tensor cos = unsqueeze(rotary.cos, 1), sin = unsqueeze(rotary.sin, 1);
      Tensor q = rotate(heads.q, cos, sin);
      Tensor k = rotate(heads.k, cos, sin);
      heads.q = std::move(q);
      heads.k = std::move(k);
    }
    AttentionResult result = attend(heads, mask);
    result.output = permute(std::move(result.output), {0, 2, 1, 3});
    result.output = reshape(result.output, {batch, length, a.hidden});
    result.output = out_(result.output);
    drop(fused, heads.q, heads.k, heads.v);
    return result;
  }

  AttentionResult attend(const Heads& heads, const Tensor& mask) const {
    if (context_->options.attention == EagerAttention::sdpa) {
      SdpaOptions options;
      options.causal = false;
      return {sdpa(heads.q, heads.k, heads.v, mask, options), {}};
    }
    Tensor scores = matmul(heads.q, transpose(heads.k, 2, 3));
    scores = scale_in_place(std::move(scores));
    scores = softmax(add(scores, mask));
    Tensor output = matmul(scores, heads.v);
    return {std::move(output), std::move(scores)};
  }

  const Context* context_ = nullptr;
  bool grouped_ = false;
  int module_ = -1;
  Linear qkv_, out_;
};

class FalconLayer {
 public:
  FalconLayer(Context& context, const std::string& path) : context_(&context) {
    const Architecture& a = context.sizes;
    const bool bias = a.family.biases.mlp;
    module_ = context.module(path, "FalconDecoderLayer", true);
    attention_ = FalconAttention(context, path + ".self_attention");
    mlp_ = context.module(path + ".mlp", "FalconMLP");
    up_ = Linear(context, path + ".mlp.dense_h_to_4h", a.hidden, a.width, bias, LinearKind::falcon);
    activation_ = ActivationModule(context, path + ".mlp.act", a.activation);
    down_ = Linear(context, path + ".mlp.dense_4h_to_h", a.width, a.hidden, bias, LinearKind::falcon);
    two_norms_ = a.family.residual == Residual::parallel_two_norms;
    const auto norm = [&](const std::string& name) {
      return Norm(context, path + name, "LayerNorm", NormStyle::layer, {a.hidden}, true);
    };
    norm1_ = norm(two_norms_ ? ".ln_attn" : ".input_layernorm");
    if (two_norms_) norm2_ = norm(".ln_mlp");
    dropout_ = context.number("hidden_dropout", 0);
  }

  /// inputs: hidden, mask, positions, sin, cos. Outputs: hidden and the attention's weights.
  Tensors operator()(const Tensors& inputs) const {
    return framed(context_->tape, module_, inputs[0], [&](Tensor own) {
      return forward(std::move(own), inputs[1], {inputs[4], inputs[3]});
    });
  }

 private:
  Tensors forward(Tensor hidden, const Tensor& mask, const RotaryTables& rotary) const {
    Tensor normed = norm1_(hidden);
    Tensor fed_norm = two_norms_ ? norm2_(hidden) : Tensor();
    AttentionResult attended = attention_(normed, mask, rotary);
    if (!two_norms_) fed_norm = normed;
    Tensor fed = call(context_->tape, mlp_, fed_norm, [&](const Tensor& own) {
      Tensor x = activation_(up_(own));
      x = down_(x);
      return x;
    });
    fed = add_in_place(std::move(fed), attended.output);
    Tensor out = add(hidden, dropout(fed, dropout_));
    drop(hidden, normed, fed_norm, attended.output, fed);
    return {std::move(out), std::move(attended.weights)};
  }

  const Context* context_ = nullptr;
  int module_ = -1, mlp_ = -1;
  FalconAttention attention_;
  Linear up_, down_;
  ActivationModule activation_;
  Norm norm1_, norm2_;
  bool two_norms_ = false;
  double dropout_ = 0;
};

class Falcon : public CausalModel {
 public:
  explicit Falcon(Context& context) : CausalModel(context, "FalconForCausalLM") {
    const Architecture& a = context.sizes;
    model_ = context.module("transformer", "FalconModel");
    tokens_ = Embedding(context, "transformer.word_embeddings", a.vocab, a.hidden).as_input();
    layers_ = make_layers<FalconLayer>(context, "transformer.h");
    norm_ = Norm(context, "transformer.ln_f", "LayerNorm", NormStyle::layer, {a.hidden}, true);
    rotary_ = RotaryEmbedding(context, "transformer.rotary_emb", "FalconRotaryEmbedding", a.head_dim);
    head_ = Head(context, a.tied ? tokens_.weight() : -1, false);
  }

 private:
  Tensor base(const Tensor& ids) override {
    Tape& tape = context_->tape;
    tape.forward_pre(model_);
    Tensor embedded = tokens_(ids);
    Tensor positions = unsqueeze(position_range(tape, context_->length()), 0);
    MaskOptions options;
    options.additive = context_->options.attention == EagerAttention::eager;
    options.skip = false;
    Tensor mask = causal_mask(*context_, options);
    Tensor hidden = embedded;
    RotaryTables rotary = rotary_(hidden, positions);
    Tensors outputs;  // holds a block's attention weights until the next block has run
    for (const FalconLayer& layer : layers_) {
      outputs = call_layer(*context_, layer, {hidden, mask, positions, rotary.sin, rotary.cos}, 1);
      hidden = outputs[0];
    }
    Tensor out = norm_(hidden);
    hidden = out;
    drop(positions, embedded, mask, hidden);
    drop(rotary.sin, rotary.cos);
    while (!outputs.empty()) outputs.pop_back();
    tape.forward_post(model_, {&out});
    return out;
  }

  int model_ = -1;
  Embedding tokens_;
  std::vector<FalconLayer> layers_;
  Norm norm_;
  RotaryEmbedding rotary_;
};

}  // namespace

std::unique_ptr<EagerModel> make_falcon(Context& context) {
  const Residual residual = context.sizes.family.residual;
  const bool parallel = residual == Residual::parallel_one_norm || residual == Residual::parallel_two_norms;
  const bool one_key = context.sizes.kv_heads == 1 || context.config.flag("new_decoder_architecture", false);
  if (context.sizes.family.positions != Positions::rotary || !parallel || !one_key) {
    throw InputError("eager step: falcon with alibi, sequential residuals or a key for each head is not known");
  }
  return std::make_unique<Falcon>(context);
}

}  // namespace zeroplan::eager
