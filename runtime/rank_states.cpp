#include "runtime/rank_states.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "runtime/adam.h"
#include "runtime/host_executor.h"
#include "runtime/kernels/kernels.h"

namespace zeroplan {
namespace {

/// Elements that are in hand at a time: what loading and saving take beside the arenas (models/zeroplan_transients.cpp
/// counts with the same).
constexpr std::int64_t kChunk = 1 << 22;

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

// Parts of a buffer on disk need not begin at disk blocks: DiskFile mends the two at their ends.
void RankStates::load_own(int block, const Block& b, const Use& fill) {
  const Precision& p = context_.plan.precision;
  std::vector<float> master;
  std::vector<std::byte> moments;
  for (std::int64_t at = 0; at < b.count; at += kChunk) {
    const std::int64_t n = std::min(kChunk, b.count - at), each = size_of(p.states);
    const std::size_t half = bytes_for(n, each);
    master.resize(static_cast<std::size_t>(n));
    moments.resize(2 * half);
    const std::span<std::byte> both(moments);
    fill({block, b.begin + at, b.begin + at + n}, {master, both.first(half), both.subspan(half)});
    write(b.moments.value(), at * each, both.first(half));
    write(*b.moments, (b.count + at) * each, both.subspan(half));
    if (b.shard) write_weights(*b.shard, at, master);
    if (b.master) write_master(*b.master, at, master);
  }
}

void RankStates::write_master(BufferId to, std::int64_t at, std::span<const float> master) const {
  constexpr std::int64_t kWhole = sizeof(float), kRemainder = sizeof(std::int16_t);
  if (!context_.plan.precision.split_master) return write(to, at * kWhole, std::as_bytes(master));
  std::vector<std::uint16_t> weights(master.size());
  std::vector<std::int16_t> remainder(master.size());
  split_master(master, weights, remainder);
  write(to, at * kRemainder, std::as_bytes(std::span(remainder)));
}

void RankStates::save(const Use& use) {
  const Plan& plan = context_.plan;
  const std::int64_t copies = plan.replicas(), copy = context_.rank / plan.shard_ranks;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const Block& b = blocks_[i];
    const std::int64_t begin = b.count * copy / copies, end = b.count * (copy + 1) / copies;
    for (std::int64_t at = begin; at < end; at += kChunk)
      save_range(static_cast<int>(i), b, at, std::min(end, at + kChunk), use);
  }
}

// [begin, end) counts from the rank's first element.
void RankStates::save_range(int block, const Block& b, std::int64_t begin, std::int64_t end, const Use& use) {
  const std::int64_t n = end - begin, each = size_of(context_.plan.precision.states);
  const std::size_t half = bytes_for(n, each);
  std::vector<std::byte> moments(2 * half);
  const std::span<std::byte> both(moments);
  read(b.moments.value(), begin * each, both.first(half));
  read(*b.moments, (b.count + begin) * each, both.subspan(half));
  std::vector<float> master(static_cast<std::size_t>(n));
  read_master(b, begin, master);
  use({block, b.begin + begin, b.begin + end}, {master, both.first(half), both.subspan(half)});
}

void RankStates::read_master(const Block& b, std::int64_t begin, std::span<float> master) const {
  const Precision& p = context_.plan.precision;
  const auto n = static_cast<std::int64_t>(master.size());
  if (p.master && !p.split_master) {
    return read(*b.master, begin * static_cast<std::int64_t>(sizeof(float)), std::as_writable_bytes(master));
  }
  const std::int64_t size = size_of(p.weights);
  std::vector<std::byte> weights(bytes_for(n, size));
  read(b.weights ? *b.weights : b.shard.value(), ((b.weights ? b.begin : 0) + begin) * size, weights);
  if (!p.split_master) return to_floats(p, weights, master);
  std::vector<std::int16_t> remainder(master.size());
  read(*b.master, begin * static_cast<std::int64_t>(sizeof(std::int16_t)),
       std::as_writable_bytes(std::span(remainder)));
  join_master(as<std::uint16_t>(weights), remainder, master);
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
