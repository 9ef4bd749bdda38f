#pragma once
// The zeroplan engine's lowering, inside: one Emitter makes one schedule. Its member functions lie in
// lower_zeroplan.cpp (set-up, micro-steps), zeroplan_blocks.cpp (weights, blocks, loss head), zeroplan_reduce.cpp
// (gradients across ranks) and zeroplan_update.cpp (global norm, optimizer). The public face is lower.h.

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "models/lower.h"
#include "models/lower_parts.h"
#include "models/zeroplan_parts.h"

namespace zeroplan::zeroplan_engine {

/// Emits one plan's step, op by op: construct, run() once. `i` and `b` number blocks as ModelSpec::sequence does;
/// `after` and `barrier` are the ops to wait for; a function that returns an OpRef returns the op that completes what
/// it does.
class Emitter {
 public:
  Emitter(Lowering::State& state, const Plan& plan, Folding folding);
  Schedule run();

 private:
  /// Names of works that all blocks of one kind share.
  enum What {
    kGather,
    kGatherNvme,
    kGatherH2d,
    kReduce,
    kReplicaReduce,
    kAllReduce,
    kStageD2h,
    kSumFirst,
    kSumNext,
    kNorm,
    kAdam,
    kGradientD2h,
    kWeightH2d,
    kWeightD2h,
    kWeightRead,
    kStateRead,
    kStateWrite,
    kStateH2d,
    kStateD2h,
    kWeightWrite,
    kGradientH2d,
    kUpdateGather,
    kScalarReduce,
    kMemoryZero,
    kGradientZero,
    kFeatureLoss,
    kNormZero,
    kNormH2d,
    kNormSumWork,
    kNormD2h,
  };

  // --- facts of the plan ---------------------------------------------------------------------------

  const BlockKind& kind_of(const Block& block) const { return model_.kinds[static_cast<std::size_t>(block.kind)]; }
  Block& block(int i) { return blocks_[static_cast<std::size_t>(i)]; }
  int num_blocks() const { return static_cast<int>(blocks_.size()); }
  DType compute_type() const { return plan_.precision.weights; }
  bool sharded() const { return plan_.shard_ranks > 1; }
  bool last_micro_step() const { return micro_step_ == plan_.accumulation - 1; }
  /// No update may start before every gradient is known.
  bool needs_barrier() const { return plan_.clip_norm > 0 || plan_.loss_scaling == LossScaling::dynamic; }
  /// Gradients need a sum op of their own: several micro-steps, or another type than the wire's.
  bool sums_gradients() const {
    return plan_.accumulation > 1 || plan_.precision.accumulation != plan_.precision.gradients;
  }
  /// Adam reads the weights: they are the master, or a part of it.
  bool reads_weights() const { return !plan_.precision.master || plan_.precision.split_master; }
  /// Whether backward adds to the whole resident gradient (or overwrites it: first micro-step, or not kept whole).
  bool accumulate_weights(const Block& b) const { return b.resident_gradient && micro_step_ > 0; }
  /// A table's backward only writes its gradient; a norm behind it (BLOOM, BERT) reads its scale again.
  bool backward_reads_weights(const Block& b) const;
  /// Elements of the accumulated gradient that a rank holds.
  std::int64_t gradient_elements(const Block& b) const;
  /// Elements that a rank's optimizer updates.
  std::int64_t update_elements(const Block& b) const {
    return plan_.zero_stage == 0 ? b.layout.padded : b.layout.shard;
  }
  /// Where Adam reads the gradient.
  BufferId final_gradient(const Block& b) const { return b.resident_gradient ? b.gradient : b.gradient_shard; }
  /// Where the updated weights belong.
  BufferId device_weights(const Block& b) const { return b.resident_weights ? b.weights : b.shard; }
  static bool weights_end_in_hbm(const Block& b) { return b.resident_weights || b.parameters == Tier::hbm; }
  /// New weights leave the host's Adam through a pinned slot; else it writes them in place.
  bool uses_weight_ring(const Block& b) const { return weights_end_in_hbm(b) || b.parameters == Tier::nvme; }

  // --- ops and buffers -----------------------------------------------------------------------------

