#pragma once
// The executor that runs everywhere: plays a flat schedule on the host, one thread for each stream of the rank. What
// happens before what is the schedule's and nothing else: ops of a stream in id order, edges between streams. It is the
// reference for the CUDA executor.

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/measured.h"
#include "models/model_spec.h"
#include "models/plan.h"
#include "models/schedule.h"
#include "runtime/checkpoint.h"
#include "runtime/communicator.h"
#include "runtime/rank_memory.h"
#include "runtime/step_context.h"

namespace zeroplan {

struct HostOptions {
  int compute_threads = 1;  // host_threads_per_rank()
  int host_threads = 1;     // Adam and sums on the host
  MemoryOptions memory;
};

/// The states of a range of a block's flat buffer, as checkpoints store them. An empty span is skipped.
struct StateSpans {
  std::span<float> master;
  std::span<std::byte> first, second;  // Plan::precision.states
};

class HostExecutor {
 public:
  /// Collective over the ranks of `world`, whose size must be plan.ranks. `model` and `world` outlive this.
  /// Precondition: check_plan() passed. Throws InputError when the model has no kernels here (model_constants(),
  /// check_positions()) or the plan needs a disk that was not given, DeviceError when memory, threads or peers fail.
  /// States are zero until load_states().
  HostExecutor(const ModelSpec& model, const Plan& plan, World& world, const HostOptions& options);
  ~HostExecutor();
  HostExecutor(const HostExecutor&) = delete;
  HostExecutor& operator=(const HostExecutor&) = delete;

  /// One training step. `input` spans must hold [accumulation, micro_batch, seq_len] ids. Throws what an op threw;
  /// other ranks then get a DeviceError that names this one. After an error the executor cannot be used any more.
  StepOutput step(const StepInput& input);
  /// When each op of the last step ran.
  const StepTimes& times() const;
  double step_seconds() const;

  /// Reads weights, master and moments of this rank: calls fill(range, spans) for ranges that cover what it holds,
  /// moments and master spans sized for the range or empty.
  void load_states(const std::function<void(const FlatRange&, const StateSpans&)>& fill);
  /// Hands out what this rank stores in a checkpoint: every element of the model by one rank of the world.
  void save_states(const std::function<void(const FlatRange&, const StateSpans&)>& use);
  /// The whole weights of a block in the compute type, padding included. Collective over all ranks.
  void gather_weights(int block, std::vector<std::byte>& weights);

  const Schedule& schedule() const;
  const RankMemory& memory() const;
  /// Bytes of this rank's collectives in the last step.
  std::int64_t bytes_sent() const;
  std::int64_t bytes_received() const;
  std::vector<std::string> notes() const;
  const std::vector<Assumption>& assumptions() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zeroplan
