#include "sim/caching_allocator.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "models/units.h"
#include "sim/caching_allocator_parts.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kMinBlock = 512;
constexpr std::int64_t kSmallLimit = kMebibyte;  // largest request of the small pool
constexpr std::int64_t kSmallSegment = 2 * kMebibyte;
constexpr std::int64_t kLargeSegment = 20 * kMebibyte;
constexpr std::int64_t kOwnSegment = 10 * kMebibyte;  // from here on a request gets a segment of its own size
constexpr std::int64_t kSegmentRounding = 2 * kMebibyte;
constexpr std::int64_t kOversizeSlack = 20 * kMebibyte;  // how much larger a block a request above max_split_size takes

std::int64_t segment_size(std::int64_t size) {
  if (size <= kSmallLimit) return kSmallSegment;
  return size < kOwnSegment ? kLargeSegment : round_up(size, kSegmentRounding);
}

}  // namespace

std::string CachingAllocator::OutOfMemory::message() const {
  return fmt::format(
      "out of memory: tried to allocate {:.2f} GiB; of {:.2f} GiB, {:.2f} GiB are allocated and {:.2f} "
      "GiB reserved but unallocated",
      static_cast<double>(requested) / kGiB, static_cast<double>(capacity) / kGiB,
      static_cast<double>(allocated) / kGiB, static_cast<double>(reserved - allocated) / kGiB);
}

std::int64_t CachingAllocator::round_size(std::int64_t bytes) const {
  if (bytes < kMinBlock) return kMinBlock;
  const int log2 = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(bytes))) - 1;
  const auto entry = static_cast<std::size_t>(std::clamp(log2 - 20, 0, 15));
  const std::int64_t divisions = options_.roundup_power2_divisions[entry];
  if (divisions <= 1 || bytes <= kMinBlock * divisions) return round_up(bytes, kMinBlock);
  return round_up(bytes, (std::int64_t{1} << log2) / divisions);
}

std::variant<CachingAllocator::Block, CachingAllocator::OutOfMemory> CachingAllocator::allocate(std::int64_t bytes,
                                                                                                int stream) {
  if (bytes < 0 || stream < 0) throw std::logic_error("CachingAllocator: negative size or stream");
  if (bytes == 0) return kNone;
  Request request{round_size(bytes), stream, false};
  request.small = request.size <= kSmallLimit;
  Block block = take_cached(request);
  if (block == kNone) {
    if (options_.garbage_collection_threshold > 0 && options_.capacity != AllocatorOptions::kUnlimited) {
      collect_garbage();
    }
    block = take_new(request);
  }
  if (block == kNone && release_oversize(request)) block = take_new(request);
  if (block == kNone) {
    complete_all();
    empty_cache();
    ++stats_.num_alloc_retries;
    block = take_new(request);
  }
  if (block == kNone) return OutOfMemory{bytes, stats_.allocated, stats_.reserved, options_.capacity};
  hand_out(block, request.size);
  return block;
}

/// Best fit among the cached blocks of the stream, taken out of its pool; kNone when there is none.
CachingAllocator::Block CachingAllocator::take_cached(const Request& request) {
  Pool& from = pool(request.small, request.stream);
  ++from.lookups;
  FreeBlocks::Position at = from.free.lower_bound(request.size, INT64_MIN);
  if (at == from.free.end()) return kNone;
  // A block that borders on unmapped room counts with that room: others that fit are preferred.
  const auto room = [&](FreeBlocks::Position position) {
    const Node& node = nodes_[static_cast<std::size_t>(from.free.at(position).block)];
    if (node.next == kNone) return node.size;
    const Node& next = nodes_[static_cast<std::size_t>(node.next)];
    return node.size + (next.state == State::unmapped ? next.size : 0);
  };
  if (options_.expandable_segments) {
    FreeBlocks::Position next = from.free.next(at);
    while (next != from.free.end() && room(next) < room(at)) {
      at = next;
      next = from.free.next(next);
    }
  }
  const Block block = from.free.at(at).block;
  const std::int64_t size = from.free.at(at).first;
  if (request.size < options_.max_split_size && size >= options_.max_split_size) return kNone;
  if (request.size >= options_.max_split_size && size >= request.size + kOversizeSlack) return kNone;
  from.free.erase(at);
  return block;
}

