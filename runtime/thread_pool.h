#pragma once
// A few threads that share one loop at a time. Kernels cut their output into ranges such that every element is made by
// one thread in one order, so results do not depend on the number of threads.

#include <cstdint>
#include <functional>
#include <memory>

namespace zeroplan {

class ThreadPool {
 public:
  /// `threads` >= 1, the caller counted: ThreadPool(1) starts none and runs everything in the caller.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return threads_; }

  /// Calls body(begin, end) on ranges that cover [0, count) once; each but the last is a multiple of `grain` long.
  /// Returns when all are done. The first exception is thrown again here. Callable from several threads and from within
  /// a body: who finds the pool busy runs its loop alone.
  void for_ranges(std::int64_t count, std::int64_t grain,
                  const std::function<void(std::int64_t begin, std::int64_t end)>& body);

 private:
  struct State;
  int threads_;
  std::unique_ptr<State> state_;  // null with one thread
};

}  // namespace zeroplan
