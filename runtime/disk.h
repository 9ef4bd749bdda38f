#pragma once
// The NVMe tier of one rank: a file that holds the rank's buffers of Memory::nvme while a job runs. Not a checkpoint:
// its contents mean nothing after the job.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/units.h"

namespace zeroplan {

class DiskBackend;
struct DiskTarget;

/// Who talks to the kernel.
enum class DiskEngine : std::uint8_t {
  automatic,  // uring where it is built in and the system allows it, else threads, with a note
  uring,      // io_uring or a DeviceError
  threads,    // a few threads that wait in pread and pwrite
};
std::string_view to_string(DiskEngine engine);

struct DiskOptions {
  std::string directory;  // exists, the user may write there
  int rank = 0;           // part of the file's name
  DiskEngine engine = DiskEngine::automatic;
  int queue_depth = 32;      // transfers in flight, for reads and writes each
  Bytes block = 1_MiB;       // the largest single transfer, a multiple of kDiskAlignment
  bool direct = true;        // past the page cache where the file system can (O_DIRECT); else a note says so
  bool keep = false;         // leaves the file, at path(), when the DiskFile goes; otherwise it has no name at all
  int stall_retries = 1000;  // of one transfer that makes no progress (EAGAIN, EINTR), up to 10 ms apart
  /// Where most transfers go from and to (the pinned arena): registered with the kernel once, so that pages are not
  /// pinned for each transfer. Must outlive the DiskFile. Other memory works as well.
  std::vector<std::span<std::byte>> fixed_memory;
};

/// Every buffer starts at a multiple of this in the file, and so do the disk's own blocks (512 or 4096 bytes).
inline constexpr std::int64_t kDiskAlignment = 4096;

/// A part of a transfer: bytes [offset, offset + memory.size()) of a buffer. Fast are parts that begin at a multiple of
/// kDiskAlignment (writes: and end at one or with the buffer); of others the first and the last block are moved apart,
/// for a write by reading, changing and writing them.
template <class Byte>
struct DiskPart {
  int buffer = 0;  // index into the sizes given at construction
  std::int64_t offset = 0;
  std::span<Byte> memory;
};

/// Reads and writes whole buffers, many blocks in flight. Reads run on one thread and queue of their own and writes on
/// another, so both directions overlap; any thread may call, calls of one direction take turns. Buffers share no disk
/// block. A write and another call on the same buffer at the same time is the caller's race.
///
/// What was never written reads as zeros. Every completion is checked: what a short transfer left is asked for again,
/// EAGAIN and EINTR are tried again up to a limit, anything else is a DeviceError with path, offset and reason, thrown
/// when nothing is in flight any more; the object can be used on.
class DiskFile {
 public:
  using MakeBackend = std::function<std::unique_ptr<DiskBackend>(const DiskTarget&)>;

  /// Makes a file for buffers of these sizes and allocates its blocks on the disk. Throws InputError for a directory
  /// that is missing, read-only or none; DeviceError with path, bytes asked and bytes free when the disk is full or the
  /// size exceeds a limit, and when an engine that was asked for by name is not available.
  DiskFile(DiskOptions options, std::span<const std::int64_t> buffer_sizes);
  /// For tests: transfers go through what `make` returns; it is called once for reads and once for writes.
  DiskFile(DiskOptions options, std::span<const std::int64_t> buffer_sizes, const MakeBackend& make);
  ~DiskFile();
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  /// All of `to` is read when it returns. Throws DeviceError, std::logic_error on a bad range.
  void read(int buffer, std::int64_t offset, std::span<std::byte> to);
  /// The parts in one go, without a pause between them.
  void read(std::span<const DiskPart<std::byte>> parts);
  /// `from` may be changed again when it returns. Throws DeviceError, std::logic_error on a bad range.
  void write(int buffer, std::int64_t offset, std::span<const std::byte> from);
  void write(std::span<const DiskPart<const std::byte>> parts);

  std::int64_t planned_bytes() const;  // sum of the buffers' sizes
  std::int64_t padding_bytes() const;  // what rounding each buffer up to kDiskAlignment adds in the file
  /// Moved so far; padding and repeated transfers are not counted, blocks at the ends of unaligned parts whole.
  std::int64_t bytes_read() const;
  std::int64_t bytes_written() const;

  const std::string& path() const;  // while it runs the file has a name only with `keep`
  DiskEngine engine() const;        // never automatic
  bool direct() const;
  /// What the system refused and what is done instead, for people.
  const std::vector<std::string>& notes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zeroplan
