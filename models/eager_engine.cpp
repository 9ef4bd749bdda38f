// The backward engine (torch/csrc/autograd/engine.cpp) and checkpointing (torch/utils/checkpoint.py).

#include <queue>
#include <stdexcept>
#include <utility>

#include "models/eager_ops.h"
#include "models/eager_tape.h"

namespace zeroplan::eager {

struct Tape::Task {
  Ref<Node> node;
};

namespace {

struct NodeState {
  int dependencies = 0;
  Tensors buffer;
};

}  // namespace

struct Tape::GraphTask {
  struct LaterFirst {
    bool operator()(const Task& a, const Task& b) const { return a.node->sequence < b.node->sequence; }
  };
  std::unordered_map<const Node*, NodeState> states;
  std::priority_queue<Task, std::vector<Task>, LaterFirst> ready;
  void count_dependencies(const Ref<Node>& root);
};

void Tape::GraphTask::count_dependencies(const Ref<Node>& root) {
  std::vector<const Node*> open = {root.get()};
  states.try_emplace(root.get());
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    for (const Edge& edge : node->next) {
      if (!edge.node) continue;
      const auto [found, is_new] = states.try_emplace(edge.node.get());
      ++found->second.dependencies;
      if (is_new) open.push_back(edge.node.get());
    }
  }
}

void Tape::backward(const Tensor& root) {
  pass_ = Pass::backward;
  const Tensors grads = {allocate(root.sizes(), root.type())};
  run_engine({root}, grads);
}

void Tape::run_engine(const Tensors& roots, const Tensors& grads) {
  GraphTask task;
  const NoGrad no_grad(*this);
  Ref<Node> root;
  Tensors buffer;
  if (roots.size() == 1) {
    root = edge_to(roots[0]).node;
    buffer.resize(static_cast<std::size_t>(root->outputs));
    buffer[static_cast<std::size_t>(roots[0].impl().output)] = grads[0];
  } else {
    root = Ref<Node>(new Node);
    root->tape = this;
    root->backward = [](BackwardCall& call) {
      for (std::size_t i = 0; i < call.grads.size(); ++i) call.results[i] = call.grads[i];
    };
    for (const Tensor& tensor : roots) root->next.push_back(edge_to(tensor));
    root->outputs = static_cast<int>(roots.size());
    buffer = grads;
  }
  task.count_dependencies(root);
  task.states[root.get()].buffer = std::move(buffer);
  task.ready.push({root});
  root.reset();
  while (!task.ready.empty()) {
    const Ref<Node> node = task.ready.top().node;
    task.ready.pop();
    Tensors inputs = std::move(task.states[node.get()].buffer);
    evaluate(*node, inputs, task);
  }
}

void Tape::call_hooks(const Node& node, const Tensors& grads) {
  // Hooks of one tensor: the recorded order is the reverse of registration, outer modules first.
  std::vector<bool> done(node.hooks.size());
  for (std::size_t i = 0; i < node.hooks.size(); ++i) {
    if (done[i]) continue;
    for (std::size_t j = node.hooks.size(); j-- > i;) {
      if (done[j] || node.hooks[j].output != node.hooks[i].output) continue;
      done[j] = true;
      if (!grads[static_cast<std::size_t>(node.hooks[j].output)]) continue;
      add_event(node.hooks[j].pre ? EagerEventKind::backward_pre : EagerEventKind::backward_post, node.hooks[j].module);
    }
  }
}

void Tape::evaluate(Node& node, Tensors& grads, GraphTask& task) {
  call_hooks(node, grads);
  if (node.backward == nullptr) return accumulate(node, grads);
  Tensors saved(node.saved.size());
  for (std::size_t i = 0; i < saved.size(); ++i) saved[i] = unpack(node.saved[i]);
  Tensors results(node.next.size());
  BackwardCall call{*this, node, grads, saved, results};
  node.backward(call);
  while (!saved.empty()) saved.pop_back();  // C++ locals die last first
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i] && node.needs(i)) results[i] = fit_gradient(std::move(results[i]), node.next[i]);
  }
  for (Tensor& grad : grads) grad.drop();
  for (Saved& kept : node.saved) kept.reset();
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (node.needs(i)) deliver(node.next[i], results[i], task);
  }
  for (Tensor& result : results) result.drop();
}

