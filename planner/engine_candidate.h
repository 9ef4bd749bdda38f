#pragma once
// The Prediction of a plan under DeepSpeed or FSDP2, from its step time and its memory.

#include "planner/engine_fit.h"
#include "planner/prediction.h"
#include "sim/engine_time.h"

namespace zeroplan {

/// Step, utilisation (causal attention count), memory by owner (breakdowns sum to the peaks) of `plan`. Traffic as
/// the replayed tape has it, and FLOPs of HFU and the op at the peak; resource times are not known under these engines
/// and stay empty. `tokens` of a step, the whole job.
Prediction engine_candidate_prediction(const ModelSpec& model, const MachineSpec& machine, const Plan& plan,
                                       const EngineTime& time, const EngineFit& fit, double tokens);

}  // namespace zeroplan
