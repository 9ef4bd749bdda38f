// launch.sh: the lines that start the plan under DeepSpeed or accelerate on one node, on several by hand, and under
// Slurm.

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "planner/export_parts.h"

namespace zeroplan {

namespace {

/// Hugging Face Trainer's name of a form of torch's AdamW; nothing for the loop on the GPU, which no name asks for
/// (transformers 5.17, trainer_optimizer.py).
std::string_view optim_of(const Plan& plan) {
  if (plan.optimizer.hbm < plan.optimizer.total()) return "adamw_torch";  // on the host torch takes the loop
  switch (plan.adam) {
    case AdamForm::fused:
      return "adamw_torch_fused";
    case AdamForm::foreach:
      return "adamw_torch";
    case AdamForm::loop:
      return "";
  }
  return "";
}

class LaunchWriter {
 public:
  LaunchWriter(const ExportSubject& subject, const DeepspeedExport& deepspeed, const FsdpExport& fsdp)
      : subject_(subject), plan_(subject.plan), deepspeed_(deepspeed), fsdp_(fsdp) {}

  std::string run() {
    header();
    notes();
    settings();
    environment();
    arguments();
    slurm();
    allocator();
    launchers();
    return std::move(text_);
  }

 private:
  bool several_nodes() const { return subject_.machine.nodes > 1; }
  const Plan& deepspeed_plan() const { return deepspeed_.plan ? *deepspeed_.plan : plan_; }
  /// What ./launch.sh starts when nothing is said.
  std::string_view default_engine() const {
    return subject_.plan.engine == Engine::fsdp2 && !fsdp_.yaml.empty() ? "fsdp2" : "deepspeed";
  }
  void line(std::string_view text) { text_ += text, text_ += '\n'; }

  void header() {
    line("#!/usr/bin/env bash");
    line(fmt::format("# {} on {}: {}", comment_text(subject_.model.name, 100), comment_text(subject_.machine.name, 100),
                     describe(plan_)));
    line(fmt::format("# Written by zeroplan for {} ranks, sequences of {} tokens, {} sequences a step.", plan_.ranks,
                     plan_.seq_len, plan_.global_batch()));
    line("#");
    line("#   ./launch.sh deepspeed [arguments of the training script]");
    if (!fsdp_.yaml.empty()) line("#   ./launch.sh fsdp2 [...]");
    if (several_nodes()) {
      line(
          "#   MASTER_ADDR=<first node> NODE_RANK=<0..> ./launch.sh deepspeed [...]     on every node, or under "
          "Slurm:");
      line(fmt::format("#   sbatch --nodes={} --gpus-per-node={} --wrap './launch.sh srun deepspeed'",
                       subject_.machine.nodes, subject_.ranks_per_node()));
    }
    line("#");
    line(
        "# TRAIN is your script (it takes the flags of Hugging Face's Trainer, see train_args below), MODEL its "
        "checkpoint.");
    line("# What zeroplan predicts for the plan, op by op:");
    line("#   zeroplan simulate plan.json");
  }

  void notes() {
    if (deepspeed_.notes.empty() && fsdp_.notes.empty()) return;
    line(subject_.plan.engine == Engine::zeroplan
             ? "#\n# The plan was made for zeroplan's engine. Where the other engines differ:"
             : fmt::format("#\n# The plan was made for {}. What else there is to know:",
                           to_string(subject_.plan.engine)));
    for (const std::string& note : deepspeed_.notes) line("# - " + comment_text(note, 400));
    for (const std::string& note : fsdp_.notes) line("# - " + comment_text(note, 400));
  }

  void settings() {
    line("set -euo pipefail");
    line(R"sh(here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd))sh");
    line(fmt::format("planned_model={}", shell_quoted(subject_.model.name)));
    line("TRAIN=${TRAIN:-train.py}");
    line("MODEL=${MODEL:-$planned_model}");
    if (several_nodes()) {
      line("MASTER_PORT=${MASTER_PORT:-29500}");
      line("NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}");
    }
    line("if [[ ! -f $TRAIN ]]; then");
    line(R"(  echo "launch.sh: no training script '$TRAIN': set TRAIN=path/to/script.py" >&2)");
    line("  exit 2\nfi");
  }

  void environment() {
    if (deepspeed_.on_host) {
      const int ranks = subject_.ranks_per_node();
      line("# Adam runs on the host's cores; torchrun would leave each rank one. Started by deepspeed with");
      line("# --bind_cores_to_rank each rank keeps to cores of its own (1.3 x as fast in DeepSpeed PR 7474).");
      if (subject_.machine.physical_cores > 0) {
        line(fmt::format("export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{}}}",
                         std::max(1, subject_.machine.physical_cores / ranks)));
      } else {
        line(fmt::format("cores=$(( $(nproc) / {} ))", ranks));
        line("export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( cores > 0 ? cores : 1 ))}");
      }
    }
    if (deepspeed_.exact_pinning) {
      line(
          "# torch rounds each pinned block to a power of two, which this host has no room for; DeepSpeed's own does "
          "not.");
      line("export DS_PIN_MEMORY_BACKEND=${DS_PIN_MEMORY_BACKEND:-native}");
      line("ulimit -l unlimited || echo 'launch.sh: pinned memory needs a higher limit: ulimit -l' >&2");
    }
  }

