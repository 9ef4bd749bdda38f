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
  Bytes reserved;                 // what torch.cuda.max_memory_reserved() says at the end
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

/// When blocks that another stream uses become reusable.
enum class HostLead : std::uint8_t {
  none,     // at once: the GPU keeps up with the host
  to_sync,  // when the host next waits for the GPU: it runs ahead as far as it can
};

RunMemory replay(const EngineTape& tape, const AllocatorOptions& options, PeakCounting counting,
                 HostLead lead = HostLead::none);

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
