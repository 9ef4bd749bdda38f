#include "models/model_config.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace zeroplan {
namespace {

// Sizes above these are typing errors, and products of allowed ones stay inside int64 (spec section 5).
constexpr std::int64_t kMaxLayers = 10'000;
constexpr std::int64_t kMaxHidden = 1'000'000;
constexpr std::int64_t kMaxHeads = 100'000;
constexpr std::int64_t kMaxWidth = 100'000'000;
constexpr std::int64_t kMaxVocab = 100'000'000;
constexpr std::int64_t kMaxPositions = 1'000'000'000;
constexpr std::int64_t kMaxExperts = 10'000;

constexpr std::array<std::string_view, 18> kActivations = {
    "gelu",        "gelu_new",      "gelu_fast", "gelu_pytorch_tanh",
    "gelu_python", "gelu_accurate", "gelu_10",   "quick_gelu",
    "silu",        "swish",         "relu",      "relu2",
    "relu6",       "leaky_relu",    "tanh",      "sigmoid",
    "mish",        "linear"};

void read_heads(const Family& family, ConfigReader& reader, Architecture& a) {
  a.hidden = reader.required(family.keys.hidden, 1, kMaxHidden);
  a.heads = reader.required(family.keys.heads, 1, kMaxHeads);
  const std::string_view heads_name = first_name(family.keys.heads);
  const bool divides = a.hidden % a.heads == 0;
  if (const JsonValue* dim = reader.find(family.keys.head_dim)) {
    a.head_dim = dim->as_int(1, kMaxHeads);
  } else if (family.default_head_dim > 0 && !reader.mentions(family.keys.head_dim)) {
    a.head_dim = family.default_head_dim;
    reader.assume("head_dim", fmt::format("{}", a.head_dim), std::string(kTransformersDefault));
  } else if (family.model_type == "t5") {
    a.head_dim = reader.required(family.keys.head_dim, 1, kMaxHeads);
  } else if (divides) {
    a.head_dim = a.hidden / a.heads;
  } else if (!family.mla) {
    reader.fail(family.keys.heads, fmt::format("expected {} to divide {} ({}) or the key head_dim, got {}", heads_name,
                                               first_name(family.keys.hidden), a.hidden, a.heads));
  }
  a.kv_heads = a.heads;
  if (family.keys.kv_heads.empty() || family.mla) return;
  const std::int64_t fallback = family.default_kv_heads > 0 ? family.default_kv_heads : a.heads;
  a.kv_heads = reader.optional(family.keys.kv_heads, 1, kMaxHeads, fallback,
                               family.default_kv_heads > 0 ? kTransformersDefault : "as many as num_attention_heads");
  if (a.heads % a.kv_heads != 0) {
    reader.fail(family.keys.kv_heads, fmt::format("expected {} to divide {} ({}, num_attention_heads), got {}",
                                                  first_name(family.keys.kv_heads), heads_name, a.heads, a.kv_heads));
  }
}

void read_mla(ConfigReader& reader, Architecture& a) {
  if (const JsonValue* rank = reader.find("q_lora_rank")) {
    a.mla.q_rank = rank->as_int(1, kMaxHidden);
  } else if (!reader.mentions("q_lora_rank")) {
    a.mla.q_rank = reader.optional("q_lora_rank", 1, kMaxHidden, 1536, kTransformersDefault);
  }
  a.mla.kv_rank = reader.required("kv_lora_rank", 1, kMaxHidden);
  a.mla.nope_dim = reader.required("qk_nope_head_dim", 1, kMaxHeads);
  a.mla.rope_dim = reader.required("qk_rope_head_dim", 1, kMaxHeads);
  a.mla.v_dim = reader.required("v_head_dim", 1, kMaxHeads);
  reader.find("num_key_value_heads");  // not used for shapes (transformer-math 1.4)
  if (const JsonValue* extra = reader.find("num_nextn_predict_layers"); extra != nullptr && extra->as_int(0, 100) > 0) {
    reader.assume("multi-token prediction layers", "0",
                  fmt::format("not modelled (num_nextn_predict_layers is {})", extra->short_form()));
  }
}

void read_biases(ConfigReader& reader, Architecture& a) {
  for (const BiasKey& key : a.family.bias_keys) {
    const bool on = reader.flag(key.key, key.value) != key.inverted;
    if (key.sets.qkv) a.family.biases.qkv = on;
    if (key.sets.out) a.family.biases.out = on;
    if (key.sets.mlp) a.family.biases.mlp = on;
  }
}

void read_experts(ConfigReader& reader, Architecture& a) {
  const ConfigKeys& keys = a.family.keys;
  if (keys.experts.empty()) return;
  a.experts = reader.required(keys.experts, 1, kMaxExperts);
  a.experts_per_token = reader.required(keys.experts_per_token, 1, kMaxExperts);
  if (a.experts_per_token > a.experts) {
    reader.fail(keys.experts_per_token, fmt::format("expected at most {} ({} experts), got {}",
                                                    first_name(keys.experts), a.experts, a.experts_per_token));
  }
  a.expert_width = reader.required(keys.expert_width, 1, kMaxWidth);
  std::int64_t shared = a.family.default_shared_experts;
  if (!keys.shared_experts.empty()) {
    if (const JsonValue* value = reader.find(keys.shared_experts)) {
      shared = value->as_int(0, kMaxExperts);
    } else if (!reader.mentions(keys.shared_experts)) {
      reader.assume(keys.shared_experts, "0", "the file has no such key");
    }
  }
  a.shared_width = shared * a.expert_width;
}

/// Marks in `layers` the indices of a list; InputError outside the range.
void mark_layers(const JsonValue& list, std::vector<LayerTraits>& layers, bool moe) {
  for (const JsonValue& item : list.items()) {
    const auto index = item.as_int(0, static_cast<std::int64_t>(layers.size()) - 1);
    layers[static_cast<std::size_t>(index)].moe = moe;
  }
}

void place_experts(ConfigReader& reader, Architecture& a) {
  if (a.experts == 0) return;
  const ConfigKeys& keys = a.family.keys;
  const auto count = static_cast<std::int64_t>(a.layers.size());
  std::int64_t first = 0;
  std::int64_t step = 1;
  if (!keys.first_dense.empty()) first = reader.optional(keys.first_dense, 0, kMaxLayers, 0, kTransformersDefault);
  if (!keys.moe_step.empty()) step = reader.optional(keys.moe_step, 1, kMaxLayers, 1, kTransformersDefault);
  const std::int64_t shift = a.family.moe_step_from_one ? 1 : 0;
  for (std::int64_t i = first; i < count; ++i) {
    a.layers[static_cast<std::size_t>(i)].moe = (i + shift) % step == 0;
  }
  if (const JsonValue* list = reader.find("moe_layers"); list != nullptr && a.family.moe_step_from_one) {
    for (LayerTraits& layer : a.layers) layer.moe = false;
    mark_layers(*list, a.layers, true);
  }
  if (const JsonValue* list = reader.find("mlp_only_layers")) mark_layers(*list, a.layers, false);
}

void read_width(ConfigReader& reader, Architecture& a) {
  const Family& family = a.family;
  const bool any_dense = std::ranges::any_of(a.layers, [](const LayerTraits& layer) { return !layer.moe; });
  if (!any_dense) {
    reader.find(family.keys.width);  // known, not used
    return;
  }
  if (a.width > 0) return;  // the family's own rule has set it
  if (family.width_factor == 0) {
    a.width = reader.required(family.keys.width, 1, kMaxWidth);
    return;
  }
  const JsonValue* value = reader.find(family.keys.width);
  a.width = value != nullptr ? value->as_int(1, kMaxWidth) : family.width_factor * a.hidden;
}

/// Sets windows by `layer_types`, which newer transformers write for every family.
void windows_by_list(const JsonValue& types, std::int64_t window, ConfigReader& reader, Architecture& a) {
  if (types.items().size() != a.layers.size()) {
    types.fail_with(fmt::format("expected {} entries (one a layer), got {}", a.layers.size(), types.items().size()));
  }
  for (std::size_t i = 0; i < a.layers.size(); ++i) {
    const std::string& type = types.items()[i].as_string();
    if (type == "full_attention") continue;
    const bool chunked = type == "chunked_attention";
    if (type != "sliding_attention" && !chunked) {
      types.items()[i].fail("\"full_attention\", \"sliding_attention\" or \"chunked_attention\"");
    }
    if (window == 0) reader.fail("layer_types", "expected a window size, as some layers have windowed attention");
    a.layers[i].window = window;
    a.layers[i].chunked = chunked;
  }
}

void read_windows(ConfigReader& reader, Architecture& a) {
  const Family& family = a.family;
  const JsonValue* types = reader.find("layer_types");
  if (family.window == WindowRule::none && types == nullptr) return;
  std::int64_t window = 0;
  if (const JsonValue* value = reader.find(family.keys.window)) {
    window = value->as_int(1, kMaxPositions);
  } else if (!reader.mentions(family.keys.window)) {
    window = family.default_window;
  }
  bool on = window > 0;
  if (family.window == WindowRule::optional && types == nullptr) {
    on = reader.mentions("use_sliding_window") ? reader.flag("use_sliding_window", false) && on : false;
  }
  if (types != nullptr) return windows_by_list(*types, window, reader, a);
  if (!on) return;
  if (!reader.mentions(family.keys.window)) {
    reader.assume(family.keys.window, fmt::format("{}", window), std::string(kTransformersDefault));
  }
  std::int64_t period = 0;
  std::int64_t first = 0;
  if (family.window == WindowRule::alternating) period = 2;
  if (family.window == WindowRule::pattern) {
    period = reader.optional("sliding_window_pattern|_sliding_window_pattern", 1, kMaxLayers, 6, kTransformersDefault);
  }
  if (family.window == WindowRule::chunked) {
    period = reader.optional("no_rope_layer_interval", 1, kMaxLayers, 4, kTransformersDefault);
  }
  if (family.window == WindowRule::optional) {
    first = reader.optional("max_window_layers", 0, kMaxLayers, 28, kTransformersDefault);
  }
  for (std::int64_t i = first; i < static_cast<std::int64_t>(a.layers.size()); ++i) {
    if (period > 0 && (i + 1) % period == 0) continue;
    a.layers[static_cast<std::size_t>(i)].window = window;
    a.layers[static_cast<std::size_t>(i)].chunked = family.window == WindowRule::chunked;
  }
}

void read_activation(ConfigReader& reader, Architecture& a) {
  const std::string_view keys = a.family.keys.activation;
  a.activation = a.family.default_activation;
  if (!keys.empty()) a.activation = reader.text(keys, a.family.default_activation);
}

void check_activation(ConfigReader& reader, const Architecture& a) {
  if (std::ranges::find(kActivations, std::string_view(a.activation)) != kActivations.end()) return;
  const std::vector<std::string> known(kActivations.begin(), kActivations.end());
  const std::string_view key = a.family.keys.activation.empty() ? "feed_forward_proj" : a.family.keys.activation;
  reader.fail(
      key, fmt::format("expected a known activation, got \"{}\"; {}", a.activation, did_you_mean(a.activation, known)));
}

void read_positions(ConfigReader& reader, Architecture& a) {
  const std::string_view keys = a.family.keys.positions;
  if (a.family.image || keys.empty()) {
    return;
  }
  if (a.family.positions == Positions::learned) {
    a.max_positions = reader.required(keys, 1, kMaxPositions);
    a.position_rows = a.max_positions + a.family.extra_position_rows;
  } else if (const JsonValue* value = reader.find(keys)) {
    a.max_positions = value->as_int(1, kMaxPositions);
  }
}

void read_flags(ConfigReader& reader, Architecture& a) {
  Family& family = a.family;
  if (!family.qk_norm_key.empty() && !reader.flag(family.qk_norm_key, false)) family.qk_norm = QkNorm::none;
  read_biases(reader, a);
  if (!family.image) a.tied = reader.flag("tie_word_embeddings", family.tied);
  if (reader.mentions("apply_residual_connection_post_layernorm") &&
      reader.flag("apply_residual_connection_post_layernorm", false)) {
    reader.warnings.push_back(
        "apply_residual_connection_post_layernorm is true: the residual is modelled before the norm, sizes are the "
        "same");
  }
}

}  // namespace

Architecture read_architecture(const Family& family, ConfigReader& reader) {
  Architecture a;
  a.family = family;
  read_heads(family, reader, a);
  const std::int64_t layers = reader.required(family.keys.layers, 1, kMaxLayers);
  a.layers.resize(static_cast<std::size_t>(layers));
  if (!family.keys.decoder_layers.empty()) {
    a.decoder_layers = reader.optional(family.keys.decoder_layers, 1, kMaxLayers, layers, "as many as num_layers");
  }
  if (!family.keys.vocab.empty()) a.vocab = reader.required(family.keys.vocab, 1, kMaxVocab);
  if (family.mla) read_mla(reader, a);
  read_activation(reader, a);
  read_flags(reader, a);
  if (family.adjust != nullptr) family.adjust(reader, a);
  check_activation(reader, a);
  read_experts(reader, a);
  place_experts(reader, a);
  read_width(reader, a);
  read_windows(reader, a);
  read_positions(reader, a);
  return a;
}

}  // namespace zeroplan
