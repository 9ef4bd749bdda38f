// accelerate_fsdp.yaml: accelerate's FSDP2 plugin, keys as the source of accelerate 1.15.0 reads them. Written only
// when FSDP2 can do what the plan does.

#include <fmt/format.h>

#include <string>

#include "planner/engine_counts.h"
#include "planner/export_parts.h"

namespace zeroplan {

namespace {

bool all_on(const Placement& where, Tier tier) { return where == Placement::all(tier, where.total()); }

/// Why FSDP2 under accelerate cannot follow the plan; empty when it can.
std::string obstacle(const Plan& plan) {
  const bool on_gpu = all_on(plan.optimizer, Tier::hbm) && all_on(plan.parameters, Tier::hbm);
  const bool on_host = all_on(plan.optimizer, Tier::host) && all_on(plan.parameters, Tier::host);
  if (plan.zero_stage < 2)
    return fmt::format("FSDP2 always shards gradients and weights; the plan is ZeRO-{}", plan.zero_stage);
  if (plan.optimizer.nvme > 0 || plan.parameters.nvme > 0) return "FSDP2 has no NVMe tier";
  if (!on_gpu && !on_host)
    return "FSDP2 offloads weights and optimizer together and whole; the plan offloads a part of them";
  if (plan.precision.states != DType::fp32)
    return "accelerate keeps sharded weights and Adam states in fp32; the plan has bf16 states";
  if (plan.shard_ranks == 1 && plan.ranks > 1) return "shard groups of one rank are plain data parallelism";
  return "";
}

std::string_view mixed_precision(DType weights) {
  return weights == DType::bf16 ? "bf16" : weights == DType::fp16 ? "fp16" : "no";
}

std::string yaml_of(const ExportSubject& subject) {
  const Plan& plan = subject.plan;
  const auto flag = [](bool on) { return on ? "true" : "false"; };
  std::string yaml =
      fmt::format("# accelerate launch --config_file accelerate_fsdp.yaml ... (launch.sh does)\n# {} on {}: {}\n",
                  comment_text(subject.model.name, 100), comment_text(subject.machine.name, 100), describe(plan));
  yaml +=
      "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndowncast_bf16: 'no'\nfsdp_config:\n";
  yaml += fmt::format("  fsdp_activation_checkpointing: {}\n", flag(plan.recompute != Recompute::none));
  // Without a class name accelerate wraps the model's own blocks (_no_split_modules).
  yaml += "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n";
  yaml += "  fsdp_cpu_ram_efficient_loading: true\n";
  yaml += fmt::format("  fsdp_offload_params: {}\n", flag(all_on(plan.parameters, Tier::host)));
  yaml += fmt::format("  fsdp_reshard_after_forward: {}\n", flag(plan.zero_stage == 3));
  yaml += "  fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_version: 2\n";
  yaml += fmt::format("machine_rank: 0\nmain_training_function: main\nmixed_precision: '{}'\n",
                      mixed_precision(plan.precision.weights));
  yaml += fmt::format("num_machines: {}\nnum_processes: {}\n", subject.machine.nodes, plan.ranks);
  if (plan.shard_ranks != plan.ranks) {
    yaml += fmt::format(
        "parallelism_config:\n  parallelism_config_dp_replicate_size: {}\n  parallelism_config_dp_shard_size: {}\n",
        plan.replicas(), plan.shard_ranks);
  }
  yaml += "rdzv_backend: static\nsame_network: true\nuse_cpu: false\n";
  return yaml;
}

/// Which AdamW the figures are of, and how a script asks for it.
std::string adam_note(const Plan& plan, const ModelSpec& model) {
  const std::string roots = noted_gib(foreach_roots(model, plan));
  switch (plan.adam) {
    case AdamForm::fused:
      return fmt::format(
          "AdamW is fused (launch.sh says --optim adamw_torch_fused); torch.optim.AdamW(params) without fused=True "
          "takes foreach, which holds {} more on each GPU in the step.",
          roots);
    case AdamForm::foreach:
      return fmt::format("AdamW is foreach (launch.sh says --optim adamw_torch): {} on each GPU in the step.", roots);
    case AdamForm::loop:
      return "AdamW is the loop: make it in your script, torch.optim.AdamW(params, foreach=False); the Trainer has no "
             "name for it.";
  }
  return "";
}

/// What runs otherwise than planned although the file is written.
void note_differences(const ExportSubject& subject, std::vector<std::string>& notes) {
  const Plan& plan = subject.plan;
  const auto note = [&notes](std::string text) { notes.push_back("accelerate_fsdp.yaml: " + std::move(text)); };
  if (plan.precision.weights != DType::fp32 && !plan.precision.split_master) {
    note(
        "weights are sharded in fp32 and gathered in 16 bits: 2 bytes a parameter less than the plan, gradients in "
        "fp32.");
  }
  if (plan.accumulation > 1) {
    const Bytes unsharded(4.0 * static_cast<double>(subject.model.parameters()));
    note(
        fmt::format("reduce gradients in every micro-step (accelerate: "
                    "GradientAccumulationPlugin(sync_each_batch=True)); no_sync() "
                    "would sum them unsharded, {} on each GPU.",
                    noted_gib(unsharded)));
  }
  if (plan.recompute != Recompute::none &&
      (plan.recompute == Recompute::selective || plan.recompute_layers < subject.model.num_layers)) {
    note(fmt::format("every layer is recomputed in full; the plan has {} recompute in {} of {} layers.",
                     to_string(plan.recompute), plan.recompute_layers, subject.model.num_layers));
  }
  if (plan.optimizer.hbm == plan.optimizer.total()) note(adam_note(plan, subject.model));
  if (plan.shard_ranks != plan.ranks)
    note("shard groups need an accelerate that reads parallelism_config (1.15 does).");
}

}  // namespace

FsdpExport export_fsdp(const ExportSubject& subject) {
  FsdpExport exported;
  if (const std::string reason = obstacle(subject.plan); !reason.empty()) {
    exported.notes.push_back("accelerate_fsdp.yaml: not written: " + reason + ".");
    return exported;
  }
  exported.yaml = yaml_of(subject);
  note_differences(subject, exported.notes);
  return exported;
}

}  // namespace zeroplan
