#pragma once
// PyTorch's CUDA caching allocator as a model (torch 2.11, c10/cuda/CUDACachingAllocator.cpp): fed with the allocations
// and frees of a run in host order it gives allocated, active and reserved as torch.cuda reports them, and says
// whether a card of a given size holds the run. Blocks are counted, not tensors. Rules:
//  - a request is rounded up to 512 B (or to a fraction of a power of two); up to 1 MiB comes from the small pool;
//  - free blocks of one stream are taken best fit, lowest address first (sim/address_space.h says where segments lie);
//    other streams' blocks never;
//  - small blocks split down to 512 B, large ones only when more than 1 MiB would be left;
//  - a new segment is 2 MiB (small), 20 MiB (requests below 10 MiB) or the request rounded up to 2 MiB.
// Not modelled: CUDA graphs' private pools, the cudaMallocAsync backend.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "sim/address_space.h"
#include "sim/free_blocks.h"

namespace zeroplan {

/// What PYTORCH_CUDA_ALLOC_CONF can say, as far as it changes sizes.
struct AllocatorOptions {
  static constexpr std::int64_t kUnlimited = INT64_MAX;
  bool expandable_segments = false;
  std::int64_t max_split_size = kUnlimited;  // bytes
  /// Steps between two powers of two that requests are rounded up to; entry i serves sizes from 2^i MiB (the first and
  /// last entry also what lies outside). 0 or 1: rounded to 512 B.
  std::array<int, 16> roundup_power2_divisions{};
  double garbage_collection_threshold = 0;  // share of the capacity; 0: off
  /// What the allocator may reserve: the card without context, libraries and communicators. kUnlimited: no card is so
  /// small.
  std::int64_t capacity = kUnlimited;
};

/// Reads the value of PYTORCH_CUDA_ALLOC_CONF ("expandable_segments:True,max_split_size_mb:512"). Throws InputError
/// naming the key for keys and values that PyTorch refuses, and for those that this model has no rule for.
AllocatorOptions parse_allocator_options(std::string_view text);

class CachingAllocator {
 public:
  /// A block handed out; valid until free(). Requests of 0 bytes get kNone.
  using Block = std::int32_t;
  static constexpr Block kNone = -1;

  /// The card is full, after everything that could be given back was.
  struct OutOfMemory {
    std::int64_t requested = 0;  // bytes asked for, unrounded
    std::int64_t allocated = 0;
    std::int64_t reserved = 0;  // reserved - allocated is what fragmentation holds
    std::int64_t capacity = 0;
    std::string message() const;
  };

  struct Stats {
    std::int64_t allocated = 0, active = 0, reserved = 0;  // bytes now
    std::int64_t peak_allocated = 0, peak_active = 0, peak_reserved = 0;
    std::int64_t num_alloc_retries = 0;  // everything cached was given back to serve a request
    std::int64_t num_segments = 0;
  };

  explicit CachingAllocator(AllocatorOptions options = {}) : options_(options) {}

  /// `stream` picks the pool (0: the default stream). Throws std::logic_error on a negative size or stream.
  std::variant<Block, OutOfMemory> allocate(std::int64_t bytes, int stream = 0);
  /// Throws std::logic_error if the block is not handed out. kNone is fine.
  void free(Block block);

  /// The block is used on `stream` too (Tensor.record_stream): once freed it is out of `allocated` at once, but stays
  /// active and not reusable until complete(stream).
  void record_stream(Block block, int stream);
  /// What was freed so far and recorded on `stream` is no longer in use there.
  void complete(int stream);
  /// As torch.cuda.synchronize(): complete() of every stream.
  void complete_all();
  /// Gives every unsplit cached segment back (torch.cuda.empty_cache).
  void empty_cache();

  const Stats& stats() const { return stats_; }
  /// Peaks start anew from what is there now.
  void reset_peaks();
  /// Bytes of a block, the rounding included.
  std::int64_t size_of(Block block) const;

