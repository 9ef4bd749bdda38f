#include "models/eager_tape.h"

#include <stdexcept>
#include <utility>

namespace zeroplan::eager {
namespace {

void backward_view(BackwardCall& call);

std::uint64_t mix(std::uint64_t hash, std::int64_t value) {
  hash ^= static_cast<std::uint64_t>(value) + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdu;
}

std::uint64_t hash_of(const Gemm& g) {
  std::uint64_t hash = mix(1, g.m);
  for (const std::int64_t value : {g.n, g.k, g.groups, static_cast<std::int64_t>(g.type)}) hash = mix(hash, value);
  return hash;
}

std::uint64_t hash_of(const AttentionWork& a) {
  std::uint64_t hash = mix(2, a.shape.heads);
  for (const std::int64_t value :
       {a.shape.kv_heads, a.shape.qk_dim, a.shape.v_dim, std::int64_t{a.shape.causal}, a.shape.window, a.tokens.batch,
        a.tokens.seq_len, static_cast<std::int64_t>(a.type), std::int64_t{a.backward}}) {
    hash = mix(hash, value);
  }
  return hash;
}

std::uint64_t hash_of(const Pointwise& p) { return mix(3, static_cast<std::int64_t>(p.traffic.base())); }

/// A view's gradient is the same storage under the input's sizes.
void backward_view(BackwardCall& call) { call.results[0] = std::move(call.grads[0]); }

}  // namespace

void Saved::reset() {
  if (frame) {
    frame->alive[index] = false;
    frame->recomputed[index].drop();
    frame.reset();
  }
  tensor.drop();
}

void CheckpointFrame::destroy(CheckpointFrame* frame) {
  // Keyword arguments die with the function's partial(), then what the saver node saved.
  // A tuple of rotary tables dies from its end.
  for (std::size_t i = frame->positional; i < frame->inputs.size(); ++i) frame->inputs[i].drop();
  for (std::size_t i = 0; i < frame->positional && i < frame->inputs.size(); ++i) frame->inputs[i].drop();
  frame->dummy.drop();
  frame->saver.drop();
  delete frame;
}

void Node::destroy(Node* node) {
  Tape& tape = *node->tape;
  tape.dying_.push_back(node);
  if (tape.burying_) return;
  tape.burying_ = true;  // a chain of nodes dies in a loop, not in a recursion
  while (!tape.dying_.empty()) {
    Node* next = tape.dying_.back();
    tape.dying_.pop_back();
    for (Saved& saved : next->saved) saved.reset();
    delete next;
  }
  tape.burying_ = false;
}

Tape::~Tape() {
  parameters_.clear();
  accumulators_.clear();
}

// --- storages -------------------------------------------------------------------------------------

Tensor Tape::allocate(const Dims& sizes, const Dims& strides, Element type) {
  Tensor tensor = external(sizes, type);
  TensorImpl& impl = tensor.impl();
  impl.strides = strides;
  impl.storage->id = next_storage_++;
  impl.storage->bytes = tensor.bytes();
  add_event(EagerEventKind::alloc, impl.storage->id, impl.storage->bytes);
  return tensor;
}

Tensor Tape::external(const Dims& sizes, Element type) {
  auto* impl = new TensorImpl;
  Tensor tensor(impl);
  impl->tape = this;
  impl->type = type;
  impl->sizes = sizes;
  impl->strides = contiguous_strides(sizes);
  impl->storage = Ref<Storage>(new Storage);
  impl->storage->tape = this;
  return tensor;
}

Tensor Tape::alias(const Tensor& tensor, const Dims& sizes, const Dims& strides) {
  auto* impl = new TensorImpl;
  Tensor view(impl);
  impl->tape = this;
  impl->type = tensor.type();
  impl->sizes = sizes;
  impl->strides = strides;
  impl->storage = tensor.impl().storage;
  return view;
}

void Tape::add_parameter(int index, const Dims& sizes, Element type, bool trainable) {
  const auto at = static_cast<std::size_t>(index);
  if (parameters_.size() <= at) {
    parameters_.resize(at + 1);
    accumulators_.resize(at + 1);
  }
  Tensor tensor = external(sizes, type);
  tensor.impl().parameter = index;
  tensor.impl().storage->parameter = index;
  tensor.impl().requires_grad = trainable;
  parameters_[at] = std::move(tensor);
}

Tensor Tape::parameter(int index) { return parameters_.at(static_cast<std::size_t>(index)); }

void Tape::record_free(std::int32_t id) { add_event(EagerEventKind::free, id); }

void Tape::let_go(std::int32_t parameter, std::int32_t hold) { add_event(EagerEventKind::let_go, parameter, 0, hold); }

/// What a recomputed region packs is detached: it keeps the storage that the parameter has now (checkpoint.py). A
/// frozen parameter is packed as it is, and follows its gathers.
void Tape::hold(Tensor& kept) {
  Ref<Storage> storage(new Storage);
  storage->tape = this;
  storage->parameter = kept.impl().storage->parameter;
  storage->hold = next_hold_++;
  add_event(EagerEventKind::hold, storage->parameter, 0, storage->hold);
  kept.impl().storage = std::move(storage);
}

// --- graph ----------------------------------------------------------------------------------------

Edge Tape::edge_to(const Tensor& tensor) {
  Edge edge;
  if (!tensor.requires_grad()) return edge;
  TensorImpl& impl = tensor.impl();
  edge.sizes = impl.sizes;
  edge.type = impl.type;
  if (impl.grad_fn) {
    edge.node = impl.grad_fn;
    edge.input = impl.output;
    return edge;
  }
  Ref<Node>& accumulator =
      impl.parameter >= 0 ? accumulators_[static_cast<std::size_t>(impl.parameter)] : impl.accumulator;
  if (!accumulator) {
    accumulator = Ref<Node>(new Node);
    accumulator->tape = this;
    accumulator->sequence = ~std::uint64_t{0};
    accumulator->parameter = impl.parameter;
    accumulator->dims = impl.strides;
    if (impl.parameter < 0) {  // it keeps its variable
      Saved variable;
      variable.tensor = alias(tensor, impl.sizes, impl.strides);
      accumulator->saved.push_back(std::move(variable));
    }
  }
  edge.node = accumulator;
  return edge;
}

Ref<Node> Tape::make_node(Backward function, std::initializer_list<const Tensor*> inputs) {
  bool any = false;
  for (const Tensor* input : inputs) any = any || input->requires_grad();
  if (!grad_enabled_ || !any) return {};
  Ref<Node> node(new Node);
  node->tape = this;
  node->backward = function;
  node->sequence = next_sequence_++;
  node->next.reserve(inputs.size());
  for (const Tensor* input : inputs) node->next.push_back(edge_to(*input));
  return node;
}

Ref<Node> Tape::make_node(Backward function, std::span<const Tensor> inputs) {
  bool any = false;
  for (const Tensor& input : inputs) any = any || input.requires_grad();
  if (!grad_enabled_ || !any) return {};
  Ref<Node> node(new Node);
  node->tape = this;
  node->backward = function;
  node->sequence = next_sequence_++;
  for (const Tensor& input : inputs) node->next.push_back(edge_to(input));
  return node;
}

void Tape::save(Node& node, const Tensor& tensor) {
  Saved saved;
  if (hooks_ == SavedHooks::forward) {
    saved.frame = Ref<CheckpointFrame>(frame_);
    saved.index = frame_->alive.size();
    frame_->alive.push_back(true);
    frame_->recomputed.emplace_back();
    node.saved.push_back(std::move(saved));
    return;
  }
  saved.tensor = alias(tensor, tensor.sizes(), tensor.strides());
  saved.tensor.impl().requires_grad = false;
  if (hooks_ == SavedHooks::recompute) {
    if (zero3_ && tensor.requires_grad() && tensor.impl().storage->parameter >= 0) hold(saved.tensor);
    const std::size_t index = frame_->packed++;
    if (index >= frame_->alive.size()) throw std::logic_error("eager step: recomputation saved more than forward");
    if (frame_->alive[index]) frame_->recomputed[index] = saved.tensor;
    if (frame_->packed == frame_->alive.size()) throw StopRecomputation{};
  }
  node.saved.push_back(std::move(saved));
}

void Tape::attach(Tensor& tensor, const Ref<Node>& node, int output) {
  if (!node) return;
  tensor.impl().grad_fn = node;
  tensor.impl().output = output;
  tensor.impl().requires_grad = true;
}

// --- modules --------------------------------------------------------------------------------------

void Tape::forward_pre(int module) { add_event(EagerEventKind::forward_pre, module); }

Tensor Tape::own(int module, const Tensor& input) {
  if (!grad_enabled_ || !input.requires_grad()) return input;
  const Ref<Node> node = make_node(backward_view, {&input});
  node->hooks.push_back({0, false, module});
  Tensor view = alias(input, input.sizes(), input.strides());
  attach(view, node);
  return view;
}

void Tape::hook_output(int module, const Tensor& output) {
  if (output.requires_grad()) edge_to(output).node->hooks.push_back({output.impl().output, true, module});
}

void Tape::forward_post(int module, std::initializer_list<const Tensor*> outputs) {
  add_event(EagerEventKind::forward_post, module);
  for (const Tensor* output : outputs) hook_output(module, *output);
}

void Tape::forward_post(int module, const Tensors& outputs) {
  add_event(EagerEventKind::forward_post, module);
  for (const Tensor& output : outputs) hook_output(module, output);
}

void Tape::forward_end() { add_event(EagerEventKind::forward_end, 0); }

// --- kernels --------------------------------------------------------------------------------------

void Tape::kernel(const Compute& work, bool adds_bias) {
  const std::uint64_t hash = mix(std::visit([](const auto& kernel) { return hash_of(kernel); }, work.kernel),
                                 static_cast<std::int64_t>(work.pass));
  const auto [found, is_new] = works_.try_emplace(hash, static_cast<std::int32_t>(step_.works.size()));
  if (is_new) step_.works.push_back(work);
  add_event(EagerEventKind::kernel, found->second);
  step_.events.back().adds_bias = adds_bias;
}

void Tape::pointwise_kernel(std::int64_t traffic) {
  Compute work;
  work.pass = pass_;
  work.kernel = Pointwise{Bytes(static_cast<double>(traffic))};
  kernel(work);
}

}  // namespace zeroplan::eager
