// BERT with its masked-language-model head: norms after the residual sums, attention in both directions.

#include "models/eager_gpt.h"

namespace zeroplan::eager {
namespace {

double hidden_dropout(const Context& context) { return context.number("hidden_dropout_prob", 0.1); }

Norm bert_norm(Context& context, const std::string& path) {
  return Norm(context, path, "LayerNorm", NormStyle::layer, {context.sizes.hidden}, true);
}

class BertSelfAttention {
 public:
  BertSelfAttention() = default;
  BertSelfAttention(Context& context, const std::string& path) : context_(&context) {
    const std::int64_t hidden = context.sizes.hidden;
    module_ = context.module(path, "BertSelfAttention");
    q_ = Linear(context, path + ".query", hidden, hidden, true);
    k_ = Linear(context, path + ".key", hidden, hidden, true);
    v_ = Linear(context, path + ".value", hidden, hidden, true);
    probability_ = context.number("attention_probs_dropout_prob", 0.1);
    Dropout(context, path + ".dropout", probability_);
  }

  AttentionResult operator()(const Tensor& x) const {
    return framed(context_->tape, module_, x, [&](const Tensor& own) { return forward(own); });
  }

 private:
  AttentionResult forward(const Tensor& x) const {
    const std::int64_t batch = x.size(0), length = x.size(1), width = context_->sizes.head_dim;
    const auto heads = [&](Tensor part) { return transpose(view(std::move(part), {batch, length, -1, width}), 1, 2); };
    Tensor q = heads(q_(x));
    Tensor k = heads(k_(x));
    Tensor v = heads(v_(x));
    AttentionCall call;
    call.dropout = probability_;
    call.causal = false;
    call.upcast = false;
    AttentionResult result = attention(*context_, q, k, v, Tensor(), call);
    result.output = contiguous(reshape(std::move(result.output), {batch, length, -1}));
    drop(q, k, v);
    return result;
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  Linear q_, k_, v_;
  double probability_ = 0;
};

/// BertSelfOutput and BertOutput: norm(dropout(dense(x)) + input).
class BertOutput {
 public:
  BertOutput() = default;
  BertOutput(Context& context, const std::string& path, std::string_view type, std::int64_t in) : context_(&context) {
    module_ = context.module(path, type);
    dense_ = Linear(context, path + ".dense", in, context.sizes.hidden, true);
    norm_ = bert_norm(context, path + ".LayerNorm");
    dropout_ = Dropout(context, path + ".dropout", hidden_dropout(context));
  }
  Tensor operator()(const Tensor& x, const Tensor& input) const {
    Tape& tape = context_->tape;
    tape.forward_pre(module_);
    Tensor hidden = tape.own(module_, x);
    const Tensor own_input = tape.own(module_, input);
    hidden = dense_(hidden);
    hidden = dropout_(hidden);
    hidden = norm_(add(hidden, own_input));
    tape.forward_post(module_, {&hidden});
    return hidden;
  }

 private:
  const Context* context_ = nullptr;
  int module_ = -1;
  Linear dense_;
  Norm norm_;
  Dropout dropout_;
};

class BertLayer {
 public:
  BertLayer(Context& context, const std::string& path) : context_(&context) {
    const Architecture& a = context.sizes;
    module_ = context.module(path, "BertLayer", true);
    attention_ = context.module(path + ".attention", "BertAttention");
    self_ = BertSelfAttention(context, path + ".attention.self");
    self_output_ = BertOutput(context, path + ".attention.output", "BertSelfOutput", a.hidden);
    intermediate_ = context.module(path + ".intermediate", "BertIntermediate");
    dense_ = Linear(context, path + ".intermediate.dense", a.hidden, a.width, true);
    activation_ = ActivationModule(context, path + ".intermediate.intermediate_act_fn", a.activation);
    output_ = BertOutput(context, path + ".output", "BertOutput", a.width);
  }

  /// inputs: hidden and two absent masks.
  Tensors operator()(const Tensors& inputs) const {
    return {framed(context_->tape, module_, inputs[0], [&](const Tensor& own) { return forward(own); })};
  }

 private:
  Tensor forward(const Tensor& hidden) const {
    Tape& tape = context_->tape;
    tape.forward_pre(attention_);
    const Tensor own = tape.own(attention_, hidden);
    AttentionResult attended = self_(own);
    attended.output = self_output_(attended.output, own);
    tape.forward_post(attention_, {&attended.output, &attended.weights});
    Tensor wide = call(tape, intermediate_, attended.output, [&](Tensor x) {
      x = dense_(x);
      x = activation_(x);
      return x;
    });
    Tensor out = output_(wide, attended.output);
    drop(wide, attended.weights, attended.output);
    return out;
  }