CachingAllocator::Block CachingAllocator::take_new(const Request& request) {
  return options_.expandable_segments ? take_expandable(request) : take_segment(request);
}

CachingAllocator::Block CachingAllocator::take_segment(const Request& request) {
  const std::int64_t size = segment_size(request.size);
  if (size > options_.capacity - stats_.reserved) return kNone;
  const Block block = new_node();
  Node& node = nodes_[static_cast<std::size_t>(block)];
  node.address = addresses_.take(size);
  node.size = size;
  node.segment = next_segment_++;
  node.stream = request.stream;
  node.small = request.small;
  stats_.reserved += size;
  ++stats_.num_segments;
  stats_.peak_reserved = std::max(stats_.peak_reserved, stats_.reserved);
  return block;
}

/// Marks the block as handed out and cuts off what is not needed.
void CachingAllocator::hand_out(Block block, std::int64_t size) {
  if (splits(nodes_[static_cast<std::size_t>(block)], size)) split(block, size, State::free);
  Node& node = nodes_[static_cast<std::size_t>(block)];
  node.state = State::handed_out;
  stats_.allocated += node.size;
  stats_.active += node.size;
  stats_.peak_allocated = std::max(stats_.peak_allocated, stats_.allocated);
  stats_.peak_active = std::max(stats_.peak_active, stats_.active);
}

bool CachingAllocator::splits(const Node& node, std::int64_t size) const {
  const std::int64_t rest = node.size - size;
  if (node.small || options_.expandable_segments) return rest >= kMinBlock;
  return size < options_.max_split_size && rest > kSmallLimit;
}

/// Keeps the first `size` bytes in `block`; the rest becomes a block of its own in state `rest`.
void CachingAllocator::split(Block block, std::int64_t size, State rest) {
  const Block tail = new_node();
  Node& head = nodes_[static_cast<std::size_t>(block)];
  Node& node = nodes_[static_cast<std::size_t>(tail)];
  node = head;
  node.uses = -1;
  node.address = head.address + size;
  node.size = head.size - size;
  node.prev = block;
  node.state = rest;
  head.size = size;
  head.next = tail;
  if (node.next != kNone) nodes_[static_cast<std::size_t>(node.next)].prev = tail;
  insert(tail);
}

void CachingAllocator::free(Block block) {
  if (block == kNone) return;
  if (block < 0 || static_cast<std::size_t>(block) >= nodes_.size() ||
      nodes_[static_cast<std::size_t>(block)].state != State::handed_out) {
    throw std::logic_error("CachingAllocator: freed a block that is not handed out");
  }
  Node& node = nodes_[static_cast<std::size_t>(block)];
  stats_.allocated -= node.size;
  if (node.uses < 0) {
    make_free(block);
    return;
  }
  node.state = State::waiting;
  for (std::int32_t use = node.uses; use >= 0; use = uses_[static_cast<std::size_t>(use)].next) {
    waiting_[uses_[static_cast<std::size_t>(use)].stream].push_back({freed_++, block});
    unused_uses_.push_back(use);
    ++node.pending;
  }
  node.uses = -1;
}

void CachingAllocator::record_stream(Block block, int stream) {
  if (block == kNone) return;
  Node& node = nodes_.at(static_cast<std::size_t>(block));
  if (stream == node.stream) return;
  std::int32_t* end = &node.uses;  // recorded streams keep their order
  while (*end >= 0) {
    Use& use = uses_[static_cast<std::size_t>(*end)];
    if (use.stream == stream) return;
    end = &use.next;
  }
  if (unused_uses_.empty()) {
    *end = static_cast<std::int32_t>(uses_.size());
    uses_.push_back({stream, -1});
    return;
  }
  *end = unused_uses_.back();
  unused_uses_.pop_back();
  uses_[static_cast<std::size_t>(*end)] = {stream, -1};
}

