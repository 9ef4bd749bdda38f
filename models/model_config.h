#pragma once
// From a config.json to the numbers that the builder needs: keys looked up by family, defaults noted, ranges checked.

#include <cstdint>
#include <string>
#include <vector>

#include "models/config_reader.h"
#include "models/families.h"

namespace zeroplan {

struct MlaDims {
  std::int64_t q_rank = 0;  // 0: queries in one step
  std::int64_t kv_rank = 0, nope_dim = 0, rope_dim = 0, v_dim = 0;
};

/// What may differ from layer to layer.
struct LayerTraits {
  bool moe = false;
  std::int64_t window = 0;  // 0: none
  bool chunked = false;
  friend bool operator==(const LayerTraits&, const LayerTraits&) = default;
};

/// A family row as this file sets it, with its sizes.
struct Architecture {
  Family family;
  std::int64_t hidden = 0, heads = 0, kv_heads = 0, head_dim = 0;
  MlaDims mla;
  std::int64_t width = 0;  // dense MLP, one of gate and up
  std::int64_t experts = 0, experts_per_token = 0, expert_width = 0;
  std::int64_t shared_width = 0;  // all shared experts together; 0: none
  std::int64_t vocab = 0, max_positions = 0;
  std::int64_t position_rows = 0, token_types = 0;
  std::int64_t patch_inputs = 0;  // channels x patch x patch
  std::int64_t patch_size = 0, channels = 0;
  std::int64_t relative_buckets = 0;
  bool tied = false;
  bool final_norm = true;
  std::string activation;
  std::vector<LayerTraits> layers;  // the decoder's, or the encoder's of an encoder_decoder
  std::int64_t decoder_layers = 0;  // encoder_decoder only
};

/// Throws InputError at the first key that is missing, out of range or contradicts another.
Architecture read_architecture(const Family& family, ConfigReader& reader);

}  // namespace zeroplan
