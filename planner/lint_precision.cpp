// fp16, bf16, and the types of gradients and traffic.

#include <fmt/format.h>

#include <array>

#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

std::string brain_section(const Linter& lint) { return lint.has("bf16") ? "bf16" : "bfloat16"; }

void lint_switches(Linter& lint) {
  const std::string brain = brain_section(lint);
  if (lint.is_true("fp16.enabled") && lint.is_true(brain + ".enabled")) {
    Finding& finding =
        lint.report("fp16-and-bf16", "fp16.enabled",
                    "fp16 and bf16 are both on: DeepSpeed stops with an AssertionError. bf16 needs no loss "
                    "scaling and suits models that were trained in it.",
                    "\"enabled\": false for one of them");
    lint.replace(finding, *lint.value("fp16.enabled"), "false");
  }
  const DeepSpeedConfig& config = lint.config;
  const bool automatic = config.precision_automatic || lint.is_true("amp.enabled") || config.autocast;
  if (config.precision == DType::fp32 && !automatic) {
    lint.report("no-precision", "",
                "neither fp16 nor bf16 is on: weights, gradients and their traffic are fp32, twice the bytes"
                " (and stages 1 to 3 keep a separate fp32 master even so).",
                "\"bf16\": {\"enabled\": true}");
  }
  if (lint.machine != nullptr && lint.is_true(brain + ".enabled")) {
    const std::string& capability = lint.machine->gpu.compute_capability;
    if (!capability.empty() && capability < "8" && lint.machine->gpu.vendor == "NVIDIA" && capability.find('.') == 1) {
      lint.report(
          "bf16-no-hardware", brain + ".enabled",
          fmt::format("{} has compute capability {}: no bf16 tensor cores, so bf16 is refused or emulated slowly.",
                      lint.machine->gpu.name, capability),
          "\"fp16\": {\"enabled\": true}");
    }
  }
}

void lint_loss_scale(Linter& lint) {
  constexpr std::array<std::string_view, 5> kDynamic = {"initial_scale_power", "loss_scale_window", "hysteresis",
                                                        "consecutive_hysteresis", "min_loss_scale"};
  const ConfigNode* scale = lint.value("fp16.loss_scale");
  if (scale == nullptr || !scale->is_number() || scale->number <= 0) return;
  for (const std::string_view key : kDynamic) {
    const std::string path = fmt::format("fp16.{}", key);
    if (!lint.has(path)) continue;
    Finding& finding = lint.report("static-loss-scale", path,
                                   fmt::format("no effect: it steers dynamic loss scaling, and loss_scale {} is fixed.",
                                               lint.shown("fp16.loss_scale")),
                                   "remove it, or set loss_scale to 0 (dynamic)");
    lint.remove(finding, path);
  }
}

void lint_off_knobs(Linter& lint, const std::string& section) {
  const ConfigNode* node = lint.value(section);
  if (node == nullptr || !node->is_object() || !lint.is_false(section + ".enabled")) return;
  if (node->members.size() < 2) return;
  lint.report("precision-off-knobs", section, fmt::format("{} is off: its other settings have no effect.", section));
}

void lint_masters(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  const std::string brain = brain_section(lint);
  const std::string states = brain + ".bf16_optimizer_states", brain_master = brain + ".bf16_master_weights_and_grads";
  const std::string half_master = "fp16.fp16_master_weights_and_grads";
  if (lint.is_true(states) && !lint.is_true(brain_master)) {
    Finding& finding = lint.report(
        "states-need-master", states,
        "bf16_optimizer_states needs bf16_master_weights_and_grads: DeepSpeed stops with an AssertionError.",
        "\"bf16_master_weights_and_grads\": true");
    if (const ConfigNode* node = lint.value(brain_master)) {
      lint.replace(finding, *node, "true");
    } else {
      lint.insert(finding, brain, "bf16_master_weights_and_grads", "true");
    }
  }
  for (const std::string& path : {half_master, brain_master, states}) {
    if (!lint.is_true(path)) continue;
    if (config.stage == 0) {
      lint.report("master-stage-0", path,
                  fmt::format("{} at stage 0: DeepSpeed stops with an AssertionError.", leaf_of(path)),
                  "stage 1, 2 or 3, or remove it");
    } else if (path != states && !lint.is_true(states) && !config.optimizer_on_host()) {
      lint.report(
          "master-needs-offload", path,
          fmt::format("{} needs the optimizer on the CPU (offload_optimizer, DeepSpeedCPUAdam){}: AssertionError at "
                      "engine start.",
                      leaf_of(path), path == brain_master ? ", or bf16_optimizer_states" : ""),
          "\"offload_optimizer\": {\"device\": \"cpu\"}, or remove it");
    }
  }
}

