#include "runtime/weight_files.h"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>

#include <fmt/format.h>

#include "models/error.h"
#include "runtime/export_weights.h"

namespace zeroplan {
namespace {

/// Others store q, k, v woven by head (GPT-NeoX, BLOOM, Falcon), or norm weights less one (Gemma), or experts stacked.
constexpr std::array<std::string_view, 5> kCheckedFamilies = {"gpt2", "llama", "mistral", "qwen2", "qwen3"};

/// transformers' Conv1D, which GPT-2's layers use for linears, holds [in, out] (transformers/pytorch_utils.py).
bool is_conv1d(const ModelSpec& model, const BlockKind& kind, const TensorSpec& tensor) {
  return model.family == "gpt2" && kind.role == BlockRole::layer && tensor.shape.size() == 2;
}

}  // namespace

std::int64_t WeightTensor::elements() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

void check_weight_files(const ModelSpec& model) {
  if (std::find(kCheckedFamilies.begin(), kCheckedFamilies.end(), model.family) == kCheckedFamilies.end()) {
    throw InputError(fmt::format("{}: weights of family {} are neither exported nor imported, expected one of {}",
                                 model.source, model.family, fmt::join(kCheckedFamilies, ", ")));
  }
}

std::vector<WeightTensor> weight_tensors(const ModelSpec& model) {
  check_weight_files(model);
  const std::vector<ListedTensor> names = list_tensors(model);
  std::vector<WeightTensor> tensors;
  std::size_t listed = 0;  // these families have no copies: one name a tensor
  for (std::size_t block = 0; block < model.sequence.size(); ++block) {
    const BlockKind& kind = model.kinds[static_cast<std::size_t>(model.sequence[block])];
    for (std::size_t t = 0; t < kind.tensors.size(); ++t, ++listed) {
      const TensorSpec& spec = kind.tensors[t];
      if (spec.tied) continue;
      WeightTensor tensor{names[listed].name, spec.shape, static_cast<int>(block), static_cast<int>(t),
                          is_conv1d(model, kind, spec)};
      if (tensor.transposed) std::swap(tensor.shape[0], tensor.shape[1]);
      tensors.push_back(std::move(tensor));
    }
  }
  return tensors;
}

std::vector<std::string> tied_names(const ModelSpec& model) {
  std::vector<std::string> names;
  for (const ListedTensor& tensor : list_tensors(model)) {
    if (tensor.tied) names.push_back(tensor.name);
  }
  return names;
}

}  // namespace zeroplan
