#pragma once

#include "planner/search.h"

namespace zeroplan {

/// What `nearest` lacks, and the smallest changes of each kind that make the request plannable: each one was planned.
Shortfall shortfall_of(const Request& request, const Candidate& nearest);

}  // namespace zeroplan