void CachingAllocator::passed(const Waiting& item) {
  if (--nodes_[static_cast<std::size_t>(item.block)].pending == 0) make_free(item.block);
}

void CachingAllocator::complete(int stream) {
  const auto found = waiting_.find(stream);
  if (found == waiting_.end()) return;
  const std::vector<Waiting> items = std::move(found->second);
  waiting_.erase(found);
  for (const Waiting& item : items) passed(item);
}

void CachingAllocator::complete_all() {
  std::vector<Waiting> all;
  for (const auto& [stream, items] : waiting_) all.insert(all.end(), items.begin(), items.end());
  waiting_.clear();
  std::ranges::sort(all, {}, &Waiting::order);
  for (const Waiting& item : all) passed(item);
}

void CachingAllocator::make_free(Block block) {
  stats_.active -= nodes_[static_cast<std::size_t>(block)].size;
  block = merge(block, State::free);
  Node& node = nodes_[static_cast<std::size_t>(block)];
  node.state = State::free;
  node.age_base = pool(node.small, node.stream).lookups;
  insert(block);
}

/// Joins the block with its neighbours in `state`; they leave their pools. The result is in no pool.
CachingAllocator::Block CachingAllocator::merge(Block block, State state) {
  const auto join = [&](Block left, Block right) {
    Node& a = nodes_[static_cast<std::size_t>(left)];
    Node& b = nodes_[static_cast<std::size_t>(right)];
    a.size += b.size;
    a.next = b.next;
    if (b.next != kNone) nodes_[static_cast<std::size_t>(b.next)].prev = left;
    retire(right);
  };
  const Block next = nodes_[static_cast<std::size_t>(block)].next;
  if (next != kNone && nodes_[static_cast<std::size_t>(next)].state == state) {
    erase(next);
    join(block, next);
  }
  const Block prev = nodes_[static_cast<std::size_t>(block)].prev;
  if (prev != kNone && nodes_[static_cast<std::size_t>(prev)].state == state) {
    erase(prev);
    join(prev, block);
    return prev;
  }
  return block;
}

void CachingAllocator::insert(Block block) {
  const Node& node = nodes_[static_cast<std::size_t>(block)];
  Pool& to = pool(node.small, node.stream);
  if (node.state == State::unmapped) {
    to.unmapped.insert({node.address, 0, block});
  } else {
    to.free.insert({node.size, node.address, block});
  }
}

void CachingAllocator::erase(Block block) {
  const Node& node = nodes_[static_cast<std::size_t>(block)];
  Pool& from = pool(node.small, node.stream);
  if (node.state == State::unmapped) {
    from.unmapped.erase(node.address, 0);
  } else {
    from.free.erase(node.size, node.address);
  }
}

void CachingAllocator::empty_cache() {
  for (auto& pools : pools_) {
    for (Pool& each : pools) {
      for (const Key& key : each.free.entries()) {
        const Block block = key.block;
        const Node& node = nodes_[static_cast<std::size_t>(block)];
        if (node.expandable) {
          unmap_pages(block);
        } else if (unsplit(node)) {
          release_segment(block);
        }
      }
    }
  }
}

void CachingAllocator::release_segment(Block block) {
  erase(block);
  const Node& node = nodes_[static_cast<std::size_t>(block)];
  addresses_.give_back(node.address, node.size);
  stats_.reserved -= node.size;
  --stats_.num_segments;
  retire(block);
}

/// Gives back large unsplit blocks older than the mean age, until reserved is below the threshold.
void CachingAllocator::collect_garbage() {
  const double limit = options_.garbage_collection_threshold * static_cast<double>(options_.capacity);
  double excess = static_cast<double>(stats_.reserved) - limit;
  std::int64_t lookups = 0;
  std::vector<Block> candidates;
  for (Pool& each : pools_[0]) {
    lookups += each.lookups;
    for (const Key& key : each.free.entries()) {
      const Node& node = nodes_[static_cast<std::size_t>(key.block)];
      if (unsplit(node) && !node.expandable) candidates.push_back(key.block);
    }
  }
  const auto age = [&](Block block) {
    const Node& node = nodes_[static_cast<std::size_t>(block)];
    return static_cast<double>(pool(false, node.stream).lookups - node.age_base);
  };
  while (excess > 0 && !candidates.empty()) {
    double total = 0;
    for (const Block block : candidates) total += age(block);
    const double mean = total / static_cast<double>(candidates.size());
    const auto old =
        std::stable_partition(candidates.begin(), candidates.end(), [&](Block block) { return age(block) < mean; });
    if (old == candidates.end()) return;
    for (auto at = old; at != candidates.end(); ++at) {
      excess -= static_cast<double>(nodes_[static_cast<std::size_t>(*at)].size);
      release_segment(*at);
    }
    candidates.erase(old, candidates.end());
  }
}

