// GPT-J: eager attention only, scores in fp32, rotary positions looked up in a table a layer.

#include "models/eager_gpt.h"

namespace zeroplan::eager {
namespace {

/// [-x2, x1] of even and odd columns: stack and flatten.
Tensor rotate_every_two(const Tensor& x) {
  const std::int64_t half = x.size(-1) / 2;
  const Tensor even = slice(x, -1, 0, half, 2);
  Tensor negated = neg(slice(x, -1, 1, half, 2));
  Tensor out = view(stack_last(negated, even), x.sizes());
  negated.drop();
  return out;
}

/// A table [1, length, half] for every column and head: [1, length, 1, 2 half].
Tensor repeat_columns(const Tensor& table) {
  const std::int64_t length = table.size(1), half = table.size(2);
  Tensor wide = expand(unsqueeze(unsqueeze(table, 2), -1), {1, length, 1, half, 2});
  return view(contiguous(std::move(wide)), {1, length, 1, 2 * half});
}

Tensor turn(const Tensor& x, const Tensor& sin, const Tensor& cos) {
  Tensor wide_sin = repeat_columns(sin);
  Tensor wide_cos = repeat_columns(cos);
  Tensor plain = mul(x, wide_cos);
  Tensor turned = mul(rotate_every_two(x), wide_sin);
  Tensor out = add(std::move(plain), std::move(turned));
  drop(wide_sin, wide_cos);
  return out;
}

class GptjAttention {
 public:
  GptjAttention() = default;
  GptjAttention(Context& context, const std::string& path) : context_(&context) {
    const std::int64_t hidden = context.sizes.hidden;
    module_ = context.module(path, "GPTJAttention");
    attention_dropout_ = Dropout(context, path + ".attn_dropout", context.number("attn_pdrop", 0));
    dropout_ = Dropout(context, path + ".resid_dropout", context.number("resid_pdrop", 0));
    k_ = Linear(context, path + ".k_proj", hidden, hidden, false);
    v_ = Linear(context, path + ".v_proj", hidden, hidden, false);
    q_ = Linear(context, path + ".q_proj", hidden, hidden, false);
    out_ = Linear(context, path + ".out_proj", hidden, hidden, false);
    rotary_ = static_cast<std::int64_t>(context.number("rotary_dim", kRotary));
  }

  AttentionResult operator()(const Tensor& x, const Tensor& mask) const {
    return framed(context_->tape, module_, x, [&](const Tensor& own) { return forward(own, mask); });
  }

 private:
  static constexpr double kRotary = 64;  // transformers default of rotary_dim

  AttentionResult forward(const Tensor& x, const Tensor& mask) const {
    const Architecture& a = context_->sizes;
    Tape& tape = context_->tape;
    const std::int64_t batch = x.size(0), length = x.size(1), rest = a.head_dim - rotary_;
    const Dims sizes = {batch, length, a.heads, a.head_dim};
    Tensor q = q_(x);
    Tensor k = k_(x);
    Tensor v = v_(x);
    q = view(q, sizes);
    k = view(k, sizes);
    v = permute(view(v, sizes), {0, 2, 1, 3});
    Tensor table = tape.allocate({1, a.max_positions, rotary_}, Element::fp32);
    Tensor places = tape.allocate({1, length, rotary_}, Element::i64);
    Tensor both = to(tape.allocate({1, length, rotary_}, Element::fp32), k.type());
    Tensor sin = slice(both, -1, 0, rotary_ / 2), cos = slice(both, -1, rotary_ / 2, rotary_ / 2);
    Tensor k_turns = slice(k, -1, 0, rotary_), k_stays = slice(k, -1, rotary_, rest);
    Tensor q_turns = slice(q, -1, 0, rotary_), q_stays = slice(q, -1, rotary_, rest);
    k_turns = turn(k_turns, sin, cos);
    q_turns = turn(q_turns, sin, cos);
    k = cat({k_turns, k_stays}, -1);
    q = cat({q_turns, q_stays}, -1);
    k = permute(k, {0, 2, 1, 3});
    q = permute(q, {0, 2, 1, 3});
    AttentionResult result = attend(q, k, v, mask);
    result.output = view(contiguous(permute(result.output, {0, 2, 1, 3})), {batch, length, a.hidden});
    result.output = out_(result.output);
    result.output = dropout_(result.output);
    drop(q, k, v, table, places, both, sin, cos);
    drop(k_turns, k_stays, q_turns, q_stays);
    return result;
  }