  OpRef add(Stream stream, int b, WorkId work, std::initializer_list<OpRef> after,
            std::initializer_list<Operand> operands) {
    return add(stream, b, work, std::span<const OpRef>(after.begin(), after.size()),
               std::span<const Operand>(operands.begin(), operands.size()));
  }
  OpRef add(Stream stream, int b, WorkId work, std::span<const OpRef> after, std::span<const Operand> operands) {
    const OpRef ref = builder_.add(stream, phase_, b, work, after, operands);
    last_on_[static_cast<std::size_t>(stream)] = ref;
    return ref;
  }
  OpRef last_compute() const { return last_on_[static_cast<std::size_t>(Stream::compute)]; }

  /// Works that are equal for all blocks of one kind are made once, by make().
  template <class Make>
  WorkId shared(int key, int what, Make make) {
    auto [it, fresh] = works_.try_emplace({key, what});
    if (fresh) it->second = builder_.work(make());
    return it->second;
  }
  /// Added to `what` of shared(): blocks of one kind may keep their gradients in different memories.
  static int where(const Block& b) { return b.host_gradient ? 200 : 0; }

  OpRef alloc(int b, std::span<const Operand> buffers, OpRef after = {}) {
    return add(Stream::compute, b, alloc_work_, std::span<const OpRef>(&after, 1), buffers);
  }
  OpRef alloc_one(int b, BufferId buffer) {
    const Operand operand{buffer, Access::write};
    return alloc(b, {&operand, 1});
  }
  void free(int b, std::span<const Operand> buffers, OpRef after = {}) {
    add(Stream::compute, b, free_work_, std::span<const OpRef>(&after, 1), buffers);
  }
  void free_one(int b, BufferId buffer, OpRef after = {}) {
    const Operand operand{buffer, Access::write};
    free(b, {&operand, 1}, after);
  }
  /// Makes compute wait for the last op of every other stream.
  OpRef join(int b);

  BufferId declare(BufferRole role, Memory memory, Owner owner, Lifetime lifetime, int b, int value, Bytes size) {
    return builder_.declare(
        {role, memory, owner, lifetime, static_cast<std::int16_t>(b), static_cast<std::int16_t>(value), size});
  }
  BufferId resident(BufferRole role, Memory memory, Owner owner, int b, Bytes size) {
    return declare(role, memory, owner, Lifetime::resident, b, -1, size);
  }

  // --- set-up (lower_zeroplan.cpp) -----------------------------------------------------------------

  /// What the plan says of each block, and the order in which weights are used.
  void make_blocks();
  Block make_block(int i);
  /// Where optimizer states live.
  Memory state_memory(Tier tier) const;
  static Memory weight_memory(Tier tier);
  /// Buffers that outlive the step.
  void declare_resident();
  void declare_weights(int i, Block& b);
  void declare_gradient(int i, Block& b);
  void declare_states(int i, Block& b);
  /// Bytes of a master weight, or of what splits it from the 16-bit weight.
  int master_bytes() const;
  /// Elements that the largest block sends through each ring; 0: no block needs it.
  struct RingElements {
    std::int64_t nvme_weights = 0, host_sum = 0, gradient_down = 0, weight_up = 0, nvme_states = 0, device_states = 0,
                 gradient_up = 0;
  };
  RingElements ring_elements() const;
  void declare_rings();
  Ring make_ring(int slots, BufferRole role, Memory memory, std::int64_t elements, int element_bytes);

  // --- repetition ----------------------------------------------------------------------------------

  /// Every op reference that one layer or micro-step hands to the next.
  std::vector<OpRef*> carried_state();

  /// body() once, repeated `count` times by the schedule. Throws std::logic_error when it changes how much it hands on.
  template <class Body>
  void repeat(std::int64_t count, Body body) {
    builder_.begin_repeat(count);
    std::vector<OpRef> values;
    for (OpRef* ref : carried_state()) values.push_back(*ref = builder_.carry(*ref));
    body();
    const auto after = carried_state();
    if (after.size() != values.size()) throw std::logic_error("lower: a repeated block changes the shape of its state");
    for (std::size_t k = 0; k < values.size(); ++k) {
      builder_.set_next(values[k], *after[k]);
      *after[k] = values[k];
    }
    builder_.end_repeat();
  }

  /// Layers that one repeated block may stand for.
  static bool same(const Block& a, const Block& b) {
    return a.kind == b.kind && a.recompute == b.recompute && a.parameters == b.parameters &&
           a.optimizer == b.optimizer && a.role == BlockRole::layer;
  }

