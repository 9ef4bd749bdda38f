// T5: encoder and decoder. Its attention: eager_t5_attention.h.

#include <fmt/format.h>

#include "models/eager_gpt.h"
#include "models/eager_t5_attention.h"

namespace zeroplan::eager {
namespace {

class T5AttentionLayer {
 public:
  T5AttentionLayer() = default;
  T5AttentionLayer(Context& context, const std::string& path, bool decoder, bool cross, bool has_bias)
      : context_(&context), cross_(cross) {
    module_ = context.module(path, cross ? "T5LayerCrossAttention" : "T5LayerSelfAttention");
    attention_ = T5Attention(context, path + (cross ? ".EncDecAttention" : ".SelfAttention"), decoder, cross, has_bias);
    norm_ = Norm(context, path + ".layer_norm", "T5LayerNorm", NormStyle::t5, {context.sizes.hidden}, false);
    dropout_ = Dropout(context, path + ".dropout", context.number("dropout_rate", 0.1));
  }

  T5AttentionResult operator()(const Tensor& x, const Tensor& states, const Tensor& mask, const Tensor& bias) const {
    Tape& tape = context_->tape;
    tape.forward_pre(module_);
    const Tensor own = tape.own(module_, x);
    const Tensor own_states = tape.own(module_, states);
    const Tensor own_bias = tape.own(module_, bias);
    T5AttentionResult result = forward(own, own_states, mask, own_bias);
    tape.forward_post(module_, {&result.output, &result.bias, &result.weights});
    return result;
  }

 private:
  T5AttentionResult forward(const Tensor& x, const Tensor& states, const Tensor& mask, const Tensor& bias) const {
    Tensor normed = norm_(x);
    T5AttentionResult result = attention_(normed, mask, states, bias);
    Tensor dropped = dropout_(result.output);
    Tensor sum_of = add(x, std::move(dropped));
    if (cross_) normed.drop();
    result.output = std::move(sum_of);
    normed.drop();
    return result;
  }

  const Context* context_ = nullptr;
  bool cross_ = false;
  int module_ = -1;
  T5Attention attention_;
  Norm norm_;
  Dropout dropout_;
};

class T5Mlp {
 public:
  T5Mlp() = default;
  T5Mlp(Context& context, const std::string& path) : context_(&context), gated_(context.sizes.family.gated) {
    const Architecture& a = context.sizes;
    // "gated-gelu" is the tanh form written out (configuration_t5.py)
    const std::string function = gated_ && a.activation == "gelu" ? "gelu_new" : a.activation;
    module_ = context.module(path, gated_ ? "T5DenseGatedActDense" : "T5DenseActDense");
    if (gated_) gate_ = Linear(context, path + ".wi_0", a.hidden, a.width, false);
    up_ = Linear(context, path + (gated_ ? ".wi_1" : ".wi"), a.hidden, a.width, false);
    down_ = Linear(context, path + ".wo", a.width, a.hidden, false);
    dropout_ = Dropout(context, path + ".dropout", context.number("dropout_rate", 0.1));
    activation_ = ActivationModule(context, path + ".act", function);
  }

  Tensor operator()(Tensor x) const {
    return call(context_->tape, module_, std::move(x), [&](Tensor hidden) {
      Tensor gate, up;
      if (gated_) {
        gate = activation_(gate_(hidden));
        up = up_(hidden);
        hidden = mul(gate, up);
      } else {
        hidden = up_(hidden);
        hidden = activation_(hidden);
      }
      hidden = dropout_(hidden);
      hidden = down_(hidden);
      drop(gate, up);
      return hidden;
    });
  }

 private:
  const Context* context_ = nullptr;
  bool gated_ = false;
  int module_ = -1;
  Linear gate_, up_, down_;
  Dropout dropout_;
  ActivationModule activation_;
};

class T5FeedForward {
 public:
  T5FeedForward() = default;
  T5FeedForward(Context& context, const std::string& path) : context_(&context) {
    module_ = context.module(path, "T5LayerFF");
    mlp_ = T5Mlp(context, path + ".DenseReluDense");
    norm_ = Norm(context, path + ".layer_norm", "T5LayerNorm", NormStyle::t5, {context.sizes.hidden}, false);
    dropout_ = Dropout(context, path + ".dropout", context.number("dropout_rate", 0.1));
  }
  Tensor operator()(Tensor x) const {
    return call(context_->tape, module_, std::move(x), [&](Tensor hidden) {
      Tensor fed = norm_(hidden);
      fed = mlp_(fed);
      Tensor dropped = dropout_(fed);
      hidden = add(hidden, std::move(dropped));
      fed.drop();
      return hidden;
    });
  }

 private:
  const Context* context_ = nullptr;
  int module_ = -1;
  T5Mlp mlp_;
  Norm norm_;
  Dropout dropout_;
};

class T5Block {
 public:
  T5Block(Context& context, const std::string& path, bool decoder, bool first) : context_(&context), decoder_(decoder) {
    module_ = context.module(path, "T5Block", true);
    context.module(path + ".layer", "ModuleList");
    self_ = T5AttentionLayer(context, path + ".layer.0", decoder, false, first);
    if (decoder) cross_ = T5AttentionLayer(context, path + ".layer.1", true, true, false);
    feed_ = T5FeedForward(context, path + (decoder ? ".layer.2" : ".layer.1"));
  }

  /// inputs: hidden, mask, bias, encoder states, encoder mask, bias of cross attention. Outputs: hidden and biases.
  Tensors operator()(const Tensors& inputs) const {
    Tape& tape = context_->tape;
    tape.forward_pre(module_);
    Tensors own(inputs.size());
    for (std::size_t i = 0; i < inputs.size(); ++i) own[i] = tape.own(module_, inputs[i]);
    Tensors outputs = forward(own);
    tape.forward_post(module_, outputs);
    return outputs;
  }

