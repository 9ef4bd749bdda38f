#pragma once
// Replays an engine's tape through the caching allocator: what torch.cuda reports phase by phase, and whether a card of
// a given size holds the run.

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "models/engine_host.h"
#include "models/engine_tape.h"
#include "sim/caching_allocator.h"

namespace zeroplan {

/// How peaks are read: anew for each phase of each micro-step, the largest over micro-steps (data/groundtruth's
/// DeepSpeed rows), or since the step began (its FSDP2 rows).
enum class PeakCounting : std::uint8_t { each_phase, since_step };

struct StepMemory {
  Bytes forward, backward, step;  // peaks of allocated
  Bytes after;                    // allocated at the end
  /// What torch.cuda.max_memory_reserved() says at the end: since the peaks were reset (PeakCounting). A card that is
  /// nearly full may have given much back before.
  Bytes reserved;
  Bytes reserved_after;  // torch.cuda.memory_reserved() at the end
};

struct RunMemory {
  Bytes init_peak, after_init;
  std::vector<StepMemory> steps;  // the last one is the steady step
  Bytes peak_reserved;            // of the whole run
  std::int64_t num_alloc_retries = 0;
  /// Set when the card was too small; `steps` then ends with the last whole step.
  std::optional<CachingAllocator::OutOfMemory> out_of_memory;
  std::string failed_at;  // "initialize", "step 1 backward"
};

/// How fast the host issues work, which decides how far it runs ahead of the GPU. A block that another stream uses
/// (record_stream) becomes reusable only when that stream has passed the point at which the host freed it, so a host
/// that leads makes the allocator reserve more. Fits forward and backward of data/groundtruth's host-bound stage-3 rows
/// (Llama-2 7B, 1 x 2048, checkpointed: 0.28 and 0.48 s; measured 0.23 to 0.48 and 0.42 to 0.59).
struct HostPace {
  Seconds kernel_forward = 45.0_us;   // Python and dispatch a kernel
  Seconds kernel_backward = 20.0_us;  // autograd's engine has no Python in between
  Seconds hook = 250.0_us;            // one of stage 3's module hooks
  int launches = 1024;                // pending on a stream; CUDA then blocks the host (its launch queue's depth)
  int reductions = 2;                 // outstanding ones; beyond, the host waits for the oldest (stage3.py)
  double scale = 1;                   // of all host times
};

/// Seconds of each of tape.works() on the GPU, every one as if alone.
struct WorkTimes {
  std::vector<Seconds> seconds;
  HostPace pace;
};
class CostModel;
WorkTimes work_times(const EngineTape& tape, const CostModel& cost);

/// Without `times` blocks of other streams are reusable at once: the least that can be reserved.
RunMemory replay(const EngineTape& tape, const AllocatorOptions& options, PeakCounting counting,
                 const WorkTimes* times = nullptr);

/// Host memory of a rank.
struct HostUse {
  Bytes pageable, pinned;  // pinned: rounding included
  Bytes total() const { return pageable + pinned; }
  /// What mapping the pinned part takes on the device: 8 bytes a page of 4 KiB (fits device_used of every offload row
  /// of data/groundtruth to 0.002 GiB).
  Bytes device_page_tables() const { return pinned / 512.0; }
};
HostUse host_use(std::span<const HostBuffer> buffers);

}  // namespace zeroplan