/// With max_split_size: gives back the smallest oversize block that serves the request, or the largest ones until they
/// add up to it. Says whether enough was given back.
bool CachingAllocator::release_oversize(const Request& request) {
  if (options_.max_split_size == AllocatorOptions::kUnlimited) return false;
  Pool& from = pool(request.small, request.stream);
  const std::int64_t wanted = std::max(request.size, options_.max_split_size);
  const FreeBlocks::Position fits = from.free.lower_bound(wanted, INT64_MIN);
  if (fits != from.free.end()) {
    const Block block = from.free.at(fits).block;
    if (!unsplit(nodes_[static_cast<std::size_t>(block)])) return false;
    release_segment(block);
    return true;
  }
  std::int64_t released = 0;
  while (released < wanted && !from.free.empty()) {
    const auto [size, address, block] = from.free.last();
    if (size < options_.max_split_size || !unsplit(nodes_[static_cast<std::size_t>(block)])) break;
    released += size;
    release_segment(block);
  }
  return released >= wanted;
}

void CachingAllocator::reset_peaks() {
  stats_.peak_allocated = stats_.allocated;
  stats_.peak_active = stats_.active;
  stats_.peak_reserved = stats_.reserved;
}

std::int64_t CachingAllocator::size_of(Block block) const {
  return block == kNone ? 0 : nodes_.at(static_cast<std::size_t>(block)).size;
}

std::vector<CachingAllocator::BlockView> CachingAllocator::blocks() const {
  std::vector<BlockView> views;
  for (const Node& node : nodes_) {
    if (node.state == State::gone) continue;
    views.push_back({node.segment, node.address, node.size, node.stream, node.small, node.state == State::handed_out,
                     node.state == State::waiting, node.state != State::unmapped});
  }
  std::sort(views.begin(), views.end(), [](const BlockView& a, const BlockView& b) { return a.address < b.address; });
  return views;
}

CachingAllocator::Block CachingAllocator::new_node() {
  if (!retired_.empty()) {
    const Block block = retired_.back();
    retired_.pop_back();
    nodes_[static_cast<std::size_t>(block)] = Node{};
    return block;
  }
  nodes_.emplace_back();
  return static_cast<Block>(nodes_.size() - 1);
}

void CachingAllocator::retire(Block block) {
  nodes_[static_cast<std::size_t>(block)].state = State::gone;
  retired_.push_back(block);
}

// --- pinned host memory ----------------------------------------------------------------------------------------------

std::int64_t PinnedHostAllocator::rounded(std::int64_t bytes) {
  if (bytes < 0) throw std::logic_error("PinnedHostAllocator: negative size");
  return bytes == 0 ? 0 : static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(bytes)));
}

std::int64_t PinnedHostAllocator::allocate(std::int64_t bytes) {
  const std::int64_t size = rounded(bytes);
  if (size == 0) return 0;
  in_use_ += size;
  std::int64_t& cached = cached_[static_cast<std::size_t>(std::countr_zero(static_cast<std::uint64_t>(size)))];
  if (cached > 0) {
    --cached;
  } else {
    taken_ += size;
  }
  return size;
}

void PinnedHostAllocator::free(std::int64_t rounded_bytes) {
  if (rounded_bytes == 0) return;
  in_use_ -= rounded_bytes;
  ++cached_[static_cast<std::size_t>(std::countr_zero(static_cast<std::uint64_t>(rounded_bytes)))];
}

}  // namespace zeroplan
