#include "planner/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

namespace zeroplan {

void run_parallel(std::size_t count, const std::function<void(std::size_t)>& task) {
  constexpr std::size_t kMostThreads = 16;
  const std::size_t cores = std::max<std::size_t>(1, std::thread::hardware_concurrency());
  std::vector<std::exception_ptr> thrown(count);
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i = next++; i < count; i = next++) {
      try {
        task(i);
      } catch (...) {
        thrown[i] = std::current_exception();
      }
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (std::size_t t = 1; t < std::min({cores, count, kMostThreads}); ++t) helpers.emplace_back(work);
    work();
  }
  for (const std::exception_ptr& error : thrown) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace zeroplan
