#pragma once
// Where in a run under DeepSpeed or FSDP2 the most GPU memory is alive.

#include <optional>
#include <string>

#include "models/engine_tape.h"
#include "models/model_spec.h"
#include "sim/memory_timeline.h"

namespace zeroplan {

struct EnginePeak {
  OwnerBytes owners{};  // who holds what then
  /// The part of the model or of the run: "layer 31", "head", "initialize"; "step" for what the engine does on its own.
  std::string place;
  Phase phase = Phase::forward;
  std::optional<Work> work;  // what the last allocation was made for; none: nothing follows it
};

/// The first moment of the run, initialize included, at which buffers hold the most bytes. A pass over the tape.
EnginePeak peak_moment(const EngineTape& tape);
/// "layer 31 backward: attention backward", "initialize: elementwise".
std::string label(const EnginePeak& peak, const ModelSpec& model);

}  // namespace zeroplan
