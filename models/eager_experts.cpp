#include "models/eager_experts.h"

#include <fmt/format.h>

namespace zeroplan::eager {

// --- router ---------------------------------------------------------------------------------------

Router::Router(Context& context, const DecoderStyle& style, const std::string& path)
    : context_(&context), style_(&style) {
  module_ = context.module(path, class_name(style, style.router_class));
  weight_ = context.parameter(module_, "weight", {context.sizes.experts, context.sizes.hidden});
  if (style.expert_biases) bias_ = context.parameter(module_, "bias", {context.sizes.experts});
  normalised_ =
      context.config.flag("norm_topk_prob", style.family == "mixtral" || style.router == RouterKind::groups_sigmoid);
  limited_ = context.config.text("topk_method", "greedy") == "group_limited_greedy";
  groups_ = static_cast<std::int64_t>(context.number("n_group", 1));
  groups_used_ = static_cast<std::int64_t>(context.number("topk_group", 1));
}

Routing Router::operator()(const Tensor& x) const {
  Tape& tape = context_->tape;
  tape.forward_pre(module_);
  Routing routing = forward(tape.own(module_, x));
  tape.forward_post(module_, {&routing.logits, &routing.weights});
  return routing;
}

/// 1 for every expert of the best groups; `kept` receives what the router's variables hold to its end.
Tensor Router::group_mask(const Tensor& group_scores, Tensors& kept) const {
  const std::int64_t rows = group_scores.size(0), experts = context_->sizes.experts;
  Tensor best;
  {
    TopK groups = topk(group_scores, groups_used_);
    best = std::move(groups.indices);
  }
  Tensor chosen = pointwise({&group_scores}, group_scores.type());  // zeros, ones scattered in
  Tensor spread = reshape(expand(unsqueeze(chosen, -1), {rows, groups_, experts / groups_}), {-1, experts});
  Tensor inverse;
  {
    const Tensor flags = pointwise({&spread}, Element::boolean);
    inverse = pointwise({&flags}, Element::boolean);
  }
  kept.push_back(std::move(best));
  kept.push_back(std::move(chosen));
  kept.push_back(std::move(spread));
  return inverse;
}

Routing Router::best_of_groups(Tensor x) const {
  const Architecture& a = context_->sizes;
  Tensors kept;
  Routing routing;
  x = view(x, {-1, a.hidden});
  {
    Tensor wide = to(x, Element::fp32);
    routing.logits = linear(std::move(wide), to(context_->value(weight_), Element::fp32), {});
  }
  Tensor scores = softmax(routing.logits);
  Tensor group_scores;
  if (limited_) {
    group_scores = max_last(view(scores, {-1, groups_, a.experts / groups_})).values;
    Tensor mask = group_mask(group_scores, kept);
    scores = masked_fill(scores, std::move(mask));
  }
  TopK best = topk(scores, a.experts_per_token);
  routing.indices = std::move(best.indices);
  routing.weights = mul_scalar(best.values);
  best.values.drop();
  drop(x, scores, group_scores);
  for (Tensor& tensor : kept) tensor.drop();
  return routing;
}

Routing Router::corrected(Tensor x) const {
  const Architecture& a = context_->sizes;
  Tensors kept;
  Routing routing;
  x = view(x, {-1, a.hidden});
  {
    Tensor wide = to(x, Element::fp32);
    routing.logits = linear(std::move(wide), to(context_->value(weight_), Element::fp32), {});
  }
  Tensor scores = activate(routing.logits, Activation::sigmoid);
  Tensor choice = add(scores, context_->tape.external({a.experts}, context_->type));
  Tensor group_scores;
  {
    TopK best = topk(view(choice, {-1, groups_, a.experts / groups_}), 2);
    best.indices.drop();
    group_scores = sum(std::move(best.values), -1, false);
  }
  Tensor mask = group_mask(group_scores, kept);
  choice = masked_fill(choice, std::move(mask));
  routing.indices = topk(choice, a.experts_per_token).indices;
  routing.weights = gather(scores, routing.indices);
  Tensor total;
  if (normalised_) {
    total = add_scalar(sum(routing.weights, -1, true));
    routing.weights = div_in_place(routing.weights, total);
  }
  routing.weights = mul_scalar(routing.weights);
  drop(x, scores, choice, group_scores);
  for (Tensor& tensor : kept) tensor.drop();
  total.drop();
  return routing;
}

Routing Router::after_topk(const Tensor& x) const {
  Routing routing;
  routing.logits = linear(x, context_->value(weight_), context_->value(bias_));
  TopK best = topk(routing.logits, context_->sizes.experts_per_token);
  routing.indices = std::move(best.indices);
  routing.weights = softmax(best.values);
  best.values.drop();
  return routing;
}

Routing Router::forward(Tensor x) const {
  if (style_->router == RouterKind::after_topk) return after_topk(x);
  if (style_->router == RouterKind::groups_softmax) return best_of_groups(std::move(x));
  if (style_->router == RouterKind::groups_sigmoid) return corrected(std::move(x));
  const Architecture& a = context_->sizes;
  Routing routing;
  x = reshape(x, {-1, a.hidden});
  routing.logits = linear(x, context_->value(weight_), {});
  Tensor probabilities = softmax(to(routing.logits, Element::fp32));
  TopK best = topk(probabilities, a.experts_per_token);
  if (normalised_) {
    Tensor total = sum(best.values, -1, true);
    best.values = div_in_place(best.values, std::move(total));
  }
  if (style_->narrow_routing) best.values = to(best.values, routing.logits.type());
  routing.weights = std::move(best.values);
  routing.indices = std::move(best.indices);
  drop(x, probabilities);
  return routing;
}

// --- experts --------------------------------------------------------------------------------------

Experts::Experts(Context& context, const DecoderStyle& style, const std::string& path)
    : context_(&context), style_(&style) {
  const Architecture& a = context.sizes;
  const std::int64_t wide = 2 * a.expert_width;
  module_ = context.module(path, class_name(style, "Experts"));
  if (style.expert_biases) {  // weights [in, out]
    gate_up_ = context.parameter(module_, "gate_up_proj", {a.experts, a.hidden, wide});
    gate_up_bias_ = context.parameter(module_, "gate_up_proj_bias", {a.experts, wide});
    down_ = context.parameter(module_, "down_proj", {a.experts, a.expert_width, a.hidden});
    down_bias_ = context.parameter(module_, "down_proj_bias", {a.experts, a.hidden});
    return;
  }
  gate_up_ = context.parameter(module_, "gate_up_proj", {a.experts, wide, a.hidden});
  down_ = context.parameter(module_, "down_proj", {a.experts, a.hidden, a.expert_width});
  activation_ = ActivationModule(context, path + ".act_fn", a.activation);
}

Tensor Experts::operator()(const Tensor& x, const Routing& routing) const {
  Tape& tape = context_->tape;
  tape.forward_pre(module_);
  const Tensor rows = tape.own(module_, x);
  const Tensor weights = tape.own(module_, routing.weights);
  Tensor out = forward(rows, routing.indices, weights);
  tape.forward_post(module_, {&out});
  return out;
}

Tensor Experts::gate(const Tensor& projected) const {
  const std::int64_t width = projected.size(-1) / 2;
  Tensors parts = split(projected, {width, width}, -1);
  Tensor activated = activation_(parts[0]);
  return mul(std::move(activated), parts[1]);
}

/// GptOssExperts._apply_gate: gates and ups are neighbours, both clamped.
Tensor Experts::clamped_gate(const Tensor& projected) const {
  const std::int64_t width = projected.size(-1) / 2;
  Tensor gate = slice(projected, -1, 0, width, 2);
  Tensor up = slice(projected, -1, 1, width, 2);
  gate = clamp(gate, false);
  up = clamp(up, true);
  Tensor linear_unit = mul(gate, activate(mul_scalar(gate), Activation::sigmoid));
  Tensor out = mul(add_scalar(up), linear_unit);
  drop(gate, up, linear_unit);
  return out;
}

// grouped_mm_experts_forward: names are its variables', which die in this order.
Tensor Experts::forward(const Tensor& x, const Tensor& indices, const Tensor& weights) const {
  Tape& tape = context_->tape;
  const std::int64_t tokens = x.size(0), k = indices.size(-1), experts = context_->sizes.experts;
  const std::int64_t rows = tokens * k;
  // A list dies from its front, also when a recomputation stops here: the order of Python's variables.
  Tensors variables(14);
  auto variable = variables.begin();
  Tensor &sample_weights = *variable++, &ids = *variable++, &order = *variable++, &selected = *variable++;
  Tensor &picked = *variable++, &counted = *variable++, &counts = *variable++, &offsets = *variable++;
  Tensor &beyond = *variable++, &biases = *variable++, &out = *variable++, &weighted = *variable++;
  Tensor& inverse = *variable++;
  Tensor& summed = *variable;
  sample_weights = reshape(weights, {-1});
  ids = tape.allocate({rows}, Element::i64);
  order = tape.allocate({rows}, Element::i64);
  tape.pointwise_kernel(ids.bytes() * 4);
  selected = index_rows(x, pointwise({&order}, Element::i64));
  picked = index_rows(sample_weights, order);
  counted = to(ids, Element::fp32);
  counts = tape.allocate({experts}, Element::fp32);
  offsets = tape.allocate({experts}, Element::i32);
  beyond = unsqueeze(pointwise({&ids}, Element::boolean), -1);
  const bool biased = style_->expert_biases;
  const auto weights_of = [&](int parameter) {
    Tensor stored = context_->value(parameter);
    return biased ? stored : transpose(std::move(stored), -2, -1);
  };
  if (biased) biases = index_rows(context_->value(gate_up_bias_), ids);
  selected = masked_fill_in_place(selected, beyond);
  out = grouped_mm(selected, weights_of(gate_up_), offsets);
  if (biased) out = add_in_place(out, biases);
  out = masked_fill(out, beyond);
  out = biased ? clamped_gate(out) : gate(out);
  if (biased) biases = index_rows(context_->value(down_bias_), ids);
  out = grouped_mm(out, weights_of(down_), offsets);
  if (biased) out = add_in_place(out, biases);
  out = masked_fill(out, beyond);
  weighted = mul(out, unsqueeze(picked, -1));
  inverse = tape.allocate({rows}, Element::i64);
  {
    const Tensor range = tape.allocate({rows}, Element::i64);
    tape.pointwise_kernel(2 * range.bytes());
  }
  weighted = index_rows(weighted, inverse);
  summed = sum(view(weighted, {tokens, k, x.size(-1)}), 1, false);
  return to(summed, x.type());
}

// --- block ----------------------------------------------------------------------------------------

MoeMlp::MoeMlp(Context& context, const DecoderStyle& style, const std::string& path)
    : context_(&context), style_(&style) {
  const std::string router = path + (style.expert_biases ? ".router" : ".gate");
  module_ = context.module(path, class_name(style, style.moe_class));
  if (style.router_first) router_ = Router(context, style, router);
  experts_ = Experts(context, style, path + ".experts");
  if (!style.router_first) router_ = Router(context, style, router);
  has_shared_ = context.sizes.shared_width > 0;
  if (has_shared_) shared_ = DecoderMlp(context, style, path + ".shared_experts", context.sizes.shared_width);
}

Tensor MoeMlp::with_shared(const Tensor& x) const {
  const Dims sizes = x.sizes();
  Routing routing = router_(x);
  Tensor hidden = view(x, {-1, sizes[-1]});
  hidden = view(experts_(hidden, routing), sizes);
  hidden = add(hidden, shared_(x));
  drop(routing.logits, routing.weights, routing.indices);
  return hidden;
}

Tensor MoeMlp::operator()(Tensor x, Tensor& weights) const {
  Tape& tape = context_->tape;
  tape.forward_pre(module_);
  Tensor own = tape.own(module_, x);
  Tensor out, routed;
  if (has_shared_) {
    out = with_shared(own);
  } else {
    const Dims sizes = own.sizes();
    Tensor rows = view(own, {-1, sizes[-1]});
    Routing routing = router_(rows);
    out = experts_(rows, routing);
    out = reshape(out, sizes);
    if (style_->returns_routing) routed = routing.weights;
    drop(rows, routing.logits, routing.weights, routing.indices);
  }
  tape.forward_post(module_, {&out, &routed});
  drop(own, x);
  if (style_->returns_routing) weights = std::move(routed);
  return out;
}

}  // namespace zeroplan::eager
