// Where io_uring is not there or not allowed: a few threads, each waiting in pread or pwrite.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "runtime/disk_queue.h"

namespace zeroplan {
namespace {

constexpr int kMaxWorkers = 16;  // more did not move more on any disk tried (docs/benchmarks.md)

std::int64_t carry_out(int file, const DiskRequest& request) {
  const auto size = static_cast<std::size_t>(request.size);
  const ssize_t moved = request.direction == DiskDirection::read ? pread(file, request.memory, size, request.offset)
                                                                 : pwrite(file, request.memory, size, request.offset);
  return moved < 0 ? -errno : moved;
}

class ThreadBackend final : public DiskBackend {
 public:
  explicit ThreadBackend(const DiskTarget& target) : file_(target.file) {
    for (int i = 0; i < std::min(target.queue_depth, kMaxWorkers); ++i) workers_.emplace_back([this] { work(); });
  }

  ~ThreadBackend() override {
    {
      const std::scoped_lock lock(mutex_);
      ending_ = true;
    }
    asked_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  ThreadBackend(const ThreadBackend&) = delete;
  ThreadBackend& operator=(const ThreadBackend&) = delete;

  void submit(const DiskRequest& request) override {
    {
      const std::scoped_lock lock(mutex_);
      requests_.push_back(request);
    }
    asked_.notify_one();
  }

  void wait(std::vector<DiskCompletion>& done) override {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return !completions_.empty(); });
    done.insert(done.end(), completions_.begin(), completions_.end());
    completions_.clear();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      asked_.wait(lock, [&] { return ending_ || !requests_.empty(); });
      if (requests_.empty()) return;
      const DiskRequest request = requests_.front();
      requests_.pop_front();
      lock.unlock();
      const std::int64_t result = carry_out(file_, request);
      lock.lock();
      completions_.push_back({request.slot, result});
      ended_.notify_one();
    }
  }

  int file_;
  std::mutex mutex_;
  std::condition_variable asked_, ended_;
  std::deque<DiskRequest> requests_;
  std::vector<DiskCompletion> completions_;
  bool ending_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<DiskBackend> make_thread_backend(const DiskTarget& target) {
  return std::make_unique<ThreadBackend>(target);
}

}  // namespace zeroplan