void lint_amp(Linter& lint) {
  const ConfigNode* amp = lint.value("amp");
  if (amp == nullptr || !amp->is_object()) return;
  if (amp->find("enabled") == nullptr) {
    lint.report("amp-without-enabled", "amp", "an amp section without \"enabled\": DeepSpeed stops with a KeyError.",
                "\"enabled\": false, or remove the section");
  }
  if (lint.is_true("amp.enabled") && lint.config.stage > 0) {
    lint.report(
        "amp-with-zero", "amp.enabled",
        fmt::format("apex AMP with ZeRO (stage {}): DeepSpeed stops with an AssertionError.", lint.config.stage),
        "remove amp and use bf16 or fp16");
  }
}

void lint_data_types(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  const std::string accum = "data_types.grad_accum_dtype";
  const ConfigNode* param = lint.value("data_types.param_dtype");
  const auto param_type = param == nullptr ? std::nullopt : dtype_named(param->text);
  if (param_type && *param_type != config.precision && !config.precision_automatic) {
    lint.report("param-dtype", "data_types.param_dtype",
                fmt::format("{} differs from the precision that is on, {}: DeepSpeed stops with an AssertionError.",
                            lint.shown("data_types.param_dtype"), to_string(config.precision)),
                fmt::format("\"param_dtype\": \"{}\"", to_string(config.precision)));
  }
  if (!config.grad_accum || *config.grad_accum == config.precision || config.precision_automatic) return;
  const bool wider = *config.grad_accum == DType::fp32;
  if (config.stage == 0) {
    Finding& finding =
        lint.report("grad-accum-stage-0", accum,
                    fmt::format("gradients are {} at stage 0, and no other type can be accumulated there: "
                                "NotImplementedError at engine start.",
                                to_string(config.precision)),
                    "remove it, or use stage 1, 2 or 3");
    lint.remove(finding, accum);
  } else if (config.stage == 1 && wider) {
    const std::string bytes =
        lint.model == nullptr ? ""
                              : fmt::format(" ({} here)", format_gib(bytes_of(lint.model->parameters(), DType::fp32)));
    const bool other = config.precision == DType::bf16 && config.offload_optimizer.device != OffloadDevice::cpu;
    lint.report(
        "grad-accum-stage-1", accum,
        other ? fmt::format("at stage 1 this silently selects BF16_Optimizer: every GPU keeps all gradients in fp32, "
                            "4 more bytes of each parameter, not sharded{}.",
                            bytes)
              : fmt::format("at stage 1 gradients accumulate unsharded, in 4 bytes of each parameter instead of 2{}.",
                            bytes),
        "stage 2, where fp32 sums cost a rank's share only, or remove it");
  } else if (config.stage == 3 && wider) {
    lint.report("grad-accum-stage-3", accum,
                "the permanent gradient buffer of each rank's share is fp32: 2 more bytes of each parameter / ranks.");
  }
}

void lint_communication(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  if (config.communication == DType::fp32 && config.precision != DType::fp32) {
    lint.report(
        "fp32-communication", "communication_data_type",
        fmt::format("gradients are cast to fp32 for their reduction: twice the traffic and an fp32 copy of each "
                    "bucket{}.",
                    config.stage == 3 ? fmt::format(", whose permanent buffer is fp32 too ({})",
                                                    format_gib(bytes_of(config.reduce_bucket, DType::fp32)))
                                      : ""));
  }
  if (config.communication && config.sequence_parallel > 1) {
    lint.report(
        "communication-replaced", "communication_data_type",
        "with sequence_parallel_size above 1 seq_parallel_communication_data_type counts instead, fp32 by default.");
  }
  if (config.autocast && config.quantized_weights) {
    lint.report("autocast-with-qwz", "zero_optimization.zero_quantized_weights",
                "zero_quantized_weights with torch_autocast: DeepSpeed stops with an AssertionError.",
                "one of the two");
  }
}

}  // namespace

void lint_precision(Linter& lint) {
  lint_switches(lint);
  lint_loss_scale(lint);
  lint_off_knobs(lint, "fp16");
  lint_off_knobs(lint, brain_section(lint));
  lint_masters(lint);
  lint_amp(lint);
  lint_data_types(lint);
  lint_communication(lint);
}

}  // namespace zeroplan
