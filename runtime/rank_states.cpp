#include "runtime/rank_states.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "runtime/adam.h"
#include "runtime/host_executor.h"
#include "runtime/kernels/kernels.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kChunk = 1 << 22;  // elements converted at a time

template <class E>
std::span<E> as(std::span<std::byte> bytes) {
  return {reinterpret_cast<E*>(bytes.data()), bytes.size() / sizeof(E)};
}

// fp32 to the compute type: half up with a split master, else to nearest even, as Adam writes them.
void to_weights(const Precision& p, std::span<const float> master, std::span<std::byte> weights) {
  if (p.split_master) {
    std::vector<std::int16_t> unused(master.size());
    return split_master(master, as<std::uint16_t>(weights), unused);
  }
  ThreadPool alone(1);
  with_storage(p.weights, [&]<class T>(Storage<T>) { convert<float, T>(master, as<T>(weights), alone); });
}

void to_floats(const Precision& p, std::span<std::byte> weights, std::span<float> master) {
  ThreadPool alone(1);
  with_storage(p.weights,
               [&]<class T>(Storage<T>) { convert<T, float>(std::span<const T>(as<T>(weights)), master, alone); });
}

std::size_t bytes_for(std::int64_t elements, std::int64_t each) { return static_cast<std::size_t>(elements * each); }

}  // namespace

RankStates::RankStates(const RankContext& context) : context_(context) {
  const Plan& plan = context.plan;
  for (std::size_t i = 0; i < context.model.sequence.size(); ++i) {
    const BlockKind& kind = context.model.kinds[static_cast<std::size_t>(context.model.sequence[i])];
    const FlatLayout layout = flat_layout(kind, plan.precision.weights, plan.shard_ranks);
    Block b;
    b.padded = layout.padded;
    b.count = plan.zero_stage == 0 ? layout.padded : layout.shard;
    b.begin = plan.zero_stage == 0 ? 0 : context.shard_index() * layout.shard;
    blocks_.push_back(b);
  }
  const auto buffers = context.schedule.buffers();
  for (std::uint32_t i = 0; i < buffers.size(); ++i) {
    const Buffer& buffer = buffers[i];
    if (buffer.lifetime != Lifetime::resident || buffer.block < 0) continue;
    Block& b = blocks_[static_cast<std::size_t>(buffer.block)];
    if (buffer.role == BufferRole::weights) b.weights = BufferId{i};
    if (buffer.role == BufferRole::weight_shard) b.shard = BufferId{i};
    if (buffer.role == BufferRole::master) b.master = BufferId{i};
    if (buffer.role == BufferRole::moments) b.moments = BufferId{i};
  }
}

void RankStates::load(const Use& fill) {
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (blocks_[i].padded == 0) continue;
    if (blocks_[i].weights) load_whole_weights(static_cast<int>(i), blocks_[i], fill);
    load_own(static_cast<int>(i), blocks_[i], fill);
  }
}

void RankStates::load_whole_weights(int block, const Block& b, const Use& fill) {
  std::vector<float> master;
  for (std::int64_t at = 0; at < b.padded; at += kChunk) {
    const FlatRange range{block, at, std::min(b.padded, at + kChunk)};
    master.resize(static_cast<std::size_t>(range.count()));
    fill(range, {master, {}, {}});
    write_weights(*b.weights, at, master);
  }
}

void RankStates::write_weights(BufferId to, std::int64_t at, std::span<const float> master) const {
  const Precision& p = context_.plan.precision;
  const std::int64_t size = size_of(p.weights);
  std::vector<std::byte> weights(bytes_for(static_cast<std::int64_t>(master.size()), size));
  to_weights(p, master, weights);
  write(to, at * size, weights);
}

// On disk a buffer is written in one piece: its parts do not begin at disk blocks.
void RankStates::load_own(int block, const Block& b, const Use& fill) {
  const Precision& p = context_.plan.precision;
  const std::size_t half = bytes_for(b.count, size_of(p.states));
  std::vector<float> master(static_cast<std::size_t>(b.count));
  std::vector<std::byte> moments(2 * half);
  const std::span<std::byte> both(moments);
  fill({block, b.begin, b.begin + b.count}, {master, both.first(half), both.subspan(half)});
  write(b.moments.value(), 0, moments);
  for (std::int64_t at = 0; b.shard && at < b.count; at += kChunk) {
    const auto part = static_cast<std::size_t>(std::min(kChunk, b.count - at));
    write_weights(*b.shard, at, std::span<const float>(master).subspan(static_cast<std::size_t>(at), part));
  }
  if (!b.master) return;
  if (!p.split_master) return write(*b.master, 0, std::as_bytes(std::span(master)));
  std::vector<std::uint16_t> weights(master.size());
  std::vector<std::int16_t> remainder(master.size());
  split_master(master, weights, remainder);
  write(*b.master, 0, std::as_bytes(std::span(remainder)));
}

