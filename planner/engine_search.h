#pragma once
// The search under DeepSpeed or FSDP2: every configuration's step time by sim/engine_time.h, memory of the fastest by
// replay, until enough of them fit.

#include <optional>

#include "planner/search.h"
#include "planner/search_space.h"

namespace zeroplan {

/// Fills `answer`: plans, feasible, shortfall, assumptions, search. `answer.request` has its workload filled in.
/// Throws InputError when the model has no eager graph or no step time.
void search_engine(Answer& answer, const Workload& workload);

/// Whether any plan of the request fits: one of those that take least; nothing when none does. Throws as search_engine.
std::optional<Candidate> engine_plan_that_fits(const Request& request);
/// The fastest of a few that fit, else as engine_plan_that_fits().
std::optional<Candidate> fastest_engine_plan(const Request& request);

}  // namespace zeroplan
