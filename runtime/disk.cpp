#include "runtime/disk.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "models/error.h"
#include "models/schedule.h"
#include "runtime/disk_queue.h"
#include "runtime/scratch_file.h"

namespace zeroplan {
namespace {

// A thread that runs what it is given: an io_uring ring is quickest when one thread alone uses it.
class Channel {
 public:
  Channel() : thread_([this] { serve(); }) {}
  ~Channel() {
    {
      const std::scoped_lock lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// Runs the job on the channel's thread; its exception comes back here. One caller at a time, others wait.
  void run(const std::function<void()>& job) {
    const std::scoped_lock turn(turn_);
    std::unique_lock lock(mutex_);
    job_ = &job;
    changed_.notify_all();
    changed_.wait(lock, [&] { return job_ == nullptr; });
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ending_ || job_ != nullptr; });
      if (job_ == nullptr) return;
      lock.unlock();
      std::exception_ptr failure;
      try {
        (*job_)();
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      failure_ = std::move(failure);
      job_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable changed_;
  const std::function<void()>* job_ = nullptr;
  std::exception_ptr failure_;
  bool ending_ = false;
  std::thread thread_;
};

// One direction: its thread, its queue to the kernel, its blocks in flight.
class Lane {
 public:
  Lane(DiskDirection direction, DiskQueueRules rules) : direction_(direction), queue_(std::move(rules)) {}
  ~Lane() {
    channel_.run([this] { backend_.reset(); });
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  void open(const DiskTarget& target, const DiskFile::MakeBackend& make) {
    channel_.run([&] { backend_ = make(target); });
  }

  void transfer(std::span<const DiskPiece> pieces) {
    channel_.run([&] { queue_.transfer(*backend_, direction_, pieces); });
    for (const DiskPiece& piece : pieces) moved_ += piece.size;
  }

  std::int64_t moved() const { return moved_; }

 private:
  DiskDirection direction_;
  DiskQueue queue_;
  std::unique_ptr<DiskBackend> backend_;
  std::atomic<std::int64_t> moved_ = 0;
  Channel channel_;
};

// Where each buffer lies in the file.
struct Table {
  std::vector<std::int64_t> offset, size;
  std::int64_t planned = 0, file = 0;

  explicit Table(std::span<const std::int64_t> sizes) {
    for (const std::int64_t bytes : sizes) {
      if (bytes < 0 || bytes > std::numeric_limits<std::int64_t>::max() / 2 - file - kDiskAlignment)
        throw std::logic_error(fmt::format("a buffer of {} bytes on disk", bytes));
      offset.push_back(file);
      size.push_back(bytes);
      planned += bytes;
      file += (bytes + kDiskAlignment - 1) / kDiskAlignment * kDiskAlignment;
    }
  }

  // Throws std::logic_error if the part leaves its buffer.
  DiskPiece piece(int buffer, std::int64_t at, std::byte* memory, std::size_t count) const {
    const auto index = static_cast<std::size_t>(buffer);
    const auto bytes = static_cast<std::int64_t>(count);
    if (buffer < 0 || index >= size.size() || at < 0 || bytes > size[index] || at > size[index] - bytes)
      throw std::logic_error(fmt::format("{} bytes from byte {} on leave buffer {} on disk", bytes, at, buffer));
    return {memory, bytes, offset[index] + at};
  }

  // The end of a buffer's last block belongs to nobody else.
  bool ends_buffer(int buffer, const DiskPiece& piece) const {
    const auto index = static_cast<std::size_t>(buffer);
    return piece.offset + piece.size == offset[index] + size[index];
  }
};

// A piece in whole disk blocks, and what it has of a first and a last one.
struct Cut {
  DiskPiece first, whole, last;
};

Cut cut(const DiskPiece& piece, bool keep_end) {
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    return DiskPiece{piece.memory + begin, end - begin, piece.offset + begin};
  };
  const std::int64_t into = piece.offset % kDiskAlignment;
  const std::int64_t begin = into == 0 ? 0 : std::min(piece.size, kDiskAlignment - into);
  const std::int64_t over = keep_end ? 0 : (piece.offset + piece.size) % kDiskAlignment;
  const std::int64_t end = std::max(begin, piece.size - over);
  return {part(0, begin), part(begin, end), part(end, piece.size)};
}

const DiskOptions& checked(const DiskOptions& options) {
  const double block = options.block.base();
  if (options.queue_depth < 1 || options.queue_depth > 4096)
    throw InputError(fmt::format("disk queue depth {}: expected 1 to 4096", options.queue_depth));
  if (!(block >= kDiskAlignment && block <= kGiB) || static_cast<std::int64_t>(block) % kDiskAlignment != 0 ||
      block != static_cast<double>(static_cast<std::int64_t>(block)))
    throw InputError(
        fmt::format("disk block of {} bytes: expected a multiple of {} up to 1 GiB", block, kDiskAlignment));
  return options;
}

DiskQueueRules rules_of(const DiskOptions& options, const ScratchFile& file) {
  return {file.path(),
          options.queue_depth,
          static_cast<std::int64_t>(options.block.base()),
          file.memory_alignment(),
          file.direct() ? kDiskAlignment : 1,
          options.stall_retries};
}

}  // namespace

struct DiskFile::State {
  Table table;
  ScratchFile file;
  std::vector<std::string> notes;
  DiskEngine engine = DiskEngine::threads;
  Lane reads, writes;

