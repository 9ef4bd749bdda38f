#pragma once
// What a model family is made of, as data: one row a family, read by one builder (model_builder.h). The members'
// initial values are Llama's; a row says only what differs. Adding a family is adding a row in one of families_*.cpp.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroplan {

enum class NormKind : std::uint8_t { rms, layer, layer_no_bias };

/// Where the norms and the residual sums of a layer stand. x: layer input, A: attention, M: MLP or experts.
enum class Residual : std::uint8_t {
  pre_norm,            // u = x + A(n1(x));      y = u + M(n2(u))
  sandwich,            // u = x + n2(A(n1(x)));  y = u + n4(M(n3(u)))       Gemma 2 and 3
  post_sublayer,       // u = x + n1(A(x));      y = u + n2(M(u))           OLMo-2
  post_add,            // u = n1(x + A(x));      y = n2(u + M(u))           BERT
  parallel_one_norm,   // y = x + A(n1(x)) + M(n1(x))                       GPT-J, Phi-2, Falcon-7B, Cohere
  parallel_two_norms,  // y = x + A(n1(x)) + M(n2(x))                       GPT-NeoX, Falcon-40B
};

/// The norm of queries and keys before the scores.
enum class QkNorm : std::uint8_t {
  none,
  per_head,        // one weight of head_dim, used by every head
  head_weights,    // a weight of head_dim for each head
  per_projection,  // one norm over the whole projection
  no_weights,      // per head, without weights
};

enum class Positions : std::uint8_t {
  rotary,
  learned,   // a table that the embedding block adds
  internal,  // ALiBi or a relative bias, applied inside attention
};

enum class Stack : std::uint8_t { decoder, encoder, encoder_decoder };

/// Which layers see a window only; `layer_types` in the file wins over the rule.
enum class WindowRule : std::uint8_t {
  none,
  all,          // every layer, when the window key holds a number
  optional,     // layers from max_window_layers on, when use_sliding_window
  alternating,  // layers 0, 2, 4, ...
  pattern,      // all but every sliding_window_pattern-th
  chunked,      // chunks, all but every no_rope_layer_interval-th
};

/// Which of the linears (and norms) have a bias.
struct Biases {
  bool qkv = false;
  bool out = false;
  bool mlp = false;
};

/// A key of the file that sets biases.
struct BiasKey {
  std::string_view key;
  Biases sets;            // the members it decides
  bool inverted = false;  // "no_bias"
  bool value = false;     // the transformers default of the key, as it stands in a file
};

/// Names of keys in config.json. "a|b" is tried in this order, "a/b" looks inside object a. Empty: not in this family.
struct ConfigKeys {
  std::string_view hidden = "hidden_size";
  std::string_view layers = "num_hidden_layers";
  std::string_view decoder_layers;
  std::string_view heads = "num_attention_heads";
  std::string_view kv_heads = "num_key_value_heads";
  std::string_view head_dim = "head_dim";
  std::string_view width = "intermediate_size";  // MLP of dense layers, one of gate and up
  std::string_view vocab = "vocab_size";
  std::string_view positions = "max_position_embeddings";
  std::string_view activation = "hidden_act";
  std::string_view window = "sliding_window";
  std::string_view experts;
  std::string_view experts_per_token;
  std::string_view expert_width;
  std::string_view shared_experts;
  std::string_view first_dense;  // layers before this one are dense
  std::string_view moe_step;     // every so many layers are MoE
};

/// Tensor names. Inside `layer` they are relative to it; without ".weight" / ".bias" unless they hold a dot-less
/// parameter. Empty: the family has no such tensor.
struct TensorNames {
  std::string_view embedding = "model.embed_tokens.weight";
  std::string_view position;
  std::string_view token_type;
  std::string_view embedding_norm;
  std::string_view layer = "model.layers.{layer}.";
  std::string_view norm1 = "input_layernorm";
  std::string_view norm2 = "post_attention_layernorm";
  std::string_view norm3, norm4;
  std::string_view q = "self_attn.q_proj", k = "self_attn.k_proj", v = "self_attn.v_proj";
  std::string_view qkv;  // one tensor for the three
  std::string_view out = "self_attn.o_proj";
  std::string_view q_norm = "self_attn.q_norm", k_norm = "self_attn.k_norm";
  std::string_view sinks;          // a scalar a head
  std::string_view relative_bias;  // [buckets, heads], first layer of a stack only
  std::string_view cross_norm, cross_q, cross_k, cross_v, cross_out;
  std::string_view gate = "mlp.gate_proj", up = "mlp.up_proj", down = "mlp.down_proj";
  std::string_view gate_up;  // one tensor [2 width, hidden] for gate and up
  std::string_view router = "mlp.gate";
  std::string_view router_correction;
  // Experts: full names, "{copy}" is the expert. One of expert_gate_up or the pair expert_gate, expert_up.
  std::string_view expert_gate = "mlp.experts.{copy}.gate_proj.weight";
  std::string_view expert_up = "mlp.experts.{copy}.up_proj.weight";
  std::string_view expert_gate_up;
  std::string_view expert_down = "mlp.experts.{copy}.down_proj.weight";
  std::string_view shared_gate = "mlp.shared_experts.gate_proj";
  std::string_view shared_up = "mlp.shared_experts.up_proj";
  std::string_view shared_down = "mlp.shared_experts.down_proj";
  std::string_view final_norm = "model.norm";
  std::string_view head = "lm_head.weight";
  std::string_view head_bias;
  std::string_view head_transform;  // a linear, an activation and a norm before the output matrix (BERT)
  std::string_view head_transform_norm;
};

class ConfigReader;
struct Architecture;

struct Family {
  std::string_view model_type = "llama";
  Stack stack = Stack::decoder;
  bool image = false;  // patches instead of tokens, no vocabulary
  NormKind norm = NormKind::rms;
  Residual residual = Residual::pre_norm;
  QkNorm qk_norm = QkNorm::none;
  std::string_view qk_norm_key;  // a boolean of the file that turns qk_norm on; empty: always on
  NormKind qk_norm_kind = NormKind::rms;
  Positions positions = Positions::rotary;
  std::int64_t extra_position_rows = 0;  // OPT: 2
  bool gated = true;
  std::string_view default_activation = "silu";
  std::int64_t width_factor = 0;      // MLP width = factor x hidden when the key is absent; 0: the key is required
  std::int64_t default_kv_heads = 0;  // 0: as many as heads
  std::int64_t default_head_dim = 0;  // 0: hidden / heads
  bool mla = false;
  Biases biases;
  std::vector<BiasKey> bias_keys;
  bool expert_bias = false;
  bool router_bias = false;
  bool expert_in_out = false;  // down (and a fused gate_up) stored [in, out]
  std::int64_t default_shared_experts = 0;
  bool moe_step_from_one = false;  // MoE when (layer + 1) % step == 0, else when layer % step == 0
  bool all_moe = false;            // no dense layers, so no dense width
  WindowRule window = WindowRule::none;
  std::int64_t default_window = 0;  // transformers' default when the key is absent
  bool tied = false;                // tie_word_embeddings when the file has no such key
  ConfigKeys keys;
  TensorNames names;
  TensorNames decoder_names;  // encoder_decoder only
  /// Reads the few keys that change the row itself (Falcon's three layouts, MPT's ALiBi); null for most.
  void (*adjust)(ConfigReader&, Architecture&) = nullptr;
};

/// All families, sorted by model_type.
std::span<const Family> families();
/// nullptr when there is no such family.
const Family* find_family(std::string_view model_type);
/// Every model_type, sorted: for messages.
std::vector<std::string> family_names();

}  // namespace zeroplan
