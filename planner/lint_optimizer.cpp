// Optimizer and scheduler.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>

#include "models/json_text.h"
#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

using Names = std::span<const std::string_view>;

constexpr std::array<std::string_view, 12> kOwn = {"Adam",       "AdamW",      "Adagrad",     "Lamb",
                                                   "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam",
                                                   "MuAdamW",    "MuSGD",      "Lion",        "Muon"};
constexpr std::array<std::string_view, 11> kTorch = {"Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS",     "NAdam",
                                                     "RAdam",    "RMSprop",   "Rprop",  "SGD",  "SparseAdam"};
/// Classes that ZeRO takes by their exact type, as DeepSpeed builds them from these names.
constexpr std::array<std::string_view, 5> kTested = {"Adam", "AdamW", "Adagrad", "Lion", "Muon"};
constexpr std::array<std::string_view, 4> kOnCpu = {"Adam", "AdamW", "Adagrad", "Lion"};
constexpr std::array<std::string_view, 3> kOneBit = {"OneBitAdam", "OneBitLamb", "ZeroOneAdam"};
constexpr std::array<std::string_view, 11> kAdamParams = {
    "lr",          "betas",      "eps",           "weight_decay",          "bias_correction", "amsgrad",
    "adam_w_mode", "torch_adam", "set_grad_none", "fp32_optimizer_states", "max_grad_norm"};

bool listed(Names names, std::string_view name) { return std::ranges::find(names, name) != names.end(); }
/// DeepSpeed compares its own names in lower case.
const std::string_view* own_name(Names names, std::string_view name) {
  for (const std::string_view& known : names) {
    if (known == name || (known.size() == name.size() && same_but_case(known, name))) return &known;
  }
  return nullptr;
}
std::vector<std::string> as_strings(Names names) { return {names.begin(), names.end()}; }

void lint_optimizer_type(Linter& lint, const std::string& written) {
  const DeepSpeedConfig& config = lint.config;
  const std::string path = "optimizer.type";
  const std::string_view* own = own_name(kOwn, written);
  if (own == nullptr && !listed(kTorch, written)) {
    for (const std::string_view name : kTorch) {
      if (!same_but_case(name, written)) continue;
      Finding& finding =
          lint.report("optimizer-case", path,
                      fmt::format("{} is a class of torch.optim, whose names are case-sensitive: AssertionError.",
                                  lint.shown(path)),
                      fmt::format("\"type\": \"{}\"", name));
      lint.replace(finding, *lint.value(path), fmt::format("\"{}\"", name));
      return;
    }
    std::vector<std::string> names = as_strings(kOwn);
    for (const std::string_view name : kTorch) names.emplace_back(name);
    const std::string near = slip_of(written, names);
    Finding& finding = lint.report(
        "optimizer-unknown", path,
        fmt::format("{} is none of DeepSpeed's optimizers and no class of torch.optim that is known "
                    "here: AssertionError at engine start.",
                    lint.shown(path)),
        near.empty() ? fmt::format("one of {}", fmt::join(kOwn, ", ")) : fmt::format("\"type\": \"{}\"", near));
    if (!near.empty()) lint.replace(finding, *lint.value(path), fmt::format("\"{}\"", near));
    return;
  }
  if (!config.shards()) return;
  const std::string name(own == nullptr ? written : *own);
  const bool untested_allowed = lint.is_true("zero_allow_untested_optimizer");
  if (own != nullptr && listed(kOneBit, name)) {
    lint.report("optimizer-onebit-zero", path,
                fmt::format("{} compresses a plain all-reduce and refuses ZeRO: AssertionError at engine start.", name),
                "\"type\": \"AdamW\", or stage 0");
  } else if (!listed(kTested, name) && !untested_allowed) {
    lint.report(
        "optimizer-untested", path,
        fmt::format("ZeRO takes Adam, AdamW, Adagrad, Lion and Muon; {} is an AssertionError at engine start unless "
                    "zero_allow_untested_optimizer is true.",
                    name),
        "\"zero_allow_untested_optimizer\": true, or \"type\": \"AdamW\"");
  } else if (config.optimizer_on_host() && !listed(kOnCpu, name) && name != "Muon" &&
             !lint.is_false("zero_force_ds_cpu_optimizer")) {
    lint.report("optimizer-offload", path,
                fmt::format("{} has no CPU form in DeepSpeed: with offload_optimizer a ZeRORuntimeException unless "
                            "zero_force_ds_cpu_optimizer is false.",
                            name),
                "\"type\": \"AdamW\"");
  }
  if (name == "Muon" && config.reduce_scatter && config.stage == 3) {
    Finding& finding = lint.report("muon-stage-3", path,
                                   "Muon at stage 3 needs whole gradients: ValueError while reduce_scatter is true "
                                   "(the default).",
                                   "\"reduce_scatter\": false");
    if (const ConfigNode* node = lint.value("zero_optimization.reduce_scatter")) {
      lint.replace(finding, *node, "false");
    } else {
      lint.insert(finding, "zero_optimization", "reduce_scatter", "false");
    }
  } else if (name == "Muon" && config.reduce_scatter && config.optimizer_on_host()) {
    lint.report("muon-offload", path,
                "Muon with CPU offload at stages 1 and 2: ValueError while reduce_scatter is true.",
                "\"reduce_scatter\": false");
  }
}