  const Context* context_ = nullptr;
  int module_ = -1, attention_ = -1, intermediate_ = -1;
  BertSelfAttention self_;
  BertOutput self_output_, output_;
  Linear dense_;
  ActivationModule activation_;
};

class BertEmbeddings {
 public:
  BertEmbeddings() = default;
  explicit BertEmbeddings(Context& context) : context_(&context) {
    const Architecture& a = context.sizes;
    const std::string path = "bert.embeddings";
    module_ = context.module(path, "BertEmbeddings");
    words_ = Embedding(context, path + ".word_embeddings", a.vocab, a.hidden).as_input();
    positions_ = Embedding(context, path + ".position_embeddings", a.position_rows, a.hidden);
    types_ = Embedding(context, path + ".token_type_embeddings", a.token_types, a.hidden);
    norm_ = bert_norm(context, path + ".LayerNorm");
    dropout_ = Dropout(context, path + ".dropout", hidden_dropout(context));
  }

  Tensor operator()(const Tensor& ids) const {
    Tape& tape = context_->tape;
    tape.forward_pre(module_);
    Tensor out = forward(ids);
    tape.forward_post(module_, {&out});
    return out;
  }
  int weight() const { return words_.weight(); }

 private:
  Tensor forward(const Tensor& ids) const {
    Tape& tape = context_->tape;
    const Tensor places = tape.external({1, ids.size(1)}, Element::i64);
    Tensor kinds = tape.allocate({1, ids.size(1)}, Element::i64);
    kinds = expand(std::move(kinds), ids.sizes());
    Tensor words = words_(ids);
    Tensor types = types_(kinds);
    Tensor sum_of = add(words, types);
    Tensor positions = positions_(places);
    sum_of = add(sum_of, positions);
    sum_of = norm_(sum_of);
    sum_of = dropout_(sum_of);
    drop(kinds, words, types, positions);
    return sum_of;
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  Embedding words_, positions_, types_;
  Norm norm_;
  Dropout dropout_;
};

class BertHead {
 public:
  BertHead() = default;
  BertHead(Context& context, int words) : context_(&context), weight_(words) {
    const Architecture& a = context.sizes;
    const std::string path = "cls.predictions.transform";
    head_ = context.module("cls", "BertOnlyMLMHead");
    predictions_ = context.module("cls.predictions", "BertLMPredictionHead");
    bias_ = context.parameter(predictions_, "bias", {a.vocab});
    transform_ = context.module(path, "BertPredictionHeadTransform");
    dense_ = Linear(context, path + ".dense", a.hidden, a.hidden, true);
    activation_ = ActivationModule(context, path + ".transform_act_fn", a.activation);
    norm_ = bert_norm(context, path + ".LayerNorm");
    decoder_ = context.module("cls.predictions.decoder", "Linear");
    if (a.tied) {
      context.share(decoder_, words);
    } else {
      weight_ = context.parameter(decoder_, "weight", {a.vocab, a.hidden});
    }
    context.share(decoder_, bias_);
  }

  Tensor operator()(Tensor x) const {
    Tape& tape = context_->tape;
    return call(tape, head_, std::move(x), [&](const Tensor& own) {
      return call(tape, predictions_, own, [&](Tensor hidden) {
        hidden = call(tape, transform_, hidden, [&](Tensor inner) {
          inner = dense_(inner);
          inner = activation_(inner);
          inner = norm_(inner);
          return inner;
        });
        hidden = call(tape, decoder_, hidden, [&](Tensor inner) {
          return linear(std::move(inner), context_->value(weight_), context_->value(bias_));
        });
        return hidden;
      });
    });
  }

 private:
  const Context* context_ = nullptr;
  int head_ = -1, predictions_ = -1, transform_ = -1, decoder_ = -1, weight_ = -1, bias_ = -1;
  Linear dense_;
  ActivationModule activation_;
  Norm norm_;
};

class Bert : public EagerModel {
 public:
  explicit Bert(Context& context) : context_(&context) {
    root_ = context.module("", "BertForMaskedLM");
    model_ = context.module("bert", "BertModel");
    embeddings_ = BertEmbeddings(context);
    encoder_ = context.module("bert.encoder", "BertEncoder");
    layers_ = make_layers<BertLayer>(context, "bert.encoder.layer");
    head_ = BertHead(context, embeddings_.weight());
  }

  Tensor forward(const Tensor& ids, const Tensor& labels, Tensor& logits) override {
    Tape& tape = context_->tape;
    tape.forward_pre(root_);
    tape.forward_pre(model_);
    Tensor embedded = embeddings_(ids);
    tape.forward_pre(encoder_);
    Tensor hidden = run_layers(*context_, layers_, tape.own(encoder_, embedded), 3, [](std::size_t) {
      return Tensors{Tensor(), Tensor()};
    });
    tape.forward_post(encoder_, {&hidden});
    embedded.drop();
    tape.forward_post(model_, {&hidden});
    logits = head_(hidden);
    const std::int64_t vocab = logits.size(-1);
    Tensor loss = nll_loss(log_softmax(view(logits, {-1, vocab})), view(labels, {-1}));
    hidden.drop();
    tape.forward_post(root_, {&loss, &logits});
    return loss;
  }

 private:
  const Context* context_ = nullptr;
  int root_ = -1, model_ = -1, encoder_ = -1;
  BertEmbeddings embeddings_;
  std::vector<BertLayer> layers_;
  BertHead head_;
};

}  // namespace

std::unique_ptr<EagerModel> make_bert(Context& context) { return std::make_unique<Bert>(context); }

}  // namespace zeroplan::eager
