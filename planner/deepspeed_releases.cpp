#include "planner/deepspeed_releases.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "models/error.h"
#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

constexpr ReleaseMonth kLargeBuckets{2020, 9}, kPlainBuckets{2021, 5};  // PR 374, PR 1042
constexpr ReleaseMonth kStepCopy{2024, 4}, kNoStepCopy{2025, 5};        // PR 5301, PR 7309
constexpr ReleaseMonth kPinningObeyed{2025, 11};                        // PR 7689
constexpr double kLargeBucketFactor = 4.5;                              // PR 374

bool within(ReleaseMonth month, ReleaseMonth from, ReleaseMonth to) { return from <= month && month < to; }

bool reduces_in_backward(const DeepSpeedConfig& config) { return config.stage == 1 || config.stage == 2; }

/// Stages 1 and 2 with the optimizer on the host.
bool classic_offload(const DeepSpeedConfig& config) {
  return reduces_in_backward(config) && config.optimizer_on_host();
}

/// Page-locked bytes of a node that pin_memory: false would not lock: masters, gradients, the 16-bit staging of a
/// rank's share and of its largest parameter (lint_sizes.cpp).
Bytes locked_bytes(const DeepSpeedConfig& config, const ModelSpec& model, const MachineSpec& machine) {
  const double own = static_cast<double>(divided_up(model.trainable_parameters(), machine.ranks()));
  const double master = config.master_16bit ? 2 : 4;
  return Bytes((2 * master + size_of(config.precision)) * own +
               size_of(config.precision) * static_cast<double>(largest_parameter(model))) *
         machine.gpus_per_node;
}

}  // namespace

ReleaseMonth parse_release_month(std::string_view text, std::string_view what) {
  const auto digit = [&](std::size_t at) { return std::isdigit(static_cast<unsigned char>(text[at])) != 0; };
  const bool shaped =
      text.size() == 7 && text[4] == '-' && digit(0) && digit(1) && digit(2) && digit(3) && digit(5) && digit(6);
  ReleaseMonth result;
  if (shaped) {
    for (const std::size_t at : {0U, 1U, 2U, 3U}) result.year = 10 * result.year + (text[at] - '0');
    result.month = 10 * (text[5] - '0') + (text[6] - '0');
  }
  if (!shaped || result.year < 2020 || result.month < 1 || result.month > 12) {
    throw InputError(fmt::format("{}: expected a month from 2020-01 on such as 2021-03, got \"{}\"", what, text));
  }
  return result;
}

std::string to_string(ReleaseMonth month) { return fmt::format("{:04}-{:02}", month.year, month.month); }

Bytes reduction_buffers(const DeepSpeedConfig& config, ReleaseMonth month) {
  if (!reduces_in_backward(config) || (!config.contiguous_gradients && !config.optimizer_on_host())) return Bytes();
  const double factor = within(month, kLargeBuckets, kPlainBuckets) ? kLargeBucketFactor : 1;
  return bytes_of(config.reduce_bucket, config.precision) * (factor * (config.overlap_comm ? 2 : 1));
}

Bytes offload_step_copy(const DeepSpeedConfig& config, std::int64_t parameters, int ranks, ReleaseMonth month) {
  if (!classic_offload(config) || !within(month, kStepCopy, kNoStepCopy)) return Bytes();
  return bytes_of(divided_up(parameters, ranks), DType::fp32);
}

std::vector<ReleaseDifference> release_differences(const DeepSpeedConfig& config, const ModelSpec& model,
                                                   const MachineSpec& machine, ReleaseMonth month) {
  std::vector<ReleaseDifference> list;
  const bool any = month.year == 0;
  const Bytes large = reduction_buffers(config, kLargeBuckets) - reduction_buffers(config, kPlainBuckets);
  // A rule of 2020 that is still quoted: only who asks for those releases hears of it.
  if (large > Bytes() && within(month, kLargeBuckets, kPlainBuckets)) {
    list.push_back({"each buffer that collects gradients in backward is 4.5 times reduce_bucket_size", large, Bytes(),
                    "PR 374, gone with PR 1042", kLargeBuckets, kPlainBuckets});
  }
  const Bytes copy = offload_step_copy(config, model.trainable_parameters(), machine.ranks(), kStepCopy);
  if (copy > Bytes() && (any || within(month, kStepCopy, kNoStepCopy))) {
    list.push_back({"the end of a step holds an fp32 copy of the share's updated weights on the GPU", copy, Bytes(),
                    "PR 5301, gone with PR 7309", kStepCopy, kNoStepCopy});
  }
  const bool pageable = classic_offload(config) && !config.offload_optimizer.pin_memory;
  if (pageable && (any || month < kPinningObeyed)) {
    list.push_back(
        {"host memory of the offloaded optimizer is page-locked although pin_memory is false: it cannot be "
         "swapped, and ulimit -l has to allow it",
         Bytes(),
         locked_bytes(config, model, machine),
         "PR 7689",
         {},
         kPinningObeyed});
  }
  return list;
}

}  // namespace zeroplan
