// Bytes that DeepSpeed's states take on a GPU, a host and its disks: lower bounds.

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

// A training process without offload: 1.6 to 2.0 GiB measured (engine-rules 2.13); the low end, for a lower bound.
constexpr double kProcessBytes = 1.6 * kGiB;

struct HostSum {
  double exact = 0, rounded = 0;
  void pageable(double bytes) { exact += bytes, rounded += bytes; }
  /// One block; torch rounds it up to a power of two when it is pinned.
  void block(double bytes, bool pinned) {
    exact += bytes;
    rounded += pinned && bytes >= 1 ? static_cast<double>(std::bit_ceil(static_cast<std::uint64_t>(bytes))) : bytes;
  }
};

/// Untied parameter tensors; experts of a layer are one parameter.
template <class Visit>
void each_parameter(const ModelSpec& model, Visit visit) {
  for (const std::int64_t elements : parameter_sizes(model)) visit(elements);
}

void add_below_3(const DeepSpeedConfig& config, const ModelSpec& model, double own, HostSum& sum) {
  const double b = size_of(config.precision), m = config.master_16bit ? 2 : 4, states = config.states_16bit ? 4 : 8;
  const bool pinned = config.offload_optimizer.pin_memory;
  sum.block(m * own, pinned);
  sum.block(m * own, pinned);
  sum.block(b * own, pinned);
  sum.pageable(states * own);
  sum.block(b * static_cast<double>(largest_parameter(model)), pinned);
}

void add_at_3(const DeepSpeedConfig& config, double own, HostSum& sum) {
  const double m = config.master_16bit ? 2 : 4, states = config.states_16bit ? 4 : 8;
  const bool pinned = config.offload_optimizer.pin_memory;
  const double g = size_of(config.grad_accum.value_or(config.precision));
  sum.block(g * own, pinned);
  const double group = std::min(own, std::max(1.0, static_cast<double>(config.sub_group)));
  if (config.optimizer_on_nvme()) {
    sum.pageable(4 * group * static_cast<double>(config.offload_optimizer.buffer_count));
    return;
  }
  const double on_host = own * config.offload_optimizer.ratio;
  const double groups = std::floor(on_host / group);
  sum.pageable((m + states) * on_host);
  HostSum one;
  one.block(m * group, pinned);
  sum.exact += one.exact * groups;
  sum.rounded += one.rounded * groups;
  sum.block(m * (on_host - groups * group), pinned);
}

void add_parameters(const DeepSpeedConfig& config, const ModelSpec& model, int ranks, double own, HostSum& sum) {
  const double b = size_of(config.precision);
  if (config.parameters_on_nvme()) {
    const DeepspeedOffload& offload = config.offload_param;
    sum.pageable(b * static_cast<double>(offload.buffer_size) * static_cast<double>(offload.buffer_count));
    return;
  }
  sum.block(b * own, true);
  // The shards' first blocks stay in torch's pinned cache.
  if (!config.offload_param.pin_memory) return;
  each_parameter(model, [&](std::int64_t elements) {
    sum.rounded += static_cast<double>(
        std::bit_ceil(static_cast<std::uint64_t>(b * static_cast<double>(divided_up(elements, ranks)))));
  });
}

/// What the optimizer keeps of each element. Lion and others keep less than Adam: nothing is counted for them.
double state_bytes(const DeepSpeedConfig& config) { return config.flat_adam() ? config.states_16bit ? 4 : 8 : 0; }

/// Stage 0 (deepspeed.md 3): Adam or AdamW by name is FusedAdam in flat buffers; others are updated tensor by tensor.
GpuStates states_unsharded(const DeepSpeedConfig& config, double all) {
  const double each = state_bytes(config) + (config.precision == DType::fp32          ? 8
                                             : config.optimizer && config.flat_adam() ? 16
                                                                                      : 12);
  return {Bytes(each * all), fmt::format("{:g} bytes a parameter, nothing is sharded", each)};
}

/// One rank's share is all.
std::string share_text(int ranks) { return ranks == 1 ? "" : fmt::format(" of the share of {} ranks", ranks); }

GpuStates states_below_3(const DeepSpeedConfig& config, double all, double own, int ranks) {
  const double b = size_of(config.precision), m = config.master_16bit ? 2 : 4, states = state_bytes(config);
  const bool fp32_sums = b < 4 && config.grad_accum == DType::fp32;
  const auto answer = [&](double whole, double each) {
    return GpuStates{Bytes(whole * all + each * own),
                     ranks == 1 ? fmt::format("{:g} bytes of each parameter", whole + each)
                                : fmt::format("{:g} bytes of each parameter, {:g}{}", whole, each, share_text(ranks))};
  };
  // BF16_Optimizer (4.10): weights, fp32 sums, gradients and their cast, all unsharded.
  if (config.stage == 1 && fp32_sums && config.precision == DType::bf16 &&
      config.offload_optimizer.device != OffloadDevice::cpu) {
    return answer(2 + 4 + 2 + 2, m + states);
  }
  // Stage 1 holds all gradients to the end of backward, unless they are reduced in its hooks (4.4).
  const bool whole_gradients = config.stage == 1 && (!config.overlap_comm || config.accumulation.value_or(1) > 1);
  if (config.optimizer_on_host()) return answer(whole_gradients ? 2 * b : b, 0);
  // The step: gradient slices, their flat copy, and that in the masters' type (4.6); with fp32 sums one buffer
  // (engine-rules 2.9).
  const GpuStates step = answer(b, m + states + (fp32_sums && config.stage == 2 ? 4 : 2 * b + (b < m ? m : 0)));
  const GpuStates backward = answer(2 * b, m + states);
  return whole_gradients && backward.bytes > step.bytes ? backward : step;
}

