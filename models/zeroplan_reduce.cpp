// The zeroplan engine: gradients across ranks and over micro-steps.

#include "models/zeroplan_emitter.h"

namespace zeroplan::zeroplan_engine {

void Emitter::settle() {
  if (pending_.buffers.empty()) return;
  operands_.clear();
  for (BufferId id : pending_.buffers) operands_.push_back({id, Access::write});
  const OpRef done = pending_.done;
  pending_.done = {};
  pending_.buffers.clear();
  free(pending_.block, operands_, done);
}

void Emitter::reduce(int i, BufferId gradient) {
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

// Whole gradients kept by every rank: reduced once a step, each rank's part in place.
void Emitter::reduce_in_place(int i, Block& b) {
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

OpRef Emitter::all_reduce(int i, const Block& b, Group group, Operand operand, std::int64_t padded, DType type,
                          OpRef after) {
  const WorkId work = shared(b.kind, (group == Group::all ? kAllReduce : kReplicaReduce) + where(b), [&] {
    const std::int64_t parts = b.layout.padded / padded;
    const std::int64_t elements = (b.layout.parameters + parts - 1) / parts;
    return Collective{CollectiveKind::all_reduce, group, elements, padded, type};
  });
  return add(Stream::reduce, i, work, {after}, {operand});
}

OpRef Emitter::reduce_scatter(int i, const Block& b, Operand full, BufferId shard, DType type, OpRef after) {
  const WorkId work = shared(b.kind, kReduce, [&] {
    return Collective{CollectiveKind::reduce_scatter, Group::shard, b.layout.parameters, b.layout.padded, type};
  });
  if (shard.index == 0xffffffff) return add(Stream::reduce, i, work, {after}, {full});
  return add(Stream::reduce, i, work, {after}, {full, {shard, Access::write}});
}

// A block's gradient lives only until it is reduced into the rank's shard.
void Emitter::reduce_shard(int i, Block& b, BufferId gradient) {
  const Precision& p = plan_.precision;
  const std::int64_t n = gradient_elements(b);
  const bool direct = !b.host_gradient && !sums_gradients();
  OpRef done = last_compute();
  BufferId reduced = b.gradient_shard;
  if (plan_.ranks == 1) {
    reduced = gradient;     // nothing to reduce: it goes on as it is
  } else if (!sharded()) {  // stage 0 too: check_plan() allows no shard group there
    done = all_reduce(i, b, Group::all, {gradient, Access::read_write}, b.layout.padded, p.gradients, done);
    reduced = gradient;
  } else {
    if (!direct) {
      reduced = declare(BufferRole::gradient_staging, Memory::hbm, Owner::buffers, Lifetime::step, i, -1,
                        bytes_of(n, p.gradients));
      done = alloc_one(i, reduced);
      pending_.buffers.push_back(reduced);
    }
    done = reduce_scatter(i, b, {gradient, Access::read}, reduced, p.gradients, done);
    // Sums that lie on the host cross replicas before they go down, each micro-step; others once a step, below.
    if (plan_.replicas() > 1 && b.host_gradient) {
      done = all_reduce(i, b, Group::replica, {reduced, Access::read_write}, n, p.gradients, done);
    }
  }
  if (reduced.index != b.gradient_shard.index) {
    done = b.host_gradient ? sum_on_host(i, b, reduced, done) : sum_on_device(i, b, reduced, done);
  }
  if (sharded() && plan_.replicas() > 1 && !b.host_gradient && last_micro_step()) {
    done = all_reduce(i, b, Group::replica, {b.gradient_shard, Access::read_write}, n, p.accumulation, done);
  }
  pending_.done = done;
  // Without a global norm to wait for, the update starts as soon as the gradient is there.
  if (last_micro_step() && !needs_barrier() && b.host_gradient && plan_.update == UpdateOn::host) {
    update(i, {done, done});
  }
}

WorkId Emitter::sum_work(const Block& b, std::int64_t n) {
  const Precision& p = plan_.precision;
  const bool first = micro_step_ == 0;
  return shared(b.kind, (first ? kSumFirst : kSumNext) + where(b), [&] {
    const Bytes sum = bytes_of(n, p.accumulation);
    const Pointwise traffic{bytes_of(n, p.gradients) + (first ? sum : 2.0 * sum), n};
    return Compute{-1, kAccumulate, Pass::backward, traffic, b.host_gradient};
  });
}

OpRef Emitter::sum_on_device(int i, Block& b, BufferId reduced, OpRef after) {
  return add(Stream::reduce, i, sum_work(b, gradient_elements(b)), {after},
             {{reduced, Access::read}, {b.gradient_shard, sum_access()}});
}

OpRef Emitter::sum_on_host(int i, Block& b, BufferId reduced, OpRef after) {
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
  const OpRef summed =
      add(Stream::host, i, sum_work(b, n), {copied}, {{slot.buffer, Access::read}, {b.gradient_shard, sum_access()}});
  host_sum_.give_back(summed);
  host_summed_ = summed;
  return copied;  // device memory is free again; the host goes on
}

}  // namespace zeroplan::zeroplan_engine
