// The zeroplan engine's step. Streams: compute carries kernels and every Alloc and Free; gathers, reductions and copies
// run beside it. Order of one micro-step: blocks forward, loss head in chunks, blocks backward; then the optimizer.
// Here: set-up, the order of micro-steps, and what lower.h promises.

#include <memory>
#include <string>

#include "models/error.h"
#include "models/zeroplan_emitter.h"

namespace zeroplan {
namespace zeroplan_engine {
namespace {

constexpr int kStateRingSlots = 3;   // NVMe: one read, one updated, one written
constexpr int kUpdateRingSlots = 2;  // gradients, weights and streamed states on their way

constexpr std::size_t kOpsReserved = 1024;  // folded schedules have 300 to 900

}  // namespace

Emitter::Emitter(Lowering::State& state, const Plan& plan, Folding folding)
    : state_(state),
      model_(state.model),
      plan_(plan),
      fold_layers_(folding == Folding::layers),
      fold_micro_steps_(folding != Folding::none) {
  make_blocks();
}

Schedule Emitter::run() {
  builder_.reserve(kOpsReserved);
  declare_resident();
  micro_steps();
  optimizer();
  return builder_.finish();
}

// --- blocks -------------------------------------------------------------------------------------------

void Emitter::make_blocks() {
  int layer = 0;
  for (int i = 0; i < static_cast<int>(model_.sequence.size()); ++i) {
    blocks_.push_back(make_block(i));
    Block& b = blocks_.back();
    if (b.role == BlockRole::layer && layer++ < plan_.recompute_layers) b.recompute = plan_.recompute;
  }
  for (int i = 1; i < num_blocks(); ++i) tied_ = tied_ || block(i).uses_tied;
  for (int i = 0; i < num_blocks(); ++i) uses_.push_back(i);
  for (int i = num_blocks() - 2; i > 0; --i) uses_.push_back(i);
  if (backward_reads_weights(block(0))) uses_.push_back(0);
  alloc_work_ = builder_.work(Alloc{});
  free_work_ = builder_.work(Free{});
  join_work_ = builder_.work(Join{});
}

Block Emitter::make_block(int i) {
  Block b;
  b.kind = model_.sequence[static_cast<std::size_t>(i)];
  const BlockKind& kind = kind_of(b);
  b.role = kind.role;
  auto [layout, fresh] = layouts_.try_emplace(b.kind);
  if (fresh) layout->second = flat_layout(kind, compute_type(), plan_.shard_ranks);
  b.layout = layout->second;
  b.parameters = plan_.parameters.tier_of(i);
  b.optimizer = plan_.optimizer.tier_of(i);
  b.host_gradient = plan_.gradients == Tier::host && b.optimizer != Tier::hbm;
  b.resident_weights = plan_.zero_stage < 3 || (!sharded() && b.parameters == Tier::hbm);
  b.resident_gradient =
      (plan_.zero_stage <= 1 && plan_.reduce_each == ReduceEach::step) || (plan_.ranks == 1 && !b.host_gradient);
  for (const TensorSpec& tensor : kind.tensors) b.uses_tied = b.uses_tied || tensor.tied;
  return b;
}

bool Emitter::backward_reads_weights(const Block& b) const {
  const auto& ops = kind_of(b).ops;
  return std::any_of(ops.begin(), ops.end(),
                     [](const GraphOp& op) { return !op.inputs.empty() && !op.tensors.empty(); });
}

std::int64_t Emitter::gradient_elements(const Block& b) const {
  if (b.resident_gradient || plan_.zero_stage == 0) return b.layout.padded;
  return b.layout.shard;
}

// --- resident buffers ---------------------------------------------------------------------------------

Memory Emitter::state_memory(Tier tier) const {
  if (tier == Tier::hbm) return Memory::hbm;
  if (tier == Tier::nvme) return Memory::nvme;
  return plan_.update == UpdateOn::device ? Memory::pinned : Memory::dram;
}

Memory Emitter::weight_memory(Tier tier) {
  return tier == Tier::hbm ? Memory::hbm : tier == Tier::host ? Memory::pinned : Memory::nvme;
}

void Emitter::declare_resident() {
  const std::int64_t tokens = plan_.micro_step().tokens();
  token_ids_ = resident(BufferRole::token_ids, Memory::hbm, Owner::buffers, -1, bytes_of(2 * tokens, DType::i32));
  scalars_ = resident(BufferRole::scalars, Memory::hbm, Owner::buffers, -1, bytes_of(64, DType::fp32));
  for (int i = 0; i < num_blocks(); ++i) {
    Block& b = block(i);
    if (b.layout.padded == 0) continue;
    declare_weights(i, b);
    declare_gradient(i, b);
    declare_states(i, b);
  }
  declare_rings();
  if (needs_barrier()) declare_norm();
}

void Emitter::declare_weights(int i, Block& b) {
  const DType type = compute_type();
  if (b.resident_weights) {
    b.weights = resident(BufferRole::weights, Memory::hbm, Owner::parameters, i, bytes_of(b.layout.padded, type));
  } else {
    b.shard = resident(BufferRole::weight_shard, weight_memory(b.parameters), Owner::parameters, i,
                       bytes_of(b.layout.shard, type));
  }
}

void Emitter::declare_gradient(int i, Block& b) {
  const DType type = plan_.precision.accumulation;
  if (b.resident_gradient) {
    b.gradient = resident(BufferRole::gradient, Memory::hbm, Owner::gradients, i, bytes_of(b.layout.padded, type));
    return;
  }
  const bool pinned = b.host_gradient && !sums_gradients();
  const Memory memory = !b.host_gradient ? Memory::hbm : pinned ? Memory::pinned : Memory::dram;
  b.gradient_shard =
      resident(BufferRole::gradient_shard, memory, Owner::gradients, i, bytes_of(gradient_elements(b), type));
}

int Emitter::master_bytes() const {
  const Precision& p = plan_.precision;
  return !p.master ? 0 : p.split_master ? 2 : 4;
}

void Emitter::declare_states(int i, Block& b) {
  const Memory memory = state_memory(b.optimizer);
  const std::int64_t n = update_elements(b);
  if (plan_.precision.master) {
    b.master =
        resident(BufferRole::master, memory, Owner::optimizer, i, Bytes(static_cast<double>(n * master_bytes())));
  }
  b.moments = resident(BufferRole::moments, memory, Owner::optimizer, i, bytes_of(2 * n, plan_.precision.states));
}

// --- rings --------------------------------------------------------------------------------------------

// Rings exist only where some block needs them; the largest block sets their size.
Emitter::RingElements Emitter::ring_elements() const {
  RingElements most;
  const auto raise = [](std::int64_t& at_most, std::int64_t value) { at_most = std::max(at_most, value); };
  for (const Block& b : blocks_) {
    const std::int64_t n = update_elements(b);
    if (!b.resident_weights && b.parameters == Tier::nvme) raise(most.nvme_weights, b.layout.shard);
    if (b.host_gradient && sums_gradients()) raise(most.host_sum, b.layout.shard);
    if (b.optimizer == Tier::hbm) continue;
    if (b.optimizer == Tier::nvme) raise(most.nvme_states, n);
    if (plan_.update == UpdateOn::device) {
      raise(most.device_states, n);
      if (b.host_gradient) raise(most.gradient_up, n);
    } else {
      if (!b.host_gradient) raise(most.gradient_down, n);
      if (uses_weight_ring(b)) raise(most.weight_up, n);
    }
  }
  return most;
}

Ring Emitter::make_ring(int slots, BufferRole role, Memory memory, std::int64_t elements, int element_bytes) {
  Ring ring;
  if (elements == 0) return ring;
  const Bytes size(static_cast<double>(elements * element_bytes));
  for (int k = 0; k < slots; ++k) ring.buffers.push_back(resident(role, memory, Owner::buffers, -1, size));
  ring.last_use.assign(static_cast<std::size_t>(slots), OpRef{});
  return ring;
}

void Emitter::declare_rings() {
  using enum BufferRole;
  const Precision& p = plan_.precision;
  const RingElements n = ring_elements();
  const int weight = size_of(p.weights), sum = size_of(p.accumulation);
  const int states = master_bytes() + 2 * size_of(p.states);
  nvme_weights_ = make_ring(plan_.prefetch_layers + 2, weight_staging, Memory::pinned, n.nvme_weights, weight);
  host_sum_ = make_ring(kUpdateRingSlots, gradient_staging, Memory::pinned, n.host_sum, size_of(p.gradients));
  gradient_down_ = make_ring(kUpdateRingSlots, gradient_staging, Memory::pinned, n.gradient_down, sum);
  weight_up_ = make_ring(kUpdateRingSlots, weight_staging, Memory::pinned, n.weight_up, weight);
  nvme_states_ = make_ring(kStateRingSlots, state_slot, Memory::pinned, n.nvme_states, states);
  device_states_ = make_ring(kUpdateRingSlots, state_slot, Memory::hbm, n.device_states, states);
  gradient_up_ = make_ring(kUpdateRingSlots, gradient_staging, Memory::hbm, n.gradient_up, sum);
}

// --- micro-steps --------------------------------------------------------------------------------------

std::vector<OpRef*> Emitter::carried_state() {
  std::vector<OpRef*> refs;
  for (Gather& g : queue_) refs.push_back(&g.ready);
  refs.push_back(&pending_.done);
  for (Ring* ring :
       {&nvme_weights_, &host_sum_, &gradient_down_, &weight_up_, &nvme_states_, &device_states_, &gradient_up_}) {
    for (OpRef& ref : ring->last_use) refs.push_back(&ref);
  }
  return refs;
}

void Emitter::micro_step(std::int64_t index) {
  micro_step_ = index;
  phase_ = Phase::forward;
  const int head = num_blocks() - 1;
  for (int u = 0; u < plan_.prefetch_layers; ++u) issue_gather(static_cast<std::size_t>(u));
  for_blocks(0, head - 1, false, [&](int i) { forward_block(i); });
  head_block(head);
  for_blocks(0, head - 1, true, [&](int i) { backward_block(i); });
  settle();  // the embedding's gradient was the last one
}

void Emitter::micro_steps() {
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

}  // namespace zeroplan_engine

Lowering::Lowering(const ModelSpec& model) : state_(std::make_unique<State>(model)) {}
Lowering::~Lowering() = default;

Schedule Lowering::zeroplan(const Plan& plan, Folding folding) {
  return zeroplan_engine::Emitter(*state_, plan, folding).run();
}

Schedule lower(const ModelSpec& model, const Plan& plan, Folding folding) {
  if (plan.engine != Engine::zeroplan) {
    throw InputError("engine '" + std::string(to_string(plan.engine)) + "' has no lowering yet: expected zeroplan");
  }
  return Lowering(model).zeroplan(plan, folding);
}

}  // namespace zeroplan
