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
  DecoderLayer(Context& context, const DecoderStyle& style, const std::string& path) : context_(&context) {
    const Architecture& a = context.sizes;
    module_ = context.module(path, class_name(style, "DecoderLayer"), true);
    attention_ = Attention(context, style, path + ".self_attn");
    mlp_ = GatedMlp(context, style, path + ".mlp");
    const std::string norm = class_name(style, "RMSNorm");
    norm1_ = Norm(context, path + ".input_layernorm", norm, style.norm, {a.hidden}, false);
    norm2_ = Norm(context, path + ".post_attention_layernorm", norm, style.norm, {a.hidden}, false);
  }

  /// inputs: hidden, mask, cos, sin, positions.
  Tensors operator()(const Tensors& inputs) const {
    Tape& tape = context_->tape;
    tape.forward_pre(module_);
    const BlockArguments arguments = {inputs[1], {inputs[3], inputs[2]}, inputs[4]};
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
};

class Decoder : public EagerModel {
 public:
  Decoder(Context& context, const DecoderStyle& style) : context_(&context) {
    const Architecture& a = context.sizes;
    root_ = context.module("", class_name(style, "ForCausalLM"));
    model_ = context.module("model", class_name(style, "Model"));
    embedding_ = Embedding(context, "model.embed_tokens", a.vocab, a.hidden);
    context.module("model.layers", "ModuleList");
    for (std::size_t i = 0; i < a.layers.size(); ++i) {
      context.layer = static_cast<int>(i);
      layers_.emplace_back(context, style, fmt::format("model.layers.{}", i));
    }
    context.layer = -1;
    norm_ = Norm(context, "model.norm", class_name(style, "RMSNorm"), style.norm, {a.hidden}, false);
    rotary_ = RotaryEmbedding(context, "model.rotary_emb", class_name(style, "RotaryEmbedding"), a.head_dim);
    head_ = Head(context, a.tied ? embedding_.weight() : -1);
  }

  Tensor forward(const Tensor& ids, const Tensor& labels, Tensor& logits) override {
    Tape& tape = context_->tape;
    tape.forward_pre(root_);
    Tensor hidden = base(ids);
    logits = head_(hidden);
    Tensor loss = causal_loss(*context_, logits, labels);
    tape.forward_post(root_, {&loss, &logits});
    return loss;
  }

 private:
  struct Head {
    Head() = default;
    Head(Context& where, int tied) : context(&where) {
      module = where.module("lm_head", "Linear");
      weight = tied >= 0 ? tied : where.parameter(module, "weight", {where.sizes.vocab, where.sizes.hidden});
      if (tied >= 0) where.share(module, tied);
    }
    Tensor operator()(Tensor x) const {
      return call(context->tape, module, std::move(x),
                  [&](Tensor own) { return linear(std::move(own), context->value(weight), {}); });
    }
    const Context* context = nullptr;
    int module = -1, weight = -1;
  };

  Tensor base(const Tensor& ids) const {
    Tape& tape = context_->tape;
    tape.forward_pre(model_);
    Tensor embedded = embedding_(ids);
    Tensor positions = unsqueeze(position_range(tape, context_->length()), 0);
    MaskOptions mask_options;
    mask_options.additive = context_->options.attention == EagerAttention::eager;
    Tensor mask = causal_mask(*context_, mask_options);
    Tensor hidden = embedded;
    RotaryTables rotary = rotary_(hidden, positions);
    for (const DecoderLayer& layer : layers_) {
      Tensors inputs = {hidden, mask, rotary.sin, rotary.cos, positions};
      if (context_->options.checkpointing) {
        hidden = tape.checkpoint([&layer](const Tensors& again) { return layer(again); }, std::move(inputs), 1,
                                 context_->options.reentrant)[0];
      } else {
        Tensors outputs = layer(inputs);
        inputs.clear();
        hidden = std::move(outputs[0]);
      }
    }
    Tensor out = norm_(hidden);
    hidden = out;
    drop(positions, embedded, mask, hidden);
    drop(rotary.sin, rotary.cos);
    tape.forward_post(model_, {&out});
    return out;
  }

  const Context* context_ = nullptr;
  int root_ = -1, model_ = -1;
  Embedding embedding_;
  std::vector<DecoderLayer> layers_;
  Norm norm_;
  RotaryEmbedding rotary_;
  Head head_;
};

}  // namespace

std::unique_ptr<EagerModel> make_decoder(Context& context, const DecoderStyle& style) {
  return std::make_unique<Decoder>(context, style);
}

const DecoderStyle* find_decoder_style(std::string_view family) {
  static const std::vector<DecoderStyle> rows = {
      {"llama", "Llama", NormStyle::rms},
      {"mistral", "Mistral", NormStyle::rms},
      {"qwen2", "Qwen2", NormStyle::rms},
  };
  for (const DecoderStyle& row : rows) {
    if (row.family == family) return &row;
  }
  return nullptr;
}

}  // namespace zeroplan::eager
