#pragma once
// Numbers of a configuration that change results but no shape, so that ModelSpec leaves them out: what the executors
// need beside it.

#include <optional>

#include "models/model_spec.h"
#include "runtime/kernels/kernels.h"

namespace zeroplan {

struct ModelConstants {
  double norm_epsilon = 1e-5;
  double rope_theta = 10000.0;
  std::optional<Llama3Scaling> rope_scaling;
  std::vector<Assumption> assumptions;  // what a run should say: no dropout
};

/// Reads them from ModelSpec::config. Throws InputError naming the model and the key when the executors cannot run it:
/// a family without kernels (expected gpt2, llama or mistral), another rope_type, rotary heads that are odd or turned
/// in part, scaled attention that is not 1 / sqrt(head_dim), an activation function without a kernel, a number that is
/// none.
ModelConstants model_constants(const ModelSpec& model);

/// Throws InputError when a table of learned positions has fewer rows than a sequence has tokens.
void check_positions(const ModelSpec& model, std::int64_t seq_len);

/// The table that rotary_forward() wants; empty for models without rotary positions.
RotaryTable rotary_table(const ModelSpec& model, const ModelConstants& constants, std::int64_t seq_len);

}  // namespace zeroplan