void lint_optimizer_switches(Linter& lint, const std::string& name) {
  const bool lamb = name == "Lamb" || name == "OneBitLamb";
  const ConfigNode* scale = lint.value("fp16.loss_scale");
  if (lamb && lint.is_true("fp16.enabled") && scale != nullptr && scale->number > 0) {
    Finding& finding =
        lint.report("lamb-loss-scale", "fp16.loss_scale",
                    fmt::format("{} needs dynamic loss scaling: AssertionError.", name), "\"loss_scale\": 0");
    lint.replace(finding, *scale, "0");
  }
  if (lint.is_true("optimizer.legacy_fusion")) {
    lint.report("legacy-fusion", "optimizer.legacy_fusion",
                "it selects the old fused step, which the present FusedAdam rejects.", "remove it");
  }
}

void lint_betas(Linter& lint) {
  const std::string path = "optimizer.params.betas";
  const ConfigNode* betas = lint.value(path);
  if (betas == nullptr || betas->kind != ConfigNode::Kind::array) return;
  const bool right = betas->items.size() == 2 && std::ranges::all_of(betas->items, [](const ConfigNode& beta) {
                       return beta.is_number() && beta.number >= 0 && beta.number < 1;
                     });
  if (right) return;
  lint.report("betas-shape", path, fmt::format("{}: expected two numbers from 0 to below 1.", lint.shown(path)),
              "\"betas\": [0.9, 0.999]");
}

void lint_adam_params(Linter& lint) {
  const ConfigNode* params = lint.value("optimizer.params");
  if (params == nullptr || !params->is_object()) return;
  for (const ConfigMember& member : params->members) {
    if (lint.full()) return;
    if (member.repeated || listed(kAdamParams, member.key)) continue;
    std::string near = meant_name(member.key, as_strings(kAdamParams));
    if (member.key == "learning_rate") near = "lr";
    if (member.key == "epsilon" || member.key == "adam_epsilon") near = "eps";
    if (near == "max_grad_norm") near.clear();
    Finding& finding =
        lint.report_at("optimizer-param-unknown", joined("optimizer.params", member.key), member.line,
                       fmt::format("{} is no parameter of Adam: it is passed on as a keyword, a TypeError from the "
                                   "optimizer's constructor.",
                                   json_quoted(member.key, 60)),
                       near.empty() ? "remove it" : fmt::format("\"{}\": {}", near, lint.file.excerpt(member.value)));
    if (near.empty()) {
      lint.remove(finding, member);
    } else {
      lint.rename(finding, *params, member, near);
    }
  }
}

