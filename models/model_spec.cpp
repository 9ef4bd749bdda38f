#include "models/model_spec.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "models/error.h"

namespace zeroplan {
namespace {

/// Above this a listing would not help anyone and not fit in memory.
constexpr std::int64_t kMaxListedTensors = 10'000'000;

std::int64_t per_copy(const TensorSpec& tensor) {
  return std::accumulate(tensor.shape.begin(), tensor.shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::int64_t routed_share(const BlockKind& kind, const TensorSpec& tensor) {
  if (tensor.kind != TensorKind::expert) return tensor.elements();
  for (const GraphOp& op : kind.ops) {
    if (op.kernel == Kernel::grouped_linear && op.groups > 0) {
      return tensor.elements() / op.groups * op.rows_per_token;
    }
  }
  return tensor.elements();
}

template <class Count>
std::int64_t sum_over_blocks(const ModelSpec& model, Count count) {
  std::vector<std::int64_t> each;
  for (const BlockKind& kind : model.kinds) each.push_back(count(kind));
  std::int64_t sum = 0;
  for (int index : model.sequence) sum += each[static_cast<std::size_t>(index)];
  return sum;
}

}  // namespace

std::string_view to_string(TensorKind kind) {
  switch (kind) {
    case TensorKind::embedding:
      return "embedding";
    case TensorKind::position:
      return "position";
    case TensorKind::layer:
      return "layer";
    case TensorKind::router:
      return "router";
    case TensorKind::expert:
      return "expert";
    case TensorKind::final:
      return "final";
    case TensorKind::head:
      return "head";
  }
  return "?";
}

std::string_view to_string(Kernel kernel) {
  switch (kernel) {
    case Kernel::embedding:
      return "embedding";
    case Kernel::norm:
      return "norm";
    case Kernel::linear:
      return "linear";
    case Kernel::rotary:
      return "rotary";
    case Kernel::attention:
      return "attention";
    case Kernel::activation:
      return "activation";
    case Kernel::add:
      return "add";
    case Kernel::router:
      return "router";
    case Kernel::permute:
      return "permute";
    case Kernel::grouped_linear:
      return "grouped_linear";
    case Kernel::combine:
      return "combine";
  }
  return "?";
}

std::int64_t TensorSpec::elements() const { return per_copy(*this) * copies; }

std::int64_t BlockKind::parameters() const {
  std::int64_t sum = 0;
  for (const TensorSpec& tensor : tensors) sum += tensor.tied ? 0 : tensor.elements();
  return sum;
}

std::int64_t BlockKind::trainable_parameters() const {
  std::int64_t sum = 0;
  for (const TensorSpec& tensor : tensors) sum += tensor.tied || !tensor.trainable ? 0 : tensor.elements();
  return sum;
}

std::int64_t ModelSpec::parameters() const {
  return sum_over_blocks(*this, [](const BlockKind& kind) { return kind.parameters(); });
}

std::int64_t ModelSpec::trainable_parameters() const {
  return sum_over_blocks(*this, [](const BlockKind& kind) { return kind.trainable_parameters(); });
}

std::int64_t ModelSpec::active_parameters() const {
  return sum_over_blocks(*this, [](const BlockKind& kind) {
    std::int64_t sum = 0;
    for (const TensorSpec& tensor : kind.tensors) sum += tensor.tied ? 0 : routed_share(kind, tensor);
    return sum;
  });
}

namespace {

std::string expand(std::string_view pattern, std::string_view key, std::int64_t number) {
  std::string name(pattern);
  if (const std::size_t at = name.find(key); at != std::string::npos) {
    name.replace(at, key.size(), fmt::format("{}", number));
  }
  return name;
}

}  // namespace

std::vector<ListedTensor> list_tensors(const ModelSpec& model) {
  const std::int64_t count = sum_over_blocks(model, [](const BlockKind& kind) {
    std::int64_t sum = 0;
    for (const TensorSpec& tensor : kind.tensors) sum += tensor.copies;
    return sum;
  });
  if (count > kMaxListedTensors) {
    throw InputError(fmt::format("{}: {} tensors are too many to list", model.name, count));
  }
  std::vector<ListedTensor> list;
  list.reserve(static_cast<std::size_t>(count));
  int layer = 0;           // counted through the model
  int layer_of_stack = 0;  // as names count: a decoder after an encoder starts at 0 again
  for (int index : model.sequence) {
    const BlockKind& kind = model.kinds[static_cast<std::size_t>(index)];
    if (kind.role == BlockRole::embedding) layer_of_stack = 0;
    for (const TensorSpec& tensor : kind.tensors) {
      const bool in_layer = tensor.name.find("{layer}") != std::string::npos;
      const std::string name = expand(tensor.name, "{layer}", layer_of_stack);
      for (std::int64_t copy = 0; copy < tensor.copies; ++copy) {
        list.push_back({expand(name, "{copy}", copy), tensor.shape, in_layer ? layer : -1, tensor.tied});
      }
    }
    if (kind.role == BlockRole::layer) {
      ++layer;
      ++layer_of_stack;
    }
  }
  return list;
}

}  // namespace zeroplan
