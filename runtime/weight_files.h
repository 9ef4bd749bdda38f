#pragma once
// Which tensor of the model stands under which name and in which orientation in Hugging Face's files.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/model_spec.h"
#include "models/units.h"

namespace zeroplan {

inline constexpr std::string_view kWeightsName = "model.safetensors";
inline constexpr std::string_view kWeightsIndexName = "model.safetensors.index.json";
inline constexpr std::string_view kConfigName = "config.json";

/// One stored tensor; tied ones are not among them.
struct WeightTensor {
  std::string name;                 // "transformer.h.0.attn.c_attn.weight"
  std::vector<std::int64_t> shape;  // as stored
  int block = 0, tensor = 0;        // index into ModelSpec::sequence, into its kind's tensors
  bool transposed = false;          // stored [in, out], [out, in] in our buffers

  std::int64_t elements() const;
};

/// In order of blocks and of tensors in them. Throws InputError naming the families whose layout was checked against
/// transformers (docs/files.md) for any other.
std::vector<WeightTensor> weight_tensors(const ModelSpec& model);

/// Names of tensors that are not parameters of ours but may stand in files: the tied copies.
std::vector<std::string> tied_names(const ModelSpec& model);

/// to[c, r] = from[r, c].
template <class From, class To>
void transpose(std::span<const From> from, std::int64_t rows, std::int64_t columns, std::span<To> to) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      to[static_cast<std::size_t>(c * rows + r)] = from[static_cast<std::size_t>(r * columns + c)];
    }
  }
}

}  // namespace zeroplan