void lint_optimizer_params(Linter& lint) {
  const std::string norm = "optimizer.params.max_grad_norm";
  if (lint.has(norm)) {
    Finding& finding = lint.report(
        "max-grad-norm", norm,
        "max_grad_norm here is a ValueError at engine start, whatever its value: gradient_clipping at the "
        "top level does it.",
        lint.has("gradient_clipping") ? "remove it" : fmt::format("\"gradient_clipping\": {}", lint.shown(norm)));
    if (!lint.has("gradient_clipping") && lint.value(norm)->is_number()) {
      lint.insert(finding, "", "gradient_clipping", lint.shown(norm));
    }
    lint.remove(finding, norm);
  }
  if (lint.is_true("optimizer.params.amsgrad")) {
    Finding& finding =
        lint.report("amsgrad", "optimizer.params.amsgrad",
                    "FusedAdam raises on amsgrad, DeepSpeedCPUAdam does not implement it.", "\"amsgrad\": false");
    lint.replace(finding, *lint.value("optimizer.params.amsgrad"), "false");
  }
  if (lint.is_true("optimizer.params.torch_adam")) {
    lint.report("torch-adam", "optimizer.params.torch_adam",
                lint.config.optimizer_on_host()
                    ? "torch's own Adam instead of DeepSpeedCPUAdam: slower on the CPU."
                    : "torch's own Adam: its foreach path allocates temporaries that the fused kernels do not.");
  }
  lint_betas(lint);
}

void lint_optimizer_section(Linter& lint) {
  const ConfigNode* section = lint.value("optimizer");
  if (section == nullptr || section->kind == ConfigNode::Kind::null) {
    lint.report("optimizer-missing", "",
                "no optimizer here: give one to deepspeed.initialize() (the Trainer does). Without any, stages 1 and 2 "
                "stop with "
                "an AssertionError and stage 3 only runs inference.");
    return;
  }
  if (!section->is_object()) return;
  if (!lint.config.optimizer) {
    if (section->find("type") != nullptr) return;  // of another type: reported
    lint.report("optimizer-without-type", "optimizer",
                "an optimizer without type is ignored: none is made from this section.", "\"type\": \"AdamW\"");
    return;
  }
  lint_optimizer_type(lint, *lint.config.optimizer);
  const std::string_view* own = own_name(kOwn, *lint.config.optimizer);
  lint_optimizer_switches(lint, own == nullptr ? *lint.config.optimizer : std::string(*own));
  if (lint.config.flat_adam() && !lint.is_true("optimizer.params.torch_adam")) lint_adam_params(lint);
  lint_optimizer_params(lint);
}

struct Scheduler {
  std::string_view name;
  std::vector<std::string> needed, optional;
};