void RankStates::save(const Use& use) {
  const Plan& plan = context_.plan;
  const std::int64_t copies = plan.replicas(), copy = context_.rank / plan.shard_ranks;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const Block& b = blocks_[i];
    const std::int64_t begin = b.count * copy / copies, end = b.count * (copy + 1) / copies;
    if (begin < end) save_range(static_cast<int>(i), b, begin, end, use);
  }
}

// [begin, end) counts from the rank's first element.
void RankStates::save_range(int block, const Block& b, std::int64_t begin, std::int64_t end, const Use& use) {
  const Precision& p = context_.plan.precision;
  const std::int64_t n = end - begin, each = size_of(p.states);
  std::vector<std::byte> moments(bytes_for(2 * b.count, each));
  read(b.moments.value(), 0, moments);
  const std::span<std::byte> both(moments);
  std::vector<float> master(static_cast<std::size_t>(n));
  if (p.master && !p.split_master) {
    std::vector<float> all(static_cast<std::size_t>(b.count));
    read(*b.master, 0, std::as_writable_bytes(std::span(all)));
    std::copy(all.begin() + begin, all.begin() + end, master.begin());
  } else {
    std::vector<std::byte> weights(bytes_for(n, size_of(p.weights)));
    read_weights(b, begin, weights);
    if (p.split_master) {
      std::vector<std::int16_t> remainder(static_cast<std::size_t>(b.count));
      read(*b.master, 0, std::as_writable_bytes(std::span(remainder)));
      join_master(as<std::uint16_t>(weights),
                  std::span<const std::int16_t>(remainder).subspan(static_cast<std::size_t>(begin),
                                                                   static_cast<std::size_t>(n)),
                  master);
    } else {
      to_floats(p, weights, master);
    }
  }
  use({block, b.begin + begin, b.begin + end}, {master, both.subspan(bytes_for(begin, each), bytes_for(n, each)),
                                                both.subspan(bytes_for(b.count + begin, each), bytes_for(n, each))});
}

void RankStates::read_weights(const Block& b, std::int64_t begin, std::span<std::byte> to) const {
  const std::int64_t size = size_of(context_.plan.precision.weights);
  if (b.weights) return read(*b.weights, (b.begin + begin) * size, to);
  std::vector<std::byte> all(bytes_for(b.count, size));
  read(b.shard.value(), 0, all);
  std::memcpy(to.data(), all.data() + begin * size, to.size());
}

void RankStates::gather(int block, std::vector<std::byte>& weights, Communicator* group) {
  const Block& b = blocks_.at(static_cast<std::size_t>(block));
  const DType type = context_.plan.precision.weights;
  weights.resize(bytes_for(b.padded, size_of(type)));
  if (b.padded == 0) return;
  if (b.weights) return read(*b.weights, 0, weights);
  const std::size_t own = bytes_for(b.count, size_of(type));
  const std::span<std::byte> part =
      std::span(weights).subspan(static_cast<std::size_t>(context_.shard_index()) * own, own);
  read(b.shard.value(), 0, part);
  if (group != nullptr) group->all_gather({part.data(), b.count, type}, {weights.data(), b.padded, type});
}

void RankStates::read(BufferId buffer, std::int64_t offset, std::span<std::byte> to) const {
  if (context_.schedule.buffer(buffer).memory == Memory::nvme) {
    return context_.memory.disk().read(context_.memory.disk_buffer(buffer), offset, to);
  }
  const auto from = context_.memory.bytes(buffer).subspan(static_cast<std::size_t>(offset), to.size());
  std::memcpy(to.data(), from.data(), to.size());
}

void RankStates::write(BufferId buffer, std::int64_t offset, std::span<const std::byte> from) const {
  if (context_.schedule.buffer(buffer).memory == Memory::nvme) {
    return context_.memory.disk().write(context_.memory.disk_buffer(buffer), offset, from);
  }
  const auto to = context_.memory.bytes(buffer).subspan(static_cast<std::size_t>(offset), from.size());
  std::memcpy(to.data(), from.data(), from.size());
}

}  // namespace zeroplan
