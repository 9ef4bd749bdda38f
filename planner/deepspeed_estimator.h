#pragma once
// What DeepSpeed's own estimators print for a model: people compare with them. Formulas only, no measurement: where
// they differ from a run is listed in docs/check.md.

#include <cstdint>

#include "models/units.h"

namespace zeroplan {

/// Which form of the ZeRO-2 estimator: DeepSpeed PR 5099 (April 2024) changed it.
enum class EstimatorForm : std::uint8_t { before_2024, since_2024 };

struct EstimatorQuestion {
  std::int64_t parameters = 0;
  std::int64_t largest_module = 0;  // parameters of the largest single module; ZeRO-3 only
  int gpus_per_node = 1;
  int nodes = 1;
  bool offload_optimizer = false;
  bool offload_parameters = false;  // ZeRO-3 only, beside the optimizer's
  bool zero_init = true;            // ZeRO-3 only
  double buffer_factor = 1.5;       // additional_buffer_factor, its default
};

struct EstimatorBytes {
  Bytes gpu;   // of each
  Bytes host;  // of each node
};

/// estimate_zero2_model_states_mem_needs (DeepSpeed, runtime/zero/stage_1_and_2.py; PR 965, PR 5099).
EstimatorBytes deepspeed_zero2_estimate(const EstimatorQuestion& question, EstimatorForm form);
/// estimate_zero3_model_states_mem_needs (DeepSpeed, runtime/zero/stage3.py; PR 965).
EstimatorBytes deepspeed_zero3_estimate(const EstimatorQuestion& question);

}  // namespace zeroplan
