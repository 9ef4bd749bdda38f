#include "sim/engine_time_fetch.h"

#include <algorithm>

namespace zeroplan {
namespace {

/// Matrices of a block, one a module, in the order of their use.
std::vector<double> weights_of(const BlockKind& kind) {
  std::vector<double> weights;
  for (const GraphOp& op : kind.ops) {
    for (const int t : op.tensors) {
      const TensorSpec& tensor = kind.tensors[static_cast<std::size_t>(t)];
      if (tensor.shape.size() >= 2 && !tensor.tied) weights.push_back(static_cast<double>(tensor.elements()));
    }
  }
  if (kind.head_tensor >= 0) {
    const TensorSpec& head = kind.tensors[static_cast<std::size_t>(kind.head_tensor)];
    if (!head.tied) weights.push_back(static_cast<double>(head.elements()));
  }
  return weights;
}

struct Block {
  std::vector<double> weights;
  double size = 0;
  double repeated = 0;                                 // of the weights that backward's forward uses
  double uses() const { return 2 * size + repeated; }  // elements used in a micro-step
};

Block block_of(const BlockKind& kind, const EngineTimeRun& run) {
  Block block{weights_of(kind), 0, 0};
  for (const double w : block.weights) block.size += w;
  if (kind.role != BlockRole::layer || run.recompute != TimedRecompute::full || block.weights.empty()) return block;
  // Without reentrant checkpoints it stops before the last linear.
  block.repeated = block.size - (run.early_stop ? block.weights.back() : 0);
  return block;
}

/// Gathers of its weights in backward. `later`: elements that blocks after it use between its forward and its backward.
double gathered(const Block& block, double later, const EngineTimeRun& run) {
  const auto reuse = static_cast<double>(run.max_reuse);
  double sum = 0, before = 0;
  for (const double w : block.weights) {
    const double after = block.size - before - w;
    const bool repeats = before + w <= block.repeated;
    const double in_between = repeats ? before : block.repeated + after;  // in backward, before its first use there
    if (w > static_cast<double>(run.persistence)) {
      if (after + later + in_between >= reuse) sum += w;
      if (repeats && block.repeated - before - w + after >= reuse) sum += w;
    }
    before += w;
  }
  return sum;
}

}  // namespace

std::vector<double> gathers_in_backward(const ModelSpec& model, const EngineTimeRun& run) {
  std::vector<Block> blocks;
  std::vector<double> sums(model.kinds.size()), counts(model.kinds.size()), usual;
  for (const BlockKind& kind : model.kinds) blocks.push_back(block_of(kind, run));
  for (const Block& block : blocks) usual.push_back(gathered(block, static_cast<double>(run.max_reuse), run));
  double later = 0;
  for (auto i = model.sequence.rbegin(); i != model.sequence.rend(); ++i) {
    const auto kind = static_cast<std::size_t>(*i);
    const Block& block = blocks[kind];
    // Only the end of a model is near enough to its backward.
    sums[kind] += later >= static_cast<double>(run.max_reuse) ? usual[kind] : gathered(block, later, run);
    counts[kind] += block.size;
    later += block.uses();
  }
  for (std::size_t k = 0; k < sums.size(); ++k) sums[k] = counts[k] > 0 ? sums[k] / counts[k] : 0;
  return sums;
}

}  // namespace zeroplan
