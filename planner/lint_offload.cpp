// Offload to the host and to NVMe.

#include <fmt/format.h>

#include <array>

#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

const std::string kOptimizer = "zero_optimization.offload_optimizer", kParam = "zero_optimization.offload_param";

bool asked(const DeepspeedOffload& offload) { return offload.device != OffloadDevice::none; }

void lint_devices(Linter& lint, const std::string& section, const DeepspeedOffload& offload) {
  const ConfigNode* node = lint.value(section);
  if (node == nullptr || !node->is_object()) return;
  if (node->find("device") == nullptr) {
    Finding& finding =
        lint.report("offload-without-device", section,
                    fmt::format("{} has no device: the default is none, nothing is offloaded.", leaf_of(section)),
                    "\"device\": \"cpu\"");
    if (!node->members.empty()) lint.insert(finding, section, "device", "\"cpu\"");
  } else if (offload.device == OffloadDevice::none && node->members.size() > 1 &&
             lint.shown(section + ".device") == "\"none\"") {
    lint.report("offload-device-none", section,
                fmt::format("device none: the other settings of {} have no effect.", leaf_of(section)));
  }
}

void lint_offload_stage(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  const bool old_param = !config.offload_param.given;
  const std::string param = old_param ? "zero_optimization.cpu_offload_param" : kParam;
  const std::string optimizer = config.offload_optimizer.given ? kOptimizer : "zero_optimization.cpu_offload";
  if (asked(config.offload_param) && config.stage < 3) {
    lint.report("offload-param-below-3", param,
                fmt::format("parameters are offloaded at stage 3 only: at stage {} this is accepted and silently "
                            "ignored. It has no effect: all weights stay on every GPU.",
                            config.stage),
                "\"stage\": 3, or remove it");
  }
  if (asked(config.offload_optimizer) && config.stage == 0) {
    lint.report("offload-optimizer-stage-0", optimizer, "stage 0 has no offload: it applies to stages 1 to 3.",
                "\"stage\": 1, 2 or 3, or remove it");
  }
  const bool nvme = config.offload_optimizer.device == OffloadDevice::nvme;
  if (nvme && (config.stage == 1 || config.stage == 2)) {
    const std::string device = kOptimizer + ".device";
    if (config.stage == 1 && config.precision == DType::bf16 && config.grad_accum == DType::fp32) {
      lint.report(
          "nvme-dropped", device,
          "stage 1 with bf16 and grad_accum_dtype fp32 takes BF16_Optimizer, which ignores offload to nvme: all "
          "states stay on the GPUs.",
          "\"stage\": 3, or \"device\": \"cpu\"");
      return;
    }
    Finding& finding =
        lint.report("nvme-below-3", device,
                    fmt::format("at stage {} nvme behaves as cpu: nothing is written to the disk, and the states "
                                "take host memory (18 bytes of each element of a rank's share).",
                                config.stage),
                    "\"device\": \"cpu\", or \"stage\": 3");
    lint.replace(finding, *lint.value(device), "\"cpu\"");
  }
  if (config.parameters_on_host() && !asked(config.offload_optimizer)) {
    lint.report(
        "offload-param-alone", param,
        "weights leave the GPU, 2 bytes a parameter; masters and Adam states, 12 bytes, stay. offload_optimizer is "
        "what makes room.",
        "\"offload_optimizer\": {\"device\": \"cpu\"}");
  }
}

bool in_memory(std::string_view path) {
  for (const std::string_view mount : {"/dev/shm", "/run", "/var/run", "/dev", "/proc", "/sys"}) {
    if (path == mount || (path.starts_with(mount) && path.substr(mount.size()).starts_with('/'))) return true;
  }
  return false;
}

void lint_nvme_path(Linter& lint, const std::string& section, const DeepspeedOffload& offload) {
  if (offload.device != OffloadDevice::nvme || lint.config.stage != 3) return;
  const std::string key = section + ".nvme_path";
  const ConfigNode* node = lint.value(key);
  if (node != nullptr && node->is_auto()) return;  // auto-dropped says it
  if (!offload.nvme_path || offload.nvme_path->empty()) {
    if (node != nullptr && node->kind != ConfigNode::Kind::text && node->kind != ConfigNode::Kind::null) return;
    lint.report("nvme-path-missing", node == nullptr ? section : key,
                fmt::format("device nvme without nvme_path: the parser lets it pass, {} stops the start.",
                            section == kParam ? "an AssertionError in zero.Init" : "a TypeError from joining paths"),
                "\"nvme_path\": \"/local_nvme\"");
    return;
  }
  const std::string& path = *offload.nvme_path;
  if (path.front() != '/') {
    lint.report("nvme-path-relative", key,
                fmt::format("{} is relative: it lies below each process's working directory, wherever that is.",
                            lint.shown(key)),
                "an absolute path on a local disk, \"/local_nvme\"");
  } else if (in_memory(path)) {
    lint.report("nvme-path-memory", key,
                fmt::format("{} is in a file system that lives in memory: the states would take host memory again.",
                            lint.shown(key)),
                "a path on a local NVMe drive");
  } else if (path == "/tmp" || path.starts_with("/tmp/")) {
    lint.report("nvme-path-tmp", key,
                "/tmp is in memory on machines that mount tmpfs there, and often small: findmnt -T /tmp shows it.");
  }
}

