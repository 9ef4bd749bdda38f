#pragma once
// Training: the step repeated, with data, loss scale, checkpoints and the record of what was measured. train() is one
// rank; train_threads() makes all ranks of a job in this process.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/measured.h"
#include "models/plan.h"
#include "runtime/adam.h"
#include "runtime/communicator.h"
#include "runtime/host_executor.h"
#include "runtime/loss_scaler.h"

namespace zeroplan {

/// How long ranks of a training run wait for each other. A rank that dies, stops or leaves is noticed at once or within
/// seconds; this is for one that is slow, as rank 0 is when it writes the exported weights (NCCL's default in PyTorch).
inline constexpr std::chrono::minutes kTrainingWaitLimit{10};

struct TrainOptions {
  std::string data = "synthetic";  // or a token file
  std::int64_t steps = 10;         // in this run
  std::uint64_t weights_seed = 1, data_seed = 1;
  AdamSettings adam{.learning_rate = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
  std::int64_t warmup_steps = 0;  // the learning rate grows linearly over so many updates
  LossScaling16 loss_scaling;
  std::string weights;                // Hugging Face weights to start from; empty: made from weights_seed
  std::string checkpoints;            // directory; empty: none
  std::int64_t checkpoint_every = 0;  // steps; 0: after the last one only
  int keep_checkpoints = 2;
  bool resume = false;    // from the newest checkpoint in `checkpoints`
  std::string export_to;  // directory for Hugging Face weights after the last step; empty: none
  int cores = 1;          // of this machine
  int ranks_here = 1;     // ranks that share them
  MemoryOptions memory;
};

/// What one step did, for progress lines.
struct StepReport {
  std::int64_t step = 0;  // from 1, over all runs
  double loss = 0;        // mean over the global batch, nats a token
  double gradient_norm = 0;
  double loss_scale = 1;
  bool skipped = false;
  double seconds = 0;
};

struct TrainResult {
  Measured measured;  // of rank 0
  std::vector<StepReport> steps;
  std::int64_t first_step = 0;  // done before this run
  std::vector<std::string> notes;
  std::vector<Assumption> assumptions;
};

/// Trains on this rank; collective over the ranks of `world`. `on_step` is called on rank 0 only. Throws InputError
/// (data, checkpoint, a model without kernels) and DeviceError (memory, disk, peers, divergence).
TrainResult train(const PlanFile& file, World& world, const TrainOptions& options,
                  const std::function<void(const StepReport&)>& on_step);

/// Every rank a thread of this process. Returns rank 0's result; throws the error of the rank that failed first, and
/// then every rank has ended.
TrainResult train_threads(const PlanFile& file, const TrainOptions& options,
                          const std::function<void(const StepReport&)>& on_step);

}  // namespace zeroplan
