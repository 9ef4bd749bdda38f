#include "runtime/tensor_parts.h"

#include <algorithm>

#include "models/schedule.h"
#include "runtime/kernels/kernels.h"

namespace zeroplan {

std::vector<TensorPart> tensor_parts(const BlockKind& kind, DType type, std::int64_t begin, std::int64_t end) {
  const std::vector<std::int64_t> offsets = tensor_offsets(kind, type);
  const std::int64_t unit = kBufferAlignment / size_of(type);
  std::vector<TensorPart> parts;
  for (std::size_t t = 0; t < offsets.size(); ++t) {
    if (offsets[t] < 0) continue;  // tied
    const TensorSpec& tensor = kind.tensors[t];
    const std::int64_t each = tensor.elements() / tensor.copies;
    const std::int64_t stride = (each + unit - 1) / unit * unit;
    for (std::int64_t copy = 0; copy < tensor.copies; ++copy) {
      const std::int64_t at = offsets[t] + copy * stride;
      const std::int64_t from = std::max(begin, at);
      const std::int64_t to = std::min(end, at + each);
      if (from < to) parts.push_back({static_cast<int>(t), copy * each + (from - at), from, to - from});
    }
  }
  return parts;
}

}  // namespace zeroplan
