// MosaicML's own MPT (llm-foundry, Composer), not transformers': fused attention, fused cross-entropy. The order within
// a layer is the module's; no measured run of data/ holds it, so it is bookkeeping by the source alone.

#include "models/eager_gpt.h"
#include "models/error.h"

namespace zeroplan::eager {
namespace {

bool is_early(const Context& context) { return context.options.code == EagerCode::llm_foundry_early; }

/// Low-precision LayerNorm; before May 2023 autocast's fp32 one between casts.
class FoundryNorm {
 public:
  FoundryNorm() = default;
  FoundryNorm(Context& context, const std::string& path)
      : context_(&context), norm_(context, path, "LPLayerNorm", NormStyle::layer, {context.sizes.hidden}, false) {}
  Tensor operator()(const Tensor& x) const {
    if (!is_early(*context_)) return norm_(x);
    return to(norm_(to(x, Element::fp32)), x.type());
  }

 private:
  const Context* context_ = nullptr;
  Norm norm_;
};

class FoundryAttention {
 public:
  FoundryAttention() = default;
  FoundryAttention(Context& context, const std::string& path) : context_(&context) {
    const std::int64_t hidden = context.sizes.hidden;
    module_ = context.module(path, "MultiheadAttention");
    qkv_ = Linear(context, path + ".Wqkv", hidden, 3 * hidden, false);
    out_ = Linear(context, path + ".out_proj", hidden, hidden, false);
  }

  Tensor operator()(Tensor x) const {
    return call(context_->tape, module_, std::move(x), [&](Tensor own) { return forward(std::move(own)); });
  }

 private:
  Tensor forward(Tensor x) const {
    const Architecture& a = context_->sizes;
    const std::int64_t batch = x.size(0), length = x.size(1);
    Tensors parts = split(qkv_(std::move(x)), {a.hidden, a.hidden, a.hidden}, 2);
    for (Tensor& part : parts) {
      if (is_early(*context_)) part = clone(std::move(part));  // bert_padding.unpad_input gathers each
      part = transpose(view(std::move(part), {batch, length, a.heads, a.head_dim}), 1, 2);
    }
    Tensor mixed = sdpa(std::move(parts[0]), std::move(parts[1]), std::move(parts[2]), Tensor(), SdpaOptions{});
    mixed = reshape(transpose(std::move(mixed), 1, 2), {batch, length, a.hidden});
    return out_(std::move(mixed));
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  Linear qkv_, out_;
};

class FoundryBlock {
 public:
  FoundryBlock(Context& context, const std::string& path) : context_(&context) {
    const Architecture& a = context.sizes;
    module_ = context.module(path, "MPTBlock", true);
    norm1_ = FoundryNorm(context, path + ".norm_1");
    attention_ = FoundryAttention(context, path + ".attn");
    norm2_ = FoundryNorm(context, path + ".norm_2");
    feed_ = context.module(path + ".ffn", "MPTMLP");
    up_ = Linear(context, path + ".ffn.up_proj", a.hidden, a.width, false);
    down_ = Linear(context, path + ".ffn.down_proj", a.width, a.hidden, false);
  }

  /// inputs: hidden.
  Tensors operator()(const Tensors& inputs) const {
    return {framed(context_->tape, module_, inputs[0], [&](Tensor own) { return forward(std::move(own)); })};
  }

 private:
  Tensor forward(Tensor x) const {
    Tensor normed = norm1_(x);
    Tensor mixed = attention_(normed);
    x = add(x, mixed);
    normed = norm2_(x);
    Tensor fed = call(context_->tape, feed_, normed,
                      [&](Tensor own) { return down_(activate(up_(std::move(own)), Activation::gelu)); });
    x = add(x, fed);
    drop(normed, mixed, fed);
    return x;
  }

  const Context* context_ = nullptr;
  int module_ = -1, feed_ = -1;
  FoundryNorm norm1_, norm2_;
  FoundryAttention attention_;
  Linear up_, down_;
};

class FoundryMpt : public EagerModel {
 public:
  explicit FoundryMpt(Context& context) : context_(&context) {
    const Architecture& a = context.sizes;
    root_ = context.module("", "MPTForCausalLM");
    model_ = context.module("transformer", "MPTModel");
    tokens_ = Embedding(context, "transformer.wte", a.vocab, a.hidden, "SharedEmbedding").as_input();
    if (a.position_rows > 0) positions_ = Embedding(context, "transformer.wpe", a.position_rows, a.hidden);
    layers_ = make_layers<FoundryBlock>(context, "transformer.blocks");
    norm_ = FoundryNorm(context, "transformer.norm_f");
  }

  Tensor forward(const Tensor& ids, const Tensor& labels, Tensor& logits) override {
    Tape& tape = context_->tape;
    tape.forward_pre(root_);
    Tensor hidden = base(ids);
    logits = linear(std::move(hidden), context_->value(tokens_.weight()), Tensor());
    Tensor loss = is_early(*context_) ? causal_loss(*context_, logits, labels) : fused_loss(logits);
    tape.forward_post(root_, {&loss, &logits});
    return loss;
  }

 private:
  Tensor base(const Tensor& ids) {
    Tape& tape = context_->tape;
    tape.forward_pre(model_);
    Tensor hidden = tokens_(ids);
    if (context_->sizes.position_rows > 0) {
      Tensor placed = positions_(unsqueeze(position_range(tape, context_->length()), 0));
      hidden = add(std::move(hidden), std::move(placed));
    }
    hidden = run_layers(*context_, layers_, std::move(hidden), 1, [](std::size_t) { return Tensors{}; });
    Tensor out = norm_(hidden);
    hidden.drop();
    tape.forward_post(model_, {&out});
    return out;
  }

  const Context* context_ = nullptr;
  int root_ = -1, model_ = -1;
  Embedding tokens_, positions_;
  std::vector<FoundryBlock> layers_;
  FoundryNorm norm_;
};

}  // namespace

std::unique_ptr<EagerModel> make_llm_foundry(Context& context) {
  const Architecture& a = context.sizes;
  if (context.model.family != "mpt" || a.family.qk_norm != QkNorm::none || a.kv_heads != a.heads || !a.tied ||
      context.number("attn_config/clip_qkv", 0) > 0 || context.config.flag("attn_config/alibi", false) ||
      context.number("attn_config/attn_pdrop", 0) > 0 || context.options.attention != EagerAttention::sdpa ||
      context.type == Element::fp32) {
    throw InputError(
        "eager step: llm-foundry's graph is known for MPT with learned positions, tied embeddings, 16 bits and without "
        "qk_ln, shared keys, clip_qkv and dropout");
  }
  return std::make_unique<FoundryMpt>(context);
}

}  // namespace zeroplan::eager
