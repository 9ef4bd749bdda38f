#pragma once
// How often ZeRO-3 gathers a weight in backward: what DeepSpeed's coordinator keeps of what it has gathered
// (models/deepspeed_fetch.h plays it event by event; this is its rule over the blocks of a model).

#include <cstdint>
#include <vector>

#include "models/model_spec.h"
#include "sim/engine_time.h"

namespace zeroplan {

/// Gathers of a micro-step's backward over the parameters of a kind of block, one entry a kind, 0 to 2. A weight stays
/// until its next use if fewer than `run.max_reuse` elements are used before it: from forward to backward only at the
/// end of a model, from the recomputed forward of a block to its backward where the block is small. Otherwise each use
/// gathers it. Weights of at most `run.persistence` elements are never given up. Prefetches that reach a later use of a
/// weight before it is given up are left out.
std::vector<double> gathers_in_backward(const ModelSpec& model, const EngineTimeRun& run);

}  // namespace zeroplan
