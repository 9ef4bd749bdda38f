// PyTorch's caching allocator: single rules, invariants on random runs, and agreement with a second, naive
// implementation (linear scans over one list of blocks) written for this test.

#include "sim/caching_allocator.h"

#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "models/error.h"
#include "models/units.h"
#include "tests/catch.h"
#include "tests/processor_time.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kMiB1 = 1 << 20;
using Block = CachingAllocator::Block;

Block take(CachingAllocator& allocator, std::int64_t bytes, int stream = 0) {
  const auto result = allocator.allocate(bytes, stream);
  REQUIRE(std::holds_alternative<Block>(result));
  return std::get<Block>(result);
}

/// The rules once more, as simply as possible: no trees, no split limits, one size of everything.
class NaiveAllocator {
 public:
  struct Piece {
    std::int64_t segment, address, size;
    int stream;
    bool small, used;
  };
  const Piece* allocate(std::int64_t bytes, int stream) {
    const std::int64_t size = std::max<std::int64_t>(512, (bytes + 511) / 512 * 512);
    const bool small = size <= kMiB1;
    auto best = pieces_.end();
    for (auto at = pieces_.begin(); at != pieces_.end(); ++at) {
      if (at->used || at->small != small || at->stream != stream || at->size < size) continue;
      if (best == pieces_.end() || at->size < best->size || (at->size == best->size && at->address < best->address)) {
        best = at;
      }
    }
    if (best == pieces_.end()) {
      const std::int64_t segment = small               ? 2 * kMiB1
                                   : size < 10 * kMiB1 ? 20 * kMiB1
                                                       : (size + 2 * kMiB1 - 1) / (2 * kMiB1) * (2 * kMiB1);
      reserved += segment;
      best =
          pieces_.insert(pieces_.begin(), {segments_++, AddressSpace::kTop - reserved, segment, stream, small, false});
    }
    const std::int64_t rest = best->size - size;
    if (small ? rest >= 512 : rest > kMiB1) {
      pieces_.insert(std::next(best), {best->segment, best->address + size, rest, stream, small, false});
      best->size = size;
    }
    best->used = true;
    allocated += best->size;
    return &*best;
  }
  void free(const Piece* piece) {
    for (auto at = pieces_.begin(); at != pieces_.end(); ++at) {
      if (&*at != piece) continue;
      at->used = false;
      allocated -= at->size;
      if (const auto next = std::next(at); next != pieces_.end() && !next->used && next->segment == at->segment) {
        at->size += next->size;
        pieces_.erase(next);
      }
      if (at != pieces_.begin()) {
        if (const auto prev = std::prev(at); !prev->used && prev->segment == at->segment) {
          prev->size += at->size;
          pieces_.erase(at);
        }
      }
      return;
    }
  }
  std::int64_t allocated = 0, reserved = 0;
  const std::list<Piece>& pieces() const { return pieces_; }

 private:
  std::list<Piece> pieces_;
  std::int64_t segments_ = 0;
};

std::int64_t random_size(std::mt19937& random) {
  const int log2 = std::uniform_int_distribution<int>(4, 27)(random);
  return std::uniform_int_distribution<std::int64_t>(1, std::int64_t{1} << log2)(random);
}

/// allocated <= active <= reserved; blocks tile their segments; no two free neighbours; sums agree.
void check_invariants(const CachingAllocator& allocator) {
  const auto& stats = allocator.stats();
  REQUIRE(stats.allocated <= stats.active);
  REQUIRE(stats.active <= stats.reserved);
  std::int64_t mapped = 0, handed_out = 0, active = 0;
  const auto blocks = allocator.blocks();
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto& block = blocks[i];
    const auto free = [](const CachingAllocator::BlockView& view) {
      return view.mapped && !view.handed_out && !view.waits_for_stream;
    };
    mapped += block.mapped ? block.size : 0;
    handed_out += block.handed_out ? block.size : 0;
    active += block.handed_out || block.waits_for_stream ? block.size : 0;
    if (i == 0 || blocks[i - 1].segment != block.segment) continue;
    REQUIRE(blocks[i - 1].address + blocks[i - 1].size == block.address);
    REQUIRE_FALSE((free(blocks[i - 1]) && free(block)));
    REQUIRE_FALSE((!blocks[i - 1].mapped && !block.mapped));
    REQUIRE(blocks[i - 1].stream == block.stream);
    REQUIRE(blocks[i - 1].small == block.small);
  }
  REQUIRE(mapped == stats.reserved);
  REQUIRE(handed_out == stats.allocated);
  REQUIRE(active == stats.active);
}

}  // namespace

