#pragma once

#include "planner/search.h"

namespace zeroplan {

/// What `nearest` lacks, and the smallest changes of each kind that make the request plannable: each one was planned.
Shortfall shortfall_of(const Request& request, const Candidate& nearest);

/// The changes alone.
std::vector<Shortfall::Change> changes_that_fit(const Request& request);

}  // namespace zeroplan
