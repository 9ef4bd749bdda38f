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
  Tensor loss = causal_loss(*context_, logits, labels);
  hidden.drop();
  tape.forward_post(root_, {&loss, &logits});
  return loss;
}

Tensor plain_mask(const Context& context) {
  MaskOptions options;
  options.additive = context.options.attention == EagerAttention::eager;
  return causal_mask(context, options);
}

}  // namespace zeroplan::eager