TEST_CASE("Sizes are rounded and pools chosen as PyTorch does") {
  struct Case {
    std::int64_t bytes, allocated, reserved;
  };
  const auto c = GENERATE(
      Case{1, 512, 2 * kMiB1}, Case{513, 1024, 2 * kMiB1}, Case{kMiB1, kMiB1, 2 * kMiB1},
      Case{kMiB1 + 1, kMiB1 + 512, 20 * kMiB1}, Case{10 * kMiB1 - 512, 10 * kMiB1 - 512, 20 * kMiB1},
      // A rest of up to 1 MiB stays with a large block and counts as allocated.
      Case{19 * kMiB1, 20 * kMiB1, 20 * kMiB1}, Case{19 * kMiB1 - 512, 19 * kMiB1 - 512, 20 * kMiB1},
      Case{12 * kMiB1 + kMiB1 / 2, 12 * kMiB1 + kMiB1 / 2, 14 * kMiB1}, Case{13 * kMiB1 + 512, 14 * kMiB1, 14 * kMiB1});
  CachingAllocator allocator;
  const Block block = take(allocator, c.bytes);
  CAPTURE(c.bytes);
  CHECK(allocator.stats().allocated == c.allocated);
  CHECK(allocator.stats().reserved == c.reserved);
  allocator.free(block);
  CHECK(allocator.stats().allocated == 0);
  CHECK(allocator.stats().reserved == c.reserved);
  allocator.empty_cache();
  CHECK(allocator.stats().reserved == 0);
}

TEST_CASE("A request of nothing gets no block") {
  CachingAllocator allocator;
  CHECK(take(allocator, 0) == CachingAllocator::kNone);
  allocator.free(CachingAllocator::kNone);
  CHECK(allocator.stats().reserved == 0);
  CHECK_THROWS_AS(allocator.allocate(-1), std::logic_error);
  const Block block = take(allocator, 100);
  allocator.free(block);
  CHECK_THROWS_AS(allocator.free(block), std::logic_error);
}

TEST_CASE("Blocks of another stream are never taken") {
  CachingAllocator allocator;
  allocator.free(take(allocator, 100 * kMiB1, 1));
  take(allocator, 100 * kMiB1, 0);
  CHECK(allocator.stats().reserved == 200 * kMiB1);
  take(allocator, 50 * kMiB1, 1);
  CHECK(allocator.stats().reserved == 200 * kMiB1);
}

TEST_CASE("The best fit is taken, the lowest address among equals") {
  CachingAllocator allocator;
  const Block a = take(allocator, 64 * kMiB1), b = take(allocator, 32 * kMiB1), c = take(allocator, 32 * kMiB1);
  const std::int64_t at_c = allocator.blocks().front().address;  // segments come from the top down
  allocator.free(c);
  allocator.free(a);
  allocator.free(b);
  take(allocator, 30 * kMiB1);
  const auto blocks = allocator.blocks();
  const auto used = std::find_if(blocks.begin(), blocks.end(), [](const auto& block) { return block.handed_out; });
  REQUIRE(used != blocks.end());
  CHECK(used->address == at_c);
}

TEST_CASE("Addresses come from the top of the highest gap that is wide enough") {
  AddressSpace space;
  const std::int64_t a = space.take(30), b = space.take(20), c = space.take(10);
  CHECK(a == AddressSpace::kTop - 30);
  CHECK(b == a - 20);
  CHECK(c == b - 10);
  space.give_back(b, 20);
  CHECK(space.take(21) == c - 21);
  CHECK(space.take(15) == b + 5);
  CHECK(space.take(5) == b);
  CHECK_THROWS_AS(space.take(AddressSpace::kTop), std::logic_error);
}

TEST_CASE("Addresses that are taken never overlap, and what is given back is whole again") {
  for (const unsigned seed : {1u, 2u, 3u}) {
    std::mt19937 random(seed);
    AddressSpace space;
    std::map<std::int64_t, std::int64_t> taken;  // size by address
    for (int i = 0; i < 3000; ++i) {
      if (taken.empty() || random() % 100 < 55) {
        const std::int64_t size = 1 + static_cast<std::int64_t>(random() % 50);
        const std::int64_t address = space.take(size);
        const auto above = taken.lower_bound(address);
        REQUIRE((above == taken.end() ? AddressSpace::kTop : above->first) >= address + size);
        if (above != taken.begin()) REQUIRE(std::prev(above)->first + std::prev(above)->second <= address);
        taken[address] = size;
      } else {
        const auto at = std::next(taken.begin(), static_cast<std::ptrdiff_t>(random() % taken.size()));
        space.give_back(at->first, at->second);
        taken.erase(at);
      }
    }
    for (const auto& [address, size] : taken) space.give_back(address, size);
    REQUIRE(space.take(AddressSpace::kTop) == 0);
  }
}

