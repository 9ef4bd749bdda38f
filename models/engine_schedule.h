#pragma once
// The steady step of an engine's tape as a Schedule, so that every reader of schedules (estimate, simulate, memory
// timeline, arena, trace) reads DeepSpeed and FSDP2 as it reads our own engine.

#include <span>

#include "models/engine_host.h"
#include "models/engine_tape.h"
#include "models/model_spec.h"
#include "models/schedule.h"

namespace zeroplan {

/// The last step of the tape, flat. A buffer that lives through it is resident; one that came before it and dies in it
/// is allocated at its begin, one that outlives it is freed at its end (in a steady step the two are alike), so memory
/// at any point is what the tape says. Edges come from operands, from waits of streams and from waits of the host.
/// A use of a buffer by the stream of its own pool, or by one that record_stream names, is no operand: the allocator
/// keeps such a block until that stream has passed, and compute frees it without waiting. `host` buffers are resident,
/// pinned ones rounded as PyTorch does. Throws std::logic_error for a tape without a whole step.
///
/// What it leaves out: Alloc and Free stand on the compute stream, so a gather starts when compute reaches its hook,
/// while the real host may issue it earlier; the host's own time (Python, launches) is no op.
Schedule steady_schedule(const EngineTape& tape, const ModelSpec& model, std::span<const HostBuffer> host);

}  // namespace zeroplan