  /// body(i) for the blocks first..last, or last..first; equal neighbours folded.
  template <class Body>
  void for_blocks(int first, int last, bool reverse, Body body) {
    std::vector<std::pair<int, int>> runs;  // [begin, end)
    for (int i = first; i <= last;) {
      int end = i + 1;
      while (end <= last && same(block(i), block(end))) ++end;
      runs.emplace_back(i, end);
      i = end;
    }
    if (reverse) std::reverse(runs.begin(), runs.end());
    for (auto [begin, end] : runs) run_of(begin, end, reverse, body);
  }

  /// body(i) for the equal blocks begin..end-1: the inner ones once, with repeat().
  template <class Body>
  void run_of(int begin, int end, bool reverse, Body body) {
    // Layers at the border gather weights of another kind, or take over state from one: they stay outside.
    const int border = std::max(1, plan_.prefetch_layers);
    const int inner = end - begin - 2 * border;
    const auto one_by_one = [&](int from, int to) {
      for (int i = from; i < to; ++i) body(reverse ? begin + end - 1 - i : i);
    };
    if (!fold_layers_ || inner < 2) {
      one_by_one(begin, end);
      return;
    }
    one_by_one(begin, begin + border);
    repeat(inner, [&] { body(begin + border); });
    one_by_one(end - border, end);
  }

  void micro_steps();
  void micro_step(std::int64_t index);

  // --- weights (zeroplan_blocks.cpp) ---------------------------------------------------------------

  /// Position in `uses_`.
  std::size_t use_of(int b, bool backward) const {
    return backward ? static_cast<std::size_t>(2 * (num_blocks() - 1) - b) : static_cast<std::size_t>(b);
  }
  /// Starts what brings the weights of use `u` to the GPU.
  void issue_gather(std::size_t u);
  OpRef gather_op(int i, const Block& b, BufferId shard, BufferId full, OpRef after);
  /// Brings offloaded weights.
  void fetch(int i, Block& b, Gather& g);
  /// The weights of block b, and starts those that are `prefetch_layers` uses ahead.
  Gather take_gather(int b, bool backward);
  /// Frees gathered weights.
  void release(int i, const Gather& g);

  // --- blocks (zeroplan_blocks.cpp) ----------------------------------------------------------------

  const Instance& instance(const Block& b);
  /// One pass of a program: births, kernels, deaths.
  void emit_steps(const std::vector<ProgramStep>& steps, const std::vector<WorkId>& works, const Instance& made,
                  StepContext& c);
  /// Declares and allocates slots.
  void born(const std::vector<int>& slots, const Instance& made, int i);
  /// Adds token ids, weights and gradients to `operands_`.
  void parameter_operands(const GraphOp& op, const BlockKind& kind, const ProgramStep& step, const StepContext& c);
  void forward_block(int i);
  void backward_block(int i);
  /// Where backward writes the block's weight gradient.
  BufferId gradient_of(int i);
  void clear_table(int i, BufferId gradient);
  /// The encoder output's gradient; set to zero when first asked for.
  BufferId memory_gradient(int i);
  /// Hands that gradient to the encoder's last layer.
  void leave_decoder(int i);

  // --- loss head (zeroplan_blocks.cpp) -------------------------------------------------------------

  /// The last block forward, the loss, and the block backward.
  void head_block(int i);
  void loss(int i, const BlockKind& kind, BufferId input, const StepContext& c);
  /// A model without an output matrix.
  void feature_loss(int i, BufferId input);
  /// `adds`: to the weight gradient that is there.
  void loss_chunk(int i, const BlockKind& kind, std::int64_t rows, BufferId input, const StepContext& c, bool adds);
  const ChunkWorks& chunk_works(const BlockKind& kind, std::int64_t rows, bool adds, bool fp32_gradient);

  // --- gradients across ranks (zeroplan_reduce.cpp) ------------------------------------------------

