#include "models/eager_gpt.h"

namespace zeroplan::eager {
namespace {

class NeoxAttention {
 public:
  NeoxAttention() = default;
  NeoxAttention(Context& context, const std::string& path) : context_(&context) {
    const std::int64_t hidden = context.sizes.hidden;
    module_ = context.module(path, "GPTNeoXAttention");
    qkv_ = Linear(context, path + ".query_key_value", hidden, 3 * hidden, context.sizes.family.biases.qkv);
    out_ = Linear(context, path + ".dense", hidden, hidden, context.sizes.family.biases.out);
    dropout_ = context.number("attention_dropout", 0);
  }

  AttentionResult operator()(Tensor x, const Tensor& mask, const RotaryTables& rotary) const {
    AttentionResult result =
        framed(context_->tape, module_, x, [&](const Tensor& own) { return forward(own, mask, rotary); });
    x.drop();
    return result;
  }

 private:
  AttentionResult forward(const Tensor& x, const Tensor& mask, const RotaryTables& rotary) const {
    const std::int64_t width = context_->sizes.head_dim;
    const std::int64_t batch = x.size(0), length = x.size(1);
    Tensor qkv = transpose(view(qkv_(x), {batch, length, -1, 3 * width}), 1, 2);
    Tensors parts = split(qkv, {width, width, width}, -1);
    Tensor v = std::move(parts[2]);
    Tensor q = std::move(parts[0]);
    Tensor k = std::move(parts[1]);
    rotate_part(q, k, rotary);
    AttentionCall call;
    call.dropout = dropout_;
    AttentionResult result = attention(*context_, q, k, v, mask, call);
    result.output = contiguous(reshape(std::move(result.output), {batch, length, -1}));
    result.output = out_(result.output);
    drop(qkv, q, k, v);
    return result;
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  Linear qkv_, out_;
  double dropout_ = 0;
};

class NeoxLayer {
 public:
  NeoxLayer(Context& context, const std::string& path) : context_(&context) {
    const std::int64_t hidden = context.sizes.hidden;
    const double probability = context.number("hidden_dropout", 0);
    module_ = context.module(path, "GPTNeoXLayer", true);
    norm1_ = Norm(context, path + ".input_layernorm", "LayerNorm", NormStyle::layer, {hidden}, true);
    norm2_ = Norm(context, path + ".post_attention_layernorm", "LayerNorm", NormStyle::layer, {hidden}, true);
    dropout1_ = Dropout(context, path + ".post_attention_dropout", probability);
    dropout2_ = Dropout(context, path + ".post_mlp_dropout", probability);
    attention_ = NeoxAttention(context, path + ".attention");
    mlp_ = FeedForward(context, path + ".mlp", {"GPTNeoXMLP", "dense_h_to_4h", "dense_4h_to_h"});
    parallel_ = context.sizes.family.residual == Residual::parallel_two_norms;
  }

  /// inputs: hidden, mask, positions, sin, cos.
  Tensors operator()(const Tensors& inputs) const {
    return {framed(context_->tape, module_, inputs[0], [&](Tensor own) {
      return forward(std::move(own), inputs[1], {inputs[4], inputs[3]});
    })};
  }

 private:
  Tensor forward(Tensor hidden, const Tensor& mask, const RotaryTables& rotary) const {
    AttentionResult attended = attention_(norm1_(hidden), mask, rotary);
    attended.output = dropout1_(attended.output);
    Tensor fed;
    if (parallel_) {
      fed = mlp_(norm2_(hidden));
      fed = dropout2_(fed);
      hidden = add(add(fed, attended.output), hidden);
    } else {
      attended.output = add(attended.output, hidden);
      fed = mlp_(norm2_(attended.output));
      fed = dropout2_(fed);
      hidden = add(fed, attended.output);
    }
    Tensor out = std::move(hidden);
    drop(attended.output, attended.weights, fed);
    return out;
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  Norm norm1_, norm2_;
  Dropout dropout1_, dropout2_;
  NeoxAttention attention_;
  FeedForward mlp_;
  bool parallel_ = true;
};

class Neox : public CausalModel {
 public:
  explicit Neox(Context& context) : CausalModel(context, "GPTNeoXForCausalLM") {
    constexpr double kRotaryPart = 0.25;  // transformers default of rotary_pct
    const Architecture& a = context.sizes;
    model_ = context.module("gpt_neox", "GPTNeoXModel");
    tokens_ = Embedding(context, "gpt_neox.embed_in", a.vocab, a.hidden).as_input();
    dropout_ = Dropout(context, "gpt_neox.emb_dropout", context.number("hidden_dropout", 0));
    layers_ = make_layers<NeoxLayer>(context, "gpt_neox.layers");
    norm_ = Norm(context, "gpt_neox.final_layer_norm", "LayerNorm", NormStyle::layer, {a.hidden}, true);
    rotary_ = RotaryEmbedding(context, "gpt_neox.rotary_emb", "GPTNeoXRotaryEmbedding",
                              rotary_width(context, a.head_dim, "rotary_pct", kRotaryPart));
    head_ = Head(context, a.tied ? tokens_.weight() : -1, false);
  }

 private:
  Tensor base(const Tensor& ids) override {
    Tape& tape = context_->tape;
    tape.forward_pre(model_);
    Tensor embedded = tokens_(ids);
    Tensor positions = unsqueeze(position_range(tape, context_->length()), 0);
    Tensor mask = plain_mask(*context_);
    Tensor hidden = dropout_(embedded);
    RotaryTables rotary = rotary_(hidden, positions);
    hidden = run_layers(*context_, layers_, std::move(hidden), 1, [&](std::size_t) {
      return Tensors{mask, positions, rotary.sin, rotary.cos};
    });
    Tensor out = norm_(hidden);
    hidden = out;
    drop(positions, embedded, mask, hidden);
    drop(rotary.sin, rotary.cos);
    tape.forward_post(model_, {&out});
    return out;
  }

  int model_ = -1;
  Embedding tokens_;
  Dropout dropout_;
  std::vector<NeoxLayer> layers_;
  Norm norm_;
  RotaryEmbedding rotary_;
};

}  // namespace

std::unique_ptr<EagerModel> make_gpt_neox(Context& context) { return std::make_unique<Neox>(context); }

}  // namespace zeroplan::eager