/// Shards, the permanent bucket, hpZ's second shards, and what a sub-group's step casts (5.3, 5.7, 5.10).
GpuStates states_at_3(const DeepSpeedConfig& config, double all, double own, int ranks) {
  const double b = size_of(config.precision), m = config.master_16bit ? 2 : 4, states = state_bytes(config);
  const double g = size_of(config.grad_accum.value_or(config.precision));
  const double bucket = config.contiguous_gradients ? static_cast<double>(config.reduce_bucket) *
                                                          size_of(config.communication.value_or(config.precision))
                                                    : 0;
  const double ratio = config.optimizer_on_nvme() ? 1 : config.offload_optimizer.ratio;
  const double kept = config.optimizer_on_host() ? (1 - ratio) * (m + states) : m + states + g;
  const double each = (config.parameters_on_host() ? 0 : b) + kept;
  const double group = std::min(own, std::max(1.0, static_cast<double>(config.sub_group)));
  const double transient = config.optimizer_on_host() ? 0 : (g < 4 ? g + 4 : 4) * group;
  const auto secondary = static_cast<double>(std::min<std::int64_t>(config.hpz_ranks, ranks));
  const double second = secondary > 1 && !config.parameters_on_host() ? b * all / secondary : 0;
  return {Bytes(each * own + bucket + transient + second),
          fmt::format("{:g} bytes a parameter{}, a bucket of {}, {} for a sub-group{}", each, share_text(ranks),
                      format_gib(Bytes(bucket)), format_gib(Bytes(transient)),
                      second > 0 ? fmt::format(", {} for hpZ", format_gib(Bytes(second))) : "")};
}

}  // namespace

std::int64_t divided_up(std::int64_t count, std::int64_t by) { return (count + by - 1) / by; }

int sharding_ranks(const DeepSpeedConfig& config, int ranks) {
  const bool mics = config.stage == 3 && config.mics_ranks > 0 && ranks % config.mics_ranks == 0;
  return std::max(1, mics ? static_cast<int>(config.mics_ranks) : ranks);
}

std::vector<std::int64_t> parameter_sizes(const ModelSpec& model) {
  std::vector<std::int64_t> sizes;
  for (const int k : model.sequence) {
    for (const TensorSpec& tensor : model.kinds[static_cast<std::size_t>(k)].tensors) {
      if (!tensor.tied) sizes.push_back(tensor.elements());
    }
  }
  return sizes;
}

std::int64_t largest_parameter(const ModelSpec& model) {
  std::int64_t largest = 0;
  for (const std::int64_t elements : parameter_sizes(model)) largest = std::max(largest, elements);
  return largest;
}

HostBytes offloaded_host_bytes(const DeepSpeedConfig& config, const ModelSpec& model, const MachineSpec& machine) {
  if (!config.optimizer_on_host() && !config.parameters_on_host()) return {};
  const int ranks = sharding_ranks(config, machine.ranks());
  const auto own = static_cast<double>(divided_up(model.trainable_parameters(), ranks));
  HostSum sum;
  sum.pageable(kProcessBytes);
  if (config.optimizer_on_host()) config.stage == 3 ? add_at_3(config, own, sum) : add_below_3(config, model, own, sum);
  if (config.parameters_on_host()) add_parameters(config, model, ranks, own, sum);
  return {Bytes(sum.exact) * machine.gpus_per_node, Bytes(sum.rounded) * machine.gpus_per_node};
}

Bytes offloaded_nvme_bytes(const DeepSpeedConfig& config, const ModelSpec& model, const MachineSpec& machine) {
  const auto own =
      static_cast<double>(divided_up(model.trainable_parameters(), sharding_ranks(config, machine.ranks())));
  const double bytes =
      (config.optimizer_on_nvme() ? 16 : 0) + (config.parameters_on_nvme() ? size_of(config.precision) : 0);
  return Bytes(bytes * own) * machine.gpus_per_node;
}

GpuStates gpu_states(const DeepSpeedConfig& config, std::int64_t parameters, int ranks) {
  const auto all = static_cast<double>(parameters), own = static_cast<double>(divided_up(parameters, ranks));
  GpuStates states = config.stage == 0  ? states_unsharded(config, all)
                     : config.stage < 3 ? states_below_3(config, all, own, ranks)
                                        : states_at_3(config, all, own, ranks);
  if (!config.optimizer) states.arithmetic += "; the file names no optimizer, Adam is assumed";
  return states;
}

}  // namespace zeroplan
