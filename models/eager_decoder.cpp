#include "models/eager_decoder.h"

#include <algorithm>

#include <fmt/format.h>

#include "models/eager_decoder_parts.h"
#include "models/eager_experts.h"
#include "models/eager_mla.h"

namespace zeroplan::eager {

std::string class_name(const DecoderStyle& style, std::string_view part) {
  return fmt::format("{}{}", style.classes, part);
}

std::string norm_class(const DecoderStyle& style) {
  return style.norm == NormStyle::layer ? std::string("LayerNorm") : class_name(style, style.norm_class);
}

namespace {

class DecoderLayer {
 public:
  DecoderLayer(Context& context, const DecoderStyle& style, const std::string& path)
      : context_(&context), style_(&style), residual_(context.sizes.family.residual) {
    const Architecture& a = context.sizes;
    const TensorNames& names = a.family.names;
    module_ = context.module(path, class_name(style, "DecoderLayer"), true);
    if (a.family.mla) {
      latent_attention_ = MlaAttention(context, style, path + ".self_attn");
    } else {
      attention_ = DecoderAttention(context, style, path + ".self_attn");
    }
    moe_ = a.layers[static_cast<std::size_t>(context.layer)].moe;
    if (moe_) {
      experts_ = MoeMlp(context, style, path + ".mlp");
    } else {
      mlp_ = DecoderMlp(context, style, path + ".mlp", a.width);
    }
    const auto norm = [&](std::string_view name) {
      return Norm(context, fmt::format("{}.{}", path, name), norm_class(style), style.norm, {a.hidden},
                  a.family.norm == NormKind::layer);
    };
    norm1_ = norm(names.norm1);
    if (residual_ != Residual::parallel_one_norm) norm2_ = norm(names.norm2);
    if (residual_ == Residual::sandwich) {
      norm3_ = norm(names.norm3);
      norm4_ = norm(names.norm4);
    }
    if (!style.residual_dropout.empty()) {
      dropout_ = context.number(style.residual_dropout, 0);
      if (style.dropout_modules) add_dropouts(context, path);
    }
  }

  /// inputs: hidden, mask, then tables and positions in the caller's order.
  Tensors operator()(const Tensors& inputs) const {
    Tape& tape = context_->tape;
    tape.forward_pre(module_);
    const BlockArguments arguments = style_->positions_first
                                         ? BlockArguments{inputs[1], {inputs[4], inputs[3]}, inputs[2]}
                                         : BlockArguments{inputs[1], {inputs[3], inputs[2]}, inputs[4]};
    Tensor out = forward(tape.own(module_, inputs[0]), arguments);
    tape.forward_post(module_, {&out});
    return {std::move(out)};
  }

 private:
  void add_dropouts(Context& context, const std::string& path) {
    if (residual_ == Residual::parallel_one_norm) {
      attention_dropout_ = Dropout(context, path + ".resid_dropout", dropout_);
      mlp_dropout_ = attention_dropout_;
    } else {
      attention_dropout_ = Dropout(context, path + ".resid_attn_dropout", dropout_);
      mlp_dropout_ = Dropout(context, path + ".resid_mlp_dropout", dropout_);
    }
  }

  Tensor forward(Tensor hidden, const BlockArguments& arguments) const {
    switch (residual_) {
      case Residual::parallel_one_norm:
        return style_->dropout_modules ? parallel_with_dropout(std::move(hidden), arguments)
                                       : parallel(std::move(hidden), arguments);
      default:
        return sequential(std::move(hidden), arguments);
    }
  }