  /// Memory was replayed with these settings of PyTorch's allocator; others make another reserved.
  void allocator() {
    const std::string deepspeed = deepspeed_plan().allocator_conf;
    line("# PyTorch's allocator as memory was predicted with it (empty: its defaults).");
    if (deepspeed == plan_.allocator_conf || fsdp_.yaml.empty()) {
      line(fmt::format("planned_conf={}", shell_quoted(deepspeed)));
    } else {
      line(fmt::format("if [[ $engine == deepspeed ]]; then planned_conf={}; else planned_conf={}; fi",
                       shell_quoted(deepspeed), shell_quoted(plan_.allocator_conf)));
    }
    line("conf=${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-}}");
    line("if [[ -z $conf && -n $planned_conf ]]; then");
    line("  export PYTORCH_CUDA_ALLOC_CONF=$planned_conf");
    line("elif [[ $conf != \"$planned_conf\" ]]; then");
    line("  echo \"launch.sh: PYTORCH_CUDA_ALLOC_CONF is '$conf'; memory was predicted with\" \\");
    line("    \"${planned_conf:-its defaults}\" >&2");
    line("fi");
  }

  void arguments() {
    line("train_args=(");
    line("  --model_name_or_path \"$MODEL\"");
    line(fmt::format("  --max_grad_norm {}", plan_.clip_norm));
    if (plan_.precision.weights == DType::bf16) line("  --bf16 True");
    if (plan_.precision.weights == DType::fp16) line("  --fp16 True");
    line(")");
  }

  void slurm() {
    line(fmt::format("engine=${{1:-{}}}", default_engine()));
    line("if (( $# > 0 )); then shift; fi");
    if (!several_nodes()) return;
    line("if [[ $engine == srun ]]; then");
    line(R"(  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1))");
    line("  export MASTER_ADDR MASTER_PORT TRAIN MODEL");
    line(fmt::format(
        R"(  exec srun --nodes={} --ntasks-per-node=1 --gpus-per-node={} bash "$here/launch.sh" "${{1:-{}}}" "${{@:2}}")",
        subject_.machine.nodes, subject_.ranks_per_node(), default_engine()));
    line("fi");
    line(": \"${MASTER_ADDR:?set it to the name or address of the first node}\"");
  }

  std::string torchrun() const {
    if (!several_nodes()) return fmt::format("torchrun --standalone --nproc-per-node={}", subject_.ranks_per_node());
    return fmt::format(
        "torchrun --nnodes={} --nproc-per-node={} --node-rank=\"$NODE_RANK\" --master-addr=\"$MASTER_ADDR\" "
        "--master-port=\"$MASTER_PORT\"",
        subject_.machine.nodes, subject_.ranks_per_node());
  }

  void batch_arguments(const Plan& plan) {
    line(fmt::format("    train_args+=(--per_device_train_batch_size {} --gradient_accumulation_steps {})",
                     plan.micro_batch, plan.accumulation));
  }

  void launch_deepspeed() {
    line("  deepspeed)");
    if (deepspeed_.nvme) {
      line(fmt::format(
          "    # deepspeed.json swaps to {}: a directory on the local NVMe drives; change nvme_path there and here.",
          kNvmePath));
      line(fmt::format("    if [[ ! -w {0} ]]; then echo 'launch.sh: {0} is not a writable directory' >&2; exit 2; fi",
                       kNvmePath));
      line("    ulimit -l unlimited || echo 'launch.sh: swap buffers are page-locked: raise ulimit -l' >&2");
    }
    const Plan& plan = deepspeed_plan();
    batch_arguments(plan);
    if (plan.recompute != Recompute::none) line("    train_args+=(--gradient_checkpointing True)");
    line(fmt::format(
        "    exec {} \\\n      \"$TRAIN\" --deepspeed \"$here/deepspeed.json\" \"${{train_args[@]}}\" \"$@\"",
        torchrun()));
    line("    ;;");
  }

  void launch_fsdp() {
    if (fsdp_.yaml.empty()) return;
    line("  fsdp2)");
    batch_arguments(plan_);
    if (const std::string_view optim = optim_of(plan_); !optim.empty()) {
      line(fmt::format("    train_args+=(--optim {})", optim));
    } else {
      line(
          "    # AdamW's loop has no name of the Trainer's: make it in $TRAIN, torch.optim.AdamW(..., foreach=False).");
    }
    const std::string where = several_nodes() ? " --machine_rank \"$NODE_RANK\" --main_process_ip \"$MASTER_ADDR\" "
                                                "--main_process_port \"$MASTER_PORT\""
                                              : "";
    line(
        fmt::format("    exec accelerate launch --config_file \"$here/accelerate_fsdp.yaml\"{} \\\n"
                    "      \"$TRAIN\" \"${{train_args[@]}}\" \"$@\"",
                    where));
    line("    ;;");
  }

  void launchers() {
    line("case $engine in");
    launch_deepspeed();
    launch_fsdp();
    line("  *)");
    line(fmt::format("    echo \"launch.sh: expected deepspeed{}, got '$engine'\" >&2",
                     fsdp_.yaml.empty() ? "" : " or fsdp2"));
    line("    exit 2\n    ;;\nesac");
  }

  const ExportSubject& subject_;
  const Plan& plan_;
  const DeepspeedExport& deepspeed_;
  const FsdpExport& fsdp_;
  std::string text_;
};

}  // namespace

std::string export_launch(const ExportSubject& subject, const DeepspeedExport& deepspeed, const FsdpExport& fsdp) {
  return LaunchWriter(subject, deepspeed, fsdp).run();
}

}  // namespace zeroplan
