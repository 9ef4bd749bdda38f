#pragma once
// Inside DiskFile: cutting transfers into blocks, keeping a queue of them full and checking what came of each. Who
// carries them out is a DiskBackend: io_uring, threads, or a test that injects faults.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/arena_memory.h"
#include "runtime/disk.h"

namespace zeroplan {

enum class DiskDirection : std::uint8_t { read, write };

/// The file as a backend sees it.
struct DiskTarget {
  int file = -1;
  int queue_depth = 1;
  std::vector<std::span<std::byte>> fixed_memory;
  std::vector<std::string>* notes = nullptr;  // what the system refused goes here, during construction only
};

struct DiskRequest {
  DiskDirection direction = DiskDirection::read;
  std::byte* memory = nullptr;  // read only for a write
  std::int64_t size = 0;
  std::int64_t offset = 0;  // in the file
  int slot = 0;             // given back with the result, below DiskTarget::queue_depth
};

struct DiskCompletion {
  int slot = 0;
  std::int64_t result = 0;  // bytes moved, or -errno
};

/// One queue to the kernel. Made, used and destroyed by one thread, with nothing in flight at the end.
class DiskBackend {
 public:
  virtual ~DiskBackend() = default;
  /// Takes a request; at most queue_depth are in flight. It need not start before wait().
  virtual void submit(const DiskRequest& request) = 0;
  /// Returns when at least one request has ended; appends those that have. Called only with requests in flight.
  virtual void wait(std::vector<DiskCompletion>& done) = 0;
};

/// Throws DeviceError if the system has no io_uring for us or it is not built in.
std::unique_ptr<DiskBackend> make_uring_backend(const DiskTarget& target);
std::unique_ptr<DiskBackend> make_thread_backend(const DiskTarget& target);

/// A range of memory and where it lies in the file. `size` may end inside a disk block; the rest of that block is then
/// padding of the same buffer.
struct DiskPiece {
  std::byte* memory = nullptr;
  std::int64_t size = 0;
  std::int64_t offset = 0;
};

struct DiskQueueRules {
  std::string path;  // for messages
  int depth = 1;
  std::int64_t block = 1 << 20;
  std::int64_t memory_alignment = 1;  // other addresses, and ends inside a disk block, pass through a bounce buffer
  std::int64_t offset_alignment = 1;  // of offsets and sizes: kDiskAlignment for direct I/O
  int stall_retries = 1000;
};

/// Carries out lists of pieces, `depth` blocks at a time.
class DiskQueue {
 public:
  explicit DiskQueue(DiskQueueRules rules);
  ~DiskQueue();

  /// Throws DeviceError, after the last block in flight has ended. If the backend itself throws, what is in flight is
  /// unknown: no transfer is accepted from then on.
  void transfer(DiskBackend& backend, DiskDirection direction, std::span<const DiskPiece> pieces);

 private:
  struct Slot;
  class Transfer;
  /// A slot's buffer for data that direct I/O cannot take where it lies. Made when first needed; throws DeviceError.
  std::byte* bounce(int slot, std::int64_t size);

  DiskQueueRules rules_;
  std::vector<Slot> slots_;
  ArenaMemory bounced_ends_, bounced_blocks_;
  std::string broken_;  // why the backend threw
};

}  // namespace zeroplan
