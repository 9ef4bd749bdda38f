#include "models/eager_decoder.h"

#include <fmt/format.h>

namespace zeroplan::eager {
namespace {

/// Keyword arguments of every block.
struct BlockArguments {
  Tensor mask;
  RotaryTables rotary;
  Tensor positions;
};

std::string class_name(const DecoderStyle& style, std::string_view part) {
  return fmt::format("{}{}", style.classes, part);
}

class GatedMlp {
 public:
  GatedMlp() = default;
  GatedMlp(Context& context, const DecoderStyle& style, const std::string& path) : context_(&context) {
    const Architecture& a = context.sizes;
    module_ = context.module(path, class_name(style, "MLP"));
    gate_ = Linear(context, path + ".gate_proj", a.hidden, a.width, a.family.biases.mlp);
    up_ = Linear(context, path + ".up_proj", a.hidden, a.width, a.family.biases.mlp);
    down_ = Linear(context, path + ".down_proj", a.width, a.hidden, a.family.biases.mlp);
    activation_ = ActivationModule(context, path + ".act_fn", a.activation);
  }
  Tensor operator()(Tensor x) const {
    return call(context_->tape, module_, std::move(x), [&](const Tensor& own) {
      Tensor gate = activation_(gate_(own));
      Tensor up = up_(own);
      return down_(mul(std::move(gate), std::move(up)));
    });
  }

 private:
  const Context* context_ = nullptr;
  int module_ = -1;
  Linear gate_, up_, down_;
  ActivationModule activation_;
};

class Attention {
 public:
  Attention() = default;
  Attention(Context& context, const DecoderStyle& style, const std::string& path) : context_(&context) {
    const Architecture& a = context.sizes;
    const Biases& bias = a.family.biases;
    module_ = context.module(path, class_name(style, "Attention"));
    q_ = Linear(context, path + ".q_proj", a.hidden, a.heads * a.head_dim, bias.qkv);
    k_ = Linear(context, path + ".k_proj", a.hidden, a.kv_heads * a.head_dim, bias.qkv);
    v_ = Linear(context, path + ".v_proj", a.hidden, a.kv_heads * a.head_dim, bias.qkv);
    out_ = Linear(context, path + ".o_proj", a.heads * a.head_dim, a.hidden, bias.out);
    dropout_ = context.number("attention_dropout", 0);
  }

  AttentionResult operator()(const Tensor& x, const BlockArguments& arguments) const {
    Tape& tape = context_->tape;
    tape.forward_pre(module_);
    AttentionResult result = forward(tape.own(module_, x), arguments);
    tape.forward_post(module_, {&result.output, &result.weights});
    return result;
  }

 private:
  Tensor heads(Tensor x) const {
    const Architecture& a = context_->sizes;
    const std::int64_t batch = x.size(0), length = x.size(1);
    return transpose(view(std::move(x), {batch, length, -1, a.head_dim}), 1, 2);
  }

