#pragma once
// Ops turned into calls: each op of a flat schedule becomes one function with its buffers, shapes and kernel worked out
// beforehand, so that a step only calls. This is the host's half of the executor; streams and order are
// host_executor.h's.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "models/lower.h"
#include "models/schedule.h"
#include "runtime/communicator.h"
#include "runtime/model_constants.h"
#include "runtime/rank_memory.h"
#include "runtime/step_context.h"
#include "runtime/thread_pool.h"

namespace zeroplan {

/// Of one rank; fixed for its life.
struct RankContext {
  const ModelSpec& model;
  const ModelConstants& constants;
  const Plan& plan;
  const Schedule& schedule;  // flat
  RankMemory& memory;
  const RotaryTable& rotary;
  int rank = 0;
  ThreadPool& compute_pool;  // kernels of the compute stream
  ThreadPool& host_pool;     // the host stream: Adam, sums and norms on the host
  /// For each group of the schedule and stream, or null for groups of one.
  std::function<Communicator*(Group, Stream)> communicator;
  StepInput& input;
  StepOutput& output;

  int shard_index() const { return rank % plan.shard_ranks; }
  /// `bytes` of the buffer: all, or of a block's full weights or gradient this rank's part.
  std::span<std::byte> part(BufferId buffer, std::int64_t bytes) const;
};

using TimePoint = std::chrono::steady_clock::time_point;
/// Runs the op; collectives return when their last member had arrived.
using Action = std::function<std::optional<TimePoint>()>;

/// One action for each op, in order. Throws std::logic_error on an op that this executor has no kernel for.
std::vector<Action> bind_ops(const RankContext& context);

/// Sets the gaps between tensors, and behind the last one, of a block's gradient buffer to zero: sums and the global
/// norm run over them.
void clear_padding(const RankContext& context, BufferId gradient);
/// Element type of a gradient buffer.
DType gradient_type(const Plan& plan, const Buffer& buffer);

// --- parts, by file --------------------------------------------------------------------------------

/// Kernels of graphs, loss head, sums (bind_compute.cpp). `micro_step` and `loss_row` count as ops are bound in order.
struct BindPosition {
  std::int64_t micro_step = -1;
  std::int64_t loss_row = 0;  // tokens of this micro-step that loss chunks before this one have
};
Action bind_compute(const RankContext& context, const Op& op, const Compute& work, BindPosition& position);
/// bind_transfers.cpp
Action bind_copy(const RankContext& context, const Op& op, const Copy& work);
Action bind_collective(const RankContext& context, const Op& op, const Collective& work);
/// bind_adam.cpp
Action bind_adam(const RankContext& context, const Op& op, const AdamStep& work);
Action bind_norm(const RankContext& context, const Op& op, const Compute& work);

}  // namespace zeroplan