  State(const DiskOptions& options, std::span<const std::int64_t> sizes)
      : table(sizes),
        file({options.directory, fmt::format("zeroplan-rank{}", options.rank), table.file, options.keep, options.direct,
              static_cast<int>(kDiskAlignment)}),
        notes(file.notes()),
        reads(DiskDirection::read, rules_of(options, file)),
        writes(DiskDirection::write, rules_of(options, file)) {
    if (file.memory_alignment() > kBufferAlignment)
      notes.push_back(fmt::format(
          "{}: direct I/O wants memory at multiples of {} bytes: buffers elsewhere are copied, through up to {}",
          file.path(), file.memory_alignment(), format_gib(2.0 * options.queue_depth * options.block)));
  }

  void open(const DiskOptions& options, const MakeBackend& make) {
    const DiskTarget target{file.descriptor(), options.queue_depth, options.fixed_memory, &notes};
    const std::size_t before = notes.size();
    reads.open(target, make);
    const std::size_t after = notes.size();
    writes.open(target, make);
    // Both say the same.
    if (notes.size() - after == after - before) notes.resize(after);
  }

  void open(const DiskOptions& options) {
    if (options.engine != DiskEngine::threads) {
      try {
        open(options, make_uring_backend);
        engine = DiskEngine::uring;
        return;
      } catch (const DeviceError& e) {
        if (options.engine == DiskEngine::uring) throw DeviceError(fmt::format("{}: {}", file.path(), e.what()));
        notes.push_back(fmt::format("{}: {}; threads read and write instead", file.path(), e.what()));
      }
    }
    open(options, make_thread_backend);
  }

  // Part of one disk block.
  void move_edge(const DiskPiece& piece, DiskDirection direction) {
    if (piece.size == 0) return;
    alignas(kDiskAlignment) std::byte block[kDiskAlignment];
    const std::int64_t into = piece.offset % kDiskAlignment;
    const DiskPiece around{block, kDiskAlignment, piece.offset - into};
    reads.transfer({&around, 1});
    if (direction == DiskDirection::read) {
      std::memcpy(piece.memory, block + into, static_cast<std::size_t>(piece.size));
    } else {
      std::memcpy(block + into, piece.memory, static_cast<std::size_t>(piece.size));
      writes.transfer({&around, 1});
    }
  }

  template <class Byte>
  void move(std::span<const DiskPart<Byte>> parts, DiskDirection direction) {
    std::vector<Cut> cuts;
    for (const DiskPart<Byte>& part : parts) {
      auto* memory = const_cast<std::byte*>(part.memory.data());  // a write only reads it
      const DiskPiece piece = table.piece(part.buffer, part.offset, memory, part.memory.size());
      cuts.push_back(cut(piece, direction == DiskDirection::read || table.ends_buffer(part.buffer, piece)));
    }
    std::vector<DiskPiece> whole;
    // A write would hide a cut from the reads after it; what a read met is looked at when it is done.
    if (direction == DiskDirection::write) file.check_whole();
    for (const Cut& c : cuts) {
      move_edge(c.first, direction);
      if (c.whole.size > 0) whole.push_back(c.whole);
      move_edge(c.last, direction);
    }
    (direction == DiskDirection::read ? reads : writes).transfer(whole);
    if (direction == DiskDirection::read) file.check_whole();
  }
};

std::string_view to_string(DiskEngine engine) {
  switch (engine) {
    case DiskEngine::automatic:
      return "automatic";
    case DiskEngine::uring:
      return "io_uring";
    case DiskEngine::threads:
      return "threads";
  }
  return "";
}

DiskFile::DiskFile(DiskOptions options, std::span<const std::int64_t> buffer_sizes)
    : state_(std::make_unique<State>(checked(options), buffer_sizes)) {
  state_->open(options);
}

DiskFile::DiskFile(DiskOptions options, std::span<const std::int64_t> buffer_sizes, const MakeBackend& make)
    : state_(std::make_unique<State>(checked(options), buffer_sizes)) {
  state_->open(options, make);
}

DiskFile::~DiskFile() = default;

void DiskFile::read(int buffer, std::int64_t offset, std::span<std::byte> to) {
  const DiskPart<std::byte> part{buffer, offset, to};
  read({&part, 1});
}

void DiskFile::read(std::span<const DiskPart<std::byte>> parts) { state_->move(parts, DiskDirection::read); }

void DiskFile::write(int buffer, std::int64_t offset, std::span<const std::byte> from) {
  const DiskPart<const std::byte> part{buffer, offset, from};
  write({&part, 1});
}

void DiskFile::write(std::span<const DiskPart<const std::byte>> parts) { state_->move(parts, DiskDirection::write); }

std::int64_t DiskFile::planned_bytes() const { return state_->table.planned; }
std::int64_t DiskFile::padding_bytes() const { return state_->table.file - state_->table.planned; }
std::int64_t DiskFile::bytes_read() const { return state_->reads.moved(); }
std::int64_t DiskFile::bytes_written() const { return state_->writes.moved(); }
const std::string& DiskFile::path() const { return state_->file.path(); }
DiskEngine DiskFile::engine() const { return state_->engine; }
bool DiskFile::direct() const { return state_->file.direct(); }
const std::vector<std::string>& DiskFile::notes() const { return state_->notes; }

}  // namespace zeroplan