  AttentionResult forward(const Tensor& x, const BlockArguments& arguments) const {
    const Architecture& a = context_->sizes;
    Tensor q = heads(q_(x));
    Tensor k = heads(k_(x));
    Tensor v = heads(v_(x));
    {
      const Tensor cos = unsqueeze(arguments.rotary.cos, 1);
      const Tensor sin = unsqueeze(arguments.rotary.sin, 1);
      Tensor turned_q = rotate(q, cos, sin);
      Tensor turned_k = rotate(k, cos, sin);
      q = std::move(turned_q);
      k = std::move(turned_k);
    }
    AttentionCall call;
    call.groups = a.heads / a.kv_heads;
    call.dropout = dropout_;
    AttentionResult result = attention(*context_, q, k, v, arguments.mask, call);
    const std::int64_t batch = x.size(0), length = x.size(1);
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

class DecoderLayer {
 public:
  DecoderLayer(Context& context, const DecoderStyle& style, const std::string& path)
      : context_(&context), positions_first_(style.positions_first) {
    const Architecture& a = context.sizes;
    module_ = context.module(path, class_name(style, "DecoderLayer"), true);
    attention_ = Attention(context, style, path + ".self_attn");
    mlp_ = GatedMlp(context, style, path + ".mlp");
    const std::string norm = class_name(style, "RMSNorm");
    norm1_ = Norm(context, path + ".input_layernorm", norm, style.norm, {a.hidden}, false);
    norm2_ = Norm(context, path + ".post_attention_layernorm", norm, style.norm, {a.hidden}, false);
  }

  /// inputs: hidden, mask, then tables and positions in the caller's order.
  Tensors operator()(const Tensors& inputs) const {
    Tape& tape = context_->tape;
    tape.forward_pre(module_);
    const BlockArguments arguments = positions_first_ ? BlockArguments{inputs[1], {inputs[4], inputs[3]}, inputs[2]}
                                                      : BlockArguments{inputs[1], {inputs[3], inputs[2]}, inputs[4]};
    Tensor out = forward(tape.own(module_, inputs[0]), arguments);
    tape.forward_post(module_, {&out});
    return {std::move(out)};
  }

 private:
  Tensor forward(Tensor hidden, const BlockArguments& arguments) const {
    Tensor residual = hidden;
    hidden = norm1_(hidden);
    AttentionResult attended = attention_(hidden, arguments);
    hidden = std::move(attended.output);
    hidden = add(residual, hidden);
    residual = hidden;
    hidden = norm2_(hidden);
    hidden = mlp_(hidden);
    Tensor out = add(residual, hidden);
    drop(hidden, residual, attended.weights);
    return out;
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  Attention attention_;
  GatedMlp mlp_;
  Norm norm1_, norm2_;
  bool positions_first_ = false;
};

class Decoder : public CausalModel {
 public:
  Decoder(Context& context, const DecoderStyle& style) : CausalModel(context, class_name(style, "ForCausalLM")) {
    const Architecture& a = context.sizes;
    model_ = context.module("model", class_name(style, "Model"));
    embedding_ = Embedding(context, "model.embed_tokens", a.vocab, a.hidden).as_input();
    context.module("model.layers", "ModuleList");
    for (std::size_t i = 0; i < a.layers.size(); ++i) {
      context.layer = static_cast<int>(i);
      layers_.emplace_back(context, style, fmt::format("model.layers.{}", i));
    }
    context.layer = -1;
    norm_ = Norm(context, "model.norm", class_name(style, "RMSNorm"), style.norm, {a.hidden}, false);
    rotary_ = RotaryEmbedding(context, "model.rotary_emb", class_name(style, "RotaryEmbedding"), a.head_dim);
    head_ = Head(context, a.tied ? embedding_.weight() : -1, false);
    positions_first_ = style.positions_first;
  }

 private:
  Tensor base(const Tensor& ids) override {
    Tape& tape = context_->tape;
    tape.forward_pre(model_);
    Tensor embedded = embedding_(ids);
    Tensor positions = unsqueeze(position_range(tape, context_->length()), 0);
    MaskOptions mask_options;
    mask_options.additive = context_->options.attention == EagerAttention::eager;
    mask_options.window = context_->sizes.layers[0].window;
    Tensor mask = causal_mask(*context_, mask_options);
    Tensor hidden = embedded;
    RotaryTables rotary = rotary_(hidden, positions);
    hidden = run_layers(*context_, layers_, std::move(hidden), 1, [&](std::size_t) {
      return positions_first_ ? Tensors{mask, positions, rotary.sin, rotary.cos}
                              : Tensors{mask, rotary.sin, rotary.cos, positions};
    });
    Tensor out = norm_(hidden);
    hidden = out;
    drop(positions, embedded, mask, hidden);
    drop(rotary.sin, rotary.cos);
    tape.forward_post(model_, {&out});
    return out;
  }

  int model_ = -1;
  Embedding embedding_;
  std::vector<DecoderLayer> layers_;
  Norm norm_;
  RotaryEmbedding rotary_;
  bool positions_first_ = false;
};

}  // namespace

std::unique_ptr<EagerModel> make_decoder(Context& context, const DecoderStyle& style) {
  return std::make_unique<Decoder>(context, style);
}

const DecoderStyle* find_decoder_style(std::string_view family) {
  static const std::vector<DecoderStyle> rows = {
      {"llama", "Llama", NormStyle::rms},
      {"mistral", "Mistral", NormStyle::rms, true},
      {"qwen2", "Qwen2", NormStyle::rms},
  };
  for (const DecoderStyle& row : rows) {
    if (row.family == family) return &row;
  }
  return nullptr;
}

}  // namespace zeroplan::eager
