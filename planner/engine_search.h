#pragma once
// The search under DeepSpeed or FSDP2: every configuration's step time by sim/engine_time.h, memory of the fastest by
// replay, until enough of them fit.

#include "planner/search.h"
#include "planner/search_space.h"

namespace zeroplan {

/// Fills `answer`: plans, feasible, shortfall, assumptions, search. `answer.request` has its workload filled in.
/// Throws InputError when the model has no eager graph or no step time (experts, encoders).
void search_engine(Answer& answer, const Workload& workload);

}  // namespace zeroplan
