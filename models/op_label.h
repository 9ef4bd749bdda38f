#pragma once
// Names of what ops do, and their arithmetic, for those who have no Schedule.

#include <string>

#include "models/model_spec.h"
#include "models/schedule.h"
#include "models/units.h"

namespace zeroplan {

/// "attention backward", "all-gather", "copy to host": the last part of an op's label().
std::string work_name(const Work& work, const ModelSpec& model);

/// Matrix products and attention that a kernel runs: 2 a multiply-add, of causal attention the half that is there
/// (backward_flops()); passes over memory have none.
Flops work_flops(const Compute& compute);

}  // namespace zeroplan