// Where segments lie decides which of two equal free blocks is taken, and so which segments are whole when the card is
// full: of two freed neighbours in time the younger one is used again, the older one can be given back.
TEST_CASE("A full card gives back the older of two equal segments") {
  AllocatorOptions options;
  options.capacity = 100 * kMiB1;
  CachingAllocator allocator(options);
  const Block older = take(allocator, 30 * kMiB1), younger = take(allocator, 30 * kMiB1);
  allocator.free(older);
  allocator.free(younger);
  take(allocator, 20 * kMiB1);  // a part of the younger one
  take(allocator, 60 * kMiB1);
  const auto blocks = allocator.blocks();
  CHECK(std::ranges::count(blocks, 0, &CachingAllocator::BlockView::segment) == 0);
  CHECK(std::ranges::count(blocks, 1, &CachingAllocator::BlockView::segment) == 2);
}

TEST_CASE("Random runs agree with the naive allocator, block by block") {
  for (const unsigned seed : {1u, 2u, 3u, 4u}) {
    std::mt19937 random(seed);
    CachingAllocator allocator;
    NaiveAllocator naive;
    std::vector<std::pair<Block, const NaiveAllocator::Piece*>> live;
    for (int i = 0; i < 2000; ++i) {
      if (live.empty() || random() % 100 < 52) {
        const std::int64_t size = random_size(random);
        const int stream = static_cast<int>(random() % 3);
        live.emplace_back(take(allocator, size, stream), naive.allocate(size, stream));
      } else {
        const std::size_t at = random() % live.size();
        allocator.free(live[at].first);
        naive.free(live[at].second);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
      }
      REQUIRE(allocator.stats().allocated == naive.allocated);
      REQUIRE(allocator.stats().reserved == naive.reserved);
    }
    const auto blocks = allocator.blocks();
    REQUIRE(blocks.size() == naive.pieces().size());
    std::size_t i = 0;
    for (const auto& piece : naive.pieces()) {
      REQUIRE(blocks[i].address == piece.address);
      REQUIRE(blocks[i].size == piece.size);
      REQUIRE(blocks[i].handed_out == piece.used);
      ++i;
    }
  }
}

TEST_CASE("Invariants hold under every option, streams that lag and a full card") {
  for (int seed = 0; seed < 24; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    AllocatorOptions options;
    options.expandable_segments = seed % 2 == 1;
    if (seed % 3 == 1) options.max_split_size = 32 * kMiB1;
    if (seed % 4 >= 2) options.capacity = 1500 * kMiB1;
    if (seed % 5 == 3) options.roundup_power2_divisions.fill(4);
    if (seed % 4 == 3) options.garbage_collection_threshold = 0.6;
    CachingAllocator allocator(options);
    std::vector<Block> live;
    int failures = 0;
    for (int i = 0; i < 1500; ++i) {
      const auto dice = random() % 100;
      if (live.empty() || dice < 50) {
        const auto result = allocator.allocate(random_size(random), static_cast<int>(random() % 3));
        if (const auto* block = std::get_if<Block>(&result)) {
          live.push_back(*block);
          if (random() % 4 == 0) allocator.record_stream(*block, static_cast<int>(random() % 3));
        } else {
          const auto& full = std::get<CachingAllocator::OutOfMemory>(result);
          REQUIRE(full.reserved <= full.capacity);
          REQUIRE(full.allocated <= full.reserved);
          ++failures;
        }
      } else if (dice < 97) {
        const std::size_t at = random() % live.size();
        allocator.free(live[at]);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
      } else if (dice < 99) {
        allocator.complete(static_cast<int>(random() % 3));
      } else {
        allocator.empty_cache();
      }
      REQUIRE(allocator.stats().reserved <= options.capacity);
      if (i % 25 == 0) check_invariants(allocator);
    }
    if (options.capacity != AllocatorOptions::kUnlimited) CHECK(allocator.stats().num_alloc_retries >= failures);
    for (const Block block : live) allocator.free(block);
    allocator.complete_all();
    check_invariants(allocator);
    CHECK(allocator.stats().active == 0);
    allocator.empty_cache();
    CHECK(allocator.stats().reserved == 0);
  }
}

