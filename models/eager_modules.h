#pragma once
// nn.Module as the step sees it: a tree of names with parameters, forward hooks around each call, and the layers that
// every family uses.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/eager_ops.h"
#include "models/eager_step.h"
#include "models/json_reader.h"
#include "models/model_config.h"

namespace zeroplan::eager {

/// What a family's forward is built from.
struct Context {
  const ModelSpec& model;
  const Architecture& sizes;
  ConfigReader& config;
  const EagerOptions& options;
  EagerStep& step;
  Tape& tape;
  Element type = Element::bf16;
  std::string prefix;  // before every name: peft's wrapper
  int layer = -1;      // the block under construction
  int next_layer = 0;  // of models with several stacks
  mutable int layers_called = 0;

  std::int64_t batch() const { return options.tokens.batch; }
  std::int64_t length() const { return options.tokens.seq_len; }
  /// A number of config.json, or `fallback`.
  double number(std::string_view key, double fallback) const;

  /// Adds a module; its path is `name`. Order of calls is the order of named_modules().
  int module(const std::string& name, std::string_view class_name, bool is_block = false);
  /// Adds a parameter "name" to module `owner`.
  int parameter(int owner, std::string_view name, Dims sizes);
  /// A parameter of an adapter: the only trainable ones with LoRA.
  int adapter_parameter(int owner, Dims sizes);
  /// Makes a parameter of another module this one's too (tied weights).
  void share(int owner, int parameter);
  Tensor value(int parameter) const { return parameter < 0 ? Tensor() : tape.parameter(parameter); }
};

inline void forward_post(Tape& tape, int module, const Tensor& out) { tape.forward_post(module, {&out}); }
inline void forward_post(Tape& tape, int module, const Tensors& outputs) { tape.forward_post(module, outputs); }

/// A module call: hooks around `body`, which gets the module's own view of `x`. What it returns are the outputs, as
/// overloads of forward_post() take them.
template <class Body>
auto framed(Tape& tape, int module, const Tensor& x, Body body) {
  tape.forward_pre(module);
  auto result = body(tape.own(module, x));
  forward_post(tape, module, result);
  return result;
}

/// The same for a module whose caller gives its input away: one input and one output.
template <class Body>
Tensor call(Tape& tape, int module, Tensor x, Body body) {
  Tensor out = framed(tape, module, x, std::move(body));
  x.drop();
  return out;
}

enum class LinearKind : std::uint8_t {
  linear,
  conv1d,  // GPT-2's: the weight is [in, out]
  falcon,  // FalconLinear: the bias is added after the product
};

class Linear {
 public:
  Linear() = default;
  /// A linear of a block: peft wraps it when the options ask for adapters.
  Linear(Context& context, const std::string& name, std::int64_t in, std::int64_t out, bool bias,
         LinearKind kind = LinearKind::linear);
  Tensor operator()(Tensor x) const;
  int weight() const { return weight_; }
  int module() const { return module_; }

 private:
  Tensor base(Tensor x) const;
  Tensor adapted(Tensor x) const;
  /// peft's lora.Linear around the layer: y = base(x) + B(A(x)) scale.
  struct Adapter {
    int module = -1, dropout = -1, down = -1, up = -1, down_weight = -1, up_weight = -1;
  };
  const Context* context_ = nullptr;
  LinearKind kind_ = LinearKind::linear;
  int module_ = -1;
  int weight_ = -1, bias_ = -1;
  Adapter adapter_;
};

class Embedding {
 public:
  Embedding() = default;
  Embedding(Context& context, const std::string& name, std::int64_t rows, std::int64_t width,
            std::string_view type = "Embedding");
  Tensor operator()(const Tensor& ids) const;
  /// The rows alone, without the module's hooks.
  Tensor look_up(const Tensor& ids) const { return embedding(context_->value(weight_), ids); }
  /// The model's input embedding: with adapters and checkpointing its output is made to require a gradient.
  Embedding as_input() &&;
  /// Rows times a buffer of the model (Gemma).
  void scale() { scaled_ = true; }
  int weight() const { return weight_; }
  int module() const { return module_; }

 private:
  const Context* context_ = nullptr;
  int module_ = -1, weight_ = -1;
  bool requires_grad_ = false, scaled_ = false;
};

/// How a family computes its norm.
enum class NormStyle : std::uint8_t {
  rms,              // fp32 statistics, back to the input's type, then the weight (Llama)
  rms_gemma,        // fp32 until after (1 + weight) (Gemma)
  rms_fp32_weight,  // fp32 until after the weight (OLMo-2)
  layer,            // aten's native_layer_norm
  layer_fp32,       // LayerNorm written out in fp32 (Cohere)
  t5,               // statistics in fp32, the product with the input in both types
};

class Norm {
 public:
  Norm() = default;
  Norm(Context& context, const std::string& name, std::string_view type, NormStyle style, Dims width, bool bias);
  Tensor operator()(Tensor x) const;
  int module() const { return module_; }

 private:
  Tensor rms(Tensor x) const;
  Tensor rms_gemma(Tensor x) const;
  Tensor layer_fp32(Tensor x) const;
  Tensor t5(Tensor x) const;
  const Context* context_ = nullptr;
  NormStyle style_ = NormStyle::rms;
  int module_ = -1, weight_ = -1, bias_ = -1;
};

/// ACT2FN[name] as a module.
class ActivationModule {
 public:
  ActivationModule() = default;
  ActivationModule(Context& context, const std::string& path, const std::string& function);
  Tensor operator()(Tensor x) const;

 private:
  const Context* context_ = nullptr;
  std::string function_;
  int module_ = -1;
};
/// The function alone. Throws InputError for one that is not known.
Tensor apply_activation(const std::string& function, Tensor x);

class Dropout {
 public:
  Dropout() = default;
  Dropout(Context& context, const std::string& path, double probability);
  Tensor operator()(Tensor x) const;

 private:
  const Context* context_ = nullptr;
  double probability_ = 0;
  int module_ = -1;
};

/// Names of a feed-forward module's parts, as config and weights have them.
struct FeedForwardNames {
  std::string_view type, up, down;
};

/// Linear, activation "act", linear, and a module "dropout" where the family has one: all with biases.
class FeedForward {
 public:
  FeedForward() = default;
  FeedForward(Context& context, const std::string& path, const FeedForwardNames& names,
              LinearKind kind = LinearKind::linear, std::optional<double> dropout = std::nullopt);
  Tensor operator()(Tensor x) const;

 private:
  const Context* context_ = nullptr;
  int module_ = -1;
  Linear up_, down_;
  ActivationModule activation_;
  std::optional<Dropout> dropout_;
};

/// Mean cross-entropy of logits [.., vocab] in fp32 against shifted or plain labels.
Tensor causal_loss(const Context& context, const Tensor& logits, const Tensor& labels);

/// A family's module tree and forward. Loss first, logits second.
class EagerModel {
 public:
  virtual ~EagerModel() = default;
  /// Everything between the root's hooks: returns the loss; `logits` receives the output that the caller may hold.
  virtual Tensor forward(const Tensor& ids, const Tensor& labels, Tensor& logits) = 0;
};

}  // namespace zeroplan::eager
