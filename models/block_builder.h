#pragma once
// Emits the tensors, values and ops of one block. Knows kernels and what their backward keeps, and no families.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/families.h"
#include "models/model_spec.h"

namespace zeroplan {

/// Where a linear's weights are stored.
struct WeightSpec {
  std::string name;  // without ".weight"
  std::int64_t out = 0;
  bool bias = false;
};

class BlockBuilder {
 public:
  BlockBuilder(std::string name, BlockRole role);

  int value(std::string name, std::int64_t per_token, ValueType type = ValueType::activation);
  int tensor(std::string name, std::vector<std::int64_t> shape, TensorKind kind, std::int64_t copies = 1);
  std::int64_t width(int value) const;

  /// The value that the block before hands over.
  int input(std::int64_t hidden);
  /// The encoder output.
  int memory(std::int64_t hidden);

  /// What norm() puts over `x`.
  struct NormSpec {
    NormKind kind = NormKind::rms;
    std::int64_t statistics = 1;  // norms a token: 1, or heads
    std::int64_t out = 0;         // width of the result
    std::vector<int> tensors;     // empty: without weights
  };
  /// Keeps its input and statistics (fp32, 1 a norm for RMS, 2 for LayerNorm).
  int norm(std::string name, int x, NormSpec spec);
  /// The usual norm over the whole width, with weight (and bias) called `tensor_name`.weight (.bias).
  int norm(std::string name, int x, NormKind kind, std::string_view tensor_name, TensorKind tensor_kind);

  /// One GEMM over all `weights` side by side. Keeps its input.
  int linear(std::string name, int x, const std::vector<WeightSpec>& weights, TensorKind kind = TensorKind::layer);
  /// In place on x; keeps nothing: the rotation is undone from tables. Not pointwise: a rotated value cannot be made
  /// again without the linear before it.
  int rotary(int x);
  /// Keeps its inputs, output and log-sum-exp.
  int attention(std::string name, std::vector<int> inputs, const AttentionShape& shape, std::vector<int> tensors);
  /// Keeps its input.
  int activation(std::string name, int x, std::int64_t in, std::int64_t out, std::int64_t rows_per_token = 1);
  /// Sum of x and the terms, in place on the last term.
  int add(std::string name, int x, const std::vector<int>& terms);
  /// Cheap data movement: concatenates or broadcasts its inputs into a new value, keeps nothing.
  int assemble(std::string name, const std::vector<int>& inputs, std::int64_t per_token);

  struct Routing {
    int weights = -1;  // top-k weights and indices, 2 k 4-byte words a token
    int rows = -1;     // tokens gathered by expert, k rows of hidden
  };
  /// Router and gather. `tensors` are the router's.
  Routing route(int x, std::vector<int> tensors, std::int64_t experts, std::int64_t per_token);
  /// One GEMM for each expert. Keeps its input.
  int grouped_linear(std::string name, int x, std::vector<int> tensors, std::int64_t experts, std::int64_t per_token,
                     std::int64_t in, std::int64_t out);
  /// Weighted sum of the experts' rows. Keeps both.
  int combine(int rows, const Routing& routing, std::int64_t hidden);

  /// Looks up `tensors`; patches (in > 0) are a linear over pixels, which need no gradient.
  int embedding(std::vector<int> tensors, std::int64_t in, std::int64_t hidden);

  BlockKind& kind() { return kind_; }
  /// The block with `output` as its result.
  BlockKind finish(int output);

 private:
  GraphOp& op(Kernel kernel, std::string name, std::vector<int> inputs);
  BlockKind kind_;
};

}  // namespace zeroplan
