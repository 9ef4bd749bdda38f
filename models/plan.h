#pragma once
// A plan: every choice that turns a model and a machine into one training step. Search writes it, a person may edit it,
// lower() reads it. A choice that an engine cannot follow is refused by check_plan(), never ignored.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "models/machine_spec.h"
#include "models/model_spec.h"
#include "models/units.h"

namespace zeroplan {

enum class Engine : std::uint8_t { zeroplan, deepspeed, fsdp2 };
enum class Recompute : std::uint8_t { none, selective, full };
/// Where a state lives between its uses.
enum class Tier : std::uint8_t { hbm, host, nvme };
/// Who runs Adam for states that are not in HBM: the host's cores, or the GPU on states streamed through it.
enum class UpdateOn : std::uint8_t { host, device };
/// When gradients cross ranks under gradient accumulation.
enum class ReduceEach : std::uint8_t { step, micro_step };
enum class LossScaling : std::uint8_t { none, dynamic };
/// How torch.optim.AdamW updates a rank's share under FSDP2: one kernel for all, one kernel an operation over all
/// parameters (foreach=True, what it chooses by itself on a GPU), or parameter by parameter (foreach=False, what it
/// chooses on the host).
enum class AdamForm : std::uint8_t { fused, foreach, loop };

std::string_view to_string(Engine value);
std::string_view to_string(Recompute value);
std::string_view to_string(Tier value);
std::string_view to_string(UpdateOn value);
std::string_view to_string(ReduceEach value);
std::string_view to_string(LossScaling value);
std::string_view to_string(AdamForm value);

/// How many of the model's blocks (embedding, layers, head: `ModelSpec::sequence`) keep a state on each tier: the first
/// `hbm` blocks in execution order in HBM, the next `host` in host memory, the last `nvme` on disk.
struct Placement {
  int hbm = 0, host = 0, nvme = 0;
  int total() const { return hbm + host + nvme; }
  Tier tier_of(int block) const { return block < hbm ? Tier::hbm : block < hbm + host ? Tier::host : Tier::nvme; }
  static Placement all(Tier tier, int blocks);
  friend bool operator==(const Placement&, const Placement&) = default;
};

struct Precision {
  DType weights = DType::bf16;       // what forward and backward compute with
  bool master = true;                // an fp32 master copy beside 16-bit weights
  bool split_master = false;         // the master is the 16-bit weight plus a 16-bit remainder (runtime.md 7.3)
  DType states = DType::fp32;        // Adam's two moments
  DType gradients = DType::bf16;     // what backward writes and the wire carries
  DType accumulation = DType::bf16;  // what is summed over micro-steps
  friend bool operator==(const Precision&, const Precision&) = default;

  /// Weights + master + two moments: 14 for bf16 with fp32 master and states, 12 with a split master or in fp32, 10
  /// with bf16 states.
  int state_bytes_per_parameter() const;
  /// The part that only the optimizer touches: state_bytes_per_parameter() - size_of(weights).
  int optimizer_bytes_per_parameter() const;
};

struct Plan {
  Engine engine = Engine::zeroplan;
  int ranks = 1;
  /// Ranks that share one copy of the states (ZeRO group); divides ranks. Under DeepSpeed's stage 3, which shards over
  /// all ranks: those that share hpZ's second copy of the weights; all: none is kept.
  int shard_ranks = 1;
  int zero_stage = 0;
  /// Adapters of that rank on the linear layers, all else frozen (apply_lora()); 0: everything is trained. Under
  /// DeepSpeed and FSDP2 only.
  std::int64_t lora_rank = 0;
  std::int64_t seq_len = 4096;
  std::int64_t micro_batch = 1;   // sequences per rank and micro-step
  std::int64_t accumulation = 1;  // micro-steps per step
  Precision precision;
  Placement optimizer;               // master and moments
  Placement parameters;              // 16-bit weight shards (host and nvme: stage 3 only)
  Tier gradients = Tier::hbm;        // the accumulated gradient shard
  UpdateOn update = UpdateOn::host;  // for blocks whose optimizer states are not in HBM
  Recompute recompute = Recompute::none;
  int recompute_layers = 0;  // the first so many layers recompute; the others keep everything
  int prefetch_layers = 1;   // stage 3: weights gathered ahead, 0..3
  ReduceEach reduce_each = ReduceEach::micro_step;
  std::int64_t loss_chunk_tokens = 2048;
  double clip_norm = 1.0;  // global gradient norm; 0: no clipping
  LossScaling loss_scaling = LossScaling::none;
  AdamForm adam = AdamForm::fused;  // under FSDP2; loop with states on the host
  /// PYTORCH_CUDA_ALLOC_CONF of the run, under DeepSpeed and FSDP2: memory is replayed with it and launch.sh sets it.
  /// Empty: PyTorch's defaults. parse_allocator_options() reads it.
  std::string allocator_conf;

  std::int64_t global_batch() const { return micro_batch * accumulation * ranks; }
  TokenShape micro_step() const { return {micro_batch, seq_len}; }
  int replicas() const { return ranks / shard_ranks; }
  friend bool operator==(const Plan&, const Plan&) = default;
};

/// Throws InputError naming the field when a choice contradicts another, the model or the engine (offload of parameters
/// below stage 3, micro-batch x accumulation x ranks, placement totals, ...). `where` prefixes the message
/// ("plan.json").
void check_plan(const Plan& plan, const ModelSpec& model, std::string_view where);

/// Short name of what a plan does: "ZeRO-3, optimizer on host, full recompute, micro-batch 8 x 4".
std::string describe(const Plan& plan);

/// plan.json (schema 1): the plan, the model's configuration and the whole machine; strict, round-trips exactly.
struct PlanFile {
  Plan plan;
  ModelSpec model;  // without the adapters of plan.lora_rank
  MachineSpec machine;
};
PlanFile read_plan(std::string_view text, const std::string& file_name);
std::string write_plan(const PlanFile& file);
/// The plan's own keys as one JSON object (what `plan --json` prints under "plan").
std::string plan_keys_json(const Plan& plan, int indent);

}  // namespace zeroplan
