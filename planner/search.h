#pragma once
// The search: every plan of a space, the best K different ones, or what is missing.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/prediction.h"

namespace zeroplan {

enum class Objective : std::uint8_t { time, cost, memory };

/// Where offload may go. `optimizer`: master and moments; `parameters`: the weights too; `all`: and the gradients.
enum class OffloadWhat : std::uint8_t { none, optimizer, parameters, all };
struct Offload {
  OffloadWhat what = OffloadWhat::none;
  Tier to = Tier::host;  // "optimizer:nvme"
};

/// What the user fixed; everything else is searched.
struct Constraints {
  std::vector<int> stages;  // empty: 0..3
  std::optional<Offload> offload;
  std::optional<Recompute> recompute;
  std::optional<std::int64_t> micro_batch;
};

struct Request {
  ModelSpec model;
  MachineSpec machine;
  std::optional<std::int64_t> seq_len;       // default: the smaller of 4096 and the model's maximum
  std::optional<std::int64_t> global_batch;  // default: 512 Ki tokens, rounded up to a multiple of ranks in sequences
  DType precision = DType::bf16;             // weights and compute
  std::int64_t lora_rank = 0;                // adapters of that rank, all else frozen; 0: everything is trained
  Constraints constraints;
  Engine engine = Engine::zeroplan;
  std::optional<AdamForm> adam;  // of the update on the GPU under FSDP2; default: fused
  std::string allocator_conf;    // PYTORCH_CUDA_ALLOC_CONF under DeepSpeed and FSDP2; empty: PyTorch's defaults
  Objective objective = Objective::time;
  double margin = 0.05;
  int top_k = 3;
  bool per_stage = false;  // one row for each stage of constraints.stages (a table)
};

struct Candidate {
  Plan plan;
  Prediction prediction;
  bool fits = true;  // per_stage rows may not
};

/// Why nothing fits: the plan that comes nearest, and what each tier lacks.
struct Shortfall {
  Candidate nearest;
  struct Lack {
    std::string tier;         // "gpu", "host", "nvme"
    Bytes needed, available;  // available = capacity x (1 - margin); per GPU or per node
    Bytes missing() const { return needed - available; }
  };
  std::vector<Lack> lacks;
  Bytes optimizer_states;  // master and Adam moments of the whole job at fp32 states
  /// Changes that make it fit, each verified by planning it; cheapest first. "--host-memory 192GiB", "--nvme 1x2TB",
  /// ...
  struct Change {
    std::string what;  // for people: "256 GiB of host memory a node (now 128.0 GiB)"
    std::string flag;  // "--host-memory 256GiB"
    Candidate result;
  };
  std::vector<Change> changes;
};

struct SearchStats {
  std::uint64_t space = 0;      // plans in the space
  std::uint64_t evaluated = 0;  // lowered and estimated
  std::uint64_t simulated = 0;  // played by discrete events too; 0 when the steps are too long for that
  double seconds = 0;
};

struct Answer {
  Request request;  // with seq_len and global_batch filled in
  bool feasible = false;
  std::vector<Candidate> plans;  // best first; per_stage: one a stage, in stage order
  std::optional<Shortfall> shortfall;
  std::vector<Assumption> assumptions;
  std::vector<std::string> warnings;
  SearchStats search;
};

/// Throws InputError on a workload that no plan can meet (global batch not divisible by ranks x micro-batch, sequence
/// length not positive, adapters under our own engine, a non-text model's sequence) or an engine without a lowering.
Answer search(const Request& request);

/// What would help most, with numbers: each resource twice as fast, more GPU memory, ...; best first. Empty for none
/// above 2 %.
struct Advice {
  std::string what;    // "twice the NVLink bandwidth"
  double speedup = 1;  // step time now / then
};
std::vector<Advice> advise(const Answer& answer, const Candidate& candidate);

}  // namespace zeroplan
