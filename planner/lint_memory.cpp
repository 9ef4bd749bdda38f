// What the model and the machine say about sizes. Lower bounds: what is reported here cannot fit.

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

const std::string kZero = "zero_optimization.";

// A training process without offload: 1.6 to 2.0 GiB measured (engine-rules 2.13); the low end, for a lower bound.
constexpr double kProcessBytes = 1.6 * kGiB;

std::int64_t divided_up(std::int64_t count, std::int64_t by) { return (count + by - 1) / by; }

/// Ranks that share one copy of the states.
int sharding_ranks(const DeepSpeedConfig& config, int ranks) {
  const bool mics = config.stage == 3 && config.mics_ranks > 0 && ranks % config.mics_ranks == 0;
  return std::max(1, mics ? static_cast<int>(config.mics_ranks) : ranks);
}

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
  for (const int k : model.sequence) {
    for (const TensorSpec& tensor : model.kinds[static_cast<std::size_t>(k)].tensors) {
      if (!tensor.tied) visit(tensor.elements());
    }
  }
}

std::int64_t largest_parameter(const ModelSpec& model) {
  std::int64_t largest = 0;
  each_parameter(model, [&](std::int64_t elements) { largest = std::max(largest, elements); });
  return largest;
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

std::string offloads_text(const DeepSpeedConfig& config) {
  return config.parameters_on_host() ? config.optimizer_on_host() ? "optimizer and parameters" : "parameters"
                                     : "optimizer";
}

void lint_host(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  if (lint.model == nullptr || lint.machine == nullptr) return;
  if (!config.optimizer_on_host() && !config.parameters_on_host()) return;
  const MachineSpec& machine = *lint.machine;
  const HostBytes host = offloaded_host_bytes(config, *lint.model, machine);
  const Bytes usable = machine.usable_dram();
  const std::string key = kZero + (config.optimizer_on_host() ? "offload_optimizer" : "offload_param");
  const std::string where = fmt::format("{} offloaded from {} GPU{}", offloads_text(config), machine.gpus_per_node,
                                        machine.gpus_per_node == 1 ? "" : "s");
  if (host.exact > usable) {
    lint.report(
        "host-memory", key,
        fmt::format(
            "{}: at least {} of host memory a node, and {} leaves {}: the process is killed or the machine swaps.",
            where, format_gib(host.exact), machine.name, format_gib(usable)),
        config.stage == 3 ? "\"device\": \"nvme\", more host memory, or more nodes"
                          : "stage 3 with \"device\": \"nvme\", more host memory, or more nodes");
  } else if (host.rounded > usable) {
    lint.report(
        "host-pinned-rounding", key,
        fmt::format("{}: {} as asked for, up to {} because torch rounds each pinned block up to a power of two; {} "
                    "leaves {}.",
                    where, format_gib(host.exact), format_gib(host.rounded), machine.name, format_gib(usable)),
        "DS_PIN_MEMORY_BACKEND=native in the environment (exact sizes), or \"pin_memory\": false");
  }
}

void lint_disk(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  if (lint.model == nullptr || lint.machine == nullptr) return;
  if (!config.optimizer_on_nvme() && !config.parameters_on_nvme()) return;
  const std::string key = kZero + (config.optimizer_on_nvme() ? "offload_optimizer.device" : "offload_param.device");
  const MachineSpec& machine = *lint.machine;
  const Bytes needed = offloaded_nvme_bytes(config, *lint.model, machine);
  if (machine.nvme.drives == 0) {
    lint.report(
        "nvme-missing", key,
        fmt::format("{} has no NVMe that is known: {} a node are to be written.", machine.name, format_gib(needed)),
        "--nvme 4x2TB when the machine has drives, or \"device\": \"cpu\"");
  } else if (needed > machine.nvme.capacity) {
    lint.report("nvme-capacity", key,
                fmt::format("{} are written to the NVMe of each node, which holds {}.", format_gib(needed),
                            format_gib(machine.nvme.capacity)),
                "more drives or more nodes");
  }
}

void lint_param_buffer(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  if (lint.model == nullptr || lint.machine == nullptr || !config.parameters_on_nvme()) return;
  const std::int64_t largest = largest_parameter(*lint.model);
  const std::int64_t partition = divided_up(largest, sharding_ranks(config, lint.machine->ranks()));
  if (config.offload_param.buffer_size >= partition) return;
  const std::string section = kZero + "offload_param", key = section + ".buffer_size";
  Finding& finding = lint.report(
      "param-buffer-small", lint.has(key) ? key : section,
      fmt::format("the largest parameter has {} elements, {} on each of {} ranks; a swap buffer of {} does not "
                  "hold it: AssertionError at start.",
                  format_count(largest), format_count(partition), sharding_ranks(config, lint.machine->ranks()),
                  format_count(config.offload_param.buffer_size)),
      fmt::format("\"buffer_size\": {}", partition));
  if (const ConfigNode* node = lint.value(key)) {
    lint.replace(finding, *node, std::to_string(partition));
  } else {
    lint.insert(finding, section, "buffer_size", std::to_string(partition));
  }
}

void lint_gpu(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  if (lint.model == nullptr || lint.machine == nullptr) return;
  const Bytes memory = lint.machine->gpu.memory;
  const GpuStates states = gpu_states(config, lint.model->parameters(), sharding_ranks(config, lint.machine->ranks()));
  if (states.bytes > memory) {
    lint.report(
        "states-exceed-gpu", lint.has("zero_optimization.stage") ? "zero_optimization.stage" : "zero_optimization",
        fmt::format("{} in the step at stage {} ({}), before any activation; {} gives {}.", format_gib(states.bytes),
                    config.stage, states.arithmetic, lint.machine->gpu.name, format_gib(memory)),
        config.stage < 3 ? "\"stage\": 3, offload_optimizer, or more GPUs"
                         : "offload_optimizer and offload_param, or more GPUs");
  }
  const Bytes whole = bytes_of(lint.model->parameters(), config.precision);
  if (config.stage == 3 && whole > memory) {
    lint.report("load-whole-model", "zero_optimization.stage",
                fmt::format("the {} of weights do not fit one GPU: without deepspeed.zero.Init each of them gets the "
                            "whole model first. "
                            "Create TrainingArguments before from_pretrained().",
                            format_gib(whole)));
  }
}

void lint_bucket_sizes(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  if (!config.shards()) return;
  const std::string key = kZero + "reduce_bucket_size";
  const bool written = lint.has(key);
  const std::string place = written ? key : "zero_optimization";
  const double each = static_cast<double>(config.reduce_bucket) *
                      size_of(config.stage == 3 ? config.communication.value_or(config.precision) : config.precision);
  const int buffers = !config.contiguous_gradients && !config.optimizer_on_host() ? 0
                      : config.stage < 3 && config.overlap_comm                   ? 2
                                                                                  : 1;
  const std::string kept = config.stage == 3 ? "for good"
                           : buffers == 2    ? "twice in backward, for overlap_comm"
                                             : "in backward";
  const bool automatic = written && lint.value(key)->is_auto();
  if (lint.model != nullptr && buffers > 0 && config.reduce_bucket > lint.model->parameters() && !automatic) {
    const std::int64_t parameters = lint.model->parameters();
    Finding& finding = lint.report(written ? "bucket-above-model" : "bucket-default-above-model", place,
                                   fmt::format("{} elements{}, and the model has {}: {} are allocated {} all the same.",
                                               format_count(config.reduce_bucket), written ? "" : " (the default)",
                                               format_count(parameters), format_gib(Bytes(each)), kept),
                                   fmt::format("\"reduce_bucket_size\": {}", parameters));
    if (written && coerced_integer(*lint.value(key)))
      lint.replace(finding, *lint.value(key), std::to_string(parameters));
  }
  constexpr double kNoticeable = 0.1;
  if (lint.machine != nullptr && each * buffers > kNoticeable * lint.machine->gpu.memory.base()) {
    lint.report("bucket-memory", place,
                fmt::format("{} elements{} take {} {}, of {} that a {} gives.", format_count(config.reduce_bucket),
                            written ? "" : " (the default)", format_gib(Bytes(each * buffers)), kept,
                            format_gib(lint.machine->gpu.memory), lint.machine->gpu.name),
                "\"reduce_bucket_size\": 50000000");
  }
}

void lint_gathered(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  if (lint.model == nullptr || config.stage != 3) return;
  const std::int64_t parameters = lint.model->parameters();
  const auto place = [&](const char* name) {
    const std::string full = kZero + "stage3_" + name;
    return lint.has(full) ? full : lint.has(kZero + name) ? kZero + name : std::string("zero_optimization.stage");
  };
  std::int64_t persistent = 0;
  each_parameter(*lint.model, [&](std::int64_t elements) {
    if (elements <= config.param_persistence && persistent <= config.model_persistence - elements)
      persistent += elements;
  });
  constexpr double kNoticeable = 0.02;
  if (lint.machine != nullptr && lint.machine->ranks() > 1) {
    const Bytes kept = bytes_of(persistent, config.precision);
    if (kept.base() > kNoticeable * lint.machine->gpu.memory.base()) {
      lint.report(
          "persistence-memory", place("param_persistence_threshold"),
          fmt::format(
              "parameters of up to {} elements stay gathered: {} of {} elements, {} on each GPU beside its shard.",
              format_count(config.param_persistence), format_count(persistent), format_count(parameters),
              format_gib(kept)),
          "\"stage3_param_persistence_threshold\": 100000");
    }
    const std::int64_t own = divided_up(parameters, sharding_ranks(config, lint.machine->ranks()));
    const double transient = (size_of(config.grad_accum.value_or(config.precision)) + 4.0) * static_cast<double>(own);
    if (config.sub_group >= own && !config.optimizer_on_host() &&
        transient > kNoticeable * lint.machine->gpu.memory.base()) {
      lint.report(
          "sub-group-step", lint.has(kZero + "sub_group_size") ? kZero + "sub_group_size" : "zero_optimization",
          fmt::format("sub_group_size {} makes one sub-group of a rank's {} elements: the step casts them at once, {}.",
                      format_count(config.sub_group), format_count(own), format_gib(Bytes(transient))),
          "\"sub_group_size\": 100000000");
    }
  }
  if (config.max_live >= parameters && config.prefetch_bucket > 0) {
    lint.report(
        "live-whole-model", place("max_live_parameters"),
        fmt::format(
            "max_live_parameters {} is above the model's {}: prefetch may keep all of it on each GPU from forward to "
            "backward, {}.",
            format_count(config.max_live), format_count(parameters),
            format_gib(bytes_of(parameters, config.precision))));
  }
}

void lint_ratio_groups(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  const std::string key = kZero + "offload_optimizer.ratio";
  if (lint.model == nullptr || lint.machine == nullptr || config.stage != 3 || !lint.has(key) ||
      config.offload_optimizer.ratio >= 1)
    return;
  const std::int64_t own = divided_up(lint.model->parameters(), sharding_ranks(config, lint.machine->ranks()));
  const std::int64_t groups = divided_up(own, std::max<std::int64_t>(1, config.sub_group));
  if (std::floor((1 - config.offload_optimizer.ratio) * static_cast<double>(groups)) >= 1) return;
  lint.report(
      "ratio-sub-groups", key,
      fmt::format("a rank's {} elements are {} sub-group{} of {}: {} of them stay on the GPU at ratio {}, none. The "
                  "ratio works in "
                  "whole sub-groups.",
                  format_count(own), groups, groups == 1 ? "" : "s", format_count(config.sub_group),
                  json_number((1 - config.offload_optimizer.ratio) * static_cast<double>(groups)), lint.shown(key)),
      "\"sub_group_size\": 100000000");
}

}  // namespace

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

