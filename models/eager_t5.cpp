// T5: encoder and decoder, relative position bias, cross attention.

#include <fmt/format.h>

#include "models/eager_gpt.h"

namespace zeroplan::eager {
namespace {

// --- relative positions ---------------------------------------------------------------------------

/// _relative_position_bucket: integers [length, length].
Tensor buckets(Tensor relative, bool bidirectional) {
  const auto next = [](Tensor x, Element type) { return pointwise({&x}, type); };
  Tensor bucket;
  if (bidirectional) {
    Tensor later = next(relative, Element::boolean);
    Tensor wide = to(std::move(later), Element::i64);
    later = add_scalar(std::move(wide));
    bucket = add_scalar(std::move(later));
    relative = next(relative, Element::i64);
  } else {
    Tensor zeros = next(relative, Element::i64);
    Tensor least = pointwise({&relative, &zeros}, Element::i64);
    zeros.drop();
    relative = add_scalar(std::move(least));
  }
  Tensor is_small = next(relative, Element::boolean);
  Tensor large = to(relative, Element::fp32);
  for (int step = 0; step < 4; ++step) large = add_scalar(std::move(large));  // / max, log, / log, * rest
  large = add_scalar(to(std::move(large), Element::i64));
  Tensor limit = next(large, Element::i64);
  Tensor least = pointwise({&large, &limit}, Element::i64);
  limit.drop();
  large = std::move(least);
  Tensor chosen = pointwise({&is_small, &relative, &large}, Element::i64);
  if (!bidirectional) bucket = add_scalar(chosen);
  drop(chosen);
  drop(relative, is_small, large);
  return bucket;
}

/// torch.where(rows >= columns, bias, lowest).
Tensor causal_bias(const Tensor& bias, std::int64_t length) {
  Tape& tape = bias.tape();
  Tensor rows = tape.allocate({length}, Element::i64);
  Tensor columns = tape.allocate({length}, Element::i64);
  Tensor mask = tape.allocate({1, 1, length, length}, Element::boolean);
  tape.pointwise_kernel(mask.bytes());
  drop(rows, columns);
  return where_scalar(std::move(mask), bias);
}

// --- modules --------------------------------------------------------------------------------------

struct T5AttentionResult {  // dies from its end
  Tensor weights, bias, output;
};

class T5Attention {
 public:
  T5Attention() = default;
  T5Attention(Context& context, const std::string& path, bool decoder, bool cross, bool has_bias)
      : context_(&context), decoder_(decoder), cross_(cross), has_bias_(has_bias) {
    const Architecture& a = context.sizes;
    const std::int64_t inner = a.heads * a.head_dim;
    module_ = context.module(path, "T5Attention");
    q_ = Linear(context, path + ".q", a.hidden, inner, false);
    k_ = Linear(context, path + ".k", a.hidden, inner, false);
    v_ = Linear(context, path + ".v", a.hidden, inner, false);
    out_ = Linear(context, path + ".o", inner, a.hidden, false);
    if (has_bias) table_ = Embedding(context, path + ".relative_attention_bias", a.relative_buckets, a.heads);
    dropout_ = context.number("dropout_rate", 0.1);
  }

  /// `states`: the encoder's output in cross attention.
  T5AttentionResult operator()(const Tensor& x, const Tensor& mask, const Tensor& states, const Tensor& bias) const {
    Tape& tape = context_->tape;
    tape.forward_pre(module_);
    const Tensor own = tape.own(module_, x);
    const Tensor own_states = tape.own(module_, states);
    const Tensor own_bias = tape.own(module_, bias);
    T5AttentionResult result = forward(own, mask, cross_ ? own_states : own, own_bias);
    tape.forward_post(module_, {&result.output, &result.bias, &result.weights});
    return result;
  }

 private:
  Tensor heads(Tensor x) const {
    const std::int64_t batch = x.size(0), length = x.size(1);
    return transpose(view(std::move(x), {batch, length, -1, context_->sizes.head_dim}), 1, 2);
  }

  /// compute_bias: [1, heads, length, length].
  Tensor relative_bias(std::int64_t length) const {
    Tape& tape = context_->tape;
    Tensor rows = unsqueeze(position_range(tape, length), 1);
    Tensor columns = unsqueeze(tape.allocate({length}, Element::i64), 0);
    Tensor relative = pointwise({&columns, &rows}, Element::i64);
    Tensor bucket = buckets(relative, !decoder_);
    Tensor values = table_(bucket);
    values = unsqueeze(permute(std::move(values), {2, 0, 1}), 0);
    drop(rows, columns, relative, bucket);
    return values;
  }

  Tensor zero_bias(std::int64_t rows, std::int64_t columns) const {
    Tensor bias = context_->tape.allocate({1, context_->sizes.heads, rows, columns}, context_->type);
    if (context_->options.checkpointing) bias.impl().requires_grad = true;
    return bias;
  }

  T5AttentionResult forward(const Tensor& x, const Tensor& mask, const Tensor& states, Tensor bias) const {
    const std::int64_t batch = x.size(0), length = x.size(1);
    Tensor q = heads(q_(x));
    Tensor k = heads(k_(states));
    Tensor v = heads(v_(states));
    if (!bias) bias = has_bias_ ? relative_bias(length) : zero_bias(length, k.size(2));
    T5AttentionResult result;
    if (context_->options.attention == EagerAttention::eager) {
      result = eager(q, k, v, mask, bias);
    } else {
      SdpaOptions options;
      options.dropout = dropout_;
      options.causal = false;
      Tensor added = decoder_ && !cross_ ? causal_bias(bias, length) : bias;
      Tensor attended = sdpa(q, k, v, added, options);
      result.output = contiguous(transpose(std::move(attended), 1, 2));
    }
    result.output = contiguous(reshape(std::move(result.output), {batch, length, -1}));
    result.output = out_(result.output);
    drop(q, k, v);
    result.bias = std::move(bias);
    return result;
  }

  T5AttentionResult eager(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                          const Tensor& bias) const {
    Tensor weights = mul_scalar(matmul(q, transpose(k, 2, 3)));
    weights = add(weights, bias);
    if (mask) weights = add(weights, mask);
    weights = softmax(weights);
    weights = dropout(weights, dropout_);
    Tensor output = matmul(weights, v);
    output = contiguous(transpose(output, 1, 2));
    return {std::move(weights), {}, std::move(output)};
  }

  const Context* context_ = nullptr;
  bool decoder_ = false, cross_ = false, has_bias_ = false;
  int module_ = -1;
  Linear q_, k_, v_, out_;
  Embedding table_;
  double dropout_ = 0;
};

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