TEST_CASE("A block recorded on another stream leaves allocated at once and comes back when that stream has passed") {
  CachingAllocator allocator;
  const Block block = take(allocator, 40 * kMiB1, 1);
  allocator.record_stream(block, 0);
  allocator.free(block);
  CHECK(allocator.stats().allocated == 0);
  CHECK(allocator.stats().active == 40 * kMiB1);
  take(allocator, 40 * kMiB1, 1);  // cannot take it yet
  CHECK(allocator.stats().reserved == 80 * kMiB1);
  allocator.complete(0);
  CHECK(allocator.stats().active == 40 * kMiB1);
  take(allocator, 40 * kMiB1, 1);
  CHECK(allocator.stats().reserved == 80 * kMiB1);
}

TEST_CASE("A full card gives cached segments back before it gives up, and the message says what is left") {
  AllocatorOptions options;
  options.capacity = 100 * kMiB1;
  CachingAllocator allocator(options);
  const Block kept = take(allocator, 40 * kMiB1);
  allocator.free(take(allocator, 50 * kMiB1, 1));
  take(allocator, 60 * kMiB1);
  CHECK(allocator.stats().num_alloc_retries == 1);
  CHECK(allocator.stats().reserved == 100 * kMiB1);
  const auto result = allocator.allocate(2 * kMiB1);
  REQUIRE(std::holds_alternative<CachingAllocator::OutOfMemory>(result));
  const auto& full = std::get<CachingAllocator::OutOfMemory>(result);
  CHECK(full.requested == 2 * kMiB1);
  CHECK(full.allocated == 100 * kMiB1);
  CHECK(full.message() ==
        "out of memory: tried to allocate 0.00 GiB; of 0.10 GiB, 0.10 GiB are allocated and 0.00 GiB reserved but "
        "unallocated");
  allocator.free(kept);
  take(allocator, 2 * kMiB1);  // from the 40 MiB that are free again
}

TEST_CASE("A segment with one live block stays whole: fragmentation") {
  AllocatorOptions options;
  options.capacity = 64 * kMiB1;
  CachingAllocator allocator(options);
  const Block big = take(allocator, 64 * kMiB1);
  allocator.free(big);
  const Block left = take(allocator, 24 * kMiB1);
  const Block kept = take(allocator, 8 * kMiB1);
  const Block right = take(allocator, 32 * kMiB1);
  allocator.free(left);
  allocator.free(right);
  CHECK(std::holds_alternative<CachingAllocator::OutOfMemory>(allocator.allocate(40 * kMiB1)));
  allocator.free(kept);
  take(allocator, 40 * kMiB1);
}

TEST_CASE("Expandable segments reserve pages of what is needed at once") {
  AllocatorOptions options;
  options.expandable_segments = true;
  CachingAllocator allocator(options);
  const Block a = take(allocator, 30 * kMiB1);
  CHECK(allocator.stats().reserved == 40 * kMiB1);
  const Block b = take(allocator, 15 * kMiB1);  // 10 MiB were left: one page more
  CHECK(allocator.stats().reserved == 60 * kMiB1);
  allocator.free(a);
  allocator.free(b);
  take(allocator, 100 * kMiB1);  // grows in place
  CHECK(allocator.stats().reserved == 100 * kMiB1);
  check_invariants(allocator);
}

TEST_CASE("max_split_size keeps large blocks whole") {
  AllocatorOptions options;
  options.max_split_size = 64 * kMiB1;
  CachingAllocator allocator(options);
  allocator.free(take(allocator, 200 * kMiB1));
  take(allocator, 10 * kMiB1);  // does not cut the 200 MiB
  CHECK(allocator.stats().reserved == 210 * kMiB1);
  take(allocator, 190 * kMiB1);  // within 20 MiB: the whole block
  CHECK(allocator.stats().reserved == 210 * kMiB1);
  CHECK(allocator.stats().allocated == 210 * kMiB1);
}

