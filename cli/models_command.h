#pragma once
// What `zeroplan models` prints. Argument parsing is elsewhere.

#include <ostream>

#include "models/model_spec.h"

namespace zeroplan {

/// The catalog: one line a model (name, family, parameters, active ones, layers, hidden, heads), or a JSON array.
void print_models(std::ostream& out, bool json);

/// One model: tensors grouped by name, FLOPs and kept activation bytes a token, sources, assumptions, warnings. As
/// JSON: name, family, parameters, active_parameters, tensors [{name, shape, layer, tied}] (one entry a tensor; layer
/// is left out for tensors outside the layers), flops, blocks. What is not known is left out.
void print_model(const ModelSpec& model, std::ostream& out, bool json);

}  // namespace zeroplan
