#pragma once
// T5's attention: of a sequence on itself with the relative position bias, and of the decoder on the encoder's output.

#include <string>

#include "models/eager_gpt.h"

namespace zeroplan::eager {

struct T5AttentionResult {  // dies from its end
  Tensor weights, bias, output;
};

class T5Attention {
 public:
  T5Attention() = default;
  T5Attention(Context& context, const std::string& path, bool decoder, bool cross, bool has_bias);

  /// x: [batch, length, hidden]. `states`: the encoder's output in cross attention. `bias`: of the stack's first layer,
  /// which makes it; none there.
  T5AttentionResult operator()(const Tensor& x, const Tensor& mask, const Tensor& states, const Tensor& bias) const;

 private:
  Tensor heads(Tensor x) const;
  /// compute_bias: [1, heads, length, length].
  Tensor relative_bias(std::int64_t length) const;
  Tensor zero_bias(std::int64_t rows, std::int64_t columns) const;
  T5AttentionResult forward(const Tensor& x, const Tensor& mask, const Tensor& states, Tensor bias) const;
  T5AttentionResult eager(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                          const Tensor& bias) const;

  const Context* context_ = nullptr;
  bool decoder_ = false, cross_ = false, has_bias_ = false;
  int module_ = -1;
  Linear q_, k_, v_, out_;
  Embedding table_;
  double dropout_ = 0;
};

}  // namespace zeroplan::eager
