#pragma once
// A deepspeed.json that fits under DeepSpeed: the plan was made for our engine, which needs less memory.

#include <optional>
#include <string>
#include <vector>

#include "planner/engine_fit.h"
#include "planner/export_parts.h"

namespace zeroplan {

struct DeepspeedFit {
  DeepspeedExport exported;      // of `plan`; a note says what was changed, or that nothing fits
  Plan plan;                     // as DeepSpeed is to run it
  std::optional<EngineFit> fit;  // of it; none when it cannot be predicted
  std::string unknown;           // then: why
  std::string as_planned;        // describe() of the plan's own deepspeed.json, unchanged; empty: cannot be predicted
};

/// The plan itself if it fits; else the first that does of: every layer checkpointed, smaller micro-batches, stage 3,
/// the optimizer on the host, the weights too, the optimizer on NVMe where there are drives, the weights too. The
/// global batch stays. When none does: the plan itself.
DeepspeedFit deepspeed_that_fits(const ExportSubject& subject, EngineFitter& fitter);

/// Whether `plan`'s deepspeed.json fits; without a change.
DeepspeedFit deepspeed_as_planned(const ExportSubject& subject, EngineFitter& fitter);

}  // namespace zeroplan