namespace {

/// What the optimizer keeps of each element. Lion and others keep less than Adam: nothing is counted for them.
double state_bytes(const DeepSpeedConfig& config) { return config.flat_adam() ? config.states_16bit ? 4 : 8 : 0; }

/// Stage 0 (deepspeed.md 3): Adam or AdamW by name is FusedAdam in flat buffers; others are updated tensor by tensor.
GpuStates states_unsharded(const DeepSpeedConfig& config, double all) {
  const double each = state_bytes(config) + (config.precision == DType::fp32          ? 8
                                             : config.optimizer && config.flat_adam() ? 16
                                                                                      : 12);
  return {Bytes(each * all), fmt::format("{:g} bytes a parameter, nothing is sharded", each)};
}

GpuStates states_below_3(const DeepSpeedConfig& config, double all, double own, int ranks) {
  const double b = size_of(config.precision), m = config.master_16bit ? 2 : 4, states = state_bytes(config);
  const bool fp32_sums = b < 4 && config.grad_accum == DType::fp32;
  const auto answer = [&](double whole, double each) {
    return GpuStates{Bytes(whole * all + each * own),
                     fmt::format("{:g} bytes of each parameter, {:g} of the share of {} ranks", whole, each, ranks)};
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
          fmt::format("{:g} bytes a parameter of the share of {} ranks, a bucket of {}, {} for a sub-group{}", each,
                      ranks, format_gib(Bytes(bucket)), format_gib(Bytes(transient)),
                      second > 0 ? fmt::format(", {} for hpZ", format_gib(Bytes(second))) : "")};
}

/// What the loading and saving of the model takes on a host.
void lint_load_and_save(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  if (lint.model == nullptr || lint.machine == nullptr) return;
  const MachineSpec& machine = *lint.machine;
  const Bytes whole = bytes_of(lint.model->parameters(), config.precision), usable = machine.usable_dram();
  if (whole * machine.gpus_per_node > usable) {
    lint.report("load-host-memory", "",
                fmt::format("{} processes of a node that each load the model take {}, and {} leaves {}: load it below "
                            "deepspeed.zero.Init, or on one rank of a node at a time.",
                            machine.gpus_per_node, format_gib(whole * machine.gpus_per_node), machine.name,
                            format_gib(usable)));
  }
  const Bytes offloaded = offloaded_host_bytes(config, *lint.model, machine).exact;
  if (config.stage == 3 && config.gather_on_save && offloaded <= usable && offloaded + whole > usable) {
    lint.report(
        "save-host-memory", "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        fmt::format("saving collects {} of weights in rank 0's host memory{}; {} leaves {}.", format_gib(whole),
                    offloaded > Bytes() ? fmt::format(" beside {} of offloaded states", format_gib(offloaded)) : "",
                    machine.name, format_gib(usable)),
        "\"stage3_gather_16bit_weights_on_model_save\": false, and zero_to_fp32.py afterwards");
  }
}