void Tape::accumulate(Node& node, Tensors& grads) {
  Tensor grad = std::move(grads[0]);
  if (!grad) return;
  const bool same_layout = grad.strides() == node.dims || (grad.is_contiguous() && grad.sizes().count() <= 1);
  if (grad.owners() > 1 || !same_layout) {
    Tensor copy = allocate(grad.sizes(), node.dims, grad.type());
    pointwise_kernel(grad.bytes() + copy.bytes());
    grad = std::move(copy);
  }
  if (node.parameter < 0) {
    Saved kept;
    kept.tensor = std::move(grad);
    node.saved.insert(node.saved.begin(), std::move(kept));
    return;
  }
  Storage& storage = *grad.impl().storage;
  add_event(EagerEventKind::gradient, node.parameter, 0, storage.id);
  storage.id = -1;  // its death is the engine's business
}

/// validate_outputs: sums what was broadcast, casts what was promoted.
Tensor Tape::fit_gradient(Tensor grad, const Edge& edge) {
  if (!(grad.sizes() == edge.sizes)) grad = sum_to(std::move(grad), edge.sizes);
  if (grad.type() != edge.type) grad = to(std::move(grad), edge.type);
  return grad;
}

/// InputBuffer::add: a gradient that is added to an earlier one stays in the node's list of results until that dies.
void Tape::deliver(const Edge& edge, Tensor& grad, GraphTask& task) {
  NodeState& state = task.states[edge.node.get()];
  state.buffer.resize(static_cast<std::size_t>(edge.node->outputs));
  if (grad) {
    Tensor& slot = state.buffer[static_cast<std::size_t>(edge.input)];
    slot = slot ? add(slot, grad) : std::move(grad);
  }
  if (--state.dependencies == 0) task.ready.push({edge.node});
}

// --- checkpointing --------------------------------------------------------------------------------

Tensor Tape::unpack(const Saved& saved) {
  if (!saved.frame) return saved.tensor;
  if (!saved.frame->has_recomputed) recompute(*saved.frame);
  return std::move(saved.frame->recomputed[saved.index]);
}

Tensors Tape::rerun(CheckpointFrame& frame, const Tensors& inputs) {
  const Pass pass = std::exchange(pass_, Pass::recompute);
  const NoGrad enable(*this, true);
  Tensors outputs = frame.function(inputs);
  pass_ = pass;
  return outputs;
}

void Tape::recompute(CheckpointFrame& frame) {
  const auto hooks = std::exchange(hooks_, SavedHooks::recompute);
  CheckpointFrame* const outer = std::exchange(frame_, &frame);
  const Pass pass = pass_;
  frame.packed = 0;
  frame.next_kept = 0;
  frame.matmuls = 0;
  bring_back(frame);
  try {
    rerun(frame, frame.inputs);
  } catch (const StopRecomputation&) {
  }
  frame.has_recomputed = true;
  hooks_ = hooks;
  frame_ = outer;
  pass_ = pass;
}

Tensors Tape::checkpoint(std::function<Tensors(const Tensors&)> function, Tensors inputs, std::size_t positional,
                         bool reentrant) {
  const Ref<CheckpointFrame> frame(new CheckpointFrame);
  frame->tape = this;
  frame->function = std::move(function);
  frame->positional = positional;
  frame->inputs = std::move(inputs);
  if (reentrant) return checkpoint_reentrant(frame);
  frame->dummy = allocate({0}, Element::fp32);
  frame->saver = allocate({0}, Element::fp32);
  const auto hooks = std::exchange(hooks_, SavedHooks::forward);
  CheckpointFrame* const outer = std::exchange(frame_, frame.get());
  Tensors outputs = frame->function(frame->inputs);
  hooks_ = hooks;
  frame_ = outer;
  send_away(*frame);
  return outputs;
}

