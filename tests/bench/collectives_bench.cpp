// Bandwidth and latency of the collectives between threads and between processes of this host (docs/benchmarks.md):
//   collectives_bench [thread|shared|tcp] [ranks]
// "GB/s" is the size of the full tensor over the time of a call, as every rank sees it; the median of the calls.

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "runtime/process_communicator.h"
#include "runtime/sockets.h"
#include "runtime/thread_communicator.h"

using namespace zeroplan;
using Clock = std::chrono::steady_clock;

namespace {

template <class Call>
double median_seconds(int calls, Call call) {
  std::vector<double> times;
  for (int i = 0; i < calls; ++i) {
    const auto begin = Clock::now();
    call();
    if (i > 0) times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

void measure(World& world, const std::string& name) {
  std::vector<int> all(static_cast<std::size_t>(world.size()));
  std::iota(all.begin(), all.end(), 0);
  const auto communicator = world.communicator(all, 0);
  for (const std::int64_t mib : {0, 1, 4, 16, 64}) {
    const std::int64_t bytes = std::max<std::int64_t>(mib << 20, 16 * world.size());
    std::vector<std::uint16_t> data(static_cast<std::size_t>(bytes / 2), 0x3f80);
    const std::int64_t shard = bytes / 2 / world.size();
    const TensorView full{data.data(), shard * world.size(), DType::bf16};
    const TensorView own{data.data() + shard * world.rank(), shard, DType::bf16};
    const int calls = mib == 0 ? 2000 : static_cast<int>(std::max<std::int64_t>(10, 400 / mib / world.size()));
    const double gather = median_seconds(calls, [&] { communicator->all_gather(own, full); });
    const double scatter = median_seconds(calls, [&] { communicator->reduce_scatter(full, own); });
    const double reduce = median_seconds(calls, [&] { communicator->all_reduce(full); });
    if (world.rank() != 0) continue;
    if (mib == 0) {
      fmt::print("{} ranks={} {:3} B: all_gather {:.1f} us, reduce_scatter {:.1f} us, all_reduce {:.1f} us\n", name,
                 world.size(), bytes, gather * 1e6, scatter * 1e6, reduce * 1e6);
    } else {
      const auto rate = [&](double time) { return static_cast<double>(bytes) / time / 1e9; };
      fmt::print(
          "{} ranks={} {:3} MiB bf16: all_gather {:.2f} GB/s, reduce_scatter {:.2f} GB/s, all_reduce {:.2f} GB/s\n",
          name, world.size(), mib, rate(gather), rate(scatter), rate(reduce));
    }
    std::fflush(stdout);
  }
}

void run_threads(int ranks) {
  auto worlds = make_thread_worlds(ranks);
  std::vector<std::thread> threads;
  for (auto& world : worlds) threads.emplace_back([&world] { measure(*world, "thread"); });
  for (std::thread& thread : threads) thread.join();
}

void run_processes(const std::string& name, int ranks) {
  ProcessWorldOptions options;
  options.size = ranks;
  options.store_port = port_of(listen_tcp(0, "127.0.0.1").value());
  if (name == "tcp") options.transport = ProcessWorldOptions::Transport::tcp;
  std::vector<pid_t> children;
  for (options.rank = ranks - 1; options.rank > 0; --options.rank) {
    const pid_t child = fork();
    if (child == 0) {
      measure(*make_process_world(options), name);
      _exit(0);
    }
    children.push_back(child);
  }
  measure(*make_process_world(options), name);
  for (const pid_t child : children) waitpid(child, nullptr, 0);
}

}  // namespace

int main(int count, char** arguments) {
  const std::string name = count > 1 ? arguments[1] : "thread";
  const int ranks = count > 2 ? std::atoi(arguments[2]) : 2;
  if (ranks < 1 || ranks > 64 || (name != "thread" && name != "shared" && name != "tcp")) return 2;
  name == "thread" ? run_threads(ranks) : run_processes(name, ranks);
  return 0;
}
