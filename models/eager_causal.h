#pragma once
// What causal language models share: the head, the loss, and the loop over blocks with or without checkpointing.

#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "models/eager_attention.h"

namespace zeroplan::eager {

/// lm_head; its matrix may be the embedding's.
class Head {
 public:
  Head() = default;
  /// `tied`: a parameter to share, or -1 for one of its own.
  Head(Context& context, int tied, bool bias);
  Tensor operator()(Tensor x) const;

 private:
  const Context* context_ = nullptr;
  int module_ = -1, weight_ = -1, bias_ = -1;
};

/// flash_attn's CrossEntropyLoss: keeps the logits and a sum a row; its backward makes a gradient as large as the
/// logits.
Tensor fused_loss(const Tensor& logits);
/// Megatron's vocab_parallel_cross_entropy on one rank: an fp32 copy of the logits becomes the softmax, which becomes
/// the gradient, all in place.
Tensor vocab_parallel_loss(const Tensor& logits);

/// Root of a causal model: base model, head, shifted cross-entropy.
class CausalModel : public EagerModel {
 public:
  Tensor forward(const Tensor& ids, const Tensor& labels, Tensor& logits) override;

 protected:
  CausalModel(Context& context, const std::string& type);
  /// The base model's output [b, s, hidden].
  virtual Tensor base(const Tensor& ids) = 0;
  /// What a family does to the head's output.
  virtual Tensor finish_logits(Tensor logits) const { return logits; }

  const Context* context_ = nullptr;
  Head head_;

 private:
  int root_ = -1;
};

/// The model's layers, modules `path`.0, `path`.1, ...; `more` goes to each between context and path.
template <class Layer, class... More>
std::vector<Layer> make_layers(Context& context, const std::string& path, const More&... more) {
  context.module(path, "ModuleList");
  std::vector<Layer> layers;
  for (std::size_t i = 0; i < context.sizes.layers.size(); ++i) {
    context.layer = static_cast<int>(i);
    layers.emplace_back(context, more..., fmt::format("{}.{}", path, i));
  }
  context.layer = -1;
  return layers;
}

/// One layer, checkpointed or not. The inputs' references are gone when it returns.
template <class Layer>
Tensors call_layer(const Context& context, const Layer& layer, Tensors inputs, std::size_t positional) {
  const bool checkpointed = ++context.layers_called % context.options.checkpoint_every == 0;
  if (context.options.checkpointing && checkpointed) {
    return context.tape.checkpoint([&layer](const Tensors& again) { return layer(again); }, std::move(inputs),
                                   positional, context.options.reentrant);
  }
  Tensors outputs = layer(inputs);
  inputs.clear();
  return outputs;
}

/// Calls each layer on its output before; `arguments(i)` are the other tensors of call i, keyword arguments in the
/// order in which the caller's dictionary holds them. A layer is called with one list: hidden, then these.
template <class Layer, class Arguments>
Tensor run_layers(const Context& context, const std::vector<Layer>& layers, Tensor hidden, std::size_t positional,
                  Arguments arguments) {
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    Tensors inputs = arguments(i);
    inputs.insert(inputs.begin(), hidden);
    Tensors outputs = call_layer(context, layer, std::move(inputs), positional);
    hidden = std::move(outputs[0]);
  }
  return hidden;
}

/// The mask of full causal attention for the attention function in use.
Tensor plain_mask(const Context& context);

}  // namespace zeroplan::eager
