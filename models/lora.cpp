// Low-rank adapters (LoRA, arXiv:2106.09685): y = W x becomes W x + B (A x), W frozen.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "models/error.h"
#include "models/model_spec.h"

namespace zeroplan {
namespace {

int new_value(BlockKind& kind, std::string name, std::int64_t per_token) {
  kind.values.push_back({std::move(name), per_token, ValueType::activation});
  return static_cast<int>(kind.values.size()) - 1;
}

/// Adds to `down` and `up` the matrices [rank, in] and [out, rank] of each weight of `base`, for each copy of it.
/// Returns how many weights there are.
std::int64_t add_matrices(BlockKind& kind, const GraphOp& base, std::int64_t rank, GraphOp& down, GraphOp& up) {
  constexpr std::string_view kSuffix = ".weight";
  std::int64_t adapters = 0;
  for (const int t : base.tensors) {
    const TensorSpec tensor = kind.tensors[static_cast<std::size_t>(t)];  // a copy: the list grows below
    if (tensor.shape.size() < 2) continue;                                // a bias
    const std::int64_t out = tensor.elements() / tensor.copies / base.in_features;
    std::string stem = tensor.name;
    if (stem.ends_with(kSuffix)) stem.erase(stem.size() - kSuffix.size());
    const auto add = [&](std::string_view name, std::vector<std::int64_t> shape, GraphOp& op) {
      op.tensors.push_back(static_cast<int>(kind.tensors.size()));
      kind.tensors.push_back(
          {fmt::format("{}.{}.weight", stem, name), std::move(shape), tensor.copies, tensor.kind, false, true});
    };
    add("lora_A", {rank, base.in_features}, down);
    add("lora_B", {out, rank}, up);
    ++adapters;
  }
  return adapters;
}

/// The linear `base` makes y. Returns the ops that take its place: base into a value of its own, A, B and their sum
/// into y, so that readers of y stay as they are. All weights of a fused linear share one pair of GEMMs.
std::vector<GraphOp> with_adapters(BlockKind& kind, GraphOp base, std::int64_t rank) {
  const int y = base.outputs[0];
  const std::int64_t y_width = kind.values[static_cast<std::size_t>(y)].per_token;
  GraphOp down = base;
  GraphOp up = base;
  down.name = base.name + " lora A";
  up.name = base.name + " lora B";
  down.tensors.clear();
  up.tensors.clear();
  const std::int64_t adapters = add_matrices(kind, base, rank, down, up);
  const int frozen = new_value(kind, base.name + " frozen output", y_width);
  const int inner = new_value(kind, down.name + " output", adapters * rank * base.rows_per_token);
  const int change = new_value(kind, up.name + " output", y_width);
  base.outputs[0] = frozen;
  base.keeps.clear();  // a frozen linear's backward reads its weight only
  down.outputs = {inner};
  down.out_features = adapters * rank;
  up.inputs = {inner};
  up.outputs = {change};
  up.keeps = {inner};
  up.in_features = rank;  // block-diagonal: each adapter's columns meet its own outputs only
  GraphOp sum;
  sum.kernel = Kernel::add;
  sum.name = base.name + " lora add";
  sum.inputs = {frozen, change};
  sum.outputs = {y};
  sum.in_place = 0;
  sum.in_features = sum.out_features = y_width;
  return {std::move(base), std::move(down), std::move(up), std::move(sum)};
}

bool is_linear(const GraphOp& op) { return op.kernel == Kernel::linear || op.kernel == Kernel::grouped_linear; }

}  // namespace

void apply_lora(ModelSpec& model, std::int64_t rank) {
  if (rank < 1 || rank > model.hidden) {
    throw InputError(fmt::format("LoRA rank: expected an integer from 1 to {} (the hidden size of {}), got {}",
                                 model.hidden, model.name, rank));
  }
  for (BlockKind& kind : model.kinds) {
    for (TensorSpec& tensor : kind.tensors) tensor.trainable = false;
    if (kind.role != BlockRole::layer) continue;
    std::vector<GraphOp> ops;
    for (GraphOp& op : kind.ops) {
      if (!is_linear(op)) {
        ops.push_back(std::move(op));
        continue;
      }
      for (GraphOp& part : with_adapters(kind, std::move(op), rank)) ops.push_back(std::move(part));
    }
    kind.ops = std::move(ops);
  }
}

ModelSpec adapted_model(const ModelSpec& model, std::int64_t rank) {
  ModelSpec adapted = model;
  if (rank > 0) apply_lora(adapted, rank);
  return adapted;
}

}  // namespace zeroplan
