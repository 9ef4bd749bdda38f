#pragma once
// Puts the blocks of a model together: which kernels a layer of this architecture runs, in which order.

#include "models/model_config.h"
#include "models/model_spec.h"

namespace zeroplan {

/// Fills the sizes, kinds and sequence of `model`. Throws std::logic_error only for a wrong family row.
void build_blocks(const Architecture& architecture, ModelSpec& model);

}  // namespace zeroplan
