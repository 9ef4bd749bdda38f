#include "models/model_builder.h"

#include <algorithm>

#include <fmt/format.h>

#include "models/layer_builder.h"

namespace zeroplan {
namespace {

BlockKind embedding_block(const Architecture& a, const TensorNames& names, std::string name, bool shared) {
  BlockBuilder block(std::move(name), BlockRole::embedding);
  std::vector<int> tensors;
  tensors.push_back(block.tensor(std::string(names.embedding), {a.vocab, a.hidden}, TensorKind::embedding));
  block.kind().tensors.back().tied = shared;
  if (a.family.positions == Positions::learned) {
    tensors.push_back(block.tensor(std::string(names.position), {a.position_rows, a.hidden}, TensorKind::position));
  }
  if (!names.token_type.empty()) {
    tensors.push_back(block.tensor(std::string(names.token_type), {a.token_types, a.hidden}, TensorKind::position));
  }
  int x = block.embedding(std::move(tensors), 0, a.hidden);
  if (!names.embedding_norm.empty()) {
    x = block.norm("embedding norm", x, a.family.norm, names.embedding_norm, TensorKind::embedding);
  }
  return block.finish(x);
}

/// Patches of an image through one linear, a class token in front, learned positions.
BlockKind patch_block(const Architecture& a, const TensorNames& names) {
  BlockBuilder block("embedding", BlockRole::embedding);
  const std::string projection(names.embedding);
  std::vector<int> tensors = {
      block.tensor(std::string(names.token_type), {1, 1, a.hidden}, TensorKind::position),
      block.tensor(std::string(names.position), {1, a.position_rows, a.hidden}, TensorKind::position),
      block.tensor(projection + ".weight", {a.hidden, a.channels, a.patch_size, a.patch_size}, TensorKind::embedding),
      block.tensor(projection + ".bias", {a.hidden}, TensorKind::embedding)};
  return block.finish(block.embedding(std::move(tensors), a.patch_inputs, a.hidden));
}

BlockKind head_block(const Architecture& a, const TensorNames& names) {
  BlockBuilder block("head", BlockRole::head);
  int x = block.input(a.hidden);
  if (a.final_norm) x = block.norm("final norm", x, a.family.norm, names.final_norm, TensorKind::final);
  if (!names.head_transform.empty()) {
    x = block.linear("transform", x, {{std::string(names.head_transform), a.hidden, true}}, TensorKind::head);
    x = block.activation("activation " + a.activation, x, a.hidden, a.hidden);
    x = block.norm("transform norm", x, a.family.norm, names.head_transform_norm, TensorKind::head);
  }
  if (!names.head.empty()) {
    BlockKind& kind = block.kind();
    kind.vocab = a.vocab;
    kind.head_tensor = block.tensor(std::string(names.head), {a.vocab, a.hidden}, TensorKind::head);
    kind.tensors.back().tied = a.tied;
    if (!names.head_bias.empty()) {
      kind.head_bias = block.tensor(std::string(names.head_bias), {a.vocab}, TensorKind::head);
    }
  }
  return block.finish(x);
}

std::string layer_name(const Architecture& a, const LayerPlace& place) {
  std::string name = "layer";
  if (a.experts > 0 && !a.family.all_moe) name = place.traits.moe ? "MoE layer" : "dense layer";
  if (a.family.stack == Stack::encoder_decoder) {
    name = place.decoder_stack ? "decoder layer" : "encoder layer";
    if (place.last_encoder) name = "last " + name;
    if (place.first) name = "first " + name;
  }
  if (place.traits.window > 0) {
    name += fmt::format(", {} {}", place.traits.chunked ? "chunk" : "window", place.traits.window);
  }
  return name;
}

/// Appends layers, one kind for equal places.
class StackBuilder {
 public:
  StackBuilder(const Architecture& a, ModelSpec& model) : a_(a), model_(model) {}

  void add(BlockKind kind) {
    model_.sequence.push_back(static_cast<int>(model_.kinds.size()));
    model_.kinds.push_back(std::move(kind));
  }

  void add_layer(const TensorNames& names, const LayerPlace& place) {
    const auto found = std::ranges::find(places_, place, &std::pair<LayerPlace, int>::first);
    int index = static_cast<int>(model_.kinds.size());
    if (found != places_.end()) {
      index = found->second;
    } else {
      model_.kinds.push_back(LayerBuilder(a_, names, place, layer_name(a_, place)).build());
      places_.emplace_back(place, index);
    }
    model_.sequence.push_back(index);
    ++model_.num_layers;
  }

 private:
  const Architecture& a_;
  ModelSpec& model_;
  std::vector<std::pair<LayerPlace, int>> places_;
};

}  // namespace

void build_blocks(const Architecture& a, ModelSpec& model) {
  const TensorNames& names = a.family.names;
  const bool two_stacks = a.family.stack == Stack::encoder_decoder;
  model.family = a.family.model_type;
  model.hidden = a.hidden;
  model.vocab = a.vocab;
  model.max_positions = a.max_positions;
  model.tied_embeddings = a.tied;
  StackBuilder stack(a, model);
  stack.add(a.family.image ? patch_block(a, names)
                           : embedding_block(a, names, two_stacks ? "encoder embedding" : "embedding", false));
  for (std::size_t i = 0; i < a.layers.size(); ++i) {
    LayerPlace place;
    place.traits = a.layers[i];
    place.first = two_stacks && i == 0;
    place.last_encoder = two_stacks && i + 1 == a.layers.size();
    stack.add_layer(names, place);
  }
  if (two_stacks) {
    stack.add(embedding_block(a, a.family.decoder_names, "decoder embedding", true));
    for (std::int64_t i = 0; i < a.decoder_layers; ++i) {
      LayerPlace place;
      place.decoder_stack = true;
      place.first = i == 0;
      stack.add_layer(a.family.decoder_names, place);
    }
  }
  stack.add(head_block(a, two_stacks ? a.family.decoder_names : names));
}

}  // namespace zeroplan
