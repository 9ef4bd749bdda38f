#include "models/deepspeed_quantized_reduce.h"

#include <algorithm>

namespace zeroplan {
namespace {

constexpr std::int64_t kScale = 4;  // bytes of a group's scale

}  // namespace

QuantizedReduction::QuantizedReduction(const EagerStep& step, const DeepSpeedJob& job, EngineTape& tape, Stream stream,
                                       Pool pool)
    : step_(step),
      job_(job),
      tape_(tape),
      stream_(stream),
      pool_(pool),
      communication_(job.config.communication.value_or(job.config.precision)),
      inside_(std::max(1, job.ranks_per_node)),
      nodes_(std::max(1, job.ranks / inside_)) {
  locals_.fill(kNoBuffer);
}

bool QuantizedReduction::applies(const DeepSpeedJob& job) {
  return job.config.stage == 3 && job.config.quantized_gradients && !job.config.mics() && job.ranks_per_node > 0 &&
         job.ranks / job.ranks_per_node > 1;
}

/// Vectors, and what two hops cannot cut, are reduce-scattered.
bool QuantizedReduction::quantizes(std::size_t p) const {
  return step_.parameters[p].shape.size() > 1 && step_.parameters[p].elements % (2 * job_.ranks) == 0;
}

TapeId QuantizedReduction::staging(std::int64_t bytes) {
  return tape_.alloc(
      {bytes, pool_, BufferRole::gradient_staging, Owner::buffers, static_cast<std::int16_t>(tape_.block())});
}

void QuantizedReduction::rebind(Local local, TapeId buffer) {
  tape_.free(locals_[local]);
  locals_[local] = buffer;
}

/// Values and their scales from one call: both are there before the last ones go.
void QuantizedReduction::bind(Local first, std::int64_t values, std::int64_t scales) {
  const TapeId second = staging(kScale * scales);
  const TapeId value = staging(values);
  rebind(first, value);
  rebind(static_cast<Local>(first + 1), second);
}

/// An all-to-all sends what a reduce-scatter of as many bytes does. The receiving tensors are made one after the other.
void QuantizedReduction::exchange(Group group, Local from, Local to, std::int64_t bytes, std::int64_t scales) {
  const auto next = [](Local local) { return static_cast<Local>(local + 1); };
  rebind(to, staging(bytes));
  rebind(next(to), staging(kScale * scales));
  tape_.work(stream_, Collective{CollectiveKind::reduce_scatter, group, bytes, bytes, DType::u8},
             {{at(from), Access::read}, {at(to), Access::write}});
  tape_.work(stream_, Collective{CollectiveKind::reduce_scatter, group, scales, scales, DType::fp32},
             {{at(next(from)), Access::read}, {at(next(to)), Access::write}});
}

TapeId QuantizedReduction::scatter_alone(std::size_t p) {
  const std::int64_t elements = step_.parameters[p].elements, padded = ceil_div(elements, job_.ranks) * job_.ranks;
  TapeId copy = kNoBuffer;
  if (padded != elements) {
    copy = staging(padded * size_of(communication_));
    tape_.pass(stream_, 2 * padded * size_of(communication_), {{copy, Access::write}});
  }
  tape_.work(stream_, Collective{CollectiveKind::reduce_scatter, Group::all, elements, padded, communication_},
             {{copy, Access::read_write}});
  return copy;
}

/// The nodes' parts, summed one by one and divided.
TapeId QuantizedReduction::averaged(std::int64_t elements) {
  TapeId sum = kNoBuffer;
  for (int i = 0; i <= nodes_; ++i) {  // as many sums, one division
    const TapeId next = staging(2 * elements);
    tape_.pass(stream_, 6 * elements, {{at(whole), Access::read}, {sum, Access::read}, {next, Access::write}});
    tape_.free(sum);
    sum = next;
  }
  return sum;
}

TapeId QuantizedReduction::reduce_quantized(std::size_t p) {
  const EagerParameter& parameter = step_.parameters[p];
  const std::int64_t count = parameter.elements;
  const std::int64_t groups = std::max({parameter.shape[0], parameter.shape[1], std::int64_t{job_.ranks}});
  bind(sent, count / 2, groups);
  tape_.pass(stream_, 5 * count / 2, {{at(sent), Access::write}});
  exchange(Group::shard, sent, received, count / 2, groups);
  const std::int64_t held = count / 2 / inside_, held_groups = groups / inside_;
  bind(reduced, held, held_groups);
  tape_.pass(stream_, count / 2 + held, {{at(received), Access::read}, {at(reduced), Access::write}});
  exchange(Group::replica, reduced, crossed, held, held_groups);
  rebind(whole, staging(2 * 2 * held));  // fp16
  tape_.pass(stream_, 5 * held, {{at(crossed), Access::read}, {at(whole), Access::write}});
  return averaged(2 * held / nodes_);
}

std::vector<TapeId> QuantizedReduction::reduce(const std::vector<std::size_t>& parameters) {
  std::vector<TapeId> results;
  for (const std::size_t p : parameters) results.push_back(quantizes(p) ? reduce_quantized(p) : scatter_alone(p));
  for (TapeId& local : locals_) {
    tape_.free(local);
    local = kNoBuffer;
  }
  return results;
}

}  // namespace zeroplan