bool Tape::keeps_next_matmul() {
  if (!keeps_operators_ || hooks_ == SavedHooks::none) return false;
  return ++frame_->matmuls % 2 == 1;
}

void Tape::send_away(CheckpointFrame& frame) {
  if (!offloads_checkpoints_) return;
  Tensor& input = frame.inputs[0];
  frame.away = true;
  frame.away_sizes = input.sizes();
  frame.away_type = input.type();
  input.drop();
}

void Tape::bring_back(CheckpointFrame& frame) {
  if (!frame.away) return;
  frame.away = false;
  frame.inputs[0] = allocate(frame.away_sizes, frame.away_type);
  frame.inputs[0].impl().requires_grad = true;
}

void Tape::keep(const Tensor& out) { frame_->kept.push_back(alias(out, out.sizes(), out.strides())); }

Tensor Tape::take_kept() { return std::move(frame_->kept.at(frame_->next_kept++)); }

namespace {

Tensor detached(const Tensor& tensor) {
  Tensor leaf = tensor.tape().alias(tensor, tensor.sizes(), tensor.strides());
  leaf.impl().requires_grad = tensor.requires_grad();
  return leaf;
}

/// CheckpointFunction.backward: the region again, with gradients, and an engine of its own.
void backward_reentrant(BackwardCall& call) {
  CheckpointFrame& region = *call.node.region;
  for (std::size_t i = 0; i < region.outputs.size(); ++i) {
    const CheckpointFrame::Output& output = region.outputs[i];
    if (!call.grads[i]) call.grads[i] = call.tape.allocate(output.sizes, output.type);
  }
  Tensors inputs = region.inputs;
  for (std::size_t i = 0, next = 0; i < region.positional; ++i) {
    if (call.node.lengths[i] == 0) continue;  // None
    inputs[i] = detached(call.saved[next++]);
    inputs[i].impl().requires_grad = call.node.needs(i);
  }
  Tensors outputs = call.tape.rerun(region, inputs);
  Tensors roots, grads;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    roots.push_back(outputs[i]);
    grads.push_back(call.grads[i]);
  }
  call.tape.run_engine(roots, grads);
  for (std::size_t i = 0; i < region.positional; ++i) {
    if (!inputs[i]) continue;
    const Ref<Node>& accumulator = inputs[i].impl().accumulator;
    if (accumulator && accumulator->saved.size() > 1) call.results[i] = accumulator->saved[0].tensor;
  }
  roots.clear();
  grads.clear();
  // Python's lists and tuples die from their end.
  while (!outputs.empty()) outputs.pop_back();
  for (std::size_t i = call.grads.size(); i-- > 0;) call.grads[i].drop();
}

}  // namespace

Tensors Tape::checkpoint_reentrant(const Ref<CheckpointFrame>& frame) {
  const std::span<const Tensor> positional(frame->inputs.data(), frame->positional);
  const Ref<Node> node = make_node(backward_reentrant, positional);
  if (node) {
    node->region = frame;
    for (const Tensor& input : positional) {
      node->lengths.push_back(input ? 1 : 0);
      if (input) save(*node, input);
    }
  }
  Tensors outputs;
  {
    const NoGrad no_grad(*this);
    outputs = frame->function(frame->inputs);
  }
  for (std::size_t i = 0; i < frame->positional; ++i) frame->inputs[i].drop();  // the node saved them
  if (node) node->outputs = static_cast<int>(outputs.size());
  for (const Tensor& output : outputs) frame->outputs.push_back({output.sizes(), output.type()});
  for (std::size_t i = 0; i < outputs.size(); ++i) attach(outputs[i], node, static_cast<int>(i));
  return outputs;
}

}  // namespace zeroplan::eager
