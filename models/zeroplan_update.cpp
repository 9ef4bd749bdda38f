// The zeroplan engine: the global norm and the optimizer.

#include "models/zeroplan_emitter.h"

namespace zeroplan::zeroplan_engine {
namespace {

constexpr std::int64_t kNormElements = 64;  // an ExactSum has 40 digits; one buffer unit
constexpr std::uint32_t kNoBuffer = 0xffffffff;

}  // namespace

OpRef Emitter::join(int b) {
  std::vector<OpRef> all;
  for (std::size_t s = 0; s < last_on_.size(); ++s) {
    if (s != static_cast<std::size_t>(Stream::compute)) all.push_back(last_on_[s]);
  }
  return add(Stream::compute, b, join_work_, all, {});
}

void Emitter::optimizer() {
  phase_ = Phase::optimizer;
  const OpRef gradients = join(-1);
  Barrier barrier{gradients, gradients};
  if (needs_barrier()) barrier = global_norm(gradients);
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

// The norm lies where gradients do; the all-reduce is on the device; whoever updates reads it on its side.
void Emitter::declare_norm() {
  const Bytes size = bytes_of(kNormElements, DType::fp32);
  norm_ = resident(BufferRole::norm, Memory::hbm, Owner::buffers, -1, size);
  const auto some = [&](auto holds) { return std::any_of(blocks_.begin(), blocks_.end(), holds); };
  const bool summed_on_host = some([](const Block& b) { return b.layout.padded > 0 && b.host_gradient; });
  const bool updated_on_host = plan_.update == UpdateOn::host &&
                               some([](const Block& b) { return b.layout.padded > 0 && b.optimizer != Tier::hbm; });
  if (summed_on_host) norm_part_ = resident(BufferRole::norm, Memory::hbm, Owner::buffers, -1, size);
  if (summed_on_host || updated_on_host) {
    host_norm_ = resident(BufferRole::norm, Memory::pinned, Owner::buffers, -1, size);
  }
}

void Emitter::clear_norm(Stream stream, BufferId norm, OpRef after) {
  const bool on_host = stream == Stream::host;
  const WorkId work = shared(-1, kNormZero + (on_host ? 200 : 0), [&] {
    return Compute{-1, kZero, Pass::backward, Pointwise{builder_.buffer(norm).size}, on_host};
  });
  add(stream, -1, work, {after}, {{norm, Access::write}});
}

// Sum of squares of every shard where it lies, then one small all-reduce among the ranks that share one copy of the
// states: nothing is updated before.
Barrier Emitter::global_norm(OpRef after) {
  clear_norm(Stream::compute, norm_, after);
  if (norm_part_.index != kNoBuffer) clear_norm(Stream::host, host_norm_, after);
  for_blocks(0, num_blocks() - 1, false, [&](int i) {
    const Block& b = block(i);
    if (b.layout.padded == 0) return;
    const WorkId work = shared(b.kind, kNorm + where(b), [&] {
      const Pointwise traffic{bytes_of(update_elements(b), plan_.precision.accumulation), update_elements(b)};
      return Compute{-1, kGradientNorm, Pass::backward, traffic, b.host_gradient};
    });
    add(b.host_gradient ? Stream::host : Stream::compute, i, work, {after},
        {{final_gradient(b), Access::read}, {b.host_gradient ? host_norm_ : norm_, Access::read_write}});
  });
  OpRef known = join(-1);
  if (norm_part_.index != kNoBuffer) known = norm_from_host(known);
  if (sharded()) {
    // Every replica holds the whole gradient among its ranks: a sum over all ranks would count it once a replica.
    const WorkId scalar = shared(-1, kScalarReduce, [&] {
      return Collective{CollectiveKind::all_reduce, Group::shard, 1, kNormElements, DType::fp32};
    });
    known = add(Stream::reduce, -1, scalar, {known}, {{norm_, Access::read_write}});
  }
  if (host_norm_.index == kNoBuffer) return {known, known};
  const WorkId down = shared(-1, kNormD2h, [&] {
    return Copy{Memory::hbm, Memory::pinned, builder_.buffer(norm_).size};
  });
  return {known, add(Stream::d2h, -1, down, {known}, {{norm_, Access::read}, {host_norm_, Access::write}})};
}

OpRef Emitter::norm_from_host(OpRef after) {
  const Bytes size = builder_.buffer(norm_).size;
  const WorkId up = shared(-1, kNormH2d, [&] { return Copy{Memory::pinned, Memory::hbm, size}; });
  const OpRef there = add(Stream::h2d, -1, up, {after}, {{host_norm_, Access::read}, {norm_part_, Access::write}});
  const WorkId sum = shared(-1, kNormSumWork, [&] {
    return Compute{-1, kNormSum, Pass::backward, Pointwise{3.0 * size}};
  });
  return add(Stream::compute, -1, sum, {there}, {{norm_part_, Access::read}, {norm_, Access::read_write}});
}

void Emitter::update(int i, const Barrier& barrier) {
  Block& b = block(i);
  OpRef done;
  if (b.optimizer == Tier::hbm) {
    done = update_on_device(i, b, barrier.device);
  } else {
    done = plan_.update == UpdateOn::host ? update_on_host(i, b, barrier) : update_streamed(i, b, barrier.device);
  }
  if ((plan_.zero_stage == 1 || plan_.zero_stage == 2) && sharded()) {
    const WorkId work = shared(b.kind, kUpdateGather, [&] {
      return Collective{CollectiveKind::all_gather, Group::shard, b.layout.parameters, b.layout.padded, compute_type()};
    });
    add(Stream::gather, i, work, {done}, {{b.weights, Access::read_write}});
  }
}

// Read and written: gradient, states and master both ways, new weights (runtime.md 7.1: 28 B for fp32 states).
WorkId Emitter::adam_work(const Block& b) {
  return shared(b.kind, kAdam + 100 * static_cast<int>(b.optimizer), [&] {
    const Precision& p = plan_.precision;
    const std::int64_t n = update_elements(b);
    const int bytes = size_of(p.accumulation) + 2 * p.optimizer_bytes_per_parameter() +
                      size_of(p.weights) * (reads_weights() ? 2 : 1);
    const bool on_host = b.optimizer != Tier::hbm && plan_.update == UpdateOn::host;
    return AdamStep{n, on_host ? UpdateOn::host : UpdateOn::device, Bytes(static_cast<double>(n * bytes))};
  });
}

void Emitter::state_operands(const Block& b, Access access) {
  if (plan_.precision.master) operands_.push_back({b.master, access});
  operands_.push_back({b.moments, access});
}

OpRef Emitter::update_on_device(int i, Block& b, OpRef barrier) {
  operands_ = {{final_gradient(b), Access::read}, {device_weights(b), Access::read_write}};
  state_operands(b, Access::read_write);
  norm_operand(norm_);
  return add(Stream::compute, i, adam_work(b), std::span<const OpRef>(&barrier, 1), operands_);
}

Bytes Emitter::state_bytes(const Block& b) const {
  return Bytes(static_cast<double>(update_elements(b) * plan_.precision.optimizer_bytes_per_parameter()));
}

WorkId Emitter::state_copy(const Block& b, What what, Memory from, Memory to) {
  return shared(b.kind, what, [&] { return Copy{from, to, state_bytes(b)}; });
}

OpRef Emitter::read_states(int i, const Block& b, const Ring::Slot& slot) {
  operands_.assign(1, {slot.buffer, Access::write});
  state_operands(b, Access::read);
  return add(Stream::nvme_read, i, state_copy(b, kStateRead, Memory::nvme, Memory::pinned),
             std::span<const OpRef>(&slot.free_after, 1), operands_);
}

void Emitter::write_states(int i, const Block& b, BufferId slot, OpRef after) {
  operands_.assign(1, {slot, Access::read});
  state_operands(b, Access::write);
  nvme_states_.give_back(add(Stream::nvme_write, i, state_copy(b, kStateWrite, Memory::pinned, Memory::nvme),
                             std::span<const OpRef>(&after, 1), operands_));
}

// --- updated by the host ------------------------------------------------------------------------------

// Gradients come down, new weights go up; states on disk pass through pinned slots.
OpRef Emitter::update_on_host(int i, Block& b, const Barrier& barrier) {
  OpRef gradient_there = barrier.host, states_there;
  BufferId gradient = final_gradient(b);
  Ring::Slot states;
  const bool down = !b.host_gradient, disk = b.optimizer == Tier::nvme;
  if (down) gradient_there = gradient_to_host(i, b, gradient, barrier.host);
  if (disk) {
    states = nvme_states_.take();
    states_there = read_states(i, b, states);
  }
  const OpRef adam = host_adam(i, b, {gradient_there, states_there, host_summed_}, gradient, states.buffer);
  if (down) gradient_down_.give_back(adam);
  if (disk) write_states(i, b, states.buffer, adam);
  return weights_after_host(i, b, adam);
}

OpRef Emitter::gradient_to_host(int i, const Block& b, BufferId& gradient, OpRef barrier) {
  const Ring::Slot slot = gradient_down_.take();
  const WorkId copy = shared(b.kind, kGradientD2h, [&] {
    return Copy{Memory::hbm, Memory::pinned, bytes_of(update_elements(b), plan_.precision.accumulation)};
  });
  const OpRef there =
      add(Stream::d2h, i, copy, {barrier, slot.free_after}, {{gradient, Access::read}, {slot.buffer, Access::write}});
  gradient = slot.buffer;
  return there;
}

OpRef Emitter::host_adam(int i, Block& b, std::array<OpRef, 3> after, BufferId gradient, BufferId state_slot) {
  operands_.assign(1, {gradient, Access::read});
  if (b.optimizer == Tier::nvme) {
    operands_.push_back({state_slot, Access::read_write});
  } else {
    state_operands(b, Access::read_write);
  }
  OpRef target_ready;
  if (uses_weight_ring(b)) {
    const Ring::Slot slot = weight_up_.take();
    weight_target_ = slot.buffer;
    target_ready = reads_weights() ? old_weights(i, b, slot, after[0]) : slot.free_after;
  } else {
    weight_target_ = b.shard;
  }
  operands_.push_back({weight_target_, reads_weights() ? Access::read_write : Access::write});
  norm_operand(host_norm_);
  const std::array<OpRef, 4> edges{after[0], after[1], after[2], target_ready};
  return add(Stream::host, i, adam_work(b), edges, operands_);
}

// Weights that are a part of the master (split master), or the master itself (fp32), come to the host first.
OpRef Emitter::old_weights(int i, const Block& b, const Ring::Slot& slot, OpRef after) {
  const Bytes bytes = bytes_of(update_elements(b), compute_type());
  const Operand to{slot.buffer, Access::write};
  if (weights_end_in_hbm(b)) {
    const WorkId down = shared(b.kind, kWeightD2h, [&] { return Copy{Memory::hbm, Memory::pinned, bytes}; });
    return add(Stream::d2h, i, down, {after, slot.free_after}, {{device_weights(b), Access::read}, to});
  }
  const WorkId read = shared(b.kind, kWeightRead, [&] { return Copy{Memory::nvme, Memory::pinned, bytes}; });
  return add(Stream::nvme_read, i, read, {slot.free_after}, {{b.shard, Access::read}, to});
}

OpRef Emitter::weights_after_host(int i, Block& b, OpRef adam) {
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

// --- updated by the GPU, states kept elsewhere --------------------------------------------------------

// In, Adam, out.
OpRef Emitter::update_streamed(int i, Block& b, OpRef barrier) {
  const Ring::Slot device = device_states_.take();
  const bool disk = b.optimizer == Tier::nvme;
  Ring::Slot host;
  OpRef loaded;
  if (disk) {
    host = nvme_states_.take();
    loaded = read_states(i, b, host);
  }
  // The pinned slot, or the states themselves in host memory.
  const auto host_operands = [&](Access access) {
    if (disk) {
      operands_.push_back({host.buffer, access});
    } else {
      state_operands(b, access);
    }
  };
  operands_.assign(1, {device.buffer, Access::write});
  host_operands(Access::read);
  const std::array<OpRef, 2> up{device.free_after, loaded};
  const OpRef there = add(Stream::h2d, i, state_copy(b, kStateH2d, Memory::pinned, Memory::hbm), up, operands_);
  const OpRef adam = streamed_adam(i, b, device.buffer, there, barrier);
  operands_.assign(1, {device.buffer, Access::read});
  host_operands(Access::write);
  const OpRef back = add(Stream::d2h, i, state_copy(b, kStateD2h, Memory::hbm, Memory::pinned),
                         std::span<const OpRef>(&adam, 1), operands_);
  device_states_.give_back(back);
  if (disk) write_states(i, b, host.buffer, back);
  return adam;
}

OpRef Emitter::streamed_adam(int i, Block& b, BufferId states, OpRef there, OpRef barrier) {
  BufferId gradient = final_gradient(b);
  OpRef gradient_there;
  if (b.host_gradient) {
    const Ring::Slot slot = gradient_up_.take();
    const WorkId copy = shared(b.kind, kGradientH2d, [&] {
      return Copy{Memory::pinned, Memory::hbm, bytes_of(update_elements(b), plan_.precision.accumulation)};
    });
    gradient_there = add(Stream::h2d, i, copy, {barrier, slot.free_after, host_summed_},
                         {{gradient, Access::read}, {slot.buffer, Access::write}});
    gradient = slot.buffer;
  }
  operands_ = {{gradient, Access::read}, {states, Access::read_write}, {device_weights(b), Access::read_write}};
  norm_operand(norm_);
  const std::array<OpRef, 3> edges{there, gradient_there, barrier};
  const OpRef adam = add(Stream::compute, i, adam_work(b), edges, operands_);
  if (b.host_gradient) gradient_up_.give_back(adam);
  return adam;
}

}  // namespace zeroplan::zeroplan_engine