  /// Every block by address, as torch.cuda.memory_snapshot() lists them; unmapped parts of expandable segments too.
  struct BlockView {
    std::int64_t segment = 0, address = 0, size = 0;
    int stream = 0;
    bool small = false, handed_out = false, waits_for_stream = false, mapped = true;
  };
  std::vector<BlockView> blocks() const;

 private:
  enum class State : std::uint8_t { free, handed_out, waiting, unmapped, gone };
  struct Node {
    std::int64_t address = 0, size = 0, segment = 0;
    std::int64_t age_base = 0;  // look-ups of its pool when it was freed
    Block prev = kNone, next = kNone;
    int stream = 0;
    int pending = 0;  // streams that must pass before it is free
    State state = State::free;
    bool small = false, expandable = false;
    std::int32_t uses = -1;  // first of the streams of record_stream(): index into uses_
  };
  using Key = FreeBlocks::Key;
  struct Pool {
    FreeBlocks free;      // by (size, address)
    FreeBlocks unmapped;  // by (address, 0)
    std::int64_t lookups = 0;
  };
  struct Use {
    int stream = 0;
    std::int32_t next = -1;
  };
  struct Waiting {
    std::int64_t order = 0;  // in which blocks were freed, over all streams
    Block block = kNone;
  };
  struct Request {
    std::int64_t size = 0;
    int stream = 0;
    bool small = false;
  };

  std::int64_t round_size(std::int64_t bytes) const;
  Pool& pool(bool small, int stream) {
    auto& pools = pools_[small ? 1 : 0];
    if (pools.size() <= static_cast<std::size_t>(stream)) pools.resize(static_cast<std::size_t>(stream) + 1);
    return pools[static_cast<std::size_t>(stream)];
  }
  Block take_cached(const Request& request);
  Block take_new(const Request& request);
  Block take_segment(const Request& request);
  Block take_expandable(const Request& request);
  Block room_to_expand(const Request& request);
  Block reserve_address_space(const Request& request);
  bool map_pages(Block block, std::int64_t bytes);
  void unmap_pages(Block block);
  void collect_garbage();
  bool release_oversize(const Request& request);
  void release_segment(Block block);
  void hand_out(Block block, std::int64_t size);
  bool splits(const Node& node, std::int64_t size) const;
  void split(Block block, std::int64_t size, State rest);
  void make_free(Block block);
  void passed(const Waiting& item);
  Block merge(Block block, State state);
  void insert(Block block);
  void erase(Block block);
  bool unsplit(const Node& node) const { return node.prev == kNone && node.next == kNone; }
  Block new_node();
  void retire(Block block);

  AllocatorOptions options_;
  Stats stats_;
  std::vector<Node> nodes_;
  std::vector<Block> retired_;
  std::array<std::vector<Pool>, 2> pools_;  // [large, small][stream]
  std::vector<Use> uses_;
  std::vector<std::int32_t> unused_uses_;
  std::unordered_map<int, std::vector<Waiting>> waiting_;  // by stream, as freed
  std::int64_t freed_ = 0;
  AddressSpace addresses_;
  std::int64_t next_segment_ = 0;
};

/// PyTorch's pinned host memory (CachingHostAllocator): every request is rounded up to a power of two, freed blocks are
/// kept for requests of the same rounded size and never returned.
class PinnedHostAllocator {
 public:
  /// What a request takes. 0 for 0.
  static std::int64_t rounded(std::int64_t bytes);
  /// Returns what it takes; the same figure goes to free().
  std::int64_t allocate(std::int64_t bytes);
  void free(std::int64_t rounded_bytes);
  std::int64_t in_use() const { return in_use_; }
  std::int64_t taken() const { return taken_; }  // from the system, cached blocks included

 private:
  std::array<std::int64_t, 64> cached_{};  // blocks by log2 of their size
  std::int64_t in_use_ = 0, taken_ = 0;
};

}  // namespace zeroplan
