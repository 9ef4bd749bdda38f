// What depends on the number of ranks and nodes: hpZ, ZeRO++, MiCS, sequence parallelism.

#include <fmt/format.h>

#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

const std::string kZero = "zero_optimization.";

void lint_hpz(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  const std::string key = kZero + "zero_hpz_partition_size";
  if (lint.machine == nullptr || config.stage != 3 || config.hpz_ranks <= 1) return;
  const MachineSpec& machine = *lint.machine;
  const std::int64_t ranks = machine.ranks(), per_node = machine.gpus_per_node;
  const auto correct = [&](Finding& finding) {
    if (const ConfigNode* node = lint.value(key); node != nullptr && per_node > 1)
      lint.replace(finding, *node, std::to_string(per_node));
  };
  const std::string fix = fmt::format("\"zero_hpz_partition_size\": {}", per_node);
  if (config.hpz_ranks > ranks) {
    lint.report("hpz-above-ranks", key,
                fmt::format("{} is more than the {} ranks: clamped to {}.", config.hpz_ranks, ranks, ranks),
                machine.nodes > 1 ? fix : "remove it");
  } else if (ranks % config.hpz_ranks != 0) {
    Finding& finding = lint.report(
        "hpz-divides", key,
        fmt::format("{} ranks are not divisible by {}: AssertionError when groups are made.", ranks, config.hpz_ranks),
        fix);
    correct(finding);
  } else if (machine.nodes == 1) {
    lint.report(
        "hpz-one-node", key,
        fmt::format(
            "on one node hpZ keeps a second 16-bit shard of 1/{} of the model on each GPU and saves no slow traffic.",
            config.hpz_ranks),
        "remove it");
  } else if (config.hpz_ranks > per_node) {
    Finding& finding =
        lint.report("hpz-across-nodes", key,
                    fmt::format("groups of {} span nodes of {}: gathers cross the network, which hpZ is to avoid.",
                                config.hpz_ranks, per_node),
                    fix);
    correct(finding);
  }
}

void lint_quantized(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  const std::string key = kZero + "zero_quantized_gradients", loco = kZero + "zeropp_loco_param";
  if (config.stage != 3) return;
  if (config.quantized_gradients) {
    if (lint.machine != nullptr && lint.machine->nodes == 1) {
      lint.report("qgz-one-node", key,
                  "quantized gradients are used between nodes only: on one node the ordinary reduce-scatter runs.",
                  "remove it");
    }
    if (config.precision == DType::bf16 && !config.precision_automatic) {
      lint.report("qgz-bf16", key,
                  "the quantizing kernel reads fp16, and this path has no conversion from bf16: gradients look wrong "
                  "there (read in "
                  "the source, not run).",
                  "fp16, or remove it");
    }
    if (!config.reduce_scatter) {
      Finding& finding = lint.report("qgz-reduce-scatter", key, "zero_quantized_gradients needs reduce_scatter true.",
                                     "\"reduce_scatter\": true");
      if (const ConfigNode* node = lint.value(kZero + "reduce_scatter")) lint.replace(finding, *node, "true");
    }
  }
  const ConfigNode* node = lint.value(loco);
  if (node == nullptr || !node->is_object()) return;
  if (!config.quantized_gradients) {
    lint.report("loco-dead", loco, "zeropp_loco_param belongs to zero_quantized_gradients, which is off: no effect.",
                "\"zero_quantized_gradients\": true, or remove it");
    return;
  }
  if (lint.model != nullptr) {
    const Bytes buffers(1.1 * static_cast<double>(lint.model->parameters()));  // p and p / local bytes, and scales
    lint.report(
        "loco-memory", loco,
        fmt::format("LoCo keeps error buffers of about 1.1 bytes of each parameter on every GPU, not sharded: {}.",
                    format_gib(buffers)));
  }
  for (const char* name : {"err_beta", "reset_T"}) {
    if (node->find(name) != nullptr) continue;
    lint.report("loco-keys", loco, fmt::format("{} is missing: KeyError at the first reduction.", name),
                "\"zeropp_loco_param\": {\"err_beta\": 0.8, \"reset_T\": 1024}");
  }
}

void lint_mics(Linter& lint) {
  const DeepSpeedConfig& config = lint.config;
  const std::string key = kZero + "mics_shard_size";
  if (config.stage != 3) return;
  if (config.mics_ranks <= 0) {
    if (lint.is_true(kZero + "mics_hierarchical_params_gather")) {
      lint.report("mics-hierarchical-dead", kZero + "mics_hierarchical_params_gather",
                  "no effect without mics_shard_size.", "remove it");
    }
    return;
  }
  if (lint.machine != nullptr && lint.machine->ranks() % config.mics_ranks != 0) {
    lint.report("mics-divides", key,
                fmt::format("{} ranks are not divisible by {}: groups cannot be formed.", lint.machine->ranks(),
                            config.mics_ranks),
                fmt::format("\"mics_shard_size\": {}", lint.machine->gpus_per_node));
  }
  if (config.optimizer_on_host() && !(lint.machine != nullptr && lint.machine->ranks() == config.mics_ranks)) {
    lint.report("mics-offload", key,
                "MiCS with gradients on the CPU: RuntimeError as soon as there is more than one replica.",
                "without offload_optimizer, or zero_hpz_partition_size instead of MiCS");
  }
}

}  // namespace

void lint_parallel(Linter& lint) {
  if (lint.machine != nullptr) {
    const int ranks = lint.machine->ranks(), sequence = lint.config.sequence_parallel;
    if (sequence > 1 && ranks % sequence != 0) {
      lint.report("sequence-parallel-ranks", "sequence_parallel_size",
                  fmt::format("{} ranks are not divisible by {}: groups cannot be formed.", ranks, sequence),
                  "a divisor of the ranks");
    }
    if (ranks == 1 && lint.config.shards()) {
      lint.report(
          "one-rank", "zero_optimization.stage",
          fmt::format("one rank: stage {} has nothing to shard, only offload saves memory.", lint.config.stage));
    }
  }
  lint_hpz(lint);
  lint_quantized(lint);
  lint_mics(lint);
}

}  // namespace zeroplan
