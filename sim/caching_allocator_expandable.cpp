// Expandable segments: one run of addresses per stream and pool, mapped page by page where room is needed.

#include <algorithm>

#include "sim/caching_allocator.h"
#include "sim/caching_allocator_parts.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kSmallPage = 2 * kMebibyte;
constexpr std::int64_t kLargePage = 20 * kMebibyte;
/// Virtual room of a segment. PyTorch reserves 9/8 of the card; more changes nothing but addresses.
constexpr std::int64_t kAddressSpace = std::int64_t{1} << 42;

}  // namespace

/// One run of addresses per stream and pool, unmapped until needed.
CachingAllocator::Block CachingAllocator::reserve_address_space(const Request& request) {
  const Block block = new_node();
  Node& node = nodes_[static_cast<std::size_t>(block)];
  node.address = addresses_.take(kAddressSpace);
  node.size = kAddressSpace;
  node.segment = next_segment_++;
  node.stream = request.stream;
  node.small = request.small;
  node.expandable = true;
  node.state = State::unmapped;
  ++stats_.num_segments;
  insert(block);
  return block;
}

/// The lowest free or unmapped block from which enough free and unmapped room follows.
CachingAllocator::Block CachingAllocator::room_to_expand(const Request& request) {
  const auto usable = [&](Block block) {
    if (block == kNone) return false;
    const State state = nodes_[static_cast<std::size_t>(block)].state;
    return state == State::free || state == State::unmapped;
  };
  const FreeBlocks& unmapped = pool(request.small, request.stream).unmapped;
  for (FreeBlocks::Position at = unmapped.begin(); at != unmapped.end(); at = unmapped.next(at)) {
    Block first = unmapped.at(at).block;
    if (usable(nodes_[static_cast<std::size_t>(first)].prev)) first = nodes_[static_cast<std::size_t>(first)].prev;
    std::int64_t room = 0;
    for (Block b = first; room < request.size && usable(b); b = nodes_[static_cast<std::size_t>(b)].next) {
      room += nodes_[static_cast<std::size_t>(b)].size;
    }
    if (room >= request.size) return first;
  }
  return reserve_address_space(request);
}

CachingAllocator::Block CachingAllocator::take_expandable(const Request& request) {
  const Block block = room_to_expand(request);
  if (nodes_[static_cast<std::size_t>(block)].state == State::unmapped && !map_pages(block, request.size)) return kNone;
  // Mapped room joins the block before it, so `block` grows until it is large enough.
  while (nodes_[static_cast<std::size_t>(block)].size < request.size) {
    const Node& node = nodes_[static_cast<std::size_t>(block)];
    if (!map_pages(node.next, request.size - node.size)) return kNone;
  }
  erase(block);
  return block;
}

/// Maps at least `bytes` from the start of an unmapped block, in whole pages; the result joins the free blocks around.
bool CachingAllocator::map_pages(Block block, std::int64_t bytes) {
  const Node& node = nodes_[static_cast<std::size_t>(block)];
  const std::int64_t page = node.small ? kSmallPage : kLargePage;
  const std::int64_t mapped = std::min(node.size, round_up(bytes, page));
  if (mapped > options_.capacity - stats_.reserved) return false;
  erase(block);
  if (mapped < node.size) split(block, mapped, State::unmapped);
  stats_.reserved += mapped;
  stats_.peak_reserved = std::max(stats_.peak_reserved, stats_.reserved);
  nodes_[static_cast<std::size_t>(block)].state = State::free;
  const Block joined = merge(block, State::free);
  nodes_[static_cast<std::size_t>(joined)].state = State::free;
  insert(joined);
  return true;
}

/// Gives back the whole pages inside a free block of an expandable segment.
void CachingAllocator::unmap_pages(Block block) {
  const std::int64_t page = nodes_[static_cast<std::size_t>(block)].small ? kSmallPage : kLargePage;
  // Pages are counted from the start of the segment.
  const std::int64_t base = nodes_[static_cast<std::size_t>(block)].address / kAddressSpace * kAddressSpace;
  const std::int64_t begin = nodes_[static_cast<std::size_t>(block)].address - base;
  const std::int64_t end = begin + nodes_[static_cast<std::size_t>(block)].size;
  const std::int64_t first = round_up(begin, page), last = end / page * page;
  if (first >= last) return;
  erase(block);
  if (last < end) split(block, last - begin, State::free);
  Block middle = block;
  if (first > begin) {
    split(block, first - begin, State::free);
    middle = nodes_[static_cast<std::size_t>(block)].next;
    insert(block);
    erase(middle);
  }
  stats_.reserved -= last - first;
  nodes_[static_cast<std::size_t>(middle)].state = State::unmapped;
  const Block joined = merge(middle, State::unmapped);
  nodes_[static_cast<std::size_t>(joined)].state = State::unmapped;
  insert(joined);
}

}  // namespace zeroplan
