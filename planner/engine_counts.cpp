#include "planner/engine_counts.h"

#include <algorithm>
#include <set>
#include <vector>

namespace zeroplan {
namespace {

/// fp32 master and two moments.
constexpr double kStateBytes = 12;
/// The same and the gradients in fp32.
constexpr double kSwappedBytes = 16;

/// Ranks that share one copy of masters, moments and gradients: under DeepSpeed all, whatever hpZ's groups.
int state_ranks(const Plan& plan) { return plan.engine == Engine::deepspeed ? plan.ranks : plan.shard_ranks; }

bool saves_inputs(const BlockKind& kind, const GraphOp& op) {
  switch (op.kernel) {
    case Kernel::linear:  // for the gradient of the weight: a frozen one saves nothing
      return std::any_of(op.tensors.begin(), op.tensors.end(),
                         [&](int t) { return kind.tensors[static_cast<std::size_t>(t)].trainable; });
    case Kernel::attention:
      return true;
    case Kernel::activation:  // ReLU saves its output, which the next linear saves too
      return op.name.find("relu") == std::string::npos;
    case Kernel::norm:
    case Kernel::rotary:
    case Kernel::add:
    case Kernel::permute:
    case Kernel::embedding:
    case Kernel::router:
    case Kernel::grouped_linear:
    case Kernel::combine:
      return false;
  }
  return false;
}

/// Elements a token that a layer's backward needs. Layers with experts run on other tokens: their input alone.
double saved_elements(const BlockKind& kind, std::int64_t hidden, bool checkpointing) {
  const bool experts =
      std::any_of(kind.ops.begin(), kind.ops.end(), [](const GraphOp& op) { return op.kernel == Kernel::router; });
  if (checkpointing || experts) return static_cast<double>(hidden);
  std::set<int> saved;
  for (const GraphOp& op : kind.ops) {
    if (saves_inputs(kind, op)) saved.insert(op.inputs.begin(), op.inputs.end());
  }
  double sum = 0;
  for (const int value : saved) {
    // The encoder's output is one for all layers.
    if (value != kind.memory) sum += static_cast<double>(kind.values[static_cast<std::size_t>(value)].per_token);
  }
  return sum;
}

}  // namespace

Bytes engine_saved_activations(const ModelSpec& model, const Plan& plan) {
  std::vector<double> each;
  for (const BlockKind& kind : model.kinds) {
    const bool layer = kind.role == BlockRole::layer;
    each.push_back(layer ? saved_elements(kind, model.hidden, plan.recompute != Recompute::none) : 0);
  }
  double sum = 0;
  for (const int kind : model.sequence) sum += each[static_cast<std::size_t>(kind)];
  return Bytes(sum * static_cast<double>(plan.micro_step().tokens()) * size_of(plan.precision.weights));
}

Bytes engine_states_on_gpu(const ModelSpec& model, const Plan& plan) {
  const auto all = static_cast<double>(model.parameters()), trained = static_cast<double>(model.trainable_parameters());
  const double weight = size_of(plan.precision.weights), share = 1.0 / state_ranks(plan);
  const bool states = plan.optimizer.hbm == plan.optimizer.total();
  const bool weights = plan.parameters.hbm == plan.parameters.total();
  if (plan.engine == Engine::fsdp2)
    return Bytes(weights ? share * (trained * kStateBytes + (all - trained) * weight) : 0);
  if (plan.zero_stage == 0) return Bytes(all * weight + trained * kStateBytes);
  if (plan.zero_stage < 3) return Bytes(all * weight + (states ? share * trained * kStateBytes : 0));
  const double second = plan.shard_ranks != plan.ranks ? all * weight / plan.shard_ranks : 0;  // hpZ
  return Bytes(share * ((weights ? all * weight : 0) + (states ? trained * kStateBytes : 0)) + second);
}

Bytes foreach_roots(const ModelSpec& model, const Plan& plan) {
  return Bytes(size_of(DType::fp32) * static_cast<double>(model.trainable_parameters()) / plan.shard_ranks);
}

Bytes engine_nvme(const ModelSpec& model, const MachineSpec& machine, const Plan& plan) {
  const double share = static_cast<double>(std::min(machine.gpus_per_node, plan.ranks)) / state_ranks(plan);
  const double states = plan.optimizer.nvme > 0 ? kSwappedBytes * static_cast<double>(model.trainable_parameters()) : 0;
  const double weights =
      plan.parameters.nvme > 0 ? size_of(plan.precision.weights) * static_cast<double>(model.parameters()) : 0;
  return Bytes(share * (states + weights));
}

}  // namespace zeroplan