void lint_swap_knobs(Linter& lint, const std::string& section, const DeepspeedOffload& offload) {
  const ConfigNode* node = lint.value(section);
  if (node == nullptr || !node->is_object() || offload.device == OffloadDevice::none) return;
  if (offload.device == OffloadDevice::nvme && lint.config.stage == 3) return;
  std::vector<std::string> dead;
  for (const ConfigMember& member : node->members) {
    for (const std::string_view key :
         {"nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init"}) {
      if (member.key == key && member.value.kind != ConfigNode::Kind::null &&
          !(member.value.kind == ConfigNode::Kind::boolean && !member.value.flag)) {
        dead.push_back(member.key);
      }
    }
  }
  if (dead.empty()) return;
  lint.report("nvme-knobs-dead", joined(section, dead.front()),
              fmt::format("{} {} read with device nvme at stage 3 only.", fmt::join(dead, ", "),
                          dead.size() == 1 ? "is" : "are"));
}

void lint_aio(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  const bool used = config.optimizer_on_nvme() || config.parameters_on_nvme();
  if (used && !lint.has("aio")) {
    lint.report(
        "aio-missing", config.optimizer_on_nvme() ? kOptimizer : kParam,
        "NVMe without an aio section: 1 MiB blocks, queue depth 8 and one thread a tensor, which few drives reach "
        "their rate with. Measure with ds_nvme_tune or ds_io.",
        "\"aio\": {\"block_size\": 1048576, \"queue_depth\": 8, \"intra_op_parallelism\": 1, \"single_submit\": false, "
        "\"overlap_events\": true}");
  } else if (!used && lint.has("aio")) {
    lint.report("aio-dead", "aio", "aio is read when something is offloaded to NVMe (stage 3): no effect here.");
  }
  const bool other = lint.machine != nullptr && !lint.machine->host_device && lint.machine->gpu.vendor != "NVIDIA";
  if (other && lint.is_true("aio.use_gds")) {
    lint.report("gds-vendor", "aio.use_gds", "use_gds needs CUDA: AssertionError at start.", "\"use_gds\": false");
  }
  if (other && config.offload_optimizer.super_offload) {
    lint.report("super-offload-vendor", kOptimizer + ".super_offload",
                "super_offload needs CUDA: AssertionError at engine start.", "remove it");
  }
  if (used && lint.is_true("aio.use_gds") && config.parameters_on_nvme()) {
    const double pool = static_cast<double>(config.offload_param.buffer_count) *
                        static_cast<double>(config.offload_param.buffer_size) * size_of(config.precision);
    lint.report("gds-memory", "aio.use_gds",
                fmt::format("the parameter swap pool is in GPU memory then: {} a rank.", format_gib(Bytes(pool))));
  }
}

void lint_swap_buffers(Linter& lint) {
  const DeepspeedOffload& offload = lint.config.offload_optimizer;
  if (!lint.config.optimizer_on_nvme()) return;
  constexpr std::int64_t kStep = 4, kAhead = 4, kBehind = 3;
  const std::string key = lint.has(kOptimizer + ".buffer_count") ? kOptimizer + ".buffer_count" : kOptimizer;
  const std::int64_t wanted =
      kStep + (offload.pipeline_read || offload.pipeline_write ? kAhead : 0) + (offload.pipeline_write ? kBehind : 0);
  const auto correct = [&](Finding& finding, std::int64_t count) {
    if (const ConfigNode* node = lint.value(kOptimizer + ".buffer_count")) {
      lint.replace(finding, *node, std::to_string(count));
    } else {
      lint.insert(finding, kOptimizer, "buffer_count", std::to_string(count));
    }
  };
  if (offload.buffer_count < kStep) {
    Finding& finding =
        lint.report("swap-buffers-few", key,
                    fmt::format("{} buffers: the master, two Adam states and the gradient of a sub-group need {}, "
                                "or the first step stops with \"ran out of swap buffers\".",
                                offload.buffer_count, kStep),
                    fmt::format("\"buffer_count\": {}", wanted));
    correct(finding, wanted);
  } else if (offload.buffer_count < wanted) {
    Finding& finding = lint.report(
        "swap-buffers-pipeline", key,
        fmt::format("{} buffers with {}: {} for the sub-group of the step, {} for the one read ahead{}: "
                    "{} in all, or \"ran out of swap buffers\".",
                    offload.buffer_count, offload.pipeline_write ? "pipeline_write" : "pipeline_read", kStep, kAhead,
                    offload.pipeline_write ? fmt::format(", {} for the one written behind", kBehind) : "", wanted),
        fmt::format("\"buffer_count\": {}", wanted));
    correct(finding, wanted);
  }
  if (offload.fast_init && !lint.config.parameters_on_nvme()) {
    lint.report("fast-init-dead", kOptimizer + ".fast_init", "fast_init needs both offloads on NVMe: no effect.");
  }
}

