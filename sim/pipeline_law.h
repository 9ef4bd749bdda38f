#pragma once
// Time of collectives whose chunks pass through a pipeline: all-reduces in the NVLink switch, and everything between
// nodes. docs/cost-model.md section 4; tests/tools/fit_pipelines.cpp.

#include <string>

#include "models/units.h"

namespace zeroplan {

/// t = latency + wire / rate x (1 + passes x fill x min(S, pipe) / S)
///
/// Data goes in chunks, through several stages one after the other. Until the pipe is full the stages do not overlap:
/// the first `pipe` bytes pay `fill` of their transfer once more, in each pass. An all-reduce makes two passes (up and
/// down the tree), a gather or scatter one. In the switch both happen at once: one pass.
struct PipelineLaw {
  double fill = 0;  // of the first bytes' transfer, a pass
  Bytes pipe;       // of the full tensor
  std::string source;
};

/// Time of `wire` bytes a rank of a `message` at `rate`, without latency. Never falls with size.
Seconds pipeline_transfer(const PipelineLaw& law, Bytes message, Bytes wire, BytesPerSecond rate, int passes);

}  // namespace zeroplan
