#pragma once
// PyTorch's autograd as bookkeeping: a graph of nodes that save tensors, an engine that walks it backward, saved
// tensor hooks as non-reentrant checkpointing uses them. Every storage's birth and death becomes an event.

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <initializer_list>
#include <span>
#include <unordered_map>
#include <vector>

#include "models/eager_step.h"
#include "models/eager_tensor.h"

namespace zeroplan::eager {

/// One training step's arguments and results of a block: positional tensors first.
using Tensors = std::vector<Tensor>;

/// A checkpointed region: what it needs to run again, and the tensors that its nodes would have saved.
struct CheckpointFrame {
  int refs = 0;
  Tape* tape = nullptr;
  std::function<Tensors(const Tensors& inputs)> function;
  std::size_t positional = 1;  // of inputs; the rest are keyword arguments
  Tensors inputs;
  Tensor dummy, saver;  // the two empty tensors that checkpoint() makes
  Tensors recomputed;
  std::vector<bool> alive;  // saved variable i still exists
  std::size_t packed = 0;   // in this run of the region
  Tensors kept;             // outputs of operators that selective checkpointing keeps, in order
  std::size_t next_kept = 0;
  int matmuls = 0;  // in this run of the region
  /// inputs[0] went to the host when forward had run; comes back, as large, when the region runs again.
  bool away = false;
  Dims away_sizes;
  Element away_type = Element::bf16;
  bool has_recomputed = false;
  /// Of a reentrant region's outputs: autograd hands its backward zeros for those that nobody used.
  struct Output {
    Dims sizes;
    Element type = Element::bf16;
  };
  std::vector<Output> outputs;
  static void destroy(CheckpointFrame* frame);
};

/// A SavedVariable: a tensor, or the promise of a checkpointed region to make it again.
struct Saved {
  Tensor tensor;
  Ref<CheckpointFrame> frame;
  std::size_t index = 0;
  void reset();
};

/// Where a gradient goes, and the shape and type it must have there.
struct Edge {
  Ref<Node> node;
  int input = 0;
  Dims sizes;
  Element type = Element::bf16;
};

struct Hook {
  int output = 0;
  bool pre = false;
  int module = 0;
};

/// `grads`: one a output of the forward op, undefined where none came. Results go to `results`, one an edge, only where
/// node.needs(i). `saved` is what the node saved, in its order.
struct BackwardCall {
  Tape& tape;
  Node& node;
  std::span<Tensor> grads, saved, results;
};
using Backward = void (*)(BackwardCall& call);

struct Node {
  int refs = 0;
  std::uint64_t sequence = 0;
  Tape* tape = nullptr;
  Backward backward = nullptr;  // null: accumulates the gradient of a leaf
  int parameter = -1;
  int outputs = 1;
  std::vector<Edge> next;
  std::vector<Saved> saved;
  std::vector<Hook> hooks;
  Ref<CheckpointFrame> region;            // CheckpointFunction only
  std::array<std::int64_t, 4> numbers{};  // the op's own attributes
  std::vector<std::int64_t> lengths;
  Dims dims;
  Element type = Element::bf16;
  bool needs(std::size_t i) const { return static_cast<bool>(next[i].node); }
  static void destroy(Node* node);
};

/// Thrown out of the op that would save the last tensor a recomputation is for (checkpoint's early stop).
struct StopRecomputation {};

class Tape {
 public:
  explicit Tape(EagerStep& step) : step_(step) {}
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  // --- storages -------------------------------------------------------------------------------
  /// A new tensor in a storage of its own; an event.
  Tensor allocate(const Dims& sizes, const Dims& strides, Element type);
  Tensor allocate(const Dims& sizes, Element type) { return allocate(sizes, contiguous_strides(sizes), type); }
  /// A tensor that lives outside the step: parameters, buffers, token ids.
  Tensor external(const Dims& sizes, Element type);
  /// The same storage under other sizes, without history.
  Tensor alias(const Tensor& tensor, const Dims& sizes, const Dims& strides);
  Tensor parameter(int index);
  void add_parameter(int index, const Dims& sizes, Element type, bool trainable);
  void record_free(std::int32_t id);
  void let_go(std::int32_t parameter, std::int32_t hold);

  // --- graph ----------------------------------------------------------------------------------
  bool recording() const { return grad_enabled_; }
  /// A node with an edge to each input, or none when no input requires a gradient.
  Ref<Node> make_node(Backward function, std::initializer_list<const Tensor*> inputs);
  Ref<Node> make_node(Backward function, std::span<const Tensor> inputs);
  /// SavedVariable. May throw StopRecomputation.
  void save(Node& node, const Tensor& tensor);
  /// Makes `tensor` output `output` of `node` (which may be none).
  void attach(Tensor& tensor, const Ref<Node>& node, int output = 0);
  /// The step's backward from `root`.
  void backward(const Tensor& root);
  void run_engine(const Tensors& roots, const Tensors& grads);