TEST_CASE("PYTORCH_CUDA_ALLOC_CONF is read, and what has no rule is refused") {
  const AllocatorOptions options =
      parse_allocator_options("expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.8");
  CHECK(options.expandable_segments);
  CHECK(options.max_split_size == 128 * kMiB1);
  CHECK(options.garbage_collection_threshold == 0.8);
  CHECK(parse_allocator_options("roundup_power2_divisions:8").roundup_power2_divisions[3] == 8);
  const auto list = parse_allocator_options("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]");
  CHECK(list.roundup_power2_divisions[0] == 1);
  CHECK(list.roundup_power2_divisions[9] == 2);
  CHECK(list.roundup_power2_divisions[10] == 8);
  CHECK(parse_allocator_options("").expandable_segments == false);
  for (const char* bad : {"expandable_segments:yes", "max_split_size_mb:20", "max_split_size_mb",
                          "backend:cudaMallocAsync", "garbage_collection_threshold:1.5", "expandable_segment:True",
                          "roundup_power2_divisions:3", "roundup_power2_divisions:[256]"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(parse_allocator_options(bad), InputError);
  }
}

TEST_CASE("Requests are rounded to a fraction of a power of two when asked") {
  AllocatorOptions options;
  options.roundup_power2_divisions.fill(4);
  CachingAllocator allocator(options);
  take(allocator, 1200);  // at most 512 B x divisions: as ever
  CHECK(allocator.stats().allocated == 1536);
  take(allocator, 5 * 1024 + 1);
  CHECK(allocator.stats().allocated == 1536 + 6 * 1024);
}

TEST_CASE("Pinned host memory comes in powers of two and is kept") {
  CHECK(PinnedHostAllocator::rounded(0) == 0);
  CHECK(PinnedHostAllocator::rounded(4096) == 4096);
  CHECK(PinnedHostAllocator::rounded(4097) == 8192);
  PinnedHostAllocator host;
  const std::int64_t taken = host.allocate(3 * kMiB1);
  CHECK(taken == 4 * kMiB1);
  host.free(taken);
  CHECK(host.in_use() == 0);
  CHECK(host.taken() == 4 * kMiB1);
  host.allocate(4 * kMiB1);
  CHECK(host.taken() == 4 * kMiB1);
  host.allocate(4 * kMiB1);
  CHECK(host.taken() == 8 * kMiB1);
}

TEST_CASE("A million operations take well under a second", "[.slow]") {
  std::mt19937 random(7);
  std::vector<std::int64_t> sizes(4096);
  for (auto& size : sizes) size = random_size(random);
  CachingAllocator allocator;
  std::vector<Block> live(1024, CachingAllocator::kNone);
  const double start = tests::processor_seconds();
  for (std::size_t i = 0; i < 500000; ++i) {
    Block& slot = live[(i * 7919) % live.size()];
    allocator.free(slot);
    slot = std::get<Block>(allocator.allocate(sizes[i % sizes.size()], static_cast<int>(i % 2)));
  }
  const double taken = tests::processor_seconds() - start;
  UNSCOPED_INFO("seconds: " << taken);
  CHECK(taken < 2.0);
}

TEST_CASE("Free blocks stand in the order that a std::set has them in, whatever is inserted and erased") {
  std::mt19937 random(7);
  FreeBlocks blocks;
  std::set<std::pair<std::int64_t, std::int64_t>> reference;
  for (int i = 0; i < 20000; ++i) {
    // Long phases of growth and of decay, so that runs split and vanish.
    const bool grows = (i / 4000) % 2 == 0 ? random() % 4 != 0 : random() % 4 == 0;
    const auto first = static_cast<std::int64_t>(random() % 50), second = static_cast<std::int64_t>(random() % 5000);
    if (grows || reference.empty()) {
      if (reference.emplace(first, second).second) blocks.insert({first, second, i});
    } else {
      auto victim = reference.lower_bound({first, second});
      if (victim == reference.end()) victim = reference.begin();
      blocks.erase(victim->first, victim->second);
      reference.erase(victim);
    }
    const auto expected = reference.lower_bound({first, second});
    const FreeBlocks::Position found = blocks.lower_bound(first, second);
    REQUIRE((found == blocks.end()) == (expected == reference.end()));
    if (expected != reference.end()) {
      REQUIRE(blocks.at(found).first == expected->first);
      REQUIRE(blocks.at(found).second == expected->second);
    }
    REQUIRE(blocks.empty() == reference.empty());
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> all;
  for (FreeBlocks::Position at = blocks.begin(); at != blocks.end(); at = blocks.next(at))
    all.emplace_back(blocks.at(at).first, blocks.at(at).second);
  CHECK(std::equal(all.begin(), all.end(), reference.begin(), reference.end()));
  CHECK(blocks.entries().size() == reference.size());
}

}  // namespace zeroplan
