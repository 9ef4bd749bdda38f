#include "models/eager_gpt.h"

namespace zeroplan::eager {
namespace {

class OptAttention {
 public:
  OptAttention() = default;
  OptAttention(Context& context, const std::string& path) : context_(&context) {
    const std::int64_t hidden = context.sizes.hidden;
    const Biases& bias = context.sizes.family.biases;
    module_ = context.module(path, "OPTAttention");
    k_ = Linear(context, path + ".k_proj", hidden, hidden, bias.qkv);
    v_ = Linear(context, path + ".v_proj", hidden, hidden, bias.qkv);
    q_ = Linear(context, path + ".q_proj", hidden, hidden, bias.qkv);
    out_ = Linear(context, path + ".out_proj", hidden, hidden, bias.out);
    dropout_ = context.number("attention_dropout", 0);
  }

  AttentionResult operator()(const Tensor& x, const Tensor& mask) const {
    return framed(context_->tape, module_, x, [&](const Tensor& own) { return forward(own, mask); });
  }

 private:
  AttentionResult forward(const Tensor& x, const Tensor& mask) const {
    const std::int64_t batch = x.size(0), length = x.size(1), width = context_->sizes.head_dim;
    const auto heads = [&](Tensor part) { return transpose(view(std::move(part), {batch, length, -1, width}), 1, 2); };
    Tensor q = heads(mul_scalar(q_(x)));
    Tensor k = k_(x);
    Tensor v = v_(x);
    k = heads(std::move(k));
    v = heads(std::move(v));
    AttentionCall call;
    call.dropout = dropout_;
    AttentionResult result = attention(*context_, q, k, v, mask, call);
    result.output = contiguous(reshape(std::move(result.output), {batch, length, -1}));
    result.output = out_(result.output);
    drop(q, k, v);
    return result;
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  Linear q_, k_, v_, out_;
  double dropout_ = 0;
};

class OptLayer {
 public:
  OptLayer(Context& context, const std::string& path) : context_(&context) {
    const Architecture& a = context.sizes;
    const bool bias = a.family.biases.mlp;
    module_ = context.module(path, "OPTDecoderLayer", true);
    attention_ = OptAttention(context, path + ".self_attn");
    activation_ = ActivationModule(context, path + ".activation_fn", a.activation);
    norm1_ = Norm(context, path + ".self_attn_layer_norm", "LayerNorm", NormStyle::layer, {a.hidden}, true);
    up_ = Linear(context, path + ".fc1", a.hidden, a.width, bias);
    down_ = Linear(context, path + ".fc2", a.width, a.hidden, bias);
    norm2_ = Norm(context, path + ".final_layer_norm", "LayerNorm", NormStyle::layer, {a.hidden}, true);
    dropout_ = context.number("dropout", 0.1);
    norm_first_ = a.family.residual == Residual::pre_norm;
  }

  /// inputs: hidden, mask, positions.
  Tensors operator()(const Tensors& inputs) const {
    return {framed(context_->tape, module_, inputs[0], [&](Tensor own) { return forward(std::move(own), inputs[1]); })};
  }

 private:
  Tensor forward(Tensor hidden, const Tensor& mask) const {
    const Dims sizes = hidden.sizes();
    Tensor residual = hidden;
    if (norm_first_) hidden = norm1_(hidden);
    AttentionResult attended = attention_(hidden, mask);
    hidden = std::move(attended.output);
    hidden = dropout(hidden, dropout_);
    hidden = add(residual, hidden);
    if (!norm_first_) hidden = norm1_(hidden);
    hidden = reshape(hidden, {-1, sizes[-1]});
    residual = hidden;
    if (norm_first_) hidden = norm2_(hidden);
    hidden = up_(hidden);
    hidden = activation_(hidden);
    hidden = down_(hidden);
    hidden = dropout(hidden, dropout_);
    hidden = view(add(residual, hidden), sizes);
    if (!norm_first_) hidden = norm2_(hidden);
    drop(residual, attended.weights);
    return hidden;
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  OptAttention attention_;
  ActivationModule activation_;
  Norm norm1_, norm2_;
  Linear up_, down_;
  double dropout_ = 0;
  bool norm_first_ = true;
};

class Opt : public CausalModel {
 public:
  explicit Opt(Context& context) : CausalModel(context, "OPTForCausalLM") {
    const Architecture& a = context.sizes;
    context.module("model", "OPTModel");
    decoder_ = context.module("model.decoder", "OPTDecoder");
    tokens_ = Embedding(context, "model.decoder.embed_tokens", a.vocab, a.hidden).as_input();
    positions_ =
        Embedding(context, "model.decoder.embed_positions", a.position_rows, a.hidden, "OPTLearnedPositionalEmbedding");
    if (a.final_norm) {
      norm_ = Norm(context, "model.decoder.final_layer_norm", "LayerNorm", NormStyle::layer, {a.hidden}, true);
    }
    layers_ = make_layers<OptLayer>(context, "model.decoder.layers");
    head_ = Head(context, a.tied ? tokens_.weight() : -1, false);
  }

 private:
  /// position_ids from a mask of ones.
  Tensor positions_of(const Tensor& ones) const {
    Tensor sums = context_->tape.allocate(ones.sizes(), Element::fp32);
    Tensor shifted = add_scalar(pointwise({&sums, &ones}, Element::fp32));
    Tensor positions = to(std::move(shifted), Element::i64);
    sums.drop();
    return positions;
  }

  Tensor base(const Tensor& ids) override {
    Tape& tape = context_->tape;
    tape.forward_pre(decoder_);
    Tensor embedded = tokens_(ids);
    Tensor ones = tape.allocate(ids.sizes(), Element::fp32);
    Tensor positions = positions_of(ones);
    Tensor given = to(ones, Element::boolean);  // the mask as create_causal_mask takes it
    Tensor mask = masked(given);
    tape.forward_pre(positions_.module());
    Tensor shifted = add_scalar(positions);
    Tensor placed = positions_.look_up(shifted);
    shifted.drop();
    tape.forward_post(positions_.module(), {&placed});
    Tensor hidden = add(embedded, placed);
    hidden = run_layers(*context_, layers_, std::move(hidden), 1, [&](std::size_t) {
      return Tensors{mask, positions};
    });
    if (norm_.module() >= 0) hidden = norm_(hidden);
    Tensor out = std::move(hidden);
    drop(ones, embedded, positions, mask, placed);
    tape.forward_post(decoder_, {&out});
    return out;
  }

  /// create_causal_mask with a padding mask of ones.
  Tensor masked(Tensor& given) const {
    MaskOptions options;
    options.additive = context_->options.attention == EagerAttention::eager;
    options.padded = true;
    Tensor mask = causal_mask(*context_, options);
    given.drop();
    return mask;
  }

  int decoder_ = -1;
  Embedding tokens_, positions_;
  std::vector<OptLayer> layers_;
  Norm norm_;
};

}  // namespace

std::unique_ptr<EagerModel> make_opt(Context& context) { return std::make_unique<Opt>(context); }

}  // namespace zeroplan::eager
