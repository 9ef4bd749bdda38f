#include <algorithm>

#include "models/schedule.h"
#include "runtime/kernels/gemm.h"
#include "runtime/kernels/kernels.h"

namespace zeroplan {

std::vector<std::int64_t> tensor_offsets(const BlockKind& kind, DType type) {
  const std::int64_t unit = kBufferAlignment / size_of(type);
  std::vector<std::int64_t> offsets;
  std::int64_t next = 0;
  for (const TensorSpec& tensor : kind.tensors) {
    if (tensor.tied) {
      offsets.push_back(-1);
      continue;
    }
    offsets.push_back(next);
    const std::int64_t each = tensor.elements() / tensor.copies;
    next += (each + unit - 1) / unit * unit * tensor.copies;
  }
  return offsets;
}

}  // namespace zeroplan
