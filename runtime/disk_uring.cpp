// io_uring: one thread keeps the disk's queue full. Compiled with liburing only.

#include <fmt/format.h>
#include <liburing.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "models/error.h"
#include "runtime/disk_queue.h"

namespace zeroplan {
namespace {

constexpr std::size_t kLargestRegistered = std::size_t{1} << 30;  // of one buffer: io_uring_register(2)

constexpr int kMostRefusals = 10'000;  // 1 ms apart

std::string reason(int result) { return std::strerror(-result); }

// What the ring is told about its use, the most useful first: Linux 6.1, 6.0, 5.1.
constexpr unsigned kSetups[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, IORING_SETUP_SINGLE_ISSUER, 0};

// An open ring.
struct Ring {
  explicit Ring(int depth) {
    int result = -EINVAL;
    for (const unsigned flags : kSetups) {
      result = io_uring_queue_init(static_cast<unsigned>(depth), &ring, flags);
      if (result != -EINVAL) break;
    }
    if (result < 0) throw DeviceError("io_uring_setup: " + reason(result));
  }
  ~Ring() { io_uring_queue_exit(&ring); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  io_uring ring{};
};

class UringBackend final : public DiskBackend {
 public:
  explicit UringBackend(const DiskTarget& target) : file_(target.file), open_(target.queue_depth) {
    register_all(target);
  }

  // The ring itself ends later, in the background: the file must not be held that long.
  ~UringBackend() override {
    if (fixed_file_) io_uring_unregister_files(&ring_);
  }
  UringBackend(const UringBackend&) = delete;
  UringBackend& operator=(const UringBackend&) = delete;

  // The kernel is told in wait(), all requests at once.
  void submit(const DiskRequest& request) override {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) {  // cannot happen as long as no more than queue_depth are in flight
      enter(0);
      entry = io_uring_get_sqe(&ring_);
      if (entry == nullptr) throw DeviceError("io_uring: the submission queue stays full");
    }
    const auto size = static_cast<unsigned>(request.size);
    const auto offset = static_cast<std::uint64_t>(request.offset);
    const int file = fixed_file_ ? 0 : file_;
    const bool reading = request.direction == DiskDirection::read;
    if (const std::optional<int> buffer = registered(request.memory, request.size)) {
      if (reading)
        io_uring_prep_read_fixed(entry, file, request.memory, size, offset, *buffer);
      else
        io_uring_prep_write_fixed(entry, file, request.memory, size, offset, *buffer);
    } else if (reading) {
      io_uring_prep_read(entry, file, request.memory, size, offset);
    } else {
      io_uring_prep_write(entry, file, request.memory, size, offset);
    }
    if (fixed_file_) entry->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(entry, static_cast<std::uint64_t>(request.slot));
  }

  void wait(std::vector<DiskCompletion>& done) override {
    const std::size_t before = done.size();
    while (done.size() == before) {
      enter(1);
      io_uring_cqe* entry = nullptr;
      unsigned head = 0, seen = 0;
      io_uring_for_each_cqe(&ring_, head, entry) {
        done.push_back({static_cast<int>(entry->user_data), entry->res});
        ++seen;
      }
      io_uring_cq_advance(&ring_, seen);
    }
  }

 private:
  // Gives the kernel what was submitted and waits for `least` completions. It may refuse for lack of memory or for a
  // full completion queue; wait() then takes what is there, and comes again.
  void enter(unsigned least) {
    const int result = io_uring_submit_and_wait(&ring_, least);
    if (result == -EINTR) return;
    if (result >= 0) {
      refusals_ = 0;
      return;
    }
    if ((result != -EAGAIN && result != -EBUSY) || ++refusals_ > kMostRefusals)
      throw DeviceError("io_uring_enter: " + reason(result));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  void register_all(const DiskTarget& target) {
    int result = io_uring_register_files(&ring_, &target.file, 1);
    fixed_file_ = result >= 0;
    if (!fixed_file_) target.notes->push_back("io_uring: the file is not registered: " + reason(result));
    for (std::span<std::byte> memory : target.fixed_memory) {
      for (; !memory.empty(); memory = memory.subspan(std::min(memory.size(), kLargestRegistered)))
        buffers_.push_back({memory.data(), std::min(memory.size(), kLargestRegistered)});
    }
    if (buffers_.empty()) return;
    std::ranges::sort(buffers_, {}, &iovec::iov_base);
    result = io_uring_register_buffers(&ring_, buffers_.data(), static_cast<unsigned>(buffers_.size()));
    if (result >= 0) return;
    buffers_.clear();
    target.notes->push_back(
        fmt::format("io_uring: memory is not registered: {}{}; its pages are pinned for each transfer", reason(result),
                    result == -ENOMEM ? " (RLIMIT_MEMLOCK)" : ""));
  }

  // The registered buffer that holds all of the memory.
  std::optional<int> registered(const std::byte* memory, std::int64_t size) const {
    const auto behind = std::ranges::upper_bound(buffers_, static_cast<const void*>(memory), {},
                                                 [](const iovec& b) { return static_cast<const void*>(b.iov_base); });
    if (behind == buffers_.begin()) return std::nullopt;
    const iovec& buffer = *std::prev(behind);
    const std::int64_t at = memory - static_cast<const std::byte*>(buffer.iov_base);
    if (at + size > static_cast<std::int64_t>(buffer.iov_len)) return std::nullopt;
    return static_cast<int>(std::prev(behind) - buffers_.begin());
  }

  int file_;
  Ring open_;
  io_uring& ring_ = open_.ring;
  int refusals_ = 0;  // of io_uring_enter, one after the other
  bool fixed_file_ = false;
  std::vector<iovec> buffers_;  // by address
};

}  // namespace

std::unique_ptr<DiskBackend> make_uring_backend(const DiskTarget& target) {
  return std::make_unique<UringBackend>(target);
}

}  // namespace zeroplan
