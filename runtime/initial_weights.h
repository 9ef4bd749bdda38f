#pragma once
// Weights before the first step, each a function of (seed, tensor, element): independent of sharding, ranks and
// threads, the same bits on every machine.
//
// GPT-2's rule (Radford et al. 2019, section 2.3; Hugging Face `_init_weights` of GPT2PreTrainedModel and
// LlamaPreTrainedModel): matrices, embeddings and positions normal(0, std), std = the configuration's
// "initializer_range" or 0.02; linears that end a residual branch std / sqrt(2 layers), for every family (Hugging
// Face's Llama does not scale them); norm weights 1; biases 0.

#include <cstdint>
#include <span>
#include <vector>

#include "models/model_spec.h"
#include "models/units.h"

namespace zeroplan {

class InitialWeights {
 public:
  /// Keeps a reference to `model`. Throws InputError for tensors that have no rule here (tables inside attention,
  /// adapters), naming them.
  InitialWeights(const ModelSpec& model, std::uint64_t seed);

  /// Elements [begin, end) of a tensor (of all its copies, one after the other). `block` indexes ModelSpec::sequence,
  /// `tensor` its kind's tensors; not a tied one.
  void fill(int block, int tensor, std::int64_t begin, std::int64_t end, std::span<float> out) const;
  /// Elements [begin, end) of the block's flat buffer for compute type `type`; padding is 0 (models/lower.h).
  void fill_flat(int block, DType type, std::int64_t begin, std::int64_t end, std::span<float> out) const;

 private:
  struct Rule {
    double deviation = 0;  // 0: constant
    float constant = 0;
  };
  Rule rule(const BlockKind& kind, std::size_t tensor) const;

  const ModelSpec* model_;
  std::uint64_t seed_;
  double deviation_;
  std::vector<std::int64_t> first_tensor_;  // number of each block's first tensor in the model
  std::vector<std::vector<Rule>> rules_;    // of each kind
};

/// x with P(normal(0, 1) < x) = p, p in (0, 1): Wichura's algorithm AS 241 (PPND16, Applied Statistics 37, 1988),
/// relative error about 1e-16, by + - * / and square root alone, so that the bits are the same everywhere.
double inverse_normal(double p);

}  // namespace zeroplan
