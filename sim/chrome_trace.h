#pragma once
// A step as a Chrome trace ("JSON Array with metadata", Trace Event Format): opens in Perfetto and chrome://tracing.

#include <span>
#include <string>

#include "models/model_spec.h"
#include "models/schedule.h"
#include "models/trace.h"
#include "sim/simulate.h"

namespace zeroplan {

/// Streams as tracks, an arrow for each edge between streams, memory in use by tier, and the use of resources where it
/// is known (`simulation` may be null: traces of estimate() or of an executor). `trace` belongs to the flat `schedule`;
/// throws std::logic_error when it does not. Deterministic; valid JSON.
std::string chrome_trace(const Schedule& schedule, const ModelSpec& model, const Trace& trace, int rank,
                         const Simulation* simulation);

}  // namespace zeroplan
