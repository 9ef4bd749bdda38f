// MPT: eager attention only, ALiBi added to the scores in fp32.

#include <bit>

#include "models/eager_gpt.h"
#include "models/error.h"

namespace zeroplan::eager {
namespace {

class MptAttention {
 public:
  MptAttention() = default;
  MptAttention(Context& context, const std::string& path) : context_(&context) {
    const std::int64_t hidden = context.sizes.hidden;
    module_ = context.module(path, "MptAttention");
    qkv_ = Linear(context, path + ".Wqkv", hidden, 3 * hidden, false);
    out_ = Linear(context, path + ".out_proj", hidden, hidden, false);
    dropout_ = context.number("attn_config/attn_pdrop", 0);
    clips_ = context.number("attn_config/clip_qkv", 0) > 0;
  }

  AttentionResult operator()(const Tensor& x, const Tensor& mask, const Tensor& alibi) const {
    return framed(context_->tape, module_, x, [&](const Tensor& own) { return forward(own, mask, alibi); });
  }

 private:
  AttentionResult forward(const Tensor& x, const Tensor& mask, const Tensor& alibi) const {
    const Architecture& a = context_->sizes;
    const std::int64_t batch = x.size(0), length = x.size(1);
    Tensor mixed = qkv_(x);
    if (clips_) mixed = clamp(mixed, true);
    Tensors parts = split(mixed, {a.hidden, a.hidden, a.hidden}, 2);
    for (Tensor& part : parts) part = transpose(reshape(part, {batch, length, a.heads, a.head_dim}), 1, 2);
    Tensor scores = mul_scalar(matmul(parts[0], transpose(parts[1], 2, 3)));
    scores = add(scores, slice(alibi, -1, 0, length));
    scores = masked_fill(scores, mask);
    Tensor weights = to(softmax(to(scores, Element::fp32)), x.type());
    weights = dropout(weights, dropout_);
    Tensor context = matmul(weights, parts[2]);
    context = view(contiguous(permute(context, {0, 2, 1, 3})), {batch, length, -1});
    Tensor output = out_(context);
    drop(mixed);
    for (Tensor& part : parts) part.drop();
    drop(scores, context);
    return {std::move(output), std::move(weights)};
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  Linear qkv_, out_;
  double dropout_ = 0;
  bool clips_ = false;
};

class MptBlock {
 public:
  MptBlock(Context& context, const std::string& path) : context_(&context) {
    const Architecture& a = context.sizes;
    const auto norm = [&](const std::string& name) {
      return Norm(context, path + name, "LayerNorm", NormStyle::layer, {a.hidden}, false);
    };
    probability_ = context.number("attn_config/attn_pdrop", 0);
    module_ = context.module(path, "MptBlock", true);
    norm1_ = norm(".norm_1");
    attention_ = MptAttention(context, path + ".attn");
    norm2_ = norm(".norm_2");
    mlp_ = context.module(path + ".ffn", "MptMLP");
    up_ = Linear(context, path + ".ffn.up_proj", a.hidden, 4 * a.hidden, false);
    gelu_ = context.module(path + ".ffn.act", "GELU");
    down_ = Linear(context, path + ".ffn.down_proj", 4 * a.hidden, a.hidden, false);
    dropout_ = Dropout(context, path + ".resid_attn_dropout", probability_);
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
    hidden = call(tape, gelu_, up_(hidden), [](Tensor own) { return activate(std::move(own), Activation::gelu); });
    Tensor fed = down_(hidden);
    Tensor out = dropout(fed, probability_);
    out = add(out, own_residual);
    drop(hidden, fed);
    tape.forward_post(mlp_, {&out});
    return out;
  }

  Tensors forward(Tensor hidden, const Tensor& mask, const Tensor& alibi) const {
    Tensor normed = norm1_(hidden);
    Tensor residual = hidden;
    AttentionResult attended = attention_(normed, mask, alibi);
    hidden = add(dropout_(attended.output), residual);
    normed = norm2_(hidden);
    residual = hidden;
    Tensor out = mlp(normed, residual);
    drop(hidden, normed, residual, attended.output);
    return {std::move(out), std::move(attended.weights)};
  }

  const Context* context_ = nullptr;
  int module_ = -1, mlp_ = -1, gelu_ = -1;
  Norm norm1_, norm2_;
  MptAttention attention_;
  Linear up_, down_;
  Dropout dropout_;
  double probability_ = 0;
};

class Mpt : public CausalModel {
 public:
  explicit Mpt(Context& context) : CausalModel(context, "MptForCausalLM") {
    const Architecture& a = context.sizes;
    model_ = context.module("transformer", "MptModel");
    tokens_ = Embedding(context, "transformer.wte", a.vocab, a.hidden).as_input();
    layers_ = make_layers<MptBlock>(context, "transformer.blocks");
    norm_ = Norm(context, "transformer.norm_f", "LayerNorm", NormStyle::layer, {a.hidden}, false);
    head_ = Head(context, a.tied ? tokens_.weight() : -1, false);
  }

 private:
  /// build_mpt_alibi_tensor: [heads, 1, max_seq_len].
  Tensor alibi() const {
    Tape& tape = context_->tape;
    const std::int64_t heads = context_->sizes.heads, longest = context_->sizes.max_positions;
    const auto power = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(heads)));
    Tensor bias = view(tape.allocate({longest}, Element::i32), {1, 1, 1, longest});
    Tensor base = to(tape.allocate({power}, Element::i64), Element::fp32);
    base = mul_scalar(base);
    Tensor slopes;
    {
      Tensor powers = pointwise({&base}, Element::fp32);
      slopes = mul_scalar(mul_scalar(powers));
    }
    slopes = view(slopes, {1, power, 1, 1});
    if (power != heads) {
      Tensor both = cat({slice(slopes, 1, 1, power / 2, 2), slice(slopes, 1, 0, power / 2, 2)}, 1);
      slopes = slice(both, 1, 0, heads);
    }
    bias = mul(bias, slopes);
    Tensor out = squeeze(bias, 0);
    drop(bias, base, slopes);
    return out;
  }

  Tensor base(const Tensor& ids) override {
    Tape& tape = context_->tape;
    tape.forward_pre(model_);
    Tensor embedded = tokens_(ids);
    Tensor hidden = embedded;
    Tensor bias = alibi();
    Tensor mask;
    {
      MaskOptions options;
      options.additive = true;
      mask = to(causal_mask(*context_, options), Element::boolean);
    }
    Tensors outputs;
    for (const MptBlock& layer : layers_) {
      outputs = call_layer(*context_, layer, {hidden, mask, bias}, 1);
      hidden = outputs[0];
    }
    Tensor out = norm_(hidden);
    hidden = out;
    drop(embedded, hidden, bias, mask);
    while (!outputs.empty()) outputs.pop_back();
    tape.forward_post(model_, {&out});
    return out;
  }

  int model_ = -1;
  Embedding tokens_;
  std::vector<MptBlock> layers_;
  Norm norm_;
};

}  // namespace

std::unique_ptr<EagerModel> make_mpt(Context& context) {
  const Architecture& a = context.sizes;
  if (a.family.qk_norm != QkNorm::none || a.kv_heads != a.heads || a.width != 4 * a.hidden ||
      context.length() > a.max_positions) {
    throw InputError(
        "eager step: mpt with qk_ln, shared keys, an expansion_ratio other than 4 or more than max_seq_len tokens is "
        "not known");
  }
  return std::make_unique<Mpt>(context);
}

}  // namespace zeroplan::eager
