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

/// What became of MiCS. 0.19.3 to 0.19.6 cut gradients for all ranks and shards for a group (stage3.py,
/// _get_param_partition_group): ranks outside the first group take no part in the all-reduce between groups.
void lint_mics_release(Linter& lint) {
  const std::string key = kZero + "mics_shard_size";
  lint.report("mics-removed", key,
              "MiCS trains up to DeepSpeed 0.19.2: 0.19.3 to 0.19.6 cut gradients for all ranks instead of the group's "
              "(with several groups the first step does not end), 0.19.7 removed it (DeepSpeedConfigError). Train with "
              "0.19.2, and build the model under deepspeed.zero.MiCS_Init: zero.Init, which from_pretrained of the "
              "Trainer uses, ends in an AssertionError.",
              lint.machine != nullptr && lint.machine->nodes > 1
                  ? fmt::format("\"zero_hpz_partition_size\": {} instead of it", lint.machine->gpus_per_node)
                  : "remove it");
}

void lint_mics_node(Linter& lint) {
  const std::string key = kZero + "mics_hierarchical_params_gather";
  if (lint.machine == nullptr || !lint.is_true(key)) return;
  if (lint.config.mics_ranks >= 2 * static_cast<std::int64_t>(lint.machine->gpus_per_node)) return;
  lint.report("mics-hierarchical-node", key,
              fmt::format("groups of {} do not span two nodes of {} GPUs: AssertionError.", lint.config.mics_ranks,
                          lint.machine->gpus_per_node),
              "remove it");
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
  lint_mics_release(lint);
  lint_mics_node(lint);
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
  if (config.parameters_on_host()) {
    lint.report("mics-offload-param", kZero + "offload_param",
                "MiCS gathers shards from where they lie; on the host NCCL refuses them.", "remove it");
  }
  for (const char* name : {"zero_quantized_weights", "zero_quantized_gradients"}) {
    if (!lint.is_true(kZero + name)) continue;
    lint.report("mics-dead", kZero + name, "MiCS is not given it: no effect.", "remove it, or mics_shard_size");
  }
  if (config.hpz_ranks > 1) {
    lint.report("mics-dead", kZero + "zero_hpz_partition_size",
                "MiCS gathers in its own groups: the second shard of each weight is kept and never read.",
                "remove it, or mics_shard_size");
  }
}

/// DeepSpeed's runtime/config.py, _REMOVED_TOP_LEVEL_CONFIG_KEYS and _REMOVED_ZERO_CONFIG_KEYS of 0.19.7 and 0.19.8;
/// MiCS's own keys have a rule of their own.
struct RemovedKey {
  std::string_view path, release;
};
constexpr RemovedKey kRemovedKeys[] = {
    {"nebula", "0.19.7"},
    {"compression_training", "0.19.7"},
    {"quantize_training", "0.19.7"},
    {"sparse_attention", "0.19.7"},
    {"amp", "0.19.8"},
    {"sparse_gradients", "0.19.8"},
    {"eigenvalue", "0.19.8"},
    {"elasticity", "0.19.8"},
    {"graph_harvesting", "0.19.8"},
    {"curriculum_learning", "0.19.8"},
    {"progressive_layer_drop", "0.19.8"},
    {"zero_optimization.zeropp_loco_param", "0.19.8"},
};

void lint_removed(Linter& lint) {
  for (const RemovedKey& key : kRemovedKeys) {
    if (!lint.has(key.path)) continue;
    lint.report("removed-later", std::string(key.path),
                fmt::format("DeepSpeed {} removed it: DeepSpeedConfigError at start from there on, whatever its value.",
                            key.release),
                "remove it before updating");
  }
}

}  // namespace

void lint_parallel(Linter& lint) {
  lint_removed(lint);
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
