#pragma once
// Decoder-only models built like Llama: one set of blocks, families as rows of a table (eager_decoder_table.cpp).

#include <optional>

#include "models/eager_causal.h"

namespace zeroplan::eager {

enum class MlpKind : std::uint8_t {
  gated,        // down(act(gate x) * up x)
  fused_gated,  // one matrix for gate and up, split (Phi-3, GLM)
  plain,        // down(act(up x))
};

enum class RotaryKind : std::uint8_t {
  whole,             // all columns of a head
  part_joined,       // some columns, each of q and k joined again at once (Phi-3)
  part_kept,         // some columns, the pieces stay in variables of the attention (Phi)
  part_interleaved,  // some columns, even and odd ones are pairs (GLM)
  wide_tables,       // fp32 tables, results cast back (OLMo-2)
  halves,            // tables of half a head's width, halves of a head are pairs (gpt-oss)
  wide_interleaved,  // q and k in fp32, even and odd columns are pairs (Cohere)
};

enum class RouterKind : std::uint8_t {
  softmax,         // of logits in the model's type, the best k (Mixtral, Qwen3)
  groups_softmax,  // fp32 logits, best groups first where topk_method says so (DeepSeek V2)
  after_topk,      // softmax of the best k logits (gpt-oss)
  groups_sigmoid,  // fp32 logits, sigmoid and a correction, best groups first (DeepSeek V3)
};

/// Which masks the base model makes, and in what its variables hold them.
enum class MaskKind : std::uint8_t {
  one,       // one for all layers, sliding if the window is set
  by_layer,  // a dictionary: full attention, and sliding where a layer has it
  both,      // a dictionary: full and sliding, always
};

/// What a family's classes are called and how its blocks differ from Llama's.
struct DecoderStyle {
  std::string_view family = "llama";
  std::string_view classes = "Llama";  // LlamaDecoderLayer, LlamaAttention, ...
  NormStyle norm = NormStyle::rms;
  std::string_view norm_class = "RMSNorm";
  bool positions_first = false;  // position_ids stand before position_embeddings in the call of a block
  MaskKind masks = MaskKind::one;
  MlpKind mlp = MlpKind::gated;
  RotaryKind rotary = RotaryKind::whole;
  double rotary_part = 1;           // default of partial_rotary_factor
  bool qk_norm_transposed = false;  // the norm of q and k sees [b, heads, s, d]
  bool scaled_embedding = false;    // the embedding is multiplied by a buffer
  bool fused_qkv = false;
  std::string_view residual_dropout;  // key of its probability
  bool dropout_modules = false;       // nn.Dropout, else the function
  std::string_view embedding_dropout;
  bool scaled_logits = false;                // multiplied by logit_scale
  double softcap = 0;                        // default of final_logit_softcapping
  double attention_softcap = 0;              // default of attn_logit_softcapping
  bool rotary_per_type = false;              // tables for each type of layer (Gemma 3)
  std::string_view moe_class, router_class;  // empty: no experts
  bool router_first = false;                 // registered before the experts
  bool narrow_routing = false;               // routing weights go back to the model's type
  bool sinks = false;                        // a score for each head beside the keys'
  bool expert_biases = false;                // biases, weights [in, out], clamped gates (gpt-oss)
  bool returns_routing = false;              // the experts' module returns the routing weights too
  RouterKind router = RouterKind::softmax;
  bool complex_tables = false;  // rotary tables are complex numbers (DeepSeek V2)
};

/// nullptr for a family without a row.
const DecoderStyle* find_decoder_style(std::string_view family);

std::unique_ptr<EagerModel> make_decoder(Context& context, const DecoderStyle& style);

/// "Llama" + part.
std::string class_name(const DecoderStyle& style, std::string_view part);
/// The class of the family's norms: torch's LayerNorm has no prefix.
std::string norm_class(const DecoderStyle& style);

}  // namespace zeroplan::eager
