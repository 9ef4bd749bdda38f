#pragma once
// What people mean by "the memory of a model in training": bytes of weights, gradients and optimizer states of each
// parameter, by how they are kept. Activations, buffers and libraries come on top.

#include <span>
#include <string_view>

#include "models/model_spec.h"

namespace zeroplan {

struct StateRegime {
  double bytes = 0;          // of a parameter, all GPUs together, when everything is sharded
  std::string_view what;     // "16-bit weights and gradients, fp32 master and Adam states"
  std::string_view seen_in;  // who runs it so
};
/// By bytes, least first (transformer-math: weights + gradients + master + Adam's two moments).
std::span<const StateRegime> state_regimes();

/// Of the trainable parameters; frozen ones keep 16-bit weights.
Bytes state_bytes(const ModelSpec& model, const StateRegime& regime);

}  // namespace zeroplan
