#pragma once
// What the zeroplan engine's lowering works on: blocks under a plan, weights on their way, kernels of one block.

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "models/lower.h"
#include "models/lower_parts.h"

namespace zeroplan {

/// The block programs of one model, made when first asked for.
struct Lowering::State {
  explicit State(const ModelSpec& m) : model(m) {}
  const ModelSpec& model;
  std::map<std::pair<int, Recompute>, BlockProgram> programs;

  const BlockProgram& program(int kind, Recompute mode) {
    auto [it, fresh] = programs.try_emplace({kind, mode});
    if (fresh) it->second = build_program(model.kinds[static_cast<std::size_t>(kind)], mode);
    return it->second;
  }
};

namespace zeroplan_engine {

/// A block of the sequence under this plan.
struct Block {
  int kind = 0;
  BlockRole role = BlockRole::layer;
  FlatLayout layout;
  Recompute recompute = Recompute::none;
  Tier parameters = Tier::hbm;
  Tier optimizer = Tier::hbm;
  bool resident_weights = true;   // whole weights stay in HBM
  bool resident_gradient = true;  // whole gradient stays in HBM
  bool host_gradient = false;     // accumulated gradient lives in host memory
  bool uses_tied = false;         // reads the input embedding's weights
  BufferId weights, shard, gradient, gradient_shard, master, moments;
  std::vector<BufferId> slots;  // of its program, from forward to backward
};

/// Weights on their way to, or waiting for, the block that uses them.
struct Gather {
  OpRef ready;
  BufferId weights, staging;
  bool owned = false;  // to be freed after use
  bool has_staging = false;
};

/// A block program with this plan's sizes: one for all blocks that are equal.
struct Instance {
  const BlockProgram* program = nullptr;
  std::vector<Bytes> slot_size;
  std::vector<WorkId> forward, backward;  // by step
};

/// One block's kernels while they are emitted.
struct StepContext {
  int index;
  OpRef ready;  // what the first kernel waits for
  BufferId weights, gradient;
};

/// Kernels of the loss head for one chunk of tokens.
struct ChunkWorks {
  WorkId logits, loss, data, weight;
};

/// What an update waits for on either side: every gradient known, or with a global norm the norm there.
struct Barrier {
  OpRef device, host;
};

/// The latest reduction, and what it holds until it is done.
struct Pending {
  OpRef done;
  std::vector<BufferId> buffers;
  int block = -1;
};

}  // namespace zeroplan_engine
}  // namespace zeroplan
