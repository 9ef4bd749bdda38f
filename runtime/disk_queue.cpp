#include "runtime/disk_queue.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <thread>

#include "models/error.h"

namespace zeroplan {
namespace {

std::int64_t round_down(std::int64_t value, std::int64_t multiple) { return value / multiple * multiple; }

std::int64_t round_up(std::int64_t value, std::int64_t multiple) { return round_down(value + multiple - 1, multiple); }

bool worth_retrying(std::int64_t result) { return result == -EAGAIN || result == -EINTR; }

// The system's text for an error of a write that ends at `end` in its file, or for none (0: it moves nothing). A write
// that crosses the limit of the file size is cut there; the file system then refuses the odd length of direct I/O
// (EINVAL), moves nothing, or says that the file is too large, as it does for every write beyond.
std::string write_error(int code, std::int64_t end) {
  rlimit limit{};
  const bool perhaps = code == EINVAL || code == EFBIG || code == 0;
  if (perhaps && getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      static_cast<rlim_t>(end) > limit.rlim_cur)
    return fmt::format("{}: the limit of a file (RLIMIT_FSIZE) is {} bytes", std::strerror(EFBIG), limit.rlim_cur);
  return code == 0 ? "nothing was written" : std::strerror(code);
}

}  // namespace

// A block in flight. With a bounce buffer the kernel sees that one, else `piece.memory`.
struct DiskQueue::Slot {
  DiskPiece piece;
  std::byte* memory = nullptr;
  std::int64_t size = 0;  // asked of the kernel: piece.size, or rounded up to whole disk blocks
  std::int64_t done = 0;
  int stalls = 0;  // attempts since `done` last grew

  bool bounced() const { return memory != piece.memory; }
};

class DiskQueue::Transfer {
 public:
  Transfer(DiskQueue& queue, DiskBackend& backend, DiskDirection direction, std::span<const DiskPiece> pieces)
      : queue_(queue),
        rules_(queue.rules_),
        slots_(queue.slots_),
        backend_(backend),
        direction_(direction),
        pieces_(pieces) {
    for (int slot = rules_.depth; slot-- > 0;) idle_.push_back(slot);
  }

  // Returns when nothing is in flight any more.
  void run() {
    std::vector<DiskCompletion> ended;
    while (true) {
      std::optional<DiskPiece> block;
      while (!failure_ && !idle_.empty() && (block = next_block())) start(*block);
      if (in_flight_ == 0) break;
      ended.clear();
      backend_.wait(ended);
      in_flight_ -= static_cast<int>(ended.size());
      for (const DiskCompletion& completion : ended) finish(completion);
    }
  }

  const std::optional<std::string>& failure() const { return failure_; }

 private:
  bool reading() const { return direction_ == DiskDirection::read; }

  bool aligned(const std::byte* memory) const {
    return reinterpret_cast<std::uintptr_t>(memory) % static_cast<std::uintptr_t>(rules_.memory_alignment) == 0;
  }

  // The next block to move; whole disk blocks as long as there are any, so that only the end needs a bounce buffer.
  std::optional<DiskPiece> next_block() {
    while (piece_ < pieces_.size() && at_ == pieces_[piece_].size) {
      ++piece_;
      at_ = 0;
    }
    if (piece_ == pieces_.size()) return std::nullopt;
    const DiskPiece& piece = pieces_[piece_];
    const std::int64_t left = piece.size - at_, whole = round_down(left, rules_.offset_alignment);
    const bool direct = aligned(piece.memory + at_) && whole > 0;
    const std::int64_t size = std::min(rules_.block, direct ? whole : left);
    const DiskPiece block{piece.memory + at_, size, piece.offset + at_};
    at_ += size;
    return block;
  }

  void start(const DiskPiece& block) {
    Slot& slot = slots_[static_cast<std::size_t>(idle_.back())];
    slot.piece = block;
    slot.memory = block.memory;
    slot.size = round_up(block.size, rules_.offset_alignment);
    slot.done = 0;
    slot.stalls = 0;
    if (slot.size != block.size || !aligned(block.memory)) {
      try {
        slot.memory = queue_.bounce(idle_.back(), slot.size);
      } catch (const DeviceError& e) {
        return fail(slot, e.what());
      }
      if (!reading()) {
        std::memcpy(slot.memory, block.memory, static_cast<std::size_t>(block.size));
        std::memset(slot.memory + block.size, 0, static_cast<std::size_t>(slot.size - block.size));
      }
    }
    submit(idle_.back());
    idle_.pop_back();
  }

