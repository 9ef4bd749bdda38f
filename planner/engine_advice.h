#pragma once
// What would make a step under DeepSpeed or FSDP2 faster.

#include <vector>

#include "planner/search.h"

namespace zeroplan {

/// advise() of a plan of another engine: its step time (sim/engine_time.h) again with each part of the machine twice as
/// fast, and with a host that issues work twice as fast. None of them is a measurement.
std::vector<Advice> advise_engine(const Answer& answer, const Candidate& candidate);

}  // namespace zeroplan
