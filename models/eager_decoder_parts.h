#pragma once
// The attention and the MLP of decoder blocks.

#include "models/eager_decoder.h"

namespace zeroplan::eager {

/// What every block gets beside the hidden states.
struct BlockArguments {
  Tensor mask;
  RotaryTables rotary;
  Tensor positions;
};

class DecoderMlp {
 public:
  DecoderMlp() = default;
  DecoderMlp(Context& context, const DecoderStyle& style, const std::string& path, std::int64_t width);
  Tensor operator()(Tensor x) const;

 private:
  Tensor forward(Tensor x) const;
  const Context* context_ = nullptr;
  const DecoderStyle* style_ = nullptr;
  int module_ = -1;
  Linear gate_, up_, down_;
  ActivationModule activation_;
  double dropout_ = 0;
};

class DecoderAttention {
 public:
  DecoderAttention() = default;
  DecoderAttention(Context& context, const DecoderStyle& style, const std::string& path);
  AttentionResult operator()(const Tensor& x, const BlockArguments& arguments) const;

 private:
  struct Heads {
    Tensor q, k, v;
    Tensors kept;  // other variables that live until the attention returns
  };
  Heads project(const Tensor& x) const;
  Heads project_fused(const Tensor& x) const;
  void turn(Heads& heads, const RotaryTables& tables) const;
  AttentionResult forward(const Tensor& x, const BlockArguments& arguments) const;

  const Context* context_ = nullptr;
  const DecoderStyle* style_ = nullptr;
  int module_ = -1, sinks_ = -1;
  Linear qkv_, q_, k_, v_, out_;
  Norm q_norm_, k_norm_;
  double dropout_ = 0, residual_dropout_ = 0, softcap_ = 0;
};

}  // namespace zeroplan::eager
