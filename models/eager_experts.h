#pragma once
// Mixtures of experts as transformers 5.17 runs them: rows sorted by expert, one grouped product a projection
// (integrations/moe.py, grouped_mm). No allocation depends on how tokens are routed.

#include "models/eager_decoder_parts.h"

namespace zeroplan::eager {

struct Routing {   // dies from its end, as Python's variables do in this order reversed
  Tensor indices;  // [tokens, k], int64
  Tensor weights;  // [tokens, k]
  Tensor logits;   // the router returns them too
};

/// The router: weights of the k best experts a token.
class Router {
 public:
  Router() = default;
  Router(Context& context, const DecoderStyle& style, const std::string& path);
  Routing operator()(const Tensor& x) const;

 private:
  Routing forward(Tensor x) const;
  Routing best_of_groups(Tensor x) const;
  Routing corrected(Tensor x) const;
  Routing after_topk(const Tensor& x) const;
  Tensor group_mask(const Tensor& group_scores, Tensors& kept) const;
  const Context* context_ = nullptr;
  const DecoderStyle* style_ = nullptr;
  int module_ = -1, weight_ = -1, bias_ = -1;
  bool normalised_ = true, limited_ = false;
  std::int64_t groups_ = 1, groups_used_ = 1;
};

/// All experts of a layer in two stacked tensors.
class Experts {
 public:
  Experts() = default;
  Experts(Context& context, const DecoderStyle& style, const std::string& path);
  Tensor operator()(const Tensor& x, const Routing& routing) const;

 private:
  Tensor forward(const Tensor& x, const Tensor& indices, const Tensor& weights) const;
  Tensor clamped_gate(const Tensor& projected) const;
  Tensor gate(const Tensor& projected) const;
  const Context* context_ = nullptr;
  const DecoderStyle* style_ = nullptr;
  int module_ = -1, gate_up_ = -1, down_ = -1, gate_up_bias_ = -1, down_bias_ = -1;
  ActivationModule activation_;
};

class MoeMlp {
 public:
  MoeMlp() = default;
  MoeMlp(Context& context, const DecoderStyle& style, const std::string& path);
  /// `weights` receives the routing weights where the family's module returns them.
  Tensor operator()(Tensor x, Tensor& weights) const;

 private:
  Tensor with_shared(const Tensor& x) const;
  const Context* context_ = nullptr;
  const DecoderStyle* style_ = nullptr;
  int module_ = -1;
  Router router_;
  Experts experts_;
  DecoderMlp shared_;
  bool has_shared_ = false;
};

// --- operators that only experts use (eager_expert_ops.cpp) ----------------------------------------
/// Values and indices of the k largest of the last dimension.
struct TopK {
  Tensor values, indices;
};
TopK topk(Tensor x, std::int64_t k);
/// x /= y, in place.
Tensor div_in_place(Tensor x, Tensor y);
/// Values of each group's largest; x [n, groups, size].
TopK max_last(Tensor x);
/// x[i, columns[i, j]].
Tensor gather(Tensor x, Tensor columns);
/// x[rows] of the first dimension.
Tensor index_rows(Tensor x, Tensor rows);
Tensor masked_fill_in_place(Tensor x, Tensor mask);
/// torch._grouped_mm: rows [s, in] by [groups, in, out].
Tensor grouped_mm(Tensor x, Tensor weights, Tensor offsets);

}  // namespace zeroplan::eager
