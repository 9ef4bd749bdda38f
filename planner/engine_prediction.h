#pragma once
// Memory of a training run under DeepSpeed or FSDP2, as torch.cuda, nvidia-smi and ps would show it: the eager step,
// the engine on top of it, the caching allocator below, and what lies outside of it.

#include <cstdint>
#include <vector>

#include "models/deepspeed_engine.h"
#include "models/eager_step.h"
#include "models/fsdp2_engine.h"
#include "planner/engine_peak.h"
#include "planner/prediction.h"
#include "sim/cost_model.h"
#include "sim/engine_memory.h"
#include "sim/memory_timeline.h"

namespace zeroplan {

/// The GPU and PyTorch around an engine.
struct EngineEnvironment {
  /// Device memory right after CUDA starts, and what cuBLAS, cuDNN and loaded kernels add. Measured on H200, CUDA 13.0,
  /// torch 2.11 (data/groundtruth: 0.6063 and 0.817 together on 95 of 103 rows).
  Bytes context = 0.6063_GiB;
  Bytes libraries = 0.2107_GiB;
  /// NCCL's buffers (MachineCostModel::communicator_memory()); absent from data/groundtruth, whose process groups are
  /// fake.
  Bytes communicators;
  std::int64_t cublas_workspace = 32 << 20;  // bytes a handle: EngineRun
  AllocatorOptions allocator;
  /// Of the process itself, without what the engine offloads: Python, PyTorch, CUDA's libraries (data/groundtruth, rss
  /// of rows without offload: DeepSpeed 1.87 to 2.07 GiB, with zero.Init 1.66 to 1.68; FSDP2 1.33 to 1.58).
  Bytes deepspeed_process = 2.0_GiB;
  Bytes deepspeed_zero_init_process = 1.67_GiB;
  Bytes fsdp2_process = 1.5_GiB;
  /// Times of kernels, for the host's lead; null: it has none.
  const CostModel* cost = nullptr;
};

struct EnginePrediction {
  RunMemory memory;  // torch.cuda's figures
  /// In the steady step. Stage 3's depends on how far the host runs ahead of the GPU: `reserved_low` when it does not,
  /// `reserved_high` with a host twice as fast as we take it to be. All three are equal elsewhere, and without a cost
  /// model.
  Bytes reserved, reserved_low, reserved_high;
  Bytes device_used;  // by cudaMemGetInfo: reserved, context, libraries, communicators, page tables of pinned memory
  Bytes host;         // resident set of the process
  HostUse host_use;   // the engine's part of it
  Traffic traffic;    // of the steady step
  Bytes sent;         // by a rank in it, collectives going round as rings
  EnginePeak peak;    // the highest moment of the run; less than allocated by unsplit blocks
  Flops flops;        // of a rank in the steady step: matrix products and attention, what is recomputed too
};

/// Micro-steps after the second and before the last allocate what the second does, at the same addresses: a step of
/// more is recorded with so many (tests/engine_fit_test.cpp compares).
inline constexpr int kDifferentMicroSteps = 3;

/// What collectives and copies of the tape's last step move, for `accumulation` micro-steps: a tape of three stands for
/// any greater number. Throws std::logic_error when it has another number.
Traffic steady_traffic(const EngineTape& tape, int accumulation);
struct EngineRecording;
/// FLOPs of matrix products and attention in the step, of what runs: no gradient that nobody needs, recomputing
/// included.
Flops steady_flops(const EngineRecording& recording);
/// What a rank sends in the step's collectives when they go round as rings: (n - 1) / n of a gather's or scatter's
/// message among n, twice that of an all-reduce's.
Bytes steady_sent(const EngineRecording& recording);

/// A run under an engine from loading to its steady step, and what surrounds it: all that its memory is read off.
struct EngineRecording {
  EngineTape tape;
  int accumulation = 1;  // of the run; the tape may have three micro-steps a step for more (RecordedMicroSteps)
  PeakCounting counting = PeakCounting::each_phase;
  std::vector<HostBuffer> host;
  Bytes process;  // resident set without `host`
  int ranks = 1, shard_ranks = 1;
  /// One rank: collectives that it calls move nothing.
  bool alone() const { return ranks == 1; }
  /// That take part in a collective.
  int members(Group group) const;
};
/// Resident set of a process without what the engine offloads.
Bytes process_of(const DeepSpeedJob& job, const EngineEnvironment& environment);
/// How much of a step a recording holds.
enum class RecordedMicroSteps : std::uint8_t {
  different,  // kDifferentMicroSteps at most
  all,
};
/// `least_steps`: so many steps at least; with fewer it ends with the first steady one. Where the card is so full that
/// the allocator gives memory back, no two steps need be the same.
EngineRecording record_deepspeed(const EagerStep& step, TokenShape tokens, const DeepSpeedJob& job,
                                 const EngineEnvironment& environment, int least_steps = 0,
                                 RecordedMicroSteps recorded = RecordedMicroSteps::different);
EngineRecording record_fsdp2(const EagerStep& step, TokenShape tokens, int accumulation, const Fsdp2Options& options,
                             const EngineEnvironment& environment, int least_steps = 0,
                             RecordedMicroSteps recorded = RecordedMicroSteps::different);

/// How many replays a prediction takes where it depends on how far the host runs ahead.
enum class LeadDetail : std::uint8_t {
  expected,  // one: `reserved_low` and `reserved_high` are `reserved`
  bounds,    // three
};
EnginePrediction predict(const EngineRecording& recording, const EngineEnvironment& environment,
                         LeadDetail detail = LeadDetail::bounds);
/// What torch.cuda says in the steady step when the host is in step with the GPU: EnginePrediction::reserved_low.
Bytes reserved_in_step(const EngineRecording& recording, const EngineEnvironment& environment);
/// As predict().memory, nothing else.
RunMemory replay_run(const EngineRecording& recording, const EngineEnvironment& environment);
/// The most bytes that buffers hold at one moment of the run, unrounded: no replay reserves less. A pass over the tape.
Bytes live_peak(const EngineTape& tape);

/// Of job.rank: rank 0 by default; deepspeed_worst_rank() names the one that needs most.
EnginePrediction predict_deepspeed(const EagerStep& step, TokenShape tokens, const DeepSpeedJob& job,
                                   const EngineEnvironment& environment, int least_steps = 0);
EnginePrediction predict_fsdp2(const EagerStep& step, TokenShape tokens, int accumulation, const Fsdp2Options& options,
                               const EngineEnvironment& environment, int least_steps = 0);

}  // namespace zeroplan