void lint_ratio(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  const std::string key = kOptimizer + ".ratio";
  if (!lint.has(key) || config.offload_optimizer.ratio >= 1) return;
  if (config.stage != 3) {
    Finding& finding =
        lint.report("ratio-below-3", key,
                    fmt::format("ratio {} at stage {}: partial offload is stage 3's, DeepSpeed stops with a "
                                "ValidationError.",
                                lint.shown(key), config.stage),
                    "\"stage\": 3, or remove it");
    lint.remove(finding, key);
    return;
  }
  if (!config.flat_adam()) {
    lint.report("ratio-optimizer", key,
                fmt::format("ratio needs DeepSpeedCPUAdam, and the optimizer is {}: AssertionError at engine start.",
                            lint.shown("optimizer.type")),
                "remove it, or \"type\": \"AdamW\"");
  }
}

void lint_zenflow_and_super(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  const std::string super = kOptimizer + ".super_offload";
  if (config.offload_optimizer.super_offload && config.stage != 3) {
    lint.report("super-offload-below-3", super,
                fmt::format("super_offload is stage 3's: no effect at stage {}.", config.stage), "\"stage\": 3");
  } else if (config.offload_optimizer.super_offload && config.gradient_clipping != 0) {
    lint.report(
        "super-offload-clipping", lint.has("gradient_clipping") ? "gradient_clipping" : super,
        fmt::format("clipping at {}{}: CPU Adam then runs after backward instead of beside it.",
                    json_number(config.gradient_clipping), lint.has("gradient_clipping") ? "" : " (the default)"),
        "\"gradient_clipping\": 0.0");
  }
  if (!config.zenflow || config.stage == 0) return;
  const std::string zenflow = "zero_optimization.zenflow";
  if (config.offload_optimizer.device != OffloadDevice::cpu) {
    lint.report("zenflow-offload", zenflow, "zenflow without an optimizer on the CPU: ValueError at engine start.",
                "\"offload_optimizer\": {\"device\": \"cpu\"}");
  }
  if (lint.is_true(zenflow + ".offload") && config.stage < 3 && !config.overlap_comm) {
    lint.report("zenflow-overlap", zenflow + ".offload",
                "zenflow.offload needs overlap_comm at stages 1 and 2: AssertionError.", "\"overlap_comm\": true");
  }
  const ConfigNode* interval = lint.value(zenflow + ".update_interval");
  if (config.accumulation.value_or(1) > 1 && !(interval != nullptr && interval->integer() == config.accumulation)) {
    lint.report("zenflow-accumulation", "gradient_accumulation_steps",
                "zenflow replaces it by its update_interval: the step covers another number of samples.",
                "\"update_interval\": the same number");
  }
}

void lint_pinning(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  const std::string key = kOptimizer + ".pin_memory";
  if (!config.optimizer_on_host() || !lint.is_false(key)) return;
  lint.report("offload-unpinned", key,
              "pageable host memory: copies are slower and the GPU waits for them. Without room to pin, "
              "DS_PIN_MEMORY_BACKEND=native pins exact sizes instead of powers of two.",
              "\"pin_memory\": true");
}

}  // namespace

void lint_offload(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  lint_devices(lint, kOptimizer, config.offload_optimizer);
  lint_devices(lint, kParam, config.offload_param);
  lint_offload_stage(lint);
  for (const auto& [section, offload] :
       {std::pair(&kOptimizer, &config.offload_optimizer), std::pair(&kParam, &config.offload_param)}) {
    lint_nvme_path(lint, *section, *offload);
    lint_swap_knobs(lint, *section, *offload);
  }
  lint_aio(lint);
  lint_swap_buffers(lint);
  lint_ratio(lint);
  lint_zenflow_and_super(lint);
  lint_pinning(lint);
}

}  // namespace zeroplan