  void submit(int index) {
    const Slot& slot = slots_[static_cast<std::size_t>(index)];
    backend_.submit({direction_, slot.memory + slot.done, slot.size - slot.done, slot.piece.offset + slot.done, index});
    ++in_flight_;
  }

  void finish(const DiskCompletion& completion) {
    Slot& slot = slots_[static_cast<std::size_t>(completion.slot)];
    if (completion.result < 0 && !worth_retrying(completion.result)) {
      fail(slot, system_error(slot, static_cast<int>(-completion.result)));
    } else if (completion.result > slot.size - slot.done) {
      fail(slot, fmt::format("{} bytes moved, more than asked", completion.result));
    } else if (completion.result == 0) {
      fail(slot, reading() ? "the file ends here: somebody cut it" : system_error(slot, 0));
    } else {
      advance(slot, completion.result);
    }
    if (!failure_ && slot.done < slot.size) {
      submit(completion.slot);
      return;
    }
    if (slot.done == slot.size && slot.bounced() && reading())
      std::memcpy(slot.piece.memory, slot.memory, static_cast<std::size_t>(slot.piece.size));
    idle_.push_back(completion.slot);
  }

  // Direct I/O goes on at a whole disk block: what lies behind the last one is moved again.
  void advance(Slot& slot, std::int64_t result) {
    const std::int64_t moved = slot.done + std::max<std::int64_t>(result, 0);
    const std::int64_t done = moved == slot.size ? moved : round_down(moved, rules_.offset_alignment);
    if (done > slot.done) {
      slot.done = done;
      slot.stalls = 0;
      return;
    }
    if (++slot.stalls > rules_.stall_retries) {
      const int code = result < 0 ? static_cast<int>(-result) : 0;
      fail(slot, fmt::format("no progress in {} attempts{}{}", slot.stalls, code != 0 || !reading() ? ": " : "",
                             code != 0 || !reading() ? system_error(slot, code) : ""));
      return;
    }
    constexpr int kLongest = 10'000;
    std::this_thread::sleep_for(std::chrono::microseconds(std::min(10 << std::min(slot.stalls, 10), kLongest)));
  }

  std::string system_error(const Slot& slot, int code) const {
    return reading() ? std::strerror(code) : write_error(code, slot.piece.offset + slot.size);
  }

  // The first failure is the one that is told.
  void fail(const Slot& slot, const std::string& reason) {
    if (failure_) return;
    failure_ = fmt::format("{}: {} {} bytes at offset {}: {}", rules_.path, reading() ? "reading" : "writing",
                           slot.size - slot.done, slot.piece.offset + slot.done, reason);
  }

  DiskQueue& queue_;
  const DiskQueueRules& rules_;
  std::vector<Slot>& slots_;
  DiskBackend& backend_;
  DiskDirection direction_;
  std::span<const DiskPiece> pieces_;
  std::size_t piece_ = 0;
  std::int64_t at_ = 0;  // in pieces_[piece_]
  std::vector<int> idle_;
  int in_flight_ = 0;
  std::optional<std::string> failure_;
};

DiskQueue::DiskQueue(DiskQueueRules rules) : rules_(std::move(rules)), slots_(static_cast<std::size_t>(rules_.depth)) {}

DiskQueue::~DiskQueue() = default;

// In huge pages like the arenas: a disk takes few pieces of memory at once, and a block in small pages has many.
std::byte* DiskQueue::bounce(int slot, std::int64_t size) {
  const bool end = size <= kDiskAlignment;
  ArenaMemory& arena = end ? bounced_ends_ : bounced_blocks_;
  const std::int64_t each = end ? kDiskAlignment : round_up(rules_.block, kDiskAlignment);
  if (arena.size() == 0) {
    arena = ArenaMemory(Bytes(static_cast<double>(rules_.depth * each)), {rules_.path + ": copies", kDiskAlignment});
    arena.mark_used(0, arena.size());
  }
  return arena.bytes(slot * each, each).data();
}

void DiskQueue::transfer(DiskBackend& backend, DiskDirection direction, std::span<const DiskPiece> pieces) {
  if (!broken_.empty()) throw DeviceError(fmt::format("{}: unusable since {}", rules_.path, broken_));
  Transfer transfer(*this, backend, direction, pieces);
  try {
    transfer.run();
  } catch (const std::exception& e) {
    broken_ = e.what();
    throw DeviceError(fmt::format("{}: {}", rules_.path, e.what()));
  }
  if (transfer.failure()) throw DeviceError(*transfer.failure());
}

}  // namespace zeroplan
