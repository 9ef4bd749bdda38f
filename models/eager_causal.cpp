#include "models/eager_causal.h"

namespace zeroplan::eager {

Head::Head(Context& context, int tied, bool bias) : context_(&context) {
  module_ = context.module("lm_head", "Linear");
  weight_ = tied;
  if (tied >= 0) {
    context.share(module_, tied);
  } else {
    weight_ = context.parameter(module_, "weight", {context.sizes.vocab, context.sizes.hidden});
  }
  if (bias) bias_ = context.parameter(module_, "bias", {context.sizes.vocab});
}

Tensor Head::operator()(Tensor x) const {
  return call(context_->tape, module_, std::move(x),
              [&](Tensor own) { return linear(std::move(own), context_->value(weight_), context_->value(bias_)); });
}

CausalModel::CausalModel(Context& context, const std::string& type)
    : context_(&context), root_(context.module("", type)) {}

Tensor CausalModel::forward(const Tensor& ids, const Tensor& labels, Tensor& logits) {
  Tape& tape = context_->tape;
  tape.forward_pre(root_);
  Tensor hidden = base(ids);
  logits = finish_logits(head_(hidden));
  const bool megatron = context_->options.code == EagerCode::megatron;
  Tensor loss = megatron ? vocab_parallel_loss(logits) : causal_loss(*context_, logits, labels);
  hidden.drop();
  tape.forward_post(root_, {&loss, &logits});
  return loss;
}

namespace {

/// A loss in one autograd function that keeps `rows` [rows, vocab].
Tensor row_loss(Tensor rows, Backward backward) {
  Tape& tape = rows.tape();
  const Ref<Node> node = tape.make_node(backward, {&rows});
  if (node) tape.save(*node, rows);
  Tensor losses = tape.allocate({rows.size(0)}, Element::fp32);
  Tensor sums = tape.allocate({rows.size(0)}, Element::fp32);
  tape.pointwise_kernel(2 * rows.bytes());
  if (node) tape.save(*node, sums);
  Tensor loss = tape.allocate({}, Element::fp32);  // their mean
  tape.attach(loss, node);
  drop(losses, sums, rows);
  return loss;
}

Tensor as_rows(const Tensor& logits) { return view(logits, {logits.count() / logits.size(-1), logits.size(-1)}); }

}  // namespace

Tensor fused_loss(const Tensor& logits) {
  return row_loss(as_rows(logits), [](BackwardCall& call) {
    call.results[0] = call.tape.allocate(call.saved[0].sizes(), call.saved[0].type());
    call.tape.pointwise_kernel(2 * call.saved[0].bytes());
  });
}

Tensor vocab_parallel_loss(const Tensor& logits) {
  return row_loss(to(as_rows(logits), Element::fp32), [](BackwardCall& call) {
    call.results[0] = call.saved[0];
    call.tape.pointwise_kernel(2 * call.saved[0].bytes());
  });
}

Tensor plain_mask(const Context& context) {
  MaskOptions options;
  options.additive = context.options.attention == EagerAttention::eager;
  return causal_mask(context, options);
}

}  // namespace zeroplan::eager
