#include "models/eager_gpt.h"
#include "models/error.h"

namespace zeroplan::eager {
namespace {

class Gpt2Attention {
 public:
  Gpt2Attention() = default;
  Gpt2Attention(Context& context, const std::string& path) : context_(&context) {
    const std::int64_t hidden = context.sizes.hidden;
    module_ = context.module(path, "GPT2Attention");
    qkv_ = Linear(context, path + ".c_attn", hidden, 3 * hidden, true, LinearKind::conv1d);
    out_ = Linear(context, path + ".c_proj", hidden, hidden, true, LinearKind::conv1d);
    probability_ = context.number("attn_pdrop", 0.1);
    attention_dropout_ = Dropout(context, path + ".attn_dropout", probability_);
    dropout_ = Dropout(context, path + ".resid_dropout", context.number("resid_pdrop", 0.1));
  }

  AttentionResult operator()(const Tensor& x, const Tensor& mask) const {
    return framed(context_->tape, module_, x, [&](const Tensor& own) { return forward(own, mask); });
  }

 private:
  AttentionResult forward(const Tensor& x, const Tensor& mask) const {
    const Architecture& a = context_->sizes;
    const std::int64_t batch = x.size(0), length = x.size(1);
    Tensors parts = split(qkv_(x), {a.hidden, a.hidden, a.hidden}, 2);
    const auto heads = [&](Tensor part) {
      return transpose(view(std::move(part), {batch, length, -1, a.head_dim}), 1, 2);
    };
    Tensor k = heads(std::move(parts[1]));
    Tensor v = heads(std::move(parts[2]));
    Tensor q = heads(std::move(parts[0]));
    AttentionCall call;
    call.dropout = probability_;
    call.upcast = false;
    call.contiguous_output = false;
    AttentionResult result = attention(*context_, q, k, v, mask, call);
    result.output = contiguous(reshape(std::move(result.output), {batch, length, -1}));
    result.output = out_(result.output);
    result.output = dropout_(result.output);
    drop(q, k, v);
    return result;
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  Linear qkv_, out_;
  Dropout attention_dropout_, dropout_;
  double probability_ = 0;
};

class Gpt2Block {
 public:
  Gpt2Block(Context& context, const std::string& path) : context_(&context) {
    const std::int64_t hidden = context.sizes.hidden;
    module_ = context.module(path, "GPT2Block", true);
    norm1_ = Norm(context, path + ".ln_1", "LayerNorm", NormStyle::layer, {hidden}, true);
    attention_ = Gpt2Attention(context, path + ".attn");
    norm2_ = Norm(context, path + ".ln_2", "LayerNorm", NormStyle::layer, {hidden}, true);
    mlp_ = FeedForward(context, path + ".mlp", {"GPT2MLP", "c_fc", "c_proj"}, LinearKind::conv1d,
                       context.number("resid_pdrop", 0.1));
  }

  /// inputs: hidden, mask, positions.
  Tensors operator()(const Tensors& inputs) const {
    return {framed(context_->tape, module_, inputs[0], [&](Tensor own) { return forward(std::move(own), inputs[1]); })};
  }

 private:
  Tensor forward(Tensor hidden, const Tensor& mask) const {
    Tensor residual = hidden;
    hidden = norm1_(hidden);
    AttentionResult attended = attention_(hidden, mask);
    hidden = add(attended.output, residual);
    residual = hidden;
    hidden = norm2_(hidden);
    Tensor fed = mlp_(hidden);
    hidden = add(residual, fed);
    Tensor out = std::move(hidden);
    drop(residual, attended.output, attended.weights, fed);
    return out;
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  Norm norm1_, norm2_;
  Gpt2Attention attention_;
  FeedForward mlp_;
};

class Gpt2 : public CausalModel {
 public:
  explicit Gpt2(Context& context) : CausalModel(context, "GPT2LMHeadModel") {
    const Architecture& a = context.sizes;
    model_ = context.module("transformer", "GPT2Model");
    tokens_ = Embedding(context, "transformer.wte", a.vocab, a.hidden).as_input();
    positions_ = Embedding(context, "transformer.wpe", a.position_rows, a.hidden);
    dropout_ = Dropout(context, "transformer.drop", context.number("embd_pdrop", 0.1));
    layers_ = make_layers<Gpt2Block>(context, "transformer.h");
    norm_ = Norm(context, "transformer.ln_f", "LayerNorm", NormStyle::layer, {a.hidden}, true);
    head_ = Head(context, a.tied ? tokens_.weight() : -1, false);
  }

 private:
  Tensor base(const Tensor& ids) override {
    Tape& tape = context_->tape;
    tape.forward_pre(model_);
    Tensor embedded = tokens_(ids);
    Tensor positions = unsqueeze(position_range(tape, context_->length()), 0);
    Tensor placed = positions_(positions);
    Tensor hidden = add(embedded, placed);
    Tensor mask = plain_mask(*context_);
    hidden = dropout_(hidden);
    hidden = run_layers(*context_, layers_, std::move(hidden), 2, [&](std::size_t) {
      return Tensors{mask, positions};
    });
    Tensor out = norm_(hidden);
    hidden = out;
    drop(positions, embedded, placed, hidden, mask);
    tape.forward_post(model_, {&out});
    return out;
  }

  int model_ = -1;
  Embedding tokens_, positions_;
  Dropout dropout_;
  std::vector<Gpt2Block> layers_;
  Norm norm_;
};

}  // namespace

std::unique_ptr<EagerModel> make_gpt2(Context& context) {
  if (context.config.flag("reorder_and_upcast_attn", false) || context.config.flag("add_cross_attention", false)) {
    throw InputError("eager step: gpt2 with reorder_and_upcast_attn or add_cross_attention is not known");
  }
  return std::make_unique<Gpt2>(context);
}

}  // namespace zeroplan::eager