 private:
  Tensors forward(const Tensors& inputs) const {
    T5AttentionResult self = self_(inputs[0], Tensor(), inputs[1], inputs[2]);
    Tensor hidden = std::move(self.output);
    Tensor cross_bias;
    if (decoder_) {
      T5AttentionResult cross = cross_(hidden, inputs[3], inputs[4], inputs[5]);
      hidden = std::move(cross.output);
      cross_bias = std::move(cross.bias);
      self.weights = std::move(cross.weights);
    }
    hidden = feed_(hidden);
    self.weights.drop();
    return {std::move(hidden), std::move(self.bias), std::move(cross_bias)};
  }

  const Context* context_ = nullptr;
  bool decoder_ = false;
  int module_ = -1;
  T5AttentionLayer self_, cross_;
  T5FeedForward feed_;
};

class T5Stack {
 public:
  T5Stack() = default;
  T5Stack(Context& context, const std::string& path, bool decoder, std::int64_t layers, int table)
      : context_(&context), decoder_(decoder), table_(table) {
    module_ = context.module(path, "T5Stack");
    embedding_ = context.module(path + ".embed_tokens", "Embedding");
    context.share(embedding_, table);
    context.module(path + ".block", "ModuleList");
    const int first = context.next_layer;
    for (std::int64_t i = 0; i < layers; ++i) {
      context.layer = first + static_cast<int>(i);
      blocks_.emplace_back(context, fmt::format("{}.block.{}", path, i), decoder, i == 0);
    }
    context.next_layer = first + static_cast<int>(layers);
    context.layer = -1;
    norm_ = Norm(context, path + ".final_layer_norm", "T5LayerNorm", NormStyle::t5, {context.sizes.hidden}, false);
    dropout_ = Dropout(context, path + ".dropout", context.number("dropout_rate", 0.1));
  }

  Tensor operator()(const Tensor& ids, const Tensor& states) const {
    Tape& tape = context_->tape;
    tape.forward_pre(module_);
    const Tensor own_states = tape.own(module_, states);
    Tensor out = forward(ids, own_states);
    tape.forward_post(module_, {&out});
    return out;
  }

 private:
  Tensor forward(const Tensor& ids, const Tensor& states) const {
    Tape& tape = context_->tape;
    Tensor embedded =
        call(tape, embedding_, ids, [&](const Tensor& own) { return embedding(context_->value(table_), own); });
    Tensor mask;
    if (decoder_ && context_->options.attention == EagerAttention::eager) mask = plain_mask(*context_);
    Tensor bias, cross_bias;
    Tensor hidden = dropout_(embedded);
    for (const T5Block& block : blocks_) {
      Tensors inputs = {hidden, mask, bias, states, Tensor(), cross_bias};
      const std::size_t positional = inputs.size();
      Tensors outputs = call_layer(*context_, block, std::move(inputs), positional);
      hidden = std::move(outputs[0]);
      bias = std::move(outputs[1]);
      cross_bias = std::move(outputs[2]);
    }
    hidden = norm_(hidden);
    hidden = dropout_(hidden);
    drop(mask, embedded, bias, cross_bias);
    return hidden;
  }

  const Context* context_ = nullptr;
  bool decoder_ = false;
  int table_ = -1, module_ = -1, embedding_ = -1;
  std::vector<T5Block> blocks_;
  Norm norm_;
  Dropout dropout_;
};

class T5 : public EagerModel {
 public:
  explicit T5(Context& context) : context_(&context) {
    const Architecture& a = context.sizes;
    root_ = context.module("", "T5ForConditionalGeneration");
    const Embedding shared(context, "shared", a.vocab, a.hidden);
    const auto layers = static_cast<std::int64_t>(a.layers.size());
    encoder_ = T5Stack(context, "encoder", false, layers, shared.weight());
    decoder_ = T5Stack(context, "decoder", true, a.decoder_layers, shared.weight());
    // transformers 5.17 ties the head whatever the file says; the flag decides about the scale only
    head_ = Head(context, shared.weight(), false);
    scaled_ = context.config.flag("scale_decoder_outputs", a.tied);
  }

  Tensor forward(const Tensor& ids, const Tensor& labels, Tensor& logits) override {
    Tape& tape = context_->tape;
    tape.forward_pre(root_);
    const Tensor states = encoder_(ids, Tensor());
    Tensor shifted = shift_right(labels);
    Tensor decoded = decoder_(shifted, states);
    Tensor scaled = scaled_ ? mul_scalar(decoded) : decoded;
    logits = head_(scaled);
    const std::int64_t vocab = logits.size(-1);
    Tensor loss = nll_loss(log_softmax(view(logits, {-1, vocab})), view(labels, {-1}));
    drop(shifted, scaled, decoded);
    tape.forward_post(root_, {&loss, &logits, &states});
    return loss;
  }

 private:
  Tensor shift_right(const Tensor& labels) const {
    Tape& tape = context_->tape;
    Tensor shifted = tape.allocate(labels.sizes(), Element::i64);
    { const Tensor copy = tape.allocate({labels.size(0), labels.size(1) - 1}, Element::i64); }
    { const Tensor start = tape.allocate({}, Element::i64); }
    const Tensor ignored = tape.allocate(labels.sizes(), Element::boolean);
    return shifted;
  }

  const Context* context_ = nullptr;
  int root_ = -1;
  T5Stack encoder_, decoder_;
  Head head_;
  bool scaled_ = true;
};

}  // namespace

std::unique_ptr<EagerModel> make_t5(Context& context) { return std::make_unique<T5>(context); }

}  // namespace zeroplan::eager
