#pragma once
// From ranges of a block's flat buffer to the tensors in it.

#include <cstdint>
#include <vector>

#include "models/model_spec.h"
#include "models/units.h"

namespace zeroplan {

/// `count` elements that lie together in a tensor and in the flat buffer.
struct TensorPart {
  int tensor = 0;          // index into the kind's tensors
  std::int64_t begin = 0;  // first element in the tensor; copies one after the other
  std::int64_t flat = 0;   // the same element in the flat buffer
  std::int64_t count = 0;
};

/// What elements [begin, end) of the flat buffer hold, in order, padding left out. One part lies in one copy.
std::vector<TensorPart> tensor_parts(const BlockKind& kind, DType type, std::int64_t begin, std::int64_t end);

}  // namespace zeroplan