  /// Llama, and with norms elsewhere Gemma 2 and 3 and OLMo-2.
  Tensor sequential(Tensor given, const BlockArguments& arguments) const {
    const bool sandwich = residual_ == Residual::sandwich, post = residual_ == Residual::post_sublayer;
    // A stopped recomputation drops hidden before residual, as Python's frame does: C++ in reverse of declaration.
    Tensor residual = given;
    Tensor hidden = std::move(given);
    if (!post) hidden = norm1_(hidden);
    AttentionResult attended =
        context_->sizes.family.mla ? latent_attention_(hidden, arguments) : attention_(hidden, arguments);
    hidden = std::move(attended.output);
    if (sandwich) hidden = norm2_(hidden);
    if (post) hidden = norm1_(hidden);
    hidden = add(residual, style_->dropout_modules ? attention_dropout_(hidden) : hidden);
    residual = hidden;
    if (!post) hidden = sandwich ? norm3_(hidden) : norm2_(hidden);
    Tensor routed;  // gpt-oss returns its routing weights: they take the place of the attention's
    hidden = moe_ ? experts_(hidden, routed) : mlp_(hidden);
    if (routed) attended.weights = std::move(routed);
    if (sandwich) hidden = norm4_(hidden);
    if (post) hidden = norm2_(hidden);
    hidden = add(residual, style_->dropout_modules ? mlp_dropout_(hidden) : hidden);
    Tensor out = std::move(hidden);
    drop(residual, attended.weights);
    return out;
  }

  /// Cohere: x + attention + MLP.
  Tensor parallel(Tensor hidden, const BlockArguments& arguments) const {
    Tensor residual = hidden;
    hidden = norm1_(hidden);
    AttentionResult attended = attention_(hidden, arguments);
    Tensor fed = mlp_(hidden);
    hidden = add(add(residual, attended.output), fed);
    Tensor out = std::move(hidden);
    drop(residual, attended.output, attended.weights, fed);
    return out;
  }

  /// Phi: attention + MLP + x, each through dropout.
  Tensor parallel_with_dropout(Tensor hidden, const BlockArguments& arguments) const {
    Tensor residual = hidden;
    hidden = norm1_(hidden);
    AttentionResult attended = attention_(hidden, arguments);
    attended.output = attention_dropout_(attended.output);
    Tensor fed = mlp_dropout_(mlp_(hidden));
    hidden = add(add(attended.output, fed), residual);
    Tensor out = std::move(hidden);
    drop(residual, attended.output, attended.weights, fed);
    return out;
  }

  const Context* context_ = nullptr;
  const DecoderStyle* style_ = nullptr;
  Residual residual_;
  int module_ = -1;
  DecoderAttention attention_;
  MlaAttention latent_attention_;
  DecoderMlp mlp_;
  MoeMlp experts_;
  bool moe_ = false;
  Norm norm1_, norm2_, norm3_, norm4_;
  Dropout attention_dropout_, mlp_dropout_;
  double dropout_ = 0;
};

class Decoder : public CausalModel {
 public:
  Decoder(Context& context, const DecoderStyle& style)
      : CausalModel(context, class_name(style, "ForCausalLM")), style_(&style) {
    const Architecture& a = context.sizes;
    const bool text = style.family == "gemma3_text";
    model_ = context.module("model", class_name(style, text ? "TextModel" : "Model"));
    embedding_ = Embedding(context, "model.embed_tokens", a.vocab, a.hidden,
                           style.scaled_embedding ? class_name(style, "TextScaledWordEmbedding") : "Embedding")
                     .as_input();
    if (style.scaled_embedding) embedding_.scale();
    layers_ = make_layers<DecoderLayer>(context, "model.layers", style);
    add_ends(context);
    head_ = Head(context, a.tied ? embedding_.weight() : -1, !a.family.names.head_bias.empty());
    softcap_ = context.number("final_logit_softcapping", style.softcap);
  }

 private:
  struct Masks {
    Tensor full, sliding;
  };

  /// Final norm and rotary tables, in the order of registration.
  void add_ends(Context& context) {
    const Architecture& a = context.sizes;
    const auto norm = [&] {
      norm_ = Norm(context, std::string(a.family.names.final_norm), norm_class(*style_), style_->norm, {a.hidden},
                   a.family.norm == NormKind::layer);
    };
    const bool phi = style_->family == "phi";
    if (!phi) norm();
    rotary_ =
        RotaryEmbedding(context, "model.rotary_emb", class_name(*style_, "RotaryEmbedding"),
                        a.family.mla ? a.mla.rope_dim
                                     : rotary_width(context, a.head_dim, "partial_rotary_factor", style_->rotary_part));
    if (style_->rotary == RotaryKind::wide_tables) rotary_.keep_wide();
    if (style_->complex_tables) rotary_.make_complex();
    if (style_->rotary == RotaryKind::halves) rotary_.keep_single();
    if (!phi) return;
    embedding_dropout_ = Dropout(context, "model.embed_dropout", context.number(style_->embedding_dropout, 0));
    norm();
  }