  AttentionResult attend(const Tensor& query, const Tensor& key, const Tensor& v, const Tensor& mask) const {
    Tensor q = to(query, Element::fp32);
    Tensor k = to(key, Element::fp32);
    Tensor weights = matmul(q, transpose(k, -1, -2));
    weights = div_scalar(std::move(weights));
    weights = add(weights, mask);
    weights = softmax(weights);
    weights = to(weights, v.type());
    weights = attention_dropout_(weights);
    Tensor output = matmul(weights, v);
    drop(q, k);
    return {std::move(output), std::move(weights)};
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  Linear q_, k_, v_, out_;
  Dropout attention_dropout_, dropout_;
  std::int64_t rotary_ = 0;
};

class GptjBlock {
 public:
  GptjBlock(Context& context, const std::string& path) : context_(&context) {
    const Architecture& a = context.sizes;
    module_ = context.module(path, "GPTJBlock", true);
    norm_ = Norm(context, path + ".ln_1", "LayerNorm", NormStyle::layer, {a.hidden}, true);
    attention_ = GptjAttention(context, path + ".attn");
    mlp_ = FeedForward(context, path + ".mlp", {"GPTJMLP", "fc_in", "fc_out"}, LinearKind::linear,
                       context.number("resid_pdrop", 0));
  }

  /// inputs: hidden, mask, positions. Outputs: hidden and the attention's weights.
  Tensors operator()(const Tensors& inputs) const {
    return framed(context_->tape, module_, inputs[0], [&](Tensor own) { return forward(std::move(own), inputs[1]); });
  }

 private:
  Tensors forward(Tensor hidden, const Tensor& mask) const {
    Tensor residual = hidden;
    hidden = norm_(hidden);
    AttentionResult attended = attention_(hidden, mask);
    Tensor fed = mlp_(hidden);
    hidden = add(add(attended.output, fed), residual);
    Tensor out = std::move(hidden);
    drop(residual, attended.output, fed);
    return {std::move(out), std::move(attended.weights)};
  }

  const Context* context_ = nullptr;
  int module_ = -1;
  Norm norm_;
  GptjAttention attention_;
  FeedForward mlp_;
};

class Gptj : public CausalModel {
 public:
  explicit Gptj(Context& context) : CausalModel(context, "GPTJForCausalLM") {
    const Architecture& a = context.sizes;
    model_ = context.module("transformer", "GPTJModel");
    tokens_ = Embedding(context, "transformer.wte", a.vocab, a.hidden).as_input();
    dropout_ = Dropout(context, "transformer.drop", context.number("embd_pdrop", 0));
    layers_ = make_layers<GptjBlock>(context, "transformer.h");
    norm_ = Norm(context, "transformer.ln_f", "LayerNorm", NormStyle::layer, {a.hidden}, true);
    head_ = Head(context, a.tied ? tokens_.weight() : -1, true);
  }

 private:
  Tensor base(const Tensor& ids) override {
    Tape& tape = context_->tape;
    tape.forward_pre(model_);
    Tensor embedded = tokens_(ids);
    Tensor positions = unsqueeze(position_range(tape, context_->length()), 0);
    Tensor mask = plain_mask(*context_);
    Tensor hidden = dropout_(embedded);
    Tensors outputs;
    for (const GptjBlock& layer : layers_) {
      outputs = call_layer(*context_, layer, {hidden, mask, positions}, 1);
      hidden = outputs[0];
    }
    Tensor out = norm_(hidden);
    hidden = out;
    drop(positions, embedded, mask, hidden);
    while (!outputs.empty()) outputs.pop_back();
    tape.forward_post(model_, {&out});
    return out;
  }

  int model_ = -1;
  Embedding tokens_;
  Dropout dropout_;
  std::vector<GptjBlock> layers_;
  Norm norm_;
};

}  // namespace

std::unique_ptr<EagerModel> make_gptj(Context& context) { return std::make_unique<Gptj>(context); }

}  // namespace zeroplan::eager
