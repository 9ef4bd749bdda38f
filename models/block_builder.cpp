#include "models/block_builder.h"

#include <utility>

namespace zeroplan {

BlockBuilder::BlockBuilder(std::string name, BlockRole role) {
  kind_.name = std::move(name);
  kind_.role = role;
}

int BlockBuilder::value(std::string name, std::int64_t per_token, ValueType type) {
  kind_.values.push_back({std::move(name), per_token, type});
  return static_cast<int>(kind_.values.size()) - 1;
}

int BlockBuilder::tensor(std::string name, std::vector<std::int64_t> shape, TensorKind kind, std::int64_t copies) {
  TensorSpec spec;
  spec.name = std::move(name);
  spec.shape = std::move(shape);
  spec.kind = kind;
  spec.copies = copies;
  kind_.tensors.push_back(std::move(spec));
  return static_cast<int>(kind_.tensors.size()) - 1;
}

std::int64_t BlockBuilder::width(int value) const { return kind_.values[static_cast<std::size_t>(value)].per_token; }

int BlockBuilder::input(std::int64_t hidden) {
  kind_.input = value("block input", hidden);
  return kind_.input;
}

int BlockBuilder::memory(std::int64_t hidden) {
  kind_.memory = value("encoder output", hidden);
  return kind_.memory;
}

GraphOp& BlockBuilder::op(Kernel kernel, std::string name, std::vector<int> inputs) {
  GraphOp& op = kind_.ops.emplace_back();
  op.kernel = kernel;
  op.name = std::move(name);
  op.inputs = std::move(inputs);
  return op;
}

int BlockBuilder::norm(std::string name, int x, NormSpec spec) {
  const std::int64_t per_norm = spec.kind == NormKind::rms ? 1 : 2;  // rstd, or mean and rstd
  const int out = value(name + " output", spec.out);
  const int statistics = value(name + " statistics", per_norm * spec.statistics, ValueType::fp32);
  GraphOp& norm = op(Kernel::norm, std::move(name), {x});
  norm.outputs = {out, statistics};
  norm.keeps = {x, statistics};
  norm.tensors = std::move(spec.tensors);
  norm.pointwise = true;
  norm.in_features = norm.out_features = spec.out;
  return out;
}

int BlockBuilder::norm(std::string name, int x, NormKind kind, std::string_view tensor_name, TensorKind tensor_kind) {
  NormSpec spec;
  spec.kind = kind;
  spec.out = width(x);
  spec.tensors.push_back(tensor(std::string(tensor_name) + ".weight", {spec.out}, tensor_kind));
  if (kind == NormKind::layer) {
    spec.tensors.push_back(tensor(std::string(tensor_name) + ".bias", {spec.out}, tensor_kind));
  }
  return norm(std::move(name), x, std::move(spec));
}

int BlockBuilder::linear(std::string name, int x, const std::vector<WeightSpec>& weights, TensorKind kind) {
  std::vector<int> tensors;
  std::int64_t out = 0;
  for (const WeightSpec& weight : weights) {
    tensors.push_back(tensor(weight.name + ".weight", {weight.out, width(x)}, kind));
    if (weight.bias) tensors.push_back(tensor(weight.name + ".bias", {weight.out}, kind));
    out += weight.out;
  }
  const int result = value(name + " output", out);
  GraphOp& linear = op(Kernel::linear, std::move(name), {x});
  linear.outputs = {result};
  linear.tensors = std::move(tensors);
  linear.keeps = {x};
  linear.in_features = width(x);
  linear.out_features = out;
  return result;
}

int BlockBuilder::rotary(int x) {
  const int result = value("rotated " + kind_.values[static_cast<std::size_t>(x)].name, width(x));
  GraphOp& rotary = op(Kernel::rotary, "rotary", {x});
  rotary.outputs = {result};
  rotary.in_place = 0;
  rotary.in_features = rotary.out_features = width(x);
  return result;
}

int BlockBuilder::attention(std::string name, std::vector<int> inputs, const AttentionShape& shape,
                            std::vector<int> tensors) {
  const int out = value(name + " output", shape.heads * shape.v_dim);
  const int log_sum = value(name + " log-sum-exp", shape.heads, ValueType::fp32);
  GraphOp& attention = op(Kernel::attention, std::move(name), std::move(inputs));
  attention.outputs = {out, log_sum};
  attention.keeps = attention.inputs;
  attention.keeps.insert(attention.keeps.end(), {out, log_sum});
  attention.tensors = std::move(tensors);
  attention.attention = shape;
  attention.in_features = shape.heads * shape.qk_dim;
  attention.out_features = shape.heads * shape.v_dim;
  return out;
}

int BlockBuilder::activation(std::string name, int x, std::int64_t in, std::int64_t out, std::int64_t rows_per_token) {
  const int result = value(name + " output", out * rows_per_token);
  GraphOp& activation = op(Kernel::activation, std::move(name), {x});
  activation.outputs = {result};
  activation.keeps = {x};
  activation.pointwise = true;
  activation.rows_per_token = rows_per_token;
  activation.in_features = in;
  activation.out_features = out;
  return result;
}

int BlockBuilder::add(std::string name, int x, const std::vector<int>& terms) {
  const int result = value(name + " output", width(x));
  GraphOp& add = op(Kernel::add, std::move(name), {x});
  add.inputs.insert(add.inputs.end(), terms.begin(), terms.end());
  add.outputs = {result};
  add.in_place = static_cast<int>(add.inputs.size()) - 1;
  add.in_features = add.out_features = width(x);
  return result;
}

int BlockBuilder::assemble(std::string name, const std::vector<int>& inputs, std::int64_t per_token) {
  const int result = value(name + " output", per_token);
  GraphOp& assemble = op(Kernel::permute, std::move(name), inputs);
  assemble.outputs = {result};
  assemble.pointwise = true;
  assemble.in_features = width(inputs.front());
  assemble.out_features = per_token;
  return result;
}

BlockBuilder::Routing BlockBuilder::route(int x, std::vector<int> tensors, std::int64_t experts,
                                          std::int64_t per_token) {
  Routing result;
  result.weights = value("expert weights and indices", 2 * per_token, ValueType::fp32);
  const int probabilities = value("router probabilities", experts, ValueType::fp32);
  GraphOp& router = op(Kernel::router, "router", {x});
  router.outputs = {result.weights, probabilities};
  router.keeps = {x, result.weights, probabilities};
  router.tensors = std::move(tensors);
  router.in_features = width(x);
  router.out_features = experts;
  result.rows = value("expert rows", per_token * width(x));
  GraphOp& permute = op(Kernel::permute, "gather", {x, result.weights});
  permute.outputs = {result.rows};
  permute.keeps = {result.weights};
  permute.rows_per_token = per_token;
  permute.in_features = permute.out_features = width(x);
  return result;
}

int BlockBuilder::grouped_linear(std::string name, int x, std::vector<int> tensors, std::int64_t experts,
                                 std::int64_t per_token, std::int64_t in, std::int64_t out) {
  const int result = value(name + " output", per_token * out);
  GraphOp& linear = op(Kernel::grouped_linear, std::move(name), {x});
  linear.outputs = {result};
  linear.tensors = std::move(tensors);
  linear.keeps = {x};
  linear.rows_per_token = per_token;
  linear.in_features = in;
  linear.out_features = out;
  linear.groups = experts;
  return result;
}

int BlockBuilder::combine(int rows, const Routing& routing, std::int64_t hidden) {
  const int result = value("combine output", hidden);
  GraphOp& combine = op(Kernel::combine, "combine", {rows, routing.weights});
  combine.outputs = {result};
  combine.keeps = {rows, routing.weights};
  combine.rows_per_token = hidden > 0 ? width(rows) / hidden : 1;
  combine.in_features = combine.out_features = hidden;
  return result;
}

int BlockBuilder::embedding(std::vector<int> tensors, std::int64_t in, std::int64_t hidden) {
  const int result = value("embedding output", hidden);
  GraphOp& embedding = op(Kernel::embedding, "embedding", {});
  embedding.outputs = {result};
  embedding.tensors = std::move(tensors);
  embedding.in_features = in;
  embedding.out_features = hidden;
  return result;
}

BlockKind BlockBuilder::finish(int output) {
  kind_.output = output;
  return std::move(kind_);
}

}  // namespace zeroplan
