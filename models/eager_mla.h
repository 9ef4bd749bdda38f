#pragma once
// Multi-head latent attention (DeepSeek V2 and V3).

#include "models/eager_decoder_parts.h"

namespace zeroplan::eager {

class MlaAttention {
 public:
  MlaAttention() = default;
  MlaAttention(Context& context, const DecoderStyle& style, const std::string& path);
  AttentionResult operator()(const Tensor& x, const BlockArguments& arguments) const;

 private:
  AttentionResult forward(const Tensor& x, const BlockArguments& arguments) const;
  Tensor queries(const Tensor& x) const;
  const Context* context_ = nullptr;
  const DecoderStyle* style_ = nullptr;
  int module_ = -1;
  Linear q_, q_down_, q_up_, kv_down_, kv_up_, out_;
  Norm q_norm_, kv_norm_;
  double dropout_ = 0;
  bool interleaved_ = true;
};

}  // namespace zeroplan::eager
