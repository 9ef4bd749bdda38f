#pragma once
// Loading and saving beside the step: peaks and times (spec section 6).

#include <optional>
#include <string>
#include <vector>

#include "models/lower.h"
#include "planner/prediction.h"
#include "planner/report.h"

namespace zeroplan {

struct TransientUse {
  Transient what = Transient::initialise;
  Bytes gpu;                    // peak of a GPU: what the plan keeps there, context, libraries and NCCL included
  Bytes host, nvme;             // peak of a node
  std::optional<Seconds> time;  // played by discrete events; none: it needs files and the machine states no drives
};

/// Each transient of the plan. `prediction`: of the same plan, for what stands beside the arena. Throws as
/// lower_transient() and simulate() do.
std::vector<TransientUse> transient_uses(const PlanFile& file, const Prediction& prediction);

/// A table for people.
std::string report_transients(const std::vector<TransientUse>& uses, const ReportStyle& style);

}  // namespace zeroplan
