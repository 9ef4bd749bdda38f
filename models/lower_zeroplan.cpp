// The zeroplan engine's step. Streams: compute carries kernels and every Alloc and Free; gathers, reductions and copies run
// beside it. Order of one micro-step: blocks forward, loss head in chunks, blocks backward; then the optimizer.

#include <algorithm>
#include <array>
#include <cassert>
#include <map>
#include <stdexcept>

#include "models/error.h"
#include "models/lower.h"
#include "models/lower_parts.h"

namespace zeroplan {

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

namespace {

constexpr int kStateRingSlots = 3;   // NVMe: one read, one updated, one written
constexpr int kUpdateRingSlots = 2;  // gradients, weights and streamed states on their way

constexpr std::size_t kOpsReserved = 1024;  // folded schedules have 300 to 900

/// A block of the sequence under this plan.
struct Block {
  int kind = 0;
  BlockRole role = BlockRole::layer;
  FlatLayout layout;
  Recompute recompute = Recompute::none;
  Tier parameters = Tier::hbm;
  Tier optimizer = Tier::hbm;
  bool resident_weights = true;    // whole weights stay in HBM
  bool resident_gradient = true;   // whole gradient stays in HBM
  bool host_gradient = false;      // accumulated gradient lives in host memory
  bool uses_tied = false;          // reads the input embedding's weights
  BufferId weights, shard, gradient, gradient_shard, master, moments;
  std::vector<BufferId> slots;     // of its program, from forward to backward
};

/// Weights on their way to, or waiting for, the block that uses them.
struct Gather {
  OpRef ready;
  BufferId weights, staging;
  bool owned = false;    // to be freed after use
  bool has_staging = false;
};

class Emitter {
 public:
  Emitter(Lowering::State& state, const Plan& plan, Folding folding)
      : state_(state), model_(state.model), plan_(plan), fold_layers_(folding == Folding::layers),
        fold_micro_steps_(folding != Folding::none) {
    make_blocks();
  }

  Schedule run() {
    builder_.reserve(kOpsReserved);
    declare_resident();
    micro_steps();
    optimizer();
    return builder_.finish();
  }

 private:
  // --- small helpers -----------------------------------------------------------------------------

  const BlockKind& kind_of(const Block& block) const { return model_.kinds[static_cast<std::size_t>(block.kind)]; }
  Block& block(int i) { return blocks_[static_cast<std::size_t>(i)]; }
  int num_blocks() const { return static_cast<int>(blocks_.size()); }
  DType compute_type() const { return plan_.precision.weights; }
  bool sharded() const { return plan_.shard_ranks > 1; }

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

  /// Works that are equal for all blocks of one kind are made once.
  template <class Make>
  WorkId shared(int key, int what, Make make) {
    auto [it, fresh] = works_.try_emplace({key, what});
    if (fresh) it->second = builder_.work(make());
    return it->second;
  }
  enum What {
    kGather, kGatherNvme, kGatherH2d, kReduce, kReplicaReduce, kAllReduce, kStageD2h, kSumFirst, kSumNext, kNorm, kAdam,
    kGradientD2h, kWeightH2d, kStateRead, kStateWrite, kStateH2d, kStateD2h, kWeightWrite, kWeightD2h, kGradientH2d,
    kUpdateGather, kScalarReduce, kMemoryZero, kFeatureLoss,
  };

  /// Blocks of one kind may keep their gradients in different memories.
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

  BufferId declare(BufferRole role, Memory memory, Owner owner, Lifetime lifetime, int b, int value, Bytes size) {
    return builder_.declare({role, memory, owner, lifetime, static_cast<std::int16_t>(b),
                             static_cast<std::int16_t>(value), size});
  }
  BufferId resident(BufferRole role, Memory memory, Owner owner, int b, Bytes size) {
    return declare(role, memory, owner, Lifetime::resident, b, -1, size);
  }

  // --- set-up -------------------------------------------------------------------------------------

  void make_blocks() {
    int layer = 0;
    for (std::size_t i = 0; i < model_.sequence.size(); ++i) {
      Block block;
      block.kind = model_.sequence[i];
      const BlockKind& kind = kind_of(block);
      block.role = kind.role;
      auto [layout, fresh] = layouts_.try_emplace(block.kind);
      if (fresh) layout->second = flat_layout(kind, compute_type(), plan_.shard_ranks);
      block.layout = layout->second;
      if (kind.role == BlockRole::layer && layer++ < plan_.recompute_layers) block.recompute = plan_.recompute;
      block.parameters = plan_.parameters.tier_of(static_cast<int>(i));
      block.optimizer = plan_.optimizer.tier_of(static_cast<int>(i));
      block.host_gradient = plan_.gradients == Tier::host && block.optimizer != Tier::hbm;
      block.resident_weights = plan_.zero_stage < 3 || (!sharded() && block.parameters == Tier::hbm);
      block.resident_gradient = (plan_.zero_stage <= 1 && plan_.reduce_each == ReduceEach::step) ||
                                (plan_.ranks == 1 && !block.host_gradient);
      for (const TensorSpec& tensor : kind.tensors) block.uses_tied = block.uses_tied || tensor.tied;
      blocks_.push_back(std::move(block));
    }
    for (int i = 1; i < num_blocks(); ++i) tied_ = tied_ || block(i).uses_tied;
    for (int i = 0; i < num_blocks(); ++i) uses_.push_back(i);
    for (int i = num_blocks() - 2; i > 0; --i) uses_.push_back(i);
    if (backward_reads_weights(block(0))) uses_.push_back(0);
    alloc_work_ = builder_.work(Alloc{});
    free_work_ = builder_.work(Free{});
    join_work_ = builder_.work(Join{});
  }

  /// A table's backward only writes its gradient; a norm behind it (BLOOM, BERT) reads its scale again.
  bool backward_reads_weights(const Block& b) const {
    const auto& ops = kind_of(b).ops;
    return std::any_of(ops.begin(), ops.end(), [](const GraphOp& op) { return !op.inputs.empty() && !op.tensors.empty(); });
  }

