#include "planner/engine_counts.h"

#include <vector>

namespace zeroplan {
namespace {

/// fp32 master and two moments.
constexpr double kStateBytes = 12;

/// Of a layer's forward, what backward runs again.
Flops recomputed(const BlockKind& kind, TokenShape tokens) {
  Flops sum, last;
  for (const GraphOp& op : kind.ops) {
    const Flops flops = forward_flops(op, tokens);
    sum += flops;
    if (op.kernel == Kernel::linear) last = flops;
  }
  return sum - last;
}

Flops micro_step_flops(const ModelSpec& model, const BlockKind& kind, TokenShape tokens, bool checkpointing) {
  Flops sum;
  for (const GraphOp& op : kind.ops) sum += forward_flops(op, tokens) + backward_flops(op, tokens);
  if (kind.role == BlockRole::head && kind.head_tensor >= 0) sum += 3 * head_flops(kind, model.hidden, tokens);
  if (checkpointing && kind.role == BlockRole::layer) sum += recomputed(kind, tokens);
  return sum;
}

}  // namespace

Bytes engine_states_on_gpu(const ModelSpec& model, const Plan& plan) {
  const auto all = static_cast<double>(model.parameters());
  const double own = all / plan.shard_ranks, weight = size_of(plan.precision.weights);
  const bool states = plan.optimizer.hbm == plan.optimizer.total();
  const bool weights = plan.parameters.hbm == plan.parameters.total();
  if (plan.engine == Engine::fsdp2) return Bytes(weights ? own * kStateBytes : 0);
  if (plan.zero_stage == 0) return Bytes(all * (weight + kStateBytes));
  if (plan.zero_stage < 3) return Bytes(all * weight + (states ? own * kStateBytes : 0));
  return Bytes(own * ((weights ? weight : 0) + (states ? kStateBytes : 0)));
}

Flops engine_flops(const ModelSpec& model, const Plan& plan) {
  std::vector<Flops> each;
  for (const BlockKind& kind : model.kinds)
    each.push_back(micro_step_flops(model, kind, plan.micro_step(), plan.recompute != Recompute::none));
  Flops sum;
  for (const int kind : model.sequence) sum += each[static_cast<std::size_t>(kind)];
  return sum * static_cast<double>(plan.accumulation);
}

}  // namespace zeroplan