  // --- modules --------------------------------------------------------------------------------
  void forward_pre(int module);
  /// The view of an input that a module gets (DeepSpeed's rule); its gradient is the module's backward_post.
  Tensor own(int module, const Tensor& input);
  void forward_post(int module, std::initializer_list<const Tensor*> outputs);
  void forward_post(int module, const Tensors& outputs);
  void forward_end();

  /// Selective checkpointing: checkpointed regions keep every second matrix product and their attention
  /// (torchtitan's policy; torch.utils.checkpoint's create_selective_checkpoint_contexts).
  void keep_operators() { keeps_operators_ = true; }
  /// The first input of a checkpointed region is kept in host memory (DeepSpeed's cpu_checkpointing).
  void offload_checkpoints() { offloads_checkpoints_ = true; }
  /// In a region's forward: whether the next matrix product's output is kept; when it runs again: whether it was.
  bool keeps_next_matmul();
  bool keeps_attention() const { return keeps_operators_ && hooks_ != SavedHooks::none; }
  /// A kept output: `make()` in forward, the tensor of then when the region runs again. `keeps`: false: always make().
  template <class Make>
  Tensor kept(bool keeps, Make make) {
    if (!keeps) return make();
    if (hooks_ == SavedHooks::recompute) return take_kept();
    Tensor out = make();
    keep(out);
    return out;
  }
  bool recomputing() const { return hooks_ == SavedHooks::recompute; }
  /// DeepSpeed's stage 3 runs the step.
  void run_under_zero3() { zero3_ = true; }
  bool under_zero3() const { return zero3_; }
  /// Kernels of the CPU (EagerOptions::cpu_statistics).
  void keep_statistics_narrow() { narrow_statistics_ = true; }
  Element statistic_type(Element input) const { return narrow_statistics_ ? input : promote(input, Element::fp32); }

  /// torch.utils.checkpoint of `function`, as the options say.
  Tensors checkpoint(std::function<Tensors(const Tensors&)> function, Tensors inputs, std::size_t positional,
                     bool reentrant);
  void recompute(CheckpointFrame& frame);
  /// Runs a region's function with gradients enabled, as part of backward.
  Tensors rerun(CheckpointFrame& frame, const Tensors& inputs);

  void kernel(const Compute& work, bool adds_bias = false);
  void pointwise_kernel(std::int64_t traffic);
  Pass pass() const { return pass_; }

 private:
  friend struct NoGrad;
  friend struct Node;
  struct Task;
  struct GraphTask;
  enum class SavedHooks : std::uint8_t { none, forward, recompute };

  void add_event(EagerEventKind kind, std::int32_t id, std::int64_t bytes = 0, std::int32_t storage = -1) {
    step_.events.push_back({kind, id, storage, bytes});
  }
  Edge edge_to(const Tensor& tensor);
  void hook_output(int module, const Tensor& output);
  Tensor unpack(const Saved& saved);
  void call_hooks(const Node& node, const Tensors& grads);
  void evaluate(Node& node, Tensors& grads, GraphTask& task);
  void accumulate(Node& node, Tensors& grads);
  Tensor fit_gradient(Tensor grad, const Edge& edge);
  void deliver(const Edge& edge, Tensor& grad, GraphTask& task);
  Tensors checkpoint_reentrant(const Ref<CheckpointFrame>& frame);
  void send_away(CheckpointFrame& frame);
  void bring_back(CheckpointFrame& frame);
  void keep(const Tensor& out);
  Tensor take_kept();
  void hold(Tensor& kept);

  EagerStep& step_;
  std::int32_t next_storage_ = 0;
  std::uint64_t next_sequence_ = 0;
  bool grad_enabled_ = true;
  Pass pass_ = Pass::forward;
  SavedHooks hooks_ = SavedHooks::none;
  bool keeps_operators_ = false, offloads_checkpoints_ = false;
  bool zero3_ = false;
  bool narrow_statistics_ = false;
  std::int32_t next_hold_ = 0;
  CheckpointFrame* frame_ = nullptr;
  std::vector<Tensor> parameters_;
  std::vector<Ref<Node>> accumulators_;
  std::vector<Node*> dying_;
  bool burying_ = false;
  std::unordered_map<std::uint64_t, std::int32_t> works_;
};

/// torch.no_grad() or enable_grad() for a scope.
struct NoGrad {
  explicit NoGrad(Tape& tape, bool enabled = false) : tape_(tape), before_(tape.grad_enabled_) {
    tape.grad_enabled_ = enabled;
  }
  ~NoGrad() { tape_.grad_enabled_ = before_; }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  Tape& tape_;
  bool before_;
};

}  // namespace zeroplan::eager
