#pragma once
// One layer: norms and residual sums around attention and the MLP or experts.

#include <string>
#include <string_view>
#include <vector>

#include "models/block_builder.h"
#include "models/model_config.h"

namespace zeroplan {

/// A layer's place in its stack, and what may differ between layers.
struct LayerPlace {
  LayerTraits traits;
  bool decoder_stack = false;  // the second stack of an encoder_decoder
  bool first = false;          // of a stack with a relative bias table
  bool last_encoder = false;   // also holds the encoder's final norm
  friend bool operator==(const LayerPlace&, const LayerPlace&) = default;
};

class LayerBuilder {
 public:
  LayerBuilder(const Architecture& architecture, const TensorNames& names, const LayerPlace& place, std::string name);
  BlockKind build();

 private:
  std::string full(std::string_view name) const;
  int norm(std::string name, std::string_view tensor, int x);
  int residual_layer(int x);
  int attention(int x);
  int cross_attention(int x);
  int mla_attention(int x);
  int out_projection(int attention_output, std::string_view tensor);
  std::vector<int> score_inputs(int qkv);
  int qk_norm(int qkv);
  std::vector<int> attention_tensors();
  std::vector<int> mlp(int x);
  std::vector<int> experts(int x);
  int dense(int x, std::string_view prefix, std::int64_t width, const TensorNames& names);
  int one(const std::vector<int>& terms);

  const Architecture& a_;
  const Family& family_;
  const TensorNames& names_;
  LayerPlace place_;
  BlockBuilder block_;
};

}  // namespace zeroplan