const std::vector<Scheduler>& schedulers() {
  static const std::vector<Scheduler> known = {
      {"LRRangeTest",
       {},
       {"lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase"}},
      {"OneCycle",
       {"cycle_min_lr", "cycle_max_lr"},
       {"decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size", "cycle_first_stair_count",
        "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom", "cycle_max_mom",
        "decay_mom_rate"}},
      {"WarmupLR", {}, {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"}},
      {"WarmupDecayLR", {"total_num_steps"}, {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"}},
      {"WarmupCosineLR",
       {"total_num_steps"},
       {"warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"}}};
  return known;
}

constexpr std::array<std::string_view, 15> kTorchSchedulers = {"LambdaLR",
                                                               "MultiplicativeLR",
                                                               "StepLR",
                                                               "MultiStepLR",
                                                               "ConstantLR",
                                                               "LinearLR",
                                                               "ExponentialLR",
                                                               "SequentialLR",
                                                               "CosineAnnealingLR",
                                                               "ChainedScheduler",
                                                               "ReduceLROnPlateau",
                                                               "CyclicLR",
                                                               "CosineAnnealingWarmRestarts",
                                                               "OneCycleLR",
                                                               "PolynomialLR"};

void lint_scheduler_params(Linter& lint, const Scheduler& scheduler) {
  const ConfigNode* params = lint.value("scheduler.params");
  if (params != nullptr && !params->is_object()) return;
  for (const std::string& name : scheduler.needed) {
    if (params != nullptr && params->find(name) != nullptr) continue;
    lint.report("scheduler-param-missing", params == nullptr ? "scheduler" : "scheduler.params",
                fmt::format("{} needs {}: TypeError from its constructor.", scheduler.name, name),
                fmt::format("\"{}\": a number", name));
  }
  if (params == nullptr) return;
  std::vector<std::string> names = scheduler.needed;
  names.insert(names.end(), scheduler.optional.begin(), scheduler.optional.end());
  names.emplace_back("last_batch_iteration");
  for (const ConfigMember& member : params->members) {
    if (lint.full()) return;
    if (member.repeated || std::ranges::find(names, member.key) != names.end()) continue;
    const std::string near = meant_name(member.key, names);
    Finding& finding = lint.report_at(
        "scheduler-param-unknown", joined("scheduler.params", member.key), member.line,
        fmt::format("{} takes no {}: TypeError from its constructor.", scheduler.name, json_quoted(member.key, 60)),
        near.empty() ? "remove it" : fmt::format("\"{}\"", near));
    if (near.empty()) {
      lint.remove(finding, member);
    } else {
      lint.rename(finding, *params, member, near);
    }
  }
}

void lint_rates(Linter& lint) {
  const ConfigNode* total = lint.value("scheduler.params.total_num_steps");
  const ConfigNode* warmup = lint.value("scheduler.params.warmup_num_steps");
  if (total != nullptr && warmup != nullptr && total->is_number() && warmup->is_number() &&
      warmup->number >= total->number) {
    lint.report(
        "scheduler-warmup-long", "scheduler.params.warmup_num_steps",
        fmt::format("warm-up takes {} of {} steps: the rate never decays.",
                    lint.shown("scheduler.params.warmup_num_steps"), lint.shown("scheduler.params.total_num_steps")));
  }
  const ConfigNode* shape = lint.value("scheduler.params.warmup_type");
  if (shape != nullptr && shape->text != "log" && shape->text != "linear") {
    Finding& finding =
        lint.report("scheduler-warmup-type", "scheduler.params.warmup_type",
                    fmt::format("{} is neither log nor linear: a warning, and log is used.", lint.file.excerpt(*shape)),
                    "\"warmup_type\": \"linear\" or \"log\"");
    if (same_but_case(shape->text, "linear")) lint.replace(finding, *shape, "\"linear\"");
    if (same_but_case(shape->text, "log")) lint.replace(finding, *shape, "\"log\"");
  }
  const ConfigNode* top = lint.value("scheduler.params.warmup_max_lr");
  const ConfigNode* rate = lint.value("optimizer.params.lr");
  if (top != nullptr && rate != nullptr && top->is_number() && rate->is_number() && top->number != rate->number) {
    lint.report("scheduler-rate", "scheduler.params.warmup_max_lr",
                fmt::format("warm-up ends at {}, and the optimizer's lr {} is never used.", lint.file.excerpt(*top),
                            lint.file.excerpt(*rate)),
                fmt::format("\"warmup_max_lr\": {}, or the other way round", lint.file.excerpt(*rate)));
  }
}

void lint_scheduler_section(Linter& lint) {
  const ConfigNode* section = lint.value("scheduler");
  if (section == nullptr || !section->is_object()) return;
  const ConfigNode* type = section->find("type") == nullptr ? nullptr : &section->find("type")->value;
  if (type == nullptr) {
    lint.report("scheduler-without-type", "scheduler", "a scheduler without type is ignored: the rate is constant.",
                "\"type\": \"WarmupLR\"");
    return;
  }
  if (type->kind != ConfigNode::Kind::text) return;
  std::vector<std::string> names;
  for (const Scheduler& scheduler : schedulers()) {
    names.emplace_back(scheduler.name);
    if (scheduler.name == type->text) return lint_scheduler_params(lint, scheduler), lint_rates(lint);
  }
  if (std::ranges::find(kTorchSchedulers, type->text) != kTorchSchedulers.end()) return;
  std::string near;
  for (const std::string& name : names) {
    if (same_but_case(name, type->text)) near = name;
  }
  if (near.empty()) near = slip_of(type->text, names);
  Finding& finding = lint.report(
      "scheduler-unknown", "scheduler.type",
      fmt::format("{} is none of DeepSpeed's schedulers and no class of torch that is known here: "
                  "AssertionError at engine start.",
                  lint.shown("scheduler.type")),
      near.empty() ? fmt::format("one of {}", fmt::join(names, ", ")) : fmt::format("\"type\": \"{}\"", near));
  if (!near.empty()) lint.replace(finding, *type, fmt::format("\"{}\"", near));
}

}  // namespace

void lint_optimizer(Linter& lint) {
  lint_optimizer_section(lint);
  lint_scheduler_section(lint);
}

}  // namespace zeroplan
