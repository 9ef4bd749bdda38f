#pragma once
// Where older DeepSpeed releases take other memory than 0.19: what threads and tutorials of those years describe.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/deepspeed_config.h"
#include "models/machine_spec.h"
#include "models/model_spec.h"

namespace zeroplan {

/// The month in which a release was made.
struct ReleaseMonth {
  int year = 0, month = 0;
  friend auto operator<=>(const ReleaseMonth&, const ReleaseMonth&) = default;
};
/// "2021-03"; throws InputError naming `what`.
ReleaseMonth parse_release_month(std::string_view text, std::string_view what);
std::string to_string(ReleaseMonth month);

/// What stages 1 and 2 hold in backward to collect gradients (ipg buffers), all of them together: bucket elements in
/// the type of the weights, a second buffer with overlap_comm, none without contiguous_gradients. 4.5 times the bucket
/// from PR 374 (September 2020) until PR 1042 (May 2021).
Bytes reduction_buffers(const DeepSpeedConfig& config, ReleaseMonth month);

/// The copy of updated weights that stages 1 and 2 with an offloaded optimizer make on the GPU at the end of a step:
/// fp32 of a rank's share from PR 5301 (April 2024) until PR 7309 (May 2025), none before and since.
Bytes offload_step_copy(const DeepSpeedConfig& config, std::int64_t parameters, int ranks, ReleaseMonth month);

/// One difference from 0.19, of this configuration.
struct ReleaseDifference {
  std::string what;       // a whole sentence
  Bytes gpu, pinned;      // more than 0.19 takes: on a GPU, of page-locked host memory on a node
  std::string source;     // "PR 1042"
  ReleaseMonth from, to;  // releases of [from, to) have it; from.year 0: all before
};
/// What a release of that month does differently here; every difference that we have a source for when `month` is
/// empty of a year. Nothing when none applies.
std::vector<ReleaseDifference> release_differences(const DeepSpeedConfig& config, const ModelSpec& model,
                                                   const MachineSpec& machine, ReleaseMonth month = {});

}  // namespace zeroplan
