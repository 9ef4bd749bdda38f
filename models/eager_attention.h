#pragma once
// What transformers' attention modules share: rotary positions, masks, the eager and the SDPA function.

#include "models/eager_modules.h"

namespace zeroplan::eager {

/// cos and sin, [1, length, width].
struct RotaryTables {
  Tensor cos, sin;
};

/// The module rotary_emb: tables of `width` for `positions` [1, length] (or [length]); `x` gives the type.
class RotaryEmbedding {
 public:
  RotaryEmbedding() = default;
  RotaryEmbedding(Context& context, const std::string& path, const std::string& type, std::int64_t width);
  RotaryTables operator()(Tensor x, const Tensor& positions) const;
  /// The tables stay in fp32.
  void keep_wide() { wide_ = true; }
  /// The tables have half the width: angles are not doubled.
  void keep_single() { single_ = true; }
  /// One table of complex numbers, in `cos`.
  void make_complex() { complex_ = true; }

 private:
  const Context* context_ = nullptr;
  int module_ = -1;
  std::int64_t width_ = 0;
  bool wide_ = false, complex_ = false, single_ = false;
};

/// [-x2, x1] of the last dimension's halves.
Tensor rotate_half(const Tensor& x);
/// x cos + rotate_half(x) sin; tables already broadcast.
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin);
/// Queries and keys of which only the first columns turn (the tables' width): GPT-NeoX, Phi, GLM.
void rotate_part(Tensor& q, Tensor& k, const RotaryTables& tables);
/// Columns that turn: the head's size times partial_rotary_factor, or the family's own key, or `fallback`.
std::int64_t rotary_width(const Context& context, std::int64_t head_dim, std::string_view key, double fallback);
/// Keys or values [b, kv, s, d] for every query head.
Tensor repeat_heads(Tensor x, std::int64_t groups);

/// torch.arange(n) + offset.
Tensor position_range(Tape& tape, std::int64_t length);

struct MaskOptions {
  bool additive = false;    // 0 and -inf in the model's type (eager attention), else booleans
  std::int64_t window = 0;  // sliding window or chunk; 0: none
  bool chunked = false;
  bool skip = true;     // SDPA's is_causal may stand for it
  bool padded = false;  // a padding mask of ones was given
};
/// create_causal_mask and its relatives: undefined where SDPA does without.
Tensor causal_mask(const Context& context, const MaskOptions& options);

struct AttentionCall {
  std::int64_t groups = 1;  // query heads a key head
  double dropout = 0;
  bool causal = true;
  double softcap = 0;             // Gemma-2: scores are capped in eager attention
  bool upcast = true;             // eager attention's softmax runs in fp32
  Tensor sinks;                   // [heads]: a score beside the keys' (gpt-oss)
  bool contiguous_output = true;  // eager attention copies its output to [b, s, heads, d]
};
struct AttentionResult {
  Tensor output;   // [b, s, heads, d]
  Tensor weights;  // eager attention only
};
inline void forward_post(Tape& tape, int module, const AttentionResult& result) {
  tape.forward_post(module, {&result.output, &result.weights});
}
/// eager_attention_forward.
AttentionResult eager_attention(Tensor q, Tensor k, Tensor v, const Tensor& mask, const AttentionCall& call);
/// sdpa_attention_forward.
AttentionResult sdpa_attention(Tensor q, Tensor k, Tensor v, const Tensor& mask, const AttentionCall& call);
/// The one that the options ask for.
AttentionResult attention(const Context& context, Tensor q, Tensor k, Tensor v, const Tensor& mask,
                          const AttentionCall& call);

}  // namespace zeroplan::eager
