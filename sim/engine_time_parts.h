#pragma once
// Inside of predict_engine_time(): the run on its machine, and the update at the end of a step.

#include <optional>
#include <vector>

#include "sim/collective_model.h"
#include "sim/engine_time.h"
#include "sim/engine_time_work.h"

namespace zeroplan {

/// A run, checked, with the rates it gets.
class EngineTimeContext {
 public:
  /// Throws InputError on what is not modelled.
  EngineTimeContext(const ModelSpec& model, const MachineSpec& machine, const EngineTimeRun& given,
                    const EngineTimeFit& fit);

  /// Full tensors of that many parameters, over the ranks that share them.
  Seconds gather(double parameters) const;
  Seconds gather_inside(double parameters) const;  // among the ranks of one node
  /// Gradients, to their owners: reduce-scatter; all-reduce in DDP, at DeepSpeed's stages 0 to 2, and between copies
  /// under HSDP and MiCS.
  Seconds reduce(double parameters) const { return reduce_inside(parameters) + reduce_between(parameters); }
  Seconds reduce_inside(double parameters) const;   // a shard group
  Seconds reduce_between(double parameters) const;  // copies of the same shard
  /// One collective of tensor parallelism: 2 B x hidden x tokens; async ones are half hidden.
  Seconds tensor_parallel(TokenShape tokens, std::int64_t hidden) const;
  int shards() const { return run.stage == 0 ? 1 : run.shard_ranks; }  // ranks that share optimizer states
  BytesPerSecond pcie(bool pinned) const;                              // of host copies, one GPU
  double gpus_per_node() const;                                        // of the run
  Seconds nvme_read(double bytes) const;                               // of all ranks of a node together
  Seconds nvme_write(double bytes) const;
  std::vector<Assumption> assumptions() const;

  EngineTimeRun run;  // with ranks and shard_ranks filled in
  const MachineSpec& machine;
  const EngineTimeFit& fit;
  GpuModel gpu;
  ChosenEfficiency efficiency;
  double attention_efficiency = 0;
  KernelRates rates;

 private:
  RankGroup group(int ranks) const;  // `ranks` neighbours that work together
  Seconds collective(CollectiveKind kind, double bytes, RankGroup ranks) const;

  void check_unmeasured(const ModelSpec& model) const;
  std::vector<Assumption> unmeasured_assumptions() const;

  const ModelSpec& model_;
  int ranks_per_node_ = 1;  // data-parallel
  std::optional<CollectiveModel> collectives_;
};

/// What is not measured in any row that the model of step times was fitted to or checked against.
struct Unmeasured {
  bool experts = false, encoders = false, nvme = false;
};
Unmeasured unmeasured(const ModelSpec& model, const EngineTimeRun& run);

struct Update {
  Seconds optimizer, communication, host, offload;
  Seconds adam;             // of `offload`: on the host's cores
  Seconds gradient_writes;  // to NVMe, beside the last backward; the update waits for them
};
/// Optimizer, its collectives and copies, and the fixed work of a step.
Update step_update(const ModelSpec& model, const EngineTimeContext& context);

}  // namespace zeroplan
