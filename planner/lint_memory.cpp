// What the model and the machine say about sizes. Lower bounds: what is reported here cannot fit.

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

const std::string kZero = "zero_optimization.";

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
    lint.report("host-memory", key,
                fmt::format("{}: at least {} of host memory a node, and {} leaves {}: the machine swaps, or a process "
                            "is killed (exit code "
                            "-9, SIGKILL, no traceback).",
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

/// A sub_group_size whose masters fill a power of two.
std::int64_t even_group(const DeepSpeedConfig& config) {
  return static_cast<std::int64_t>(
      std::bit_floor(static_cast<std::uint64_t>(std::max<std::int64_t>(1, config.sub_group))));
}

/// Rounding that fits, and is worth knowing all the same.
void lint_rounding(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  if (lint.model == nullptr || lint.machine == nullptr) return;
  const HostBytes host = offloaded_host_bytes(config, *lint.model, *lint.machine);
  constexpr double kNoticeable = 1.1;
  if (host.exact == Bytes() || host.rounded > lint.machine->usable_dram() || host.rounded < host.exact * kNoticeable)
    return;
  DeepSpeedConfig even = config;
  even.sub_group = even_group(config);
  const Bytes then = offloaded_host_bytes(even, *lint.model, *lint.machine).rounded;
  const bool helps = config.stage == 3 && then < host.rounded;
  lint.report(
      "host-pinned-factor", kZero + (config.optimizer_on_host() ? "offload_optimizer" : "offload_param"),
      fmt::format("torch rounds each pinned block up to a power of two: up to {} for the {} that are asked for, "
                  "{:.2f} times.",
                  format_gib(host.rounded), format_gib(host.exact), host.rounded / host.exact),
      helps ? fmt::format("\"sub_group_size\": {} ({}), or DS_PIN_MEMORY_BACKEND=native", even.sub_group,
                          format_gib(then))
            : "DS_PIN_MEMORY_BACKEND=native in the environment (exact sizes)");
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

/// What the stage-3 keys of the file are for this model, in bytes; one note for all.
void lint_gather_knobs(Linter& lint, std::int64_t persistent) {
  const DeepSpeedConfig& c = lint.config;
  const auto mib = [&](std::int64_t elements) {
    return fmt::format("{:.0f} MiB", bytes_of(std::min(elements, lint.model->parameters()), c.precision).base() / kMiB);
  };
  struct KnobText {
    std::string_view key;
    std::string says;
  };
  const KnobText knobs[] = {
      {"prefetch_bucket_size", fmt::format("prefetch {}: gathered ahead of use", mib(c.prefetch_bucket))},
      {"max_live_parameters", fmt::format("live {}: gathered at one time, at most", mib(c.max_live))},
      {"max_reuse_distance", fmt::format("reuse {}: kept when used again within that", mib(c.max_reuse))},
      {"param_persistence_threshold",
       fmt::format("persistence {} elements: {} never sharded", format_count(c.param_persistence), mib(persistent))}};
  std::vector<std::string> told;
  std::string first;
  for (const KnobText& knob : knobs) {
    const std::string full = fmt::format("{}stage3_{}", kZero, knob.key), brief = fmt::format("{}{}", kZero, knob.key);
    if (!lint.has(full) && !lint.has(brief)) continue;
    if (first.empty()) first = lint.has(full) ? full : brief;
    told.push_back(knob.says);
  }
  if (told.empty()) return;
  lint.report("stage3-knobs", first, fmt::format("on each GPU here: {}.", fmt::join(told, "; ")));
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
  for (const std::int64_t elements : parameter_sizes(*lint.model)) {
    if (elements <= config.param_persistence && persistent <= config.model_persistence - elements)
      persistent += elements;
  }
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
  lint_gather_knobs(lint, persistent);
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
      fmt::format(
          "a rank's {} elements are {} sub-group{} of {}: {} of them stay on the GPU at ratio {}, none. The "
          "ratio works in whole sub-groups.",
          format_count(own), groups, groups == 1 ? "" : "s", format_count(config.sub_group),
          json_number(std::round((1 - config.offload_optimizer.ratio) * static_cast<double>(groups) * 1e6) / 1e6),
          lint.shown(key)),
      "\"sub_group_size\": 100000000");
}

/// What the loading and saving of the model takes on a host.
void lint_load_and_save(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  if (lint.model == nullptr || lint.machine == nullptr) return;
  const MachineSpec& machine = *lint.machine;
  const Bytes whole = bytes_of(lint.model->parameters(), config.precision), usable = machine.usable_dram();
  const Bytes wide = bytes_of(lint.model->parameters(), DType::fp32) * machine.gpus_per_node;
  if (wide > usable) {
    lint.report("load-host-memory", "",
                fmt::format("{} processes of a node that each load the model take {} in fp32 ({} in {}), and {} leaves "
                            "{}: load it below deepspeed.zero.Init, or on one rank of a node at a time ({}).",
                            machine.gpus_per_node, format_gib(wide), format_gib(whole * machine.gpus_per_node),
                            to_string(config.precision), machine.name, format_gib(usable),
                            format_gib(bytes_of(lint.model->parameters(), DType::fp32))));
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

void lint_memory(Linter& lint) {
  lint_bucket_sizes(lint);
  lint_gathered(lint);
  lint_param_buffer(lint);
  lint_ratio_groups(lint);
  lint_gpu(lint);
  lint_host(lint);
  lint_rounding(lint);
  lint_disk(lint);
  lint_load_and_save(lint);
  lint_swap_sizes(lint);
}

}  // namespace zeroplan
