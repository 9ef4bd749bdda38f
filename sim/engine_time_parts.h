#pragma once
// Inside of predict_engine_time(): the run on its machine, and the update at the end of a step.

#include <optional>
#include <vector>

#include "sim/all_to_all.h"
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
  /// ZeRO++, stage 3 (engine_time_quantized.cpp).
  bool has_secondary() const { return run.hpz_ranks > 1; }
  Seconds gather_secondary(double parameters) const;       // among the ranks that share hpZ's second copy
  Seconds keep_secondary(double parameters) const;         // kernels that write it, once a step
  Seconds dequantize(double parameters) const;             // kernels behind a gather of qwZ; none without it
  Seconds quantize_launches(const BlockKind& kind) const;  // host time of a gather under qwZ, beyond other gathers'
  bool exchanges() const;                                  // qgZ, on several nodes
  Seconds reduce_exchanged(const BlockKind& kind) const;   // a block's gradients under qgZ
  Seconds exchange_launches(const BlockKind& kind) const;  // host time of that, beyond other reductions'
  /// Gradients, to their owners: reduce-scatter; all-reduce in DDP, at DeepSpeed's stages 0 to 2, and between copies
  /// under HSDP and MiCS.
  Seconds reduce(double parameters) const { return reduce_inside(parameters) + reduce_between(parameters); }
  Seconds reduce_inside(double parameters) const;   // a shard group
  Seconds reduce_between(double parameters) const;  // copies of the same shard
  /// One collective of tensor parallelism: 2 B x hidden x tokens; async ones are half hidden.
  Seconds tensor_parallel(TokenShape tokens, std::int64_t hidden) const;
  int shards() const { return run.stage == 0 ? 1 : run.shard_ranks; }  // ranks that share optimizer states
  BytesPerSecond pcie(bool pinned) const;                              // of host copies, one GPU
  /// DeepSpeed in a fake process group, which has its host to itself; only ZeRO-3's hooks cost as much there as
  /// elsewhere.
  bool alone_on_host() const { return run.engine == TimedEngine::deepspeed && !run.communicates && run.stage < 3; }
  /// Whose host time of a PyTorch op the run has.
  TimeFit host_op() const {
    const bool several = run.engine == TimedEngine::deepspeed && !alone_on_host();
    return several ? TimeFit::host_op_deepspeed : TimeFit::host_op;
  }
  double gpus_per_node() const;           // of the run
  Seconds nvme_read(double bytes) const;  // of all ranks of a node together
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
  double messages() const;  // that a layer's collective is split into
  /// Of `parameters` in the type of compute, or of 8-bit values.
  Seconds gather_among(double parameters, RankGroup ranks) const;
  /// One more that follows at once: the ranks are there already.
  Seconds following(CollectiveKind kind, double bytes, RankGroup ranks) const;
  Seconds exchange(double values, double scales, RankGroup ranks) const;
  Seconds exchange_matrix(double elements, double scales) const;

  void check_unmeasured(const ModelSpec& model) const;
  std::vector<Assumption> unmeasured_assumptions() const;
  std::vector<Assumption> zero_plus_plus_assumptions() const;

  const ModelSpec& model_;
  int ranks_per_node_ = 1;  // data-parallel
  std::optional<CollectiveModel> collectives_;
  std::optional<CollectiveModel> queued_;  // of quantized collectives: values, then scales
  SecondsPerByte beyond_ring_;             // an all-to-all inside a node
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
