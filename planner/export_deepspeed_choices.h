#pragma once
// What deepspeed.json says, before it is JSON: the knobs DeepSpeed 0.19 has, chosen from a plan made for our engine.
// Facts: DeepSpeed 0.19.6 source and 0.19.8 measurements (allocation formulas cited at each use).

#include <cstdint>
#include <string>
#include <vector>

#include "planner/export_parts.h"

namespace zeroplan {

struct DeepspeedChoices {
  int stage = 0;
  Tier optimizer = Tier::hbm;      // offload_optimizer.device
  double optimizer_ratio = 1;      // share of sub-groups on the CPU (stage 3)
  Tier parameters = Tier::hbm;     // offload_param.device
  int hpz_ranks = 1;               // zero_hpz_partition_size
  bool fp32_accumulation = false;  // data_types.grad_accum_dtype
  // Elements:
  std::int64_t reduce_bucket = 0;
  std::int64_t sub_group = 0;  // of one rank's partition
  std::int64_t prefetch_bucket = 0;
  std::int64_t live_parameters = 0;
  std::int64_t reuse_distance = 0;
  std::int64_t persistence_threshold = 0;
  std::int64_t persistent_parameters = 0;
  std::int64_t swap_buffer = 0;   // offload_param.buffer_size
  std::int64_t swap_buffers = 0;  // offload_param.buffer_count
  std::int64_t max_in_cpu = 0;    // per rank
};

/// Page-locked buffers of the NVMe optimizer swapper: 4 of the sub-group at work, 4 read ahead, 3 being written, 1 to
/// spare.
inline constexpr std::int64_t kOptimizerSwapBuffers = 12;

/// The knobs, and one note for each difference from the plan.
DeepspeedChoices choose_deepspeed(const ExportSubject& subject, std::vector<std::string>& notes);

/// Host memory of a node under these choices, with exact pinned blocks and with torch's power-of-two ones.
struct HostNeed {
  Bytes exact, rounded;
};
HostNeed deepspeed_host_need(const ExportSubject& subject, const DeepspeedChoices& choices);

}  // namespace zeroplan
