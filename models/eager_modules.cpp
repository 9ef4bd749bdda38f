#include "models/eager_modules.h"

#include <algorithm>

#include <fmt/format.h>

#include "models/error.h"

namespace zeroplan::eager {

double Context::number(std::string_view key, double fallback) const {
  const JsonValue* value = config.find(key);
  return value != nullptr && value->is_number() ? value->as_real(-1e18, 1e18) : fallback;
}

int Context::module(const std::string& name, std::string_view class_name, bool is_block) {
  EagerModule entry;
  entry.name = prefix.empty() || name.empty() ? prefix + name : fmt::format("{}.{}", prefix, name);
  entry.type = class_name;
  entry.layer = layer;
  entry.is_block = is_block;
  step.modules.push_back(std::move(entry));
  return static_cast<int>(step.modules.size()) - 1;
}

int Context::parameter(int owner, std::string_view name, Dims shape) {
  EagerModule& module = step.modules[static_cast<std::size_t>(owner)];
  EagerParameter entry;
  entry.name = module.name.empty() ? std::string(name) : fmt::format("{}.{}", module.name, name);
  for (int i = 0; i < shape.size(); ++i) entry.shape.push_back(shape[i]);
  entry.elements = shape.count();
  entry.trainable = options.lora_rank == 0;
  const int index = static_cast<int>(step.parameters.size());
  tape.add_parameter(index, shape, type, entry.trainable);
  step.parameters.push_back(std::move(entry));
  module.parameters.push_back(index);
  return index;
}

int Context::adapter_parameter(int owner, Dims shape) {
  const int index = parameter(owner, "weight", shape);
  step.parameters[static_cast<std::size_t>(index)].trainable = true;
  tape.add_parameter(index, shape, type, true);
  return index;
}

void Context::share(int owner, int parameter) {
  step.modules[static_cast<std::size_t>(owner)].parameters.push_back(parameter);
}

// --- linear ---------------------------------------------------------------------------------------

namespace {

std::string_view linear_class(LinearKind kind) {
  switch (kind) {
    case LinearKind::linear:
      return "Linear";
    case LinearKind::conv1d:
      return "Conv1D";
    case LinearKind::falcon:
      return "FalconLinear";
  }
  return {};
}

}  // namespace

Linear::Linear(Context& context, const std::string& name, std::int64_t in, std::int64_t out, bool bias, LinearKind kind)
    : context_(&context), kind_(kind) {
  const bool adapts = context.options.lora_rank > 0;
  if (adapts) adapter_.module = context.module(name, "Linear");
  const std::string base_name = adapts ? name + ".base_layer" : name;
  module_ = context.module(base_name, linear_class(kind));
  weight_ = context.parameter(module_, "weight", kind == LinearKind::conv1d ? Dims{in, out} : Dims{out, in});
  if (bias) bias_ = context.parameter(module_, "bias", {out});
  if (!adapts) return;
  const std::int64_t rank = context.options.lora_rank;
  context.module(name + ".lora_dropout", "ModuleDict");
  adapter_.dropout = context.module(name + ".lora_dropout.default", "Identity");
  context.module(name + ".lora_A", "ModuleDict");
  adapter_.down = context.module(name + ".lora_A.default", "Linear");
  adapter_.down_weight = context.adapter_parameter(adapter_.down, {rank, in});
  // peft's forward reads lora_A.weight.dtype, so DeepSpeed registers it as an external parameter of the wrapper.
  if (context.options.zero3) context.share(adapter_.module, adapter_.down_weight);
  context.module(name + ".lora_B", "ModuleDict");
  adapter_.up = context.module(name + ".lora_B.default", "Linear");
  adapter_.up_weight = context.adapter_parameter(adapter_.up, {out, rank});
  context.module(name + ".lora_embedding_A", "ParameterDict");
  context.module(name + ".lora_embedding_B", "ParameterDict");
  context.module(name + ".lora_magnitude_vector", "ModuleDict");
}

Tensor Linear::base(Tensor x) const {
  return call(context_->tape, module_, std::move(x), [&](Tensor own) {
    if (kind_ == LinearKind::falcon) {
      Tensor out = linear(std::move(own), context_->value(weight_), {});
      return bias_ >= 0 ? add(std::move(out), context_->value(bias_)) : out;
    }
    if (kind_ == LinearKind::linear) {
      return linear(std::move(own), context_->value(weight_), context_->value(bias_));
    }
    Dims sizes = own.sizes();
    const std::int64_t width = sizes[-1];
    const Tensor weight = context_->value(weight_);
    sizes[-1] = weight.size(1);
    Tensor rows = view(std::move(own), {-1, width});
    return view(addmm(context_->value(bias_), std::move(rows), weight), sizes);
  });
}

Tensor Linear::adapted(Tensor x) const {
  Tape& tape = context_->tape;
  return call(tape, adapter_.module, std::move(x), [&](const Tensor& own) {
    Tensor result = base(own);
    Tensor low = call(tape, adapter_.dropout, own, [](Tensor same) { return same; });
    low = call(tape, adapter_.down, std::move(low),
               [&](Tensor same) { return linear(std::move(same), context_->value(adapter_.down_weight), {}); });
    Tensor change = call(tape, adapter_.up, std::move(low),
                         [&](Tensor same) { return linear(std::move(same), context_->value(adapter_.up_weight), {}); });
    result = add(result, mul_scalar(std::move(change)));
    return result;
  });
}

Tensor Linear::operator()(Tensor x) const { return adapter_.module >= 0 ? adapted(std::move(x)) : base(std::move(x)); }

// --- embedding ------------------------------------------------------------------------------------

Embedding::Embedding(Context& context, const std::string& name, std::int64_t rows, std::int64_t width,
                     std::string_view type)
    : context_(&context) {
  module_ = context.module(name, type);
  weight_ = context.parameter(module_, "weight", {rows, width});
}

Embedding Embedding::as_input() && {
  requires_grad_ = context_->options.lora_rank > 0 && context_->options.checkpointing;
  return *this;
}

namespace {

/// rows * a buffer of the model, a number in its type.
Tensor scale_rows(Tensor rows) {
  Tensor factor = rows.tape().external({}, rows.type());
  return mul(std::move(rows), std::move(factor));
}

}  // namespace

Tensor Embedding::operator()(const Tensor& ids) const {
  return call(context_->tape, module_, ids, [&](const Tensor& own) {
    Tensor out = look_up(own);
    if (scaled_) out = scale_rows(std::move(out));
    if (requires_grad_) out.impl().requires_grad = true;
    return out;
  });
}

// --- norms ----------------------------------------------------------------------------------------

Norm::Norm(Context& context, const std::string& name, std::string_view type, NormStyle style, Dims width, bool bias)
    : context_(&context), style_(style) {
  module_ = context.module(name, type);
  weight_ = context.parameter(module_, "weight", width);
  if (bias) bias_ = context.parameter(module_, "bias", width);
}

Tensor Norm::operator()(Tensor x) const {
  return call(context_->tape, module_, std::move(x), [&](Tensor own) {
    switch (style_) {
      case NormStyle::rms:
      case NormStyle::rms_fp32_weight:
        return rms(std::move(own));
      case NormStyle::rms_gemma:
        return rms_gemma(std::move(own));
      case NormStyle::layer:
        return layer_norm(std::move(own), context_->value(weight_), context_->value(bias_));
      case NormStyle::layer_fp32:
        return layer_fp32(std::move(own));
      case NormStyle::t5:
        return t5(std::move(own));
    }
    return Tensor();
  });
}

Tensor Norm::rms(Tensor x) const {
  const Element type = x.type();
  x = to(std::move(x), Element::fp32);
  Tensor variance = mean(pow_scalar(x), -1, true);
  x = mul(x, rsqrt(add_scalar(variance)));
  Tensor out;
  if (style_ == NormStyle::rms) {
    out = mul(context_->value(weight_), to(x, type));
  } else {
    out = to(mul(context_->value(weight_), x), type);
  }
  drop(x, variance);
  return out;
}

// _norm(x.float()), times (1 + weight.float()), then back.
Tensor Norm::rms_gemma(Tensor x) const {
  const Element type = x.type();
  Tensor wide = to(x, Element::fp32);
  Tensor output = mul(wide, rsqrt(add_scalar(mean(pow_scalar(wide), -1, true))));
  wide.drop();
  output = mul(output, add_scalar(to(context_->value(weight_), Element::fp32)));
  Tensor out = to(output, type);
  drop(x, output);
  return out;
}

Tensor Norm::t5(Tensor x) const {
  const Tensor weight = context_->value(weight_);
  Tensor variance = mean(pow_scalar(to(x, Element::fp32)), -1, true);
  x = mul(x, rsqrt(add_scalar(variance)));
  x = to(x, weight.type());
  Tensor out = mul(weight, x);
  drop(x, variance);
  return out;
}

// Mean and variance by hand, in fp32.
Tensor Norm::layer_fp32(Tensor x) const {
  const Element type = x.type();
  x = to(std::move(x), Element::fp32);
  Tensor center = mean(x, -1, true);
  Tensor variance = mean(pow_scalar(sub(x, center)), -1, true);
  Tensor centered = sub(x, center);
  x = mul(std::move(centered), rsqrt(add_scalar(variance)));
  x = mul(to(context_->value(weight_), Element::fp32), x);
  Tensor out = to(x, type);
  drop(x, center, variance);
  return out;
}

// --- activations ----------------------------------------------------------------------------------

namespace {

struct ActivationName {
  std::string_view name, type;
};
constexpr ActivationName kActivations[] = {
    {"gelu", "GELUActivation"},          {"gelu_new", "NewGELUActivation"},
    {"gelu_pytorch_tanh", "GELUTanh"},   {"relu", "ReLU"},
    {"silu", "SiLUActivation"},          {"swish", "SiLU"},
    {"gelu_fast", "FastGELUActivation"},
};

/// 0.5 x (1 + tanh(c (x + 0.044715 x^3))), written out.
Tensor new_gelu(const Tensor& x) {
  Tensor half = mul_scalar(x);
  Tensor cube = mul_scalar(pow_scalar(x));
  Tensor inner = mul_scalar(add(x, std::move(cube)));
  Tensor gate = add_scalar(activate(std::move(inner), Activation::tanh));
  return mul(std::move(half), std::move(gate));
}

/// 0.5 x (1 + tanh(x c (1 + 0.044715 x x))), written out.
Tensor gelu_fast(Tensor x) {
  Tensor half = mul_scalar(x);
  Tensor scaled = mul_scalar(x);
  Tensor square = add_scalar(mul(mul_scalar(x), x));
  Tensor gate = add_scalar(activate(mul(std::move(scaled), std::move(square)), Activation::tanh));
  Tensor out = mul(std::move(half), std::move(gate));
  x.drop();
  return out;
}

}  // namespace

Tensor apply_activation(const std::string& function, Tensor x) {
  if (function == "silu" || function == "swish") return activate(std::move(x), Activation::silu);
  if (function == "gelu" || function == "gelu_pytorch_tanh") return activate(std::move(x), Activation::gelu);
  if (function == "relu") return activate(std::move(x), Activation::relu);
  if (function == "gelu_fast") return gelu_fast(std::move(x));
  if (function == "gelu_new") {
    Tensor out = new_gelu(x);
    x.drop();
    return out;
  }
  throw InputError(fmt::format("activation function: no eager graph is known for \"{}\"", function));
}

ActivationModule::ActivationModule(Context& context, const std::string& path, const std::string& function)
    : context_(&context),
      // Megatron's tanh GELU is one jitted kernel, which keeps its input.
      function_(context.options.code == EagerCode::megatron ? "gelu" : function) {
  const auto* found = std::ranges::find(kActivations, function_, &ActivationName::name);
  if (found == std::end(kActivations)) {
    throw InputError(fmt::format("activation function: no eager graph is known for \"{}\"", function));
  }
  module_ = context.module(path, found->type);
}

Tensor ActivationModule::operator()(Tensor x) const {
  return call(context_->tape, module_, std::move(x),
              [&](Tensor own) { return apply_activation(function_, std::move(own)); });
}

Dropout::Dropout(Context& context, const std::string& path, double probability)
    : context_(&context), probability_(probability), module_(context.module(path, "Dropout")) {}

Tensor Dropout::operator()(Tensor x) const {
  return call(context_->tape, module_, std::move(x), [&](Tensor own) { return dropout(std::move(own), probability_); });
}

// --- feed-forward ---------------------------------------------------------------------------------

FeedForward::FeedForward(Context& context, const std::string& path, const FeedForwardNames& names, LinearKind kind,
                         std::optional<double> dropout)
    : context_(&context) {
  const Architecture& a = context.sizes;
  module_ = context.module(path, names.type);
  up_ = Linear(context, fmt::format("{}.{}", path, names.up), a.hidden, a.width, true, kind);
  down_ = Linear(context, fmt::format("{}.{}", path, names.down), a.width, a.hidden, true, kind);
  activation_ = ActivationModule(context, path + ".act", a.activation);
  if (dropout) dropout_ = Dropout(context, path + ".dropout", *dropout);
}

Tensor FeedForward::operator()(Tensor x) const {
  return call(context_->tape, module_, std::move(x), [&](Tensor hidden) {
    hidden = up_(hidden);
    hidden = activation_(hidden);
    hidden = down_(hidden);
    if (dropout_) hidden = (*dropout_)(hidden);
    return hidden;
  });
}

// --- loss -----------------------------------------------------------------------------------------

Tensor causal_loss(const Context& context, const Tensor& logits, const Tensor& labels) {
  Tape& tape = context.tape;
  const std::int64_t vocab = logits.size(-1);
  Tensor wide = to(logits, Element::fp32);
  Tensor padded = tape.allocate({labels.size(0), labels.size(1) + 1}, Element::i64);
  Tensor shifted = contiguous(slice(padded, 1, 1, labels.size(1)));
  wide = view(wide, {-1, vocab});
  shifted = view(shifted, {-1});
  Tensor loss = nll_loss(log_softmax(wide), shifted);
  drop(wide, padded, shifted);
  return loss;
}

}  // namespace zeroplan::eager
