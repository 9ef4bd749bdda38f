#pragma once
// The memory behind one arena: what lay_out() planned for one memory of one rank, as one mapping between two pages that
// nobody may touch.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "models/units.h"

namespace zeroplan {

struct ArenaOptions {
  std::string name = "arena";    // for messages: "rank 2, pinned"
  std::int64_t alignment = 256;  // of the first byte; a power of two, 8 to the page size
  bool huge_pages = true;        // asks for them from 4 MiB on
};

/// Anonymous memory of exactly the planned size, zero at first, with inaccessible guard pages on both sides. The end
/// lies as near to its guard as the alignment allows: with a size that is a multiple of the alignment the first byte
/// behind the arena faults. What is left between arena and guards is filled with a pattern that check_guards() reads.
///
/// Nothing is resident until touched: touch() or pin() from the thread that will use the memory, so that it lies near
/// that thread's cores. Calls on different bytes may come from different threads; creation, touch(), pin() and moves
/// are one thread's.
///
/// Built with AddressSanitizer, all bytes are poisoned but those marked used and not retired since, so a use after Free
/// inside the arena is found.
class ArenaMemory {
 public:
  /// An empty arena: size 0, nothing mapped.
  ArenaMemory() = default;
  /// Throws DeviceError with the bytes asked if the system has no room, std::logic_error on a bad size or alignment.
  explicit ArenaMemory(Bytes size, ArenaOptions options = {});
  ~ArenaMemory();
  ArenaMemory(ArenaMemory&& other) noexcept;
  ArenaMemory& operator=(ArenaMemory&& other) noexcept;

  std::byte* data() const { return data_; }
  std::int64_t size() const { return size_; }
  std::span<std::byte> all() const { return {data_, static_cast<std::size_t>(size_)}; }
  /// Throws std::logic_error if the range leaves the arena: an allocation outside the plan.
  std::span<std::byte> bytes(std::int64_t offset, std::int64_t count) const;

  /// Writes no data, but makes every page resident, near the calling thread. Throws DeviceError if there is no room.
  void touch();
  /// Locks the memory in RAM (and touches it). False, with the reason in notes(), where the system refuses.
  bool pin();
  bool pinned() const { return pinned_; }

  /// A buffer is handed out: counts it in used(). Throws like bytes(). Thread-safe.
  void mark_used(std::int64_t offset, std::int64_t count);
  /// The highest end of a buffer that was handed out: equal to size() when the plan was carried out in full.
  std::int64_t used() const { return used_.load(std::memory_order_relaxed); }
  /// The buffer is dead: AddressSanitizer reports the next use. Writes nothing. Throws like bytes().
  void retire(std::int64_t offset, std::int64_t count);
  /// For debugging: fills a dead buffer with 0xff, which is NaN in bf16, fp16 and fp32 and -1 in integers, then
  /// retire(). Throws like bytes().
  void poison(std::int64_t offset, std::int64_t count);
  /// Throws std::logic_error if somebody wrote between the arena and its guard pages.
  void check_guards() const;

  /// What the system refused, for people: no huge pages, no pinning.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  void place(const ArenaOptions& options);
  void release() noexcept;
  std::span<std::byte> slack_before() const;
  std::span<std::byte> slack_behind() const;

  std::string name_;
  std::byte* mapping_ = nullptr;   // with guards
  std::byte* writable_ = nullptr;  // pages between the guards
  std::byte* data_ = nullptr;
  std::size_t mapped_ = 0, writable_size_ = 0;
  std::int64_t size_ = 0;
  std::atomic<std::int64_t> used_ = 0;
  bool pinned_ = false;
  std::vector<std::string> notes_;
};

}  // namespace zeroplan
