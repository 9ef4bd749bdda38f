#pragma once
// What a training run says at its end.

#include <string>

#include "runtime/trainer.h"

namespace zeroplan {

/// A table of steps (all of a short run, a selection of a long one), the step's median time, memory planned and used.
std::string report_training(const PlanFile& file, const TrainResult& result);

/// `run --json`: plan (its identity), ranks, first_step, losses, steps (step, loss, gradient_norm, loss_scale, skipped,
/// seconds), step_seconds, tokens_per_second, memory, assumptions, notes.
std::string training_json(const PlanFile& file, const TrainResult& result);

}  // namespace zeroplan
