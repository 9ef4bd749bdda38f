// Host memory of a DeepSpeed rank: engine-rules.md 2.13, NVMe buffers deepspeed.md section 7.

#include <algorithm>
#include <map>

#include "models/deepspeed_stage_parts.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kAlignmentUnit = 1024;  // bytes, times the I/O threads: what NVMe transfers are rounded to
constexpr std::int64_t kDefaultOptimizerBuffers = 4, kDefaultParameterBuffers = 5;

class HostList {
 public:
  HostList(const EagerStep& step, const DeepSpeedJob& job)
      : step_(step), job_(job), weight_size_(size_of(job.config.precision)) {
    for (const EagerParameter& parameter : step.parameters) {
      if (!parameter.trainable) continue;
      owned_ += ceil_div(parameter.elements, job.shard_ranks());
      largest_ = std::max(largest_, parameter.elements);
    }
  }

  std::vector<HostBuffer> list() {
    const DeepSpeedConfig& config = job_.config;
    if (config.optimizer_on_host()) {
      if (config.stage < 3) {
        stages_12();
      } else {
        stage_3();
      }
    }
    if (config.parameters_on_host()) parameters();
    return std::move(buffers_);
  }

 private:
  void add(const char* name, std::int64_t bytes, HostKind kind, std::int64_t count = 1) {
    if (bytes > 0 && count > 0) buffers_.push_back({name, bytes, count, kind});
  }
  HostKind pinned_if(bool pin) const { return pin ? HostKind::pinned : HostKind::pageable; }

  void stages_12() {
    const ZeroLayout layout = zero_layout(step_, job_.ranks, job_.config.round_robin);
    const std::int64_t n = layout.partition;
    const HostKind kind = pinned_if(job_.config.offload_optimizer.pin_memory);
    add("master weights", 4 * n, kind);
    add("fp32 gradients", 4 * n, kind);
    add("weights on their way up", weight_size_ * n, kind);
    add("Adam moments", 4 * n, HostKind::pageable, 2);
    add("gradient staging", weight_size_ * largest_, kind);
    if (job_.accumulation == 1) return;
    for (std::size_t p = 0; p < step_.parameters.size(); ++p) {  // one buffer a parameter that the rank owns part of
      const std::int64_t elements = step_.parameters[p].elements;
      if (layout.owned(p, elements, job_.rank) > 0) add("accumulated gradients", weight_size_ * elements, kind);
    }
  }

  void stage_3() {
    const DeepSpeedConfig& config = job_.config;
    const HostKind kind = pinned_if(config.offload_optimizer.pin_memory);
    const std::int64_t sum_size = size_of(config.grad_accum.value_or(config.precision));
    add("reduced gradients", sum_size * owned_, kind);
    const std::vector<std::int64_t> groups = sub_groups(step_, job_.shard_ranks(), config.sub_group);
    if (config.optimizer_on_nvme()) {
      optimizer_swap_buffers(groups);
      return;
    }
    add("master weights", 4 * owned_, HostKind::pageable);
    for (const std::int64_t group : groups) add("fp32 gradients", 4 * group, kind);
    add("Adam moments", 4 * owned_, HostKind::pageable, 2);
  }

  std::int64_t aligned(std::int64_t bytes) const {
    const std::int64_t unit = kAlignmentUnit * job_.config.aio_threads;
    return ceil_div(bytes, unit) * unit;
  }

  /// Sub-groups too small to be worth a transfer stay in memory: master, gradient and moments.
  void optimizer_swap_buffers(const std::vector<std::int64_t>& groups) {
    const std::int64_t threshold = std::max<std::int64_t>(1 << 20, job_.config.aio_block_bytes);
    std::int64_t largest = 0;
    for (const std::int64_t group : groups) {
      largest = std::max(largest, group);
      if (4 * group < threshold) add("sub-groups too small for NVMe", 16 * group, HostKind::pageable);
    }
    const std::int64_t count = job_.config.offload_optimizer.buffer_count;
    add("optimizer swap buffers", aligned(4 * largest), HostKind::locked, count > 0 ? count : kDefaultOptimizerBuffers);
  }

  /// The flat buffer of what is trained is pinned whatever pin_memory says; its shards were pinned one by one before
  /// and stay in the cache. Frozen ones stay as they were loaded.
  void parameters() {
    const DeepSpeedConfig& config = job_.config;
    if (config.parameters_on_nvme()) {
      const std::int64_t count = config.offload_param.buffer_count;
      add("parameter swap buffers", aligned(weight_size_ * config.offload_param.buffer_size), HostKind::locked,
          count > 0 ? count : kDefaultParameterBuffers);
      return;
    }
    add("weight shards", weight_size_ * owned_, HostKind::pinned);
    const bool pin = config.offload_param.pin_memory;
    std::map<std::pair<bool, std::int64_t>, std::int64_t> counts;  // by frozen and elements
    for (const EagerParameter& parameter : step_.parameters)
      ++counts[{!parameter.trainable, ceil_div(parameter.elements, job_.shard_ranks())}];
    for (const auto& [shard, count] : counts) {
      const auto& [frozen, elements] = shard;
      if (frozen) add("frozen weight shards", weight_size_ * elements, pinned_if(pin), count);
      if (!frozen && pin)
        add("cached pinned blocks of single shards", weight_size_ * elements, HostKind::pinned, count);
    }
  }

  const EagerStep& step_;
  const DeepSpeedJob& job_;
  std::int64_t weight_size_, owned_ = 0, largest_ = 0;
  std::vector<HostBuffer> buffers_;
};

}  // namespace

std::vector<HostBuffer> deepspeed_host_memory(const EagerStep& step, const DeepSpeedJob& job) {
  return HostList(step, job).list();
}

}  // namespace zeroplan