  /// Frees what the reduction before still held; compute waits for it here, one block later.
  void settle();
  /// Starts what becomes of a block's gradient after its backward.
  void reduce(int i, BufferId gradient);
  void reduce_in_place(int i, Block& b);
  void reduce_shard(int i, Block& b, BufferId gradient);
  OpRef all_reduce(int i, const Block& b, Group group, Operand operand, std::int64_t padded, DType type, OpRef after);
  /// Without a `shard`: in place.
  OpRef reduce_scatter(int i, const Block& b, Operand full, BufferId shard, DType type, OpRef after);
  WorkId sum_work(const Block& b, std::int64_t n);
  Access sum_access() const { return micro_step_ == 0 ? Access::write : Access::read_write; }
  OpRef sum_on_device(int i, Block& b, BufferId reduced, OpRef after);
  /// Returns when device memory is free again; the host goes on.
  OpRef sum_on_host(int i, Block& b, BufferId reduced, OpRef after);

  // --- optimizer (zeroplan_update.cpp) -------------------------------------------------------------

  void optimizer();
  /// Declares what the global norm is summed in.
  void declare_norm();
  void clear_norm(Stream stream, BufferId norm, OpRef after);
  Barrier global_norm(OpRef after);
  /// Adds the host's part of the norm to the device's.
  OpRef norm_from_host(OpRef after);
  /// One block's update, wherever its states are, and the gathering of its new weights below stage 3.
  void update(int i, const Barrier& barrier);
  WorkId adam_work(const Block& b);
  /// Adds master and moments to `operands_`.
  void state_operands(const Block& b, Access access);
  /// Adds the global norm to `operands_` if there is one: it scales the gradients.
  void norm_operand(BufferId norm) {
    if (needs_barrier()) operands_.push_back({norm, Access::read});
  }
  Bytes state_bytes(const Block& b) const;
  WorkId state_copy(const Block& b, What what, Memory from, Memory to);
  /// States on disk come into a pinned slot; go back, and the slot is given back.
  OpRef read_states(int i, const Block& b, const Ring::Slot& slot);
  void write_states(int i, const Block& b, BufferId slot, OpRef after);
  OpRef update_on_device(int i, Block& b, OpRef barrier);
  OpRef update_on_host(int i, Block& b, const Barrier& barrier);
  /// Brings the gradient to a pinned slot; `gradient` becomes that slot.
  OpRef gradient_to_host(int i, const Block& b, BufferId& gradient, OpRef barrier);
  /// Adam on the host's cores; leaves the new weights in `weight_target_`.
  OpRef host_adam(int i, Block& b, std::array<OpRef, 3> after, BufferId gradient, BufferId state_slot);
  /// From there to where they belong.
  OpRef weights_after_host(int i, Block& b, OpRef adam);
  OpRef old_weights(int i, const Block& b, const Ring::Slot& slot, OpRef after);
  OpRef update_streamed(int i, Block& b, OpRef barrier);
  OpRef streamed_adam(int i, Block& b, BufferId states, OpRef there, OpRef barrier);

  Lowering::State& state_;
  const ModelSpec& model_;
  const Plan& plan_;
  bool fold_layers_, fold_micro_steps_;
  ScheduleBuilder builder_;
  Phase phase_ = Phase::forward;
  std::int64_t micro_step_ = 0;
  std::vector<Block> blocks_;
  std::vector<int> uses_;  // blocks in the order in which their weights are needed in a micro-step
  bool tied_ = false;      // some block reads the input embedding's weights
  std::map<int, FlatLayout> layouts_;
  std::map<std::pair<int, int>, WorkId> works_;
  std::map<std::tuple<int, Recompute, bool, bool>, Instance> instances_;
  std::map<std::pair<std::int64_t, bool>, ChunkWorks> chunk_works_;
  WorkId alloc_work_, free_work_, join_work_;
  std::vector<Operand> operands_;  // scratch

  BufferId token_ids_, scalars_;
  BufferId norm_, host_norm_, norm_part_;  // the norm on the device; on the host; the host's part on the device
  std::array<OpRef, kNumStreams> last_on_{};
  std::vector<Gather> queue_;
  Gather embedding_;
  Pending pending_;
  Ring nvme_weights_, host_sum_, gradient_down_, weight_up_, nvme_states_, device_states_, gradient_up_;
  OpRef host_summed_;  // last sum into a host gradient
  BufferId weight_target_;
  BufferId hidden_, hidden_gradient_, memory_, memory_gradient_, embedding_gradient_;
};

}  // namespace zeroplan::zeroplan_engine
