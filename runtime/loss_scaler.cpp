#include "runtime/loss_scaler.h"

#include <fmt/format.h>

#include <algorithm>

#include "models/error.h"

namespace zeroplan {

LossScaleState initial_loss_scale(const LossScaling16& rule) {
  LossScaleState state;
  state.scale = rule.initial;
  state.hysteresis_left = rule.hysteresis;
  return state;
}

void update_loss_scale(LossScaleState& state, const LossScaling16& rule, bool overflow) {
  if (!overflow) {
    if (++state.good_steps < rule.window) return;
    state.good_steps = 0;
    state.hysteresis_left = rule.hysteresis;
    state.scale *= 2;
    return;
  }
  ++state.skipped_steps;
  state.good_steps = 0;
  if (state.hysteresis_left > 1) {
    --state.hysteresis_left;
    return;
  }
  if (state.scale <= rule.minimum) {
    throw DeviceError(
        fmt::format("training diverged: gradients overflow at the smallest loss scale, {}", rule.minimum));
  }
  state.scale = std::max(state.scale / 2, rule.minimum);
}

}  // namespace zeroplan