  /// Elements of the accumulated gradient that a rank holds.
  std::int64_t gradient_elements(const Block& b) const {
    if (b.resident_gradient || plan_.zero_stage == 0) return b.layout.padded;
    return b.layout.shard;
  }
  std::int64_t update_elements(const Block& b) const {
    return plan_.zero_stage == 0 ? b.layout.padded : b.layout.shard;
  }
  Memory state_memory(Tier tier) const {
    if (tier == Tier::hbm) return Memory::hbm;
    if (tier == Tier::nvme) return Memory::nvme;
    return plan_.update == UpdateOn::device ? Memory::pinned : Memory::dram;
  }
  static Memory weight_memory(Tier tier) {
    return tier == Tier::hbm ? Memory::hbm : tier == Tier::host ? Memory::pinned : Memory::nvme;
  }

  void declare_resident() {
    const Precision& p = plan_.precision;
    const std::int64_t tokens = plan_.micro_step().tokens();
    token_ids_ = resident(BufferRole::token_ids, Memory::hbm, Owner::buffers, -1, bytes_of(2 * tokens, DType::i32));
    scalars_ = resident(BufferRole::scalars, Memory::hbm, Owner::buffers, -1, bytes_of(64, DType::fp32));
    const int master_bytes = !p.master ? 0 : p.split_master ? 2 : 4;
    for (int i = 0; i < num_blocks(); ++i) {
      Block& b = block(i);
      if (b.layout.padded == 0) continue;
      if (b.resident_weights) {
        b.weights = resident(BufferRole::weights, Memory::hbm, Owner::parameters, i, bytes_of(b.layout.padded, p.weights));
      } else {
        b.shard = resident(BufferRole::weight_shard, weight_memory(b.parameters), Owner::parameters, i,
                           bytes_of(b.layout.shard, p.weights));
      }
      if (b.resident_gradient) {
        b.gradient = resident(BufferRole::gradient, Memory::hbm, Owner::gradients, i,
                              bytes_of(b.layout.padded, p.accumulation));
      } else {
        const bool pinned = b.host_gradient && !sums_gradients();
        b.gradient_shard = resident(BufferRole::gradient_shard,
                                    !b.host_gradient ? Memory::hbm : pinned ? Memory::pinned : Memory::dram,
                                    Owner::gradients, i, bytes_of(gradient_elements(b), p.accumulation));
      }
      const std::int64_t n = update_elements(b);
      if (master_bytes > 0) {
        b.master = resident(BufferRole::master, state_memory(b.optimizer), Owner::optimizer, i,
                            Bytes(static_cast<double>(n * master_bytes)));
      }
      b.moments = resident(BufferRole::moments, state_memory(b.optimizer), Owner::optimizer, i,
                           bytes_of(2 * n, p.states));
    }
    declare_rings(master_bytes);
  }

  /// Gradients need a sum op of their own: several micro-steps, or another type than the wire's.
  bool sums_gradients() const {
    return plan_.accumulation > 1 || plan_.precision.accumulation != plan_.precision.gradients;
  }

  Ring make_ring(int slots, BufferRole role, Memory memory, Bytes size) {
    Ring ring;
    for (int k = 0; k < slots; ++k) ring.buffers.push_back(resident(role, memory, Owner::buffers, -1, size));
    ring.last_use.assign(static_cast<std::size_t>(slots), OpRef{});
    return ring;
  }

  // Rings exist only where some block needs them; the largest block sets their size.
  void declare_rings(int master_bytes) {
    const Precision& p = plan_.precision;
    std::int64_t nvme_weights = 0, host_sum = 0, gradient_d2h = 0, weight_h2d = 0, nvme_states = 0, device_states = 0,
                 gradient_h2d = 0;
    for (const Block& b : blocks_) {
      const std::int64_t n = update_elements(b);
      const auto most = [](std::int64_t& at_most, std::int64_t value) { at_most = std::max(at_most, value); };
      if (!b.resident_weights && b.parameters == Tier::nvme) most(nvme_weights, b.layout.shard);
      if (b.host_gradient && sums_gradients()) most(host_sum, b.layout.shard);
      if (b.optimizer == Tier::hbm) continue;
      if (b.optimizer == Tier::nvme) most(nvme_states, n);
      if (plan_.update == UpdateOn::device) {
        most(device_states, n);
        if (b.host_gradient) most(gradient_h2d, n);
      } else {
        if (!b.host_gradient) most(gradient_d2h, n);
        if (weights_end_in_hbm(b) || b.parameters == Tier::nvme) most(weight_h2d, n);
      }
    }
    const int state_bytes = master_bytes + 2 * size_of(p.states);
    const auto ring = [&](Ring& r, int slots, BufferRole role, Memory memory, std::int64_t n, int bytes) {
      if (n > 0) r = make_ring(slots, role, memory, Bytes(static_cast<double>(n * bytes)));
    };
    ring(nvme_weights_, plan_.prefetch_layers + 2, BufferRole::weight_staging, Memory::pinned, nvme_weights, size_of(p.weights));
    ring(host_sum_, kUpdateRingSlots, BufferRole::gradient_staging, Memory::pinned, host_sum, size_of(p.gradients));
    ring(gradient_down_, kUpdateRingSlots, BufferRole::gradient_staging, Memory::pinned, gradient_d2h, size_of(p.accumulation));
    ring(weight_up_, kUpdateRingSlots, BufferRole::weight_staging, Memory::pinned, weight_h2d, size_of(p.weights));
    ring(nvme_states_, kStateRingSlots, BufferRole::state_slot, Memory::pinned, nvme_states, state_bytes);
    ring(device_states_, kUpdateRingSlots, BufferRole::state_slot, Memory::hbm, device_states, state_bytes);
    ring(gradient_up_, kUpdateRingSlots, BufferRole::gradient_staging, Memory::hbm, gradient_h2d, size_of(p.accumulation));
  }

  static bool weights_end_in_hbm(const Block& b) { return b.resident_weights || b.parameters == Tier::hbm; }

  // --- repetition ----------------------------------------------------------------------------------

