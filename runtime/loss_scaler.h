#pragma once
// Dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740, section 3.2), with DeepSpeed's knobs and their
// defaults (reference: DeepSpeed configuration "fp16": initial_scale_power, loss_scale_window, hysteresis,
// min_loss_scale).

#include "runtime/checkpoint.h"

namespace zeroplan {

struct LossScaling16 {
  double initial = 65536;       // 2^16
  std::int64_t window = 1000;   // good steps until the scale doubles
  std::int64_t hysteresis = 2;  // overflows in a row of windows until the scale halves
  double minimum = 1;
};

LossScaleState initial_loss_scale(const LossScaling16& rule);
/// After a step: `overflow` when its gradients were not finite. A skipped step uses up hysteresis first, then halves
/// the scale, down to the minimum; a window of good steps doubles it and restores the hysteresis. Throws DeviceError
/// when the scale is at the minimum already: training has diverged.
void update_loss_scale(LossScaleState& state, const LossScaling16& rule, bool overflow);

}  // namespace zeroplan