  Tensor finish_logits(Tensor logits) const override {
    if (style_->scaled_logits) logits = mul_scalar(std::move(logits));
    if (softcap_ > 0) {
      logits = div_scalar(std::move(logits));
      logits = activate(std::move(logits), Activation::tanh);
      logits = mul_scalar(std::move(logits));
    }
    return logits;
  }

  Masks masks() const {
    const std::vector<LayerTraits>& layers = context_->sizes.layers;
    const auto windowed = std::ranges::find_if(layers, [](const LayerTraits& layer) { return layer.window > 0; });
    MaskOptions full;
    full.additive = context_->options.attention == EagerAttention::eager;
    MaskOptions sliding = full;
    if (windowed != layers.end()) sliding.window = windowed->window;
    const bool has_window = windowed != layers.end();
    switch (style_->masks) {
      case MaskKind::one:
        return {causal_mask(*context_, sliding), {}};
      case MaskKind::by_layer:
      case MaskKind::both:
        break;
    }
    Masks masks;
    masks.full = causal_mask(*context_, full);
    if (has_window || style_->masks == MaskKind::both) masks.sliding = causal_mask(*context_, sliding);
    return masks;
  }

  Tensor base(const Tensor& ids) override {
    Tape& tape = context_->tape;
    tape.forward_pre(model_);
    Tensor embedded = embedding_(ids);
    Tensor positions = unsqueeze(position_range(tape, context_->length()), 0);
    Masks made = masks();
    if (style_->family == "phi") embedded = embedding_dropout_(embedded);
    Tensor hidden = embedded;
    if (style_->family == "starcoder2") hidden = dropout(hidden, context_->number(style_->embedding_dropout, 0));
    std::vector<RotaryTables> tables = {rotary_(hidden, positions)};
    if (style_->rotary_per_type) tables.push_back(rotary_(hidden, positions));
    hidden = run(std::move(hidden), made, tables, positions);
    Tensor out = norm_(hidden);
    hidden = out;
    leave(positions, embedded, made, hidden, tables);
    tape.forward_post(model_, {&out});
    return out;
  }

  Tensor run(Tensor hidden, const Masks& made, const std::vector<RotaryTables>& tables, const Tensor& positions) const {
    return run_layers(*context_, layers_, std::move(hidden), 1, [&](std::size_t i) {
      const bool slides = context_->sizes.layers[i].window > 0;
      const Tensor& mask = style_->masks != MaskKind::one && slides ? made.sliding : made.full;
      const RotaryTables& rotary = tables.size() > 1 && slides ? tables[1] : tables[0];
      return style_->positions_first ? Tensors{mask, positions, rotary.sin, rotary.cos}
                                     : Tensors{mask, rotary.sin, rotary.cos, positions};
    });
  }

  /// Variables die in the order in which the function first names them.
  void leave(Tensor& positions, Tensor& embedded, Masks& made, Tensor& hidden,
             std::vector<RotaryTables>& tables) const {
    if (style_->sinks) {  // gpt-oss: its dictionary has no positions
      drop(positions, made.full, made.sliding, embedded);
    } else if (style_->masks == MaskKind::one) {
      drop(positions, embedded, made.full);
    } else {
      drop(made.full, made.sliding, embedded, positions);
    }
    hidden.drop();
    for (RotaryTables& table : tables) drop(table.sin, table.cos);
  }

  const DecoderStyle* style_ = nullptr;
  int model_ = -1;
  Embedding embedding_;
  Dropout embedding_dropout_;
  std::vector<DecoderLayer> layers_;
  Norm norm_;
  RotaryEmbedding rotary_;
  double softcap_ = 0;
};

}  // namespace

std::unique_ptr<EagerModel> make_decoder(Context& context, const DecoderStyle& style) {
  return std::make_unique<Decoder>(context, style);
}

}  // namespace zeroplan::eager