  /// Every op reference that one layer or micro-step hands to the next.
  std::vector<OpRef*> carried_state() {
    std::vector<OpRef*> refs;
    for (Gather& g : queue_) refs.push_back(&g.ready);
    refs.push_back(&pending_.done);
    for (Ring* ring : {&nvme_weights_, &host_sum_, &gradient_down_, &weight_up_, &nvme_states_, &device_states_, &gradient_up_}) {
      for (OpRef& ref : ring->last_use) refs.push_back(&ref);
    }
    return refs;
  }

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

  bool same(const Block& a, const Block& b) const {
    return a.kind == b.kind && a.recompute == b.recompute && a.parameters == b.parameters && a.optimizer == b.optimizer &&
           a.role == BlockRole::layer;
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

  // --- weights -------------------------------------------------------------------------------------

  std::size_t use_of(int b, bool backward) const {
    return backward ? static_cast<std::size_t>(2 * (num_blocks() - 1) - b) : static_cast<std::size_t>(b);
  }

  /// Starts what brings the weights of use `u` to the GPU.
  void issue_gather(std::size_t u) {
    if (u >= uses_.size()) return;
    const int i = uses_[u];
    Block& b = block(i);
    Gather g;
    if (b.resident_weights || b.layout.padded == 0) {
      g.weights = b.weights;
      queue_.push_back(g);
      return;
    }
    g.owned = true;
    g.weights = declare(BufferRole::weights, Memory::hbm, Owner::buffers, Lifetime::step, i, -1,
                        bytes_of(b.layout.padded, compute_type()));
    if (b.parameters == Tier::hbm) {
      const OpRef born = alloc_one(i, g.weights);
      g.ready = gather_op(i, b, b.shard, g.weights, born);
    } else {
      fetch(i, b, g);
    }
    queue_.push_back(g);
  }

  OpRef gather_op(int i, const Block& b, BufferId shard, BufferId full, OpRef after) {
    const WorkId work = shared(b.kind, kGather, [&] {
      return Collective{CollectiveKind::all_gather, Group::shard, b.layout.parameters, b.layout.padded, compute_type()};
    });
    return add(Stream::gather, i, work, {after}, {{shard, Access::read}, {full, Access::write}});
  }

  // Offloaded weights: [disk -> pinned ->] device staging -> all-gather; a lone rank copies straight into place.
  void fetch(int i, Block& b, Gather& g) {
    const Bytes bytes = bytes_of(b.layout.shard, compute_type());
    BufferId source = b.shard;
    OpRef loaded;
    if (b.parameters == Tier::nvme) {
      const Ring::Slot slot = nvme_weights_.take();
      const WorkId read = shared(b.kind, kGatherNvme, [&] { return Copy{Memory::nvme, Memory::pinned, bytes}; });
      loaded = add(Stream::nvme_read, i, read, {slot.free_after}, {{b.shard, Access::read}, {slot.buffer, Access::write}});
      source = slot.buffer;
    }
    const WorkId copy = shared(b.kind, kGatherH2d, [&] { return Copy{Memory::pinned, Memory::hbm, bytes}; });
    BufferId target = g.weights;
    OpRef born;
    if (sharded()) {
      g.has_staging = true;
      g.staging = declare(BufferRole::weight_staging, Memory::hbm, Owner::buffers, Lifetime::step, i, -1, bytes);
      target = g.staging;
      const std::array<Operand, 2> both{{{g.weights, Access::write}, {g.staging, Access::write}}};
      born = alloc(i, both);
    } else {
      born = alloc_one(i, g.weights);
    }
    const OpRef copied = add(Stream::h2d, i, copy, {born, loaded}, {{source, Access::read}, {target, Access::write}});
    if (b.parameters == Tier::nvme) nvme_weights_.give_back(copied);
    g.ready = sharded() ? gather_op(i, b, g.staging, g.weights, copied) : copied;
  }

  Gather take_gather(int b, bool backward) {
    issue_gather(use_of(b, backward) + static_cast<std::size_t>(plan_.prefetch_layers));
    const Gather g = queue_.front();
    queue_.erase(queue_.begin());
    return g;
  }

  void release(int i, const Gather& g) {
    if (!g.owned) return;
    std::array<Operand, 2> both{{{g.weights, Access::write}, {g.staging, Access::write}}};
    free(i, {both.data(), g.has_staging ? 2u : 1u});
  }

  // --- blocks --------------------------------------------------------------------------------------

  struct Instance {
    const BlockProgram* program = nullptr;
    std::vector<Bytes> slot_size;
    std::vector<WorkId> forward, backward;
  };

  const Instance& instance(const Block& b) {
    const auto key = std::make_tuple(b.kind, b.recompute, accumulate_weights(b), b.resident_gradient);
    auto [it, fresh] = instances_.try_emplace(key);
    if (!fresh) return it->second;
    Instance& made = it->second;
    const BlockKind& kind = kind_of(b);
    made.program = &state_.program(b.kind, b.recompute);
    const WorkSizes sizes{plan_.micro_step(), compute_type(),
                          b.resident_gradient ? plan_.precision.accumulation : plan_.precision.gradients,
                          accumulate_weights(b)};
    for (const ProgramSlot& slot : made.program->slots) made.slot_size.push_back(slot_bytes(kind, slot, sizes));
    for (const auto* steps : {&made.program->forward, &made.program->backward}) {
      auto& works = steps == &made.program->forward ? made.forward : made.backward;
      for (const ProgramStep& step : *steps) {
        works.push_back(builder_.work(work_of(kind, b.kind, *made.program, step, sizes)));
      }
    }
    return made;
  }

  /// Whether backward adds to the whole resident gradient (or overwrites it: first micro-step, or not kept whole).
  bool accumulate_weights(const Block& b) const { return b.resident_gradient && micro_step_ > 0; }

  struct StepContext {
    int index;
    OpRef ready;         // what the first kernel waits for
    BufferId weights, gradient;
  };

  void emit_steps(const std::vector<ProgramStep>& steps, const std::vector<WorkId>& works, const Instance& made,
                  StepContext& c) {
    Block& b = block(c.index);
    const BlockKind& kind = kind_of(b);
    for (std::size_t k = 0; k < steps.size(); ++k) {
      const ProgramStep& step = steps[k];
      if (!step.alloc_before.empty()) born(step.alloc_before, made, c.index);
      operands_.clear();
      for (const ProgramOperand& o : step.operands) {
        operands_.push_back({b.slots[static_cast<std::size_t>(o.slot)], o.access});
      }
      if (step.graph_op >= 0) parameter_operands(kind.ops[static_cast<std::size_t>(step.graph_op)], kind, step, c);
      add(Stream::compute, c.index, works[k], std::span<const OpRef>(&c.ready, 1), operands_);
      c.ready = {};
      if (!step.free_after.empty()) {
        operands_.clear();
        for (int s : step.free_after) operands_.push_back({b.slots[static_cast<std::size_t>(s)], Access::write});
        free(c.index, operands_);
      }
    }
  }

  void born(const std::vector<int>& slots, const Instance& made, int i) {
    Block& b = block(i);
    operands_.clear();
    for (int s : slots) {
      const ProgramSlot& slot = made.program->slots[static_cast<std::size_t>(s)];
      const BufferId id = declare(slot.role, Memory::hbm, Owner::activations, Lifetime::step, i, slot.value,
                                  made.slot_size[static_cast<std::size_t>(s)]);
      b.slots[static_cast<std::size_t>(s)] = id;
      operands_.push_back({id, Access::write});
    }
    alloc(i, operands_);
  }

  void parameter_operands(const GraphOp& op, const BlockKind& kind, const ProgramStep& step, const StepContext& c) {
    if (op.inputs.empty() && step.pass == Pass::forward) operands_.push_back({token_ids_, Access::read});
    if (op.tensors.empty()) return;
    bool own = false, tied = false;
    for (int t : op.tensors) (kind.tensors[static_cast<std::size_t>(t)].tied ? tied : own) = true;
    const bool reads = step.pass != Pass::backward_weight && !op.inputs.empty();
    if (reads || step.pass == Pass::forward) {
      if (own) operands_.push_back({c.weights, Access::read});
      if (tied) operands_.push_back({embedding_.weights, Access::read});
    }
    if (step.weight_gradient) {
      if (own) operands_.push_back({c.gradient, Access::read_write});
      if (tied) operands_.push_back({embedding_gradient_, Access::read_write});
    }
  }

  void forward_block(int i) {
    Block& b = block(i);
    const Gather g = take_gather(i, false);
    const Instance& made = instance(b);
    b.slots.assign(made.program->slots.size(), BufferId{});
    if (made.program->input >= 0) b.slots[static_cast<std::size_t>(made.program->input)] = hidden_;
    if (made.program->memory >= 0) b.slots[static_cast<std::size_t>(made.program->memory)] = memory_;
    if (i == 0) embedding_ = g;
    StepContext c{i, g.ready, g.weights, {}};
    emit_steps(made.program->forward, made.forward, made, c);
    if (made.program->output >= 0) hidden_ = b.slots[static_cast<std::size_t>(made.program->output)];
    if (kind_of(b).ends_encoder) memory_ = hidden_;
    if (!(i == 0 && tied_)) release(i, g);
  }

  BufferId gradient_of(int i) {
    Block& b = block(i);
    if (b.layout.padded == 0) return {};
    if (b.resident_gradient) return b.gradient;
    const BufferId id = declare(BufferRole::gradient, Memory::hbm, Owner::gradients, Lifetime::step, i, -1,
                                bytes_of(b.layout.padded, plan_.precision.gradients));
    alloc_one(i, id);
    return id;
  }

  void backward_block(int i) {
    Block& b = block(i);
    const BlockKind& kind = kind_of(b);
    Gather g;
    if (i > 0 || uses_.back() == 0) g = take_gather(i, true);
    const Instance& made = instance(b);
    if (kind.ends_encoder) leave_decoder(i);
    if (made.program->memory_gradient >= 0) {
      b.slots[static_cast<std::size_t>(made.program->memory_gradient)] = memory_gradient(i);
    }
    StepContext c{i, g.ready, g.weights, {}};
    c.gradient = i == 0 && tied_ ? embedding_gradient_ : gradient_of(i);
    if (made.program->output_gradient >= 0) {
      b.slots[static_cast<std::size_t>(made.program->output_gradient)] = hidden_gradient_;
    }
    emit_steps(made.program->backward, made.backward, made, c);
    if (made.program->input_gradient >= 0) {
      hidden_gradient_ = b.slots[static_cast<std::size_t>(made.program->input_gradient)];
    }
    release(i, g);
    reduce(i, c.gradient);
  }

  // Encoder-decoder models: the gradient of the encoder output is summed by all decoder layers.
  BufferId memory_gradient(int i) {
    if (memory_gradient_.index != 0xffffffff) return memory_gradient_;
    memory_gradient_ = declare(BufferRole::value_gradient, Memory::hbm, Owner::activations, Lifetime::step, i, -1,
                               builder_.buffer(memory_).size);
    alloc_one(i, memory_gradient_);
    const WorkId zero = shared(-1, kMemoryZero, [&] {
      return Compute{-1, kZero, Pass::backward, Pointwise{builder_.buffer(memory_).size}};
    });
    add(Stream::compute, i, zero, {}, {{memory_gradient_, Access::write}});
    return memory_gradient_;
  }
  void leave_decoder(int i) {
    hidden_gradient_ = memory_gradient(i);
    memory_gradient_ = {};
    free_one(i, memory_);
  }

  // --- loss head -----------------------------------------------------------------------------------

  void head_block(int i) {
    Block& b = block(i);
    const BlockKind& kind = kind_of(b);
    const Gather g = take_gather(i, false);
    const Instance& made = instance(b);
    b.slots.assign(made.program->slots.size(), BufferId{});
    b.slots[static_cast<std::size_t>(made.program->input)] = hidden_;
    StepContext c{i, g.ready, g.weights, {}};
    emit_steps(made.program->forward, made.forward, made, c);
    const BufferId head_input = made.program->output >= 0 ? b.slots[static_cast<std::size_t>(made.program->output)] : hidden_;
    phase_ = Phase::backward;
    c.gradient = gradient_of(i);
    if (tied_) embedding_gradient_ = gradient_of(0);
    hidden_gradient_ = declare(BufferRole::value_gradient, Memory::hbm, Owner::activations, Lifetime::step, i, kind.output,
                               builder_.buffer(head_input).size);
    alloc_one(i, hidden_gradient_);
    loss(i, kind, head_input, c);
    // The program keeps its output alive for the next block; the loss was its last reader.
    const auto& saved = made.program->saved;
    if (std::find(saved.begin(), saved.end(), made.program->output) == saved.end()) free_one(i, head_input);
    b.slots[static_cast<std::size_t>(made.program->output_gradient)] = hidden_gradient_;
    emit_steps(made.program->backward, made.backward, made, c);
    hidden_gradient_ = b.slots[static_cast<std::size_t>(made.program->input_gradient)];
    release(i, g);
    if (tied_) release(0, embedding_);
    reduce(i, c.gradient);
  }

  void loss(int i, const BlockKind& kind, BufferId input, const StepContext& c) {
    const std::int64_t tokens = plan_.micro_step().tokens();
    if (kind.vocab == 0) {  // no output matrix (ViT trunk): the caller's loss reads the features and writes their gradient
      const Bytes traffic = 2.0 * builder_.buffer(input).size;
      const WorkId work = shared(-1, kFeatureLoss, [&] { return Compute{-1, kHeadLoss, Pass::backward, Pointwise{traffic}}; });
      add(Stream::compute, i, work, {},
          {{input, Access::read}, {hidden_gradient_, Access::write}});
      return;
    }
    const std::int64_t chunk = std::min(plan_.loss_chunk_tokens, tokens);
    const std::int64_t whole = tokens / chunk;
    // The first chunk overwrites the weight gradient unless it adds to earlier micro-steps.
    const bool adds = accumulate_weights(block(i)) || (tied_ && accumulate_weights(block(0)));
    loss_chunk(i, kind, chunk, input, c, adds);
    const std::int64_t more = whole - 1;
    if (fold_layers_ && more >= 2) {
      repeat(more, [&] { loss_chunk(i, kind, chunk, input, c, true); });
    } else {
      for (std::int64_t k = 0; k < more; ++k) loss_chunk(i, kind, chunk, input, c, true);
    }
    if (tokens % chunk != 0) loss_chunk(i, kind, tokens % chunk, input, c, true);
  }

  struct ChunkWorks {
    WorkId logits, loss, data, weight;
  };
  const ChunkWorks& chunk_works(const BlockKind& kind, std::int64_t rows, bool adds, bool fp32_gradient) {
    auto [it, fresh] = chunk_works_.try_emplace({rows, adds});
    if (!fresh) return it->second;
    const DType type = compute_type();
    const std::int64_t v = kind.vocab, h = model_.hidden;
    const auto gemm = [&](std::int16_t op, Pass pass, Gemm g) { return builder_.work(Compute{-1, op, pass, g}); };
    it->second.logits = gemm(kHeadLogits, Pass::forward, {rows, v, h, 1, type, false, false});
    it->second.loss = builder_.work(Compute{-1, kHeadLoss, Pass::backward, Pointwise{3.0 * bytes_of(rows * v, type)}});
    it->second.data = gemm(kHeadData, Pass::backward_data, {rows, h, v, 1, type, false, false});
    it->second.weight = gemm(kHeadWeight, Pass::backward_weight, {v, h, rows, 1, type, fp32_gradient, adds});
    return it->second;
  }

  // Logits of some tokens, their loss and gradient in place, and both gradient products.
  void loss_chunk(int i, const BlockKind& kind, std::int64_t rows, BufferId input, const StepContext& c, bool adds) {
    const TensorSpec& matrix = kind.tensors[static_cast<std::size_t>(kind.head_tensor)];
    const Block& owner = block(matrix.tied ? 0 : i);
    const DType gradient_type = owner.resident_gradient ? plan_.precision.accumulation : plan_.precision.gradients;
    const ChunkWorks& w = chunk_works(kind, rows, adds, gradient_type == DType::fp32);
    const BufferId weights = matrix.tied ? embedding_.weights : c.weights;
    const BufferId gradient = matrix.tied ? embedding_gradient_ : c.gradient;
    const BufferId logits = declare(BufferRole::logits, Memory::hbm, Owner::logits, Lifetime::step, i, -1,
                                    bytes_of(rows * kind.vocab, compute_type()));
    alloc_one(i, logits);
    add(Stream::compute, i, w.logits, {}, {{input, Access::read}, {weights, Access::read}, {logits, Access::write}});
    add(Stream::compute, i, w.loss, {}, {{logits, Access::read_write}, {token_ids_, Access::read}, {scalars_, Access::read_write}});
    add(Stream::compute, i, w.data, {}, {{logits, Access::read}, {weights, Access::read}, {hidden_gradient_, Access::write}});
    add(Stream::compute, i, w.weight, {}, {{logits, Access::read}, {input, Access::read}, {gradient, Access::read_write}});
    free_one(i, logits);
  }

  // --- gradients across ranks ----------------------------------------------------------------------

  struct Pending {
    OpRef done;
    std::vector<BufferId> buffers;
    int block = -1;
  };

  /// Frees what the reduction before still held; compute waits for it here, one block later.
  void settle() {
    if (pending_.buffers.empty()) return;
    operands_.clear();
    for (BufferId id : pending_.buffers) operands_.push_back({id, Access::write});
    const OpRef done = pending_.done;
    pending_.done = {};
    pending_.buffers.clear();
    free(pending_.block, operands_, done);
  }

  void reduce(int i, BufferId gradient) {
    Block& b = block(i);
    if (b.layout.padded == 0) return;
    if (b.resident_gradient) {
      if (last_micro_step() && plan_.ranks > 1) reduce_in_place(i, b);
      return;
    }
    settle();
    pending_.block = i;
    pending_.buffers = {gradient};
    reduce_shard(i, b, gradient);
  }

  bool last_micro_step() const { return micro_step_ == plan_.accumulation - 1; }
  OpRef last_compute() const { return last_on_[static_cast<std::size_t>(Stream::compute)]; }

  // Whole gradients kept by every rank: reduced once a step, each rank's part in place.
  void reduce_in_place(int i, Block& b) {
    const DType type = plan_.precision.accumulation;
    const Operand whole{b.gradient, Access::read_write};
    if (plan_.zero_stage == 0) {
      all_reduce(i, b, Group::all, whole, b.layout.padded, type, last_compute());
      return;
    }
    OpRef done = last_compute();
    if (sharded()) done = reduce_scatter(i, b, whole, {}, type, done);
    if (plan_.replicas() > 1) all_reduce(i, b, Group::replica, whole, b.layout.shard, type, done);
  }

  OpRef all_reduce(int i, const Block& b, Group group, Operand operand, std::int64_t padded, DType type, OpRef after) {
    const WorkId work = shared(b.kind, group == Group::all ? kAllReduce : kReplicaReduce, [&] {
      const std::int64_t parts = b.layout.padded / padded;
      const std::int64_t elements = (b.layout.parameters + parts - 1) / parts;
      return Collective{CollectiveKind::all_reduce, group, elements, padded, type};
    });
    return add(Stream::reduce, i, work, {after}, {operand});
  }
  OpRef reduce_scatter(int i, const Block& b, Operand full, BufferId shard, DType type, OpRef after) {
    const WorkId work = shared(b.kind, kReduce, [&] {
      return Collective{CollectiveKind::reduce_scatter, Group::shard, b.layout.parameters, b.layout.padded, type};
    });
    if (shard.index == 0xffffffff) return add(Stream::reduce, i, work, {after}, {full});
    return add(Stream::reduce, i, work, {after}, {full, {shard, Access::write}});
  }

  // A block's gradient lives only until it is reduced into the rank's shard.
  void reduce_shard(int i, Block& b, BufferId gradient) {
    const Precision& p = plan_.precision;
    const std::int64_t n = gradient_elements(b);
    const bool direct = !b.host_gradient && !sums_gradients();
    OpRef done = last_compute();
    BufferId reduced = b.gradient_shard;
    if (plan_.ranks == 1) {
      reduced = gradient;  // nothing to reduce: it goes on as it is
    } else if (plan_.zero_stage == 0 || !sharded()) {
      done = all_reduce(i, b, sharded() ? Group::replica : Group::all, {gradient, Access::read_write}, b.layout.padded, p.gradients, done);
      reduced = gradient;
    } else {
      if (!direct) {
        reduced = declare(BufferRole::gradient_staging, Memory::hbm, Owner::buffers, Lifetime::step, i, -1,
                          bytes_of(n, p.gradients));
        done = alloc_one(i, reduced);
        pending_.buffers.push_back(reduced);
      }
      done = reduce_scatter(i, b, {gradient, Access::read}, reduced, p.gradients, done);
      if (plan_.replicas() > 1) done = all_reduce(i, b, Group::replica, {reduced, Access::read_write}, n, p.gradients, done);
    }
    if (reduced.index != b.gradient_shard.index) {
      done = b.host_gradient ? sum_on_host(i, b, reduced, done) : sum_on_device(i, b, reduced, done);
    }
    pending_.done = done;
    // Without a global norm to wait for, the update starts as soon as the gradient is there.
    if (last_micro_step() && !needs_barrier() && b.host_gradient && plan_.update == UpdateOn::host) {
      update(i, done);
    }
  }

  WorkId sum_work(const Block& b, std::int64_t n) {
    const Precision& p = plan_.precision;
    const bool first = micro_step_ == 0;
    return shared(b.kind, (first ? kSumFirst : kSumNext) + where(b), [&] {
      const Bytes sum = bytes_of(n, p.accumulation);
      const Pointwise traffic{bytes_of(n, p.gradients) + (first ? sum : 2.0 * sum)};
      return Compute{-1, kAccumulate, Pass::backward, traffic, b.host_gradient};
    });
  }
  Access sum_access() const { return micro_step_ == 0 ? Access::write : Access::read_write; }

  OpRef sum_on_device(int i, Block& b, BufferId reduced, OpRef after) {
    return add(Stream::reduce, i, sum_work(b, gradient_elements(b)), {after},
               {{reduced, Access::read}, {b.gradient_shard, sum_access()}});
  }

  OpRef sum_on_host(int i, Block& b, BufferId reduced, OpRef after) {
    const std::int64_t n = gradient_elements(b);
    const WorkId copy = shared(b.kind, kStageD2h, [&] {
      return Copy{Memory::hbm, Memory::pinned, bytes_of(n, plan_.precision.gradients)};
    });
    if (!sums_gradients()) {
      return add(Stream::d2h, i, copy, {after}, {{reduced, Access::read}, {b.gradient_shard, Access::write}});
    }
    const Ring::Slot slot = host_sum_.take();
    const OpRef copied =
        add(Stream::d2h, i, copy, {after, slot.free_after}, {{reduced, Access::read}, {slot.buffer, Access::write}});
    const OpRef summed = add(Stream::host, i, sum_work(b, n), {copied},
                             {{slot.buffer, Access::read}, {b.gradient_shard, sum_access()}});
    host_sum_.give_back(summed);
    host_summed_ = summed;
    return copied;  // device memory is free again; the host goes on
  }

  // --- micro-steps ---------------------------------------------------------------------------------

  void micro_step(std::int64_t index) {
    micro_step_ = index;
    phase_ = Phase::forward;
    const int head = num_blocks() - 1;
    for (int u = 0; u < plan_.prefetch_layers; ++u) issue_gather(static_cast<std::size_t>(u));
    for_blocks(0, head - 1, false, [&](int i) { forward_block(i); });
    head_block(head);
    for_blocks(0, head - 1, true, [&](int i) { backward_block(i); });
    settle();
    // The gradient of the embedding's output was the last one.
  }

  void micro_steps() {
    const std::int64_t steps = plan_.accumulation;
    micro_step(0);
    if (steps == 1) return;
    const std::int64_t inner = steps - 2;
    if (fold_micro_steps_ && inner >= 2) {
      repeat(inner, [&] { micro_step(1); });
    } else {
      for (std::int64_t m = 1; m <= inner; ++m) micro_step(m);
    }
    micro_step(steps - 1);
  }

  // --- optimizer -----------------------------------------------------------------------------------

  bool needs_barrier() const { return plan_.clip_norm > 0 || plan_.loss_scaling == LossScaling::dynamic; }

  OpRef join(int b) {
    std::vector<OpRef> all;
    for (std::size_t s = 0; s < last_on_.size(); ++s) {
      if (s != static_cast<std::size_t>(Stream::compute)) all.push_back(last_on_[s]);
    }
    return add(Stream::compute, b, join_work_, all, {});
  }

  void optimizer() {
    phase_ = Phase::optimizer;
    OpRef barrier = join(-1);
    if (needs_barrier()) barrier = global_norm(barrier);
    const auto left_to_do = [&](int i) {
      const Block& b = block(i);
      const bool done_in_backward = !needs_barrier() && b.host_gradient && plan_.update == UpdateOn::host;
      return b.layout.padded > 0 && !done_in_backward;
    };
    for (int i = 0; i < num_blocks(); ++i) {
      if (!left_to_do(i)) continue;
      int last = i;
      while (last + 1 < num_blocks() && left_to_do(last + 1)) ++last;
      for_blocks(i, last, false, [&](int k) { update(k, barrier); });
      i = last;
    }
    join(-1);
  }

  BufferId final_gradient(const Block& b) const { return b.resident_gradient ? b.gradient : b.gradient_shard; }

  // Sum of squares of every shard where it lies, then one small all-reduce: nothing is updated before.
  OpRef global_norm(OpRef after) {
    for_blocks(0, num_blocks() - 1, false, [&](int i) {
      const Block& b = block(i);
      if (b.layout.padded == 0) return;
      const WorkId work = shared(b.kind, kNorm + where(b), [&] {
        const Pointwise traffic{bytes_of(update_elements(b), plan_.precision.accumulation)};
        return Compute{-1, kGradientNorm, Pass::backward, traffic, b.host_gradient};
      });
      add(b.host_gradient ? Stream::host : Stream::compute, i, work, {after}, {{final_gradient(b), Access::read}});
    });
    const OpRef summed = join(-1);
    if (plan_.ranks == 1 || plan_.zero_stage == 0) return summed;
    const WorkId scalar = shared(-1, kScalarReduce, [&] {
      return Collective{CollectiveKind::all_reduce, Group::all, 1, 64, DType::fp32};
    });
    return add(Stream::reduce, -1, scalar, {summed}, {{scalars_, Access::read_write}});
  }

  void update(int i, OpRef barrier) {
    Block& b = block(i);
    OpRef done;
    if (b.optimizer == Tier::hbm) {
      done = update_on_device(i, b, barrier);
    } else {
      done = plan_.update == UpdateOn::host ? update_on_host(i, b, barrier) : update_streamed(i, b, barrier);
    }
    if ((plan_.zero_stage == 1 || plan_.zero_stage == 2) && sharded()) {
      const WorkId work = shared(b.kind, kUpdateGather, [&] {
        return Collective{CollectiveKind::all_gather, Group::shard, b.layout.parameters, b.layout.padded, compute_type()};
      });
      add(Stream::gather, i, work, {done}, {{b.weights, Access::read_write}});
    }
  }

  // Read and written: gradient, states and master both ways, new weights (runtime.md 7.1: 28 B for fp32 states).
  WorkId adam_work(const Block& b) {
    return shared(b.kind, kAdam + 100 * static_cast<int>(b.optimizer), [&] {
      const Precision& p = plan_.precision;
      const std::int64_t n = update_elements(b);
      const bool reads_weights = !p.master || p.split_master;
      const int bytes = size_of(p.accumulation) + 2 * p.optimizer_bytes_per_parameter() + size_of(p.weights) * (reads_weights ? 2 : 1);
      const bool on_host = b.optimizer != Tier::hbm && plan_.update == UpdateOn::host;
      return AdamStep{n, on_host ? UpdateOn::host : UpdateOn::device, Bytes(static_cast<double>(n * bytes))};
    });
  }

  BufferId device_weights(const Block& b) const { return b.resident_weights ? b.weights : b.shard; }

  void state_operands(const Block& b, Access access) {
    if (plan_.precision.master) operands_.push_back({b.master, access});
    operands_.push_back({b.moments, access});
  }

  OpRef update_on_device(int i, Block& b, OpRef barrier) {
    operands_ = {{final_gradient(b), Access::read}, {device_weights(b), Access::read_write}};
    state_operands(b, Access::read_write);
    return add(Stream::compute, i, adam_work(b), std::span<const OpRef>(&barrier, 1), operands_);
  }

  Bytes state_bytes(const Block& b) const {
    return Bytes(static_cast<double>(update_elements(b) * plan_.precision.optimizer_bytes_per_parameter()));
  }
  WorkId state_copy(const Block& b, What what, Memory from, Memory to) {
    return shared(b.kind, what, [&] { return Copy{from, to, state_bytes(b)}; });
  }

  // Host Adam: gradients come down, new weights go up; states on disk pass through pinned slots.
  OpRef update_on_host(int i, Block& b, OpRef barrier) {
    const std::int64_t n = update_elements(b);
    OpRef gradient_there = barrier, states_there;
    BufferId gradient = final_gradient(b);
    Ring::Slot states;
    const bool down = !b.host_gradient;
    if (down) {
      const Ring::Slot slot = gradient_down_.take();
      const WorkId copy = shared(b.kind, kGradientD2h, [&] {
        return Copy{Memory::hbm, Memory::pinned, bytes_of(n, plan_.precision.accumulation)};
      });
      gradient_there = add(Stream::d2h, i, copy, {barrier, slot.free_after}, {{gradient, Access::read}, {slot.buffer, Access::write}});
      gradient = slot.buffer;
    }
    if (b.optimizer == Tier::nvme) {
      states = nvme_states_.take();
      operands_.assign(1, {states.buffer, Access::write});
      state_operands(b, Access::read);
      states_there = add(Stream::nvme_read, i, state_copy(b, kStateRead, Memory::nvme, Memory::pinned),
                         std::span<const OpRef>(&states.free_after, 1), operands_);
    }
    const OpRef adam = host_adam(i, b, {gradient_there, states_there, host_summed_}, gradient, states.buffer);
    if (down) gradient_down_.give_back(adam);
    if (b.optimizer == Tier::nvme) {
      operands_.assign(1, {states.buffer, Access::read});
      state_operands(b, Access::write);
      nvme_states_.give_back(add(Stream::nvme_write, i, state_copy(b, kStateWrite, Memory::pinned, Memory::nvme),
                                 std::span<const OpRef>(&adam, 1), operands_));
    }
    return weights_after_host(i, b, adam);
  }

  OpRef host_adam(int i, Block& b, std::array<OpRef, 3> after, BufferId gradient, BufferId state_slot) {
    operands_.assign(1, {gradient, Access::read});
    if (b.optimizer == Tier::nvme) {
      operands_.push_back({state_slot, Access::read_write});
    } else {
      state_operands(b, Access::read_write);
    }
    OpRef slot_free;
    if (uses_weight_ring(b)) {
      const Ring::Slot slot = weight_up_.take();
      slot_free = slot.free_after;
      weight_target_ = slot.buffer;
    } else {
      weight_target_ = b.shard;
    }
    operands_.push_back({weight_target_, Access::write});
    const std::array<OpRef, 4> edges{after[0], after[1], after[2], slot_free};
    return add(Stream::host, i, adam_work(b), edges, operands_);
  }
  bool uses_weight_ring(const Block& b) const { return weights_end_in_hbm(b) || b.parameters == Tier::nvme; }

  OpRef weights_after_host(int i, Block& b, OpRef adam) {
    if (!uses_weight_ring(b)) return adam;
    const Bytes bytes = bytes_of(update_elements(b), compute_type());
    OpRef moved;
    if (weights_end_in_hbm(b)) {
      const WorkId copy = shared(b.kind, kWeightH2d, [&] { return Copy{Memory::pinned, Memory::hbm, bytes}; });
      moved = add(Stream::h2d, i, copy, {adam}, {{weight_target_, Access::read}, {device_weights(b), Access::write}});
    } else {
      const WorkId write = shared(b.kind, kWeightWrite, [&] { return Copy{Memory::pinned, Memory::nvme, bytes}; });
      moved = add(Stream::nvme_write, i, write, {adam}, {{weight_target_, Access::read}, {b.shard, Access::write}});
    }
    weight_up_.give_back(moved);
    return moved;
  }

  // States kept on the host (or disk) but updated by the GPU: in, Adam, out.
  OpRef update_streamed(int i, Block& b, OpRef barrier) {
    const Ring::Slot device = device_states_.take();
    OpRef loaded;
    BufferId source;
    Ring::Slot host;
    const bool disk = b.optimizer == Tier::nvme;
    if (disk) {
      host = nvme_states_.take();
      source = host.buffer;
      operands_.assign(1, {host.buffer, Access::write});
      state_operands(b, Access::read);
      loaded = add(Stream::nvme_read, i, state_copy(b, kStateRead, Memory::nvme, Memory::pinned),
                   std::span<const OpRef>(&host.free_after, 1), operands_);
    }
    operands_.assign(1, {device.buffer, Access::write});
    if (disk) operands_.push_back({source, Access::read});
    else state_operands(b, Access::read);
    const std::array<OpRef, 2> up{device.free_after, loaded};
    const OpRef there = add(Stream::h2d, i, state_copy(b, kStateH2d, Memory::pinned, Memory::hbm), up, operands_);
    const OpRef adam = streamed_adam(i, b, device.buffer, there, barrier);
    operands_.assign(1, {device.buffer, Access::read});
    if (disk) operands_.push_back({source, Access::write});
    else state_operands(b, Access::write);
    const OpRef back = add(Stream::d2h, i, state_copy(b, kStateD2h, Memory::hbm, Memory::pinned), std::span<const OpRef>(&adam, 1), operands_);
    device_states_.give_back(back);
    if (disk) {
      operands_.assign(1, {source, Access::read});
      state_operands(b, Access::write);
      nvme_states_.give_back(add(Stream::nvme_write, i, state_copy(b, kStateWrite, Memory::pinned, Memory::nvme), std::span<const OpRef>(&back, 1), operands_));
    }
    return adam;
  }

  OpRef streamed_adam(int i, Block& b, BufferId states, OpRef there, OpRef barrier) {
    BufferId gradient = final_gradient(b);
    OpRef gradient_there;
    if (b.host_gradient) {
      const Ring::Slot slot = gradient_up_.take();
      const WorkId copy = shared(b.kind, kGradientH2d, [&] {
        return Copy{Memory::pinned, Memory::hbm, bytes_of(update_elements(b), plan_.precision.accumulation)};
      });
      gradient_there = add(Stream::h2d, i, copy, {barrier, slot.free_after, host_summed_}, {{gradient, Access::read}, {slot.buffer, Access::write}});
      gradient = slot.buffer;
    }
    const OpRef adam = add(Stream::compute, i, adam_work(b), {there, gradient_there, barrier},
                           {{gradient, Access::read}, {states, Access::read_write}, {device_weights(b), Access::read_write}});
    if (b.host_gradient) gradient_up_.give_back(adam);
    return adam;
  }

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
  std::array<OpRef, kNumStreams> last_on_{};
  std::vector<Gather> queue_;
  Gather embedding_;
  Pending pending_;
  Ring nvme_weights_, host_sum_, gradient_down_, weight_up_, nvme_states_, device_states_, gradient_up_;
  OpRef host_summed_;  // last sum into a host gradient
  BufferId weight_target_;
  BufferId hidden_, hidden_gradient_, memory_, memory_gradient_, embedding_gradient_;
};

}  // namespace

Lowering::Lowering(const ModelSpec& model) : state_(std::make_unique<State>(model)) {}
Lowering::~Lowering() = default;

Schedule Lowering::zeroplan(const Plan& plan, Folding folding) { return Emitter(*state_, plan, folding).run(); }

Schedule lower(const ModelSpec& model, const Plan& plan, Folding folding) {
  if (plan.engine != Engine::zeroplan) {
    throw InputError("engine '" + std::string(to_string(plan.engine)) + "' has no lowering yet: expected zeroplan");
  }
  return Lowering(model).zeroplan(plan, folding);
}

}  // namespace zeroplan
