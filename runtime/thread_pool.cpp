#include "runtime/thread_pool.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "models/error.h"

namespace zeroplan {

struct ThreadPool::State {
  using Body = std::function<void(std::int64_t, std::int64_t)>;

  std::mutex busy;   // held by the loop that runs
  std::mutex mutex;  // guards everything below
  std::condition_variable work, done;
  const Body* body = nullptr;
  std::int64_t count = 0, range = 1, next = 0;
  int running = 0;
  std::exception_ptr error;
  bool stopping = false;
  std::vector<std::thread> threads;

  /// Takes ranges until none is left. Called and left with the lock held.
  void drain(std::unique_lock<std::mutex>& lock) {
    while (body != nullptr && next < count) {
      const std::int64_t begin = next;
      const std::int64_t end = std::min(count, begin + range);
      next = end;
      const Body& run = *body;
      ++running;
      lock.unlock();
      std::exception_ptr caught;
      try {
        run(begin, end);
      } catch (...) {
        caught = std::current_exception();
      }
      lock.lock();
      --running;
      if (caught && !error) error = caught;
      if (caught) next = count;
    }
    if (running == 0) done.notify_all();
  }

  void serve() {
    std::unique_lock lock(mutex);
    while (!stopping) {
      drain(lock);
      work.wait(lock, [&] { return stopping || (body != nullptr && next < count); });
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    work.notify_all();
    for (std::thread& thread : threads) thread.join();
  }
};

ThreadPool::ThreadPool(int threads) : threads_(std::max(1, threads)) {
  if (threads_ == 1) return;
  state_ = std::make_unique<State>();
  try {
    for (int i = 1; i < threads_; ++i) state_->threads.emplace_back([this] { state_->serve(); });
  } catch (const std::system_error& e) {
    state_->stop();
    throw DeviceError(std::string("no more threads: ") + e.what());
  }
}

ThreadPool::~ThreadPool() {
  if (state_) state_->stop();
}

void ThreadPool::for_ranges(std::int64_t count, std::int64_t grain,
                            const std::function<void(std::int64_t begin, std::int64_t end)>& body) {
  if (count <= 0) return;
  const std::unique_lock busy =
      state_ ? std::unique_lock(state_->busy, std::try_to_lock) : std::unique_lock<std::mutex>();
  if (!busy.owns_lock() || count <= grain) {
    body(0, count);
    return;
  }
  // Four ranges a thread: uneven work (causal rows) evens out, and starting one costs little.
  constexpr std::int64_t kRangesPerThread = 4;
  const std::int64_t even = (count + kRangesPerThread * threads_ - 1) / (kRangesPerThread * threads_);
  std::unique_lock lock(state_->mutex);
  state_->body = &body;
  state_->count = count;
  state_->range = (even + grain - 1) / grain * grain;
  state_->next = 0;
  state_->error = nullptr;
  state_->work.notify_all();
  state_->drain(lock);
  state_->done.wait(lock, [&] { return state_->running == 0 && state_->next >= state_->count; });
  state_->body = nullptr;
  if (state_->error) std::rethrow_exception(state_->error);
}

}  // namespace zeroplan