void lint_swap_sizes(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  if (lint.model == nullptr || lint.machine == nullptr) return;
  const int ranks = sharding_ranks(config, lint.machine->ranks());
  const std::int64_t own = divided_up(lint.model->parameters(), ranks);
  const std::int64_t group = std::min(own, std::max<std::int64_t>(1, config.sub_group));
  const std::string section = kZero + "offload_optimizer";
  if (config.optimizer_on_nvme()) {
    const Bytes locked = bytes_of(group, DType::fp32) * static_cast<double>(config.offload_optimizer.buffer_count);
    lint.report(
        "swap-buffers-locked", lint.has(section + ".buffer_count") ? section + ".buffer_count" : section,
        fmt::format(
            "{} buffers of a sub-group in fp32 are page-locked: {} a rank, {} a node; ulimit -l has to allow it.",
            config.offload_optimizer.buffer_count, format_gib(locked),
            format_gib(locked * lint.machine->gpus_per_node)),
        "\"sub_group_size\": 100000000 makes them smaller");
  }
  if (config.optimizer_on_nvme() && config.parameters_on_nvme() && config.offload_optimizer.fast_init &&
      config.offload_param.buffer_size < group) {
    lint.report("fast-init-buffer", section + ".fast_init",
                fmt::format("fast_init writes sub-groups of {} elements through parameter buffers of {}.",
                            format_count(group), format_count(config.offload_param.buffer_size)),
                "\"fast_init\": false, or a larger offload_param.buffer_size");
  }
  const Bytes largest = bytes_of(divided_up(largest_parameter(*lint.model), ranks), config.precision);
  const Bytes least(std::max<double>(kMiB, static_cast<double>(config.aio_block_bytes)));
  if (config.parameters_on_nvme() && largest < least) {
    lint.report(
        "aio-block-large", lint.has("aio.block_size") ? "aio.block_size" : kZero + "offload_param",
        fmt::format("the largest parameter's share is {:.1f} MiB, and tensors are swapped from {:.1f} MiB on: none is.",
                    largest.base() / kMiB, least.base() / kMiB),
        "\"block_size\": 1048576, or \"device\": \"cpu\"");
  }
}

}  // namespace

GpuStates gpu_states(const DeepSpeedConfig& config, std::int64_t parameters, int ranks) {
  const auto all = static_cast<double>(parameters), own = static_cast<double>(divided_up(parameters, ranks));
  GpuStates states = config.stage == 0  ? states_unsharded(config, all)
                     : config.stage < 3 ? states_below_3(config, all, own, ranks)
                                        : states_at_3(config, all, own, ranks);
  if (!config.optimizer) states.arithmetic += "; the file names no optimizer, Adam is assumed";
  return states;
}

void lint_memory(Linter& lint) {
  lint_bucket_sizes(lint);
  lint_gathered(lint);
  lint_param_buffer(lint);
  lint_ratio_groups(lint);
  lint_gpu(lint);
  lint_host(lint);
  lint_disk(lint);
  lint_load_and_save(lint);
  lint_swap_sizes(lint);
}

}  // namespace zeroplan
