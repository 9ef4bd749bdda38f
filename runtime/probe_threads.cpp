#include "runtime/probe_threads.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <span>
#include <stop_token>
#include <thread>

#include "runtime/kernels/kernels.h"
#include "runtime/probe_fit.h"
#include "runtime/probe_kernels.h"
#include "runtime/thread_communicator.h"

namespace zeroplan {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

void spin(double seconds) {
  const Clock::time_point begin = Clock::now();
  while (seconds_between(begin, Clock::now()) < seconds) {
  }
}

double lower_quartile(std::vector<double> values) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 4);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

/// Keeps every core awake while it lives, without taking time from anybody: in a step other ranks compute, and a core
/// that sleeps takes far longer to wake up than a thread.
class AwakeCores {
 public:
  explicit AwakeCores(int cores) {
    for (int core = 0; core < cores; ++core) {
      threads_.emplace_back([](const std::stop_token& stop) {
        const sched_param lowest{};
        // Refused: the cores sleep, and what is measured is on the safe side.
        (void)sched_setscheduler(0, SCHED_IDLE, &lowest);
        while (!stop.stop_requested()) {
        }
      });
    }
  }

 private:
  std::vector<std::jthread> threads_;
};

/// Long enough for a waiting thread to fall asleep.
constexpr double kUntilAsleep = 100e-6;
constexpr int kWakes = 60;

}  // namespace

std::vector<int> probed_threads(int cores) {
  std::vector<int> counts;
  for (int threads = 1; threads < cores; threads *= 2) counts.push_back(threads);
  counts.push_back(cores);
  return counts;
}

Seconds pool_wake() {
  constexpr int kRanges = 8;
  constexpr double kRangeSeconds = 50e-6;
  ThreadPool pool(2);
  const auto caller = std::this_thread::get_id();
  std::vector<double> waits;
  for (int i = 0; i < kWakes; ++i) {
    spin(kUntilAsleep);
    std::atomic<double> first = kRanges * kRangeSeconds;  // the other thread may never get a range
    const Clock::time_point begin = Clock::now();
    pool.for_ranges(kRanges, 1, [&](std::int64_t, std::int64_t) {
      if (std::this_thread::get_id() != caller) first = std::min(first.load(), seconds_between(begin, Clock::now()));
      spin(kRangeSeconds);
    });
    waits.push_back(first);
  }
  return Seconds(lower_quartile(std::move(waits)));
}

Seconds stream_wake(int cores) {
  const AwakeCores awake(cores);
  std::atomic<std::int64_t> progress = 0;
  std::atomic<std::int64_t> seen = 0;
  Clock::time_point told;
  std::vector<double> waits;
  std::jthread other([&] {
    for (std::int64_t step = 1; step <= kWakes; ++step) {
      while (progress.load(std::memory_order_acquire) < step) progress.wait(step - 1, std::memory_order_acquire);
      waits.push_back(seconds_between(told, Clock::now()));
      seen.store(step);
    }
  });
  for (std::int64_t step = 1; step <= kWakes; ++step) {
    spin(kUntilAsleep);
    told = Clock::now();
    progress.store(step);
    progress.notify_all();
    while (seen.load() < step) std::this_thread::yield();
  }
  other.join();
  return Seconds(lower_quartile(std::move(waits)));
}

namespace {

/// Processor seconds of one run(thread, i), the median over all threads and runs, while `threads` threads are at it:
/// what they take from each other inside the machine, not what other programs take of it.
template <class Run>
double busy_seconds(int threads, std::size_t runs, Run run) {
  std::vector<std::vector<double>> seconds(static_cast<std::size_t>(threads), std::vector<double>(runs));
  std::atomic<int> arrived = 0;
  const auto work = [&](int thread) {
    run(thread, 0);
    arrived.fetch_add(1);
    while (arrived.load() < threads) {
    }
    for (std::size_t i = 0; i < runs; ++i) {
      const double begin = thread_seconds();
      run(thread, i);
      seconds[static_cast<std::size_t>(thread)][i] = thread_seconds() - begin;
    }
    // The others are not to end alone: their last runs would be as fast as one thread's.
    arrived.fetch_add(1);
    while (arrived.load() < 2 * threads) run(thread, 0);
  };
  {
    std::vector<std::jthread> helpers;
    for (int thread = 1; thread < threads; ++thread) helpers.emplace_back(work, thread);
    work(0);
  }
  std::vector<double> all;
  for (const auto& of_thread : seconds) all.insert(all.end(), of_thread.begin(), of_thread.end());
  return median_of(std::move(all));
}

constexpr std::size_t kRuns = 96;

}  // namespace

// Each thread goes through an array larger than caches, a piece at a time.
std::vector<HostMemoryRate> memory_rates(int cores) {
  constexpr std::size_t kPiece = std::size_t{4} << 20 >> 2, kPieces = 16;  // fp32 elements
  std::vector<std::vector<float>> arrays(static_cast<std::size_t>(cores), std::vector<float>(kPieces * kPiece, 1.0f));
  std::vector<HostMemoryRate> rates;
  for (const int threads : probed_threads(cores)) {
    const double seconds = busy_seconds(threads, kRuns, [&](int thread, std::size_t i) {
      const auto piece = std::span(arrays[static_cast<std::size_t>(thread)]).subspan(i % kPieces * kPiece, kPiece);
      for (float& x : piece) x = x * 0.5f + 1.0f;
    });
    const double bytes = 2.0 * static_cast<double>(threads) * static_cast<double>(kPiece * sizeof(float));
    rates.push_back({threads, BytesPerSecond(bytes / seconds)});
  }
  return rates;
}

// A product for each thread: what cores take from each other, not what a pool costs.
std::vector<HostSpeedup> speedups(int cores) {
  constexpr std::int64_t kTokens = 192, kWidth = 256;
  const auto values = [](std::int64_t count) { return std::vector<float>(static_cast<std::size_t>(count), 0.5f); };
  const std::vector<float> x = values(kTokens * kWidth), w = values(kWidth * kWidth);
  const std::array<LinearPart<float>, 1> parts{{{w, {}}}};
  std::vector<std::vector<float>> y(static_cast<std::size_t>(cores), values(kTokens * kWidth));
  std::vector<HostSpeedup> result;
  double alone = 0;
  for (const int threads : probed_threads(cores)) {
    const double seconds = busy_seconds(threads, kRuns, [&](int thread, std::size_t) {
      ThreadPool pool(1);
      linear_forward<float>(x, parts, kWidth, y[static_cast<std::size_t>(thread)], pool);
    });
    if (threads == 1) alone = seconds;
    result.push_back({threads, std::clamp(threads * alone / seconds, 1.0, static_cast<double>(threads))});
  }
  return result;
}

namespace {

struct CollectiveCase {
  const char* name;
  DType type;
};
constexpr CollectiveCase kCases[] = {{"all-gather", DType::u8},       {"reduce-scatter", DType::bf16},
                                     {"reduce-scatter", DType::fp16}, {"reduce-scatter", DType::fp32},
                                     {"all-reduce", DType::bf16},     {"all-reduce", DType::fp16},
                                     {"all-reduce", DType::fp32}};
constexpr std::int64_t kMessages[] = {256, 1 << 14, 1 << 17, 1 << 20, 1 << 23};  // bytes, divisible among 8 ranks
constexpr std::int64_t kLargestMessage = 1 << 23;
constexpr int kCalls = 24;
constexpr std::int64_t kManyBytes = std::int64_t{64} << 20;  // that all calls of one case move

int calls_of(std::int64_t bytes, int ranks) {
  return static_cast<int>(std::clamp<std::int64_t>(kManyBytes / (bytes * ranks), 4, kCalls));
}

/// One rank's tensors.
struct Tensors {
  std::vector<float> full = std::vector<float>(kLargestMessage / 4), shard = std::vector<float>(kLargestMessage / 8);
};

Clock::time_point call(Communicator& communicator, const CollectiveCase& c, std::int64_t bytes, Tensors& tensors) {
  const std::int64_t count = bytes / size_of(c.type);
  const TensorView full{tensors.full.data(), count, c.type};
  const TensorView shard{tensors.shard.data(), count / communicator.size(), c.type};
  switch (c.name[0] == 'r' ? 1 : c.name[4] == 'g' ? 0 : 2) {
    case 0:
      return communicator.all_gather(shard, full);
    case 1:
      return communicator.reduce_scatter(full, shard);
    default:
      return communicator.all_reduce(full);
  }
}

/// As a step does it before a collective: a rank's own tensor is in its core's cache.
void write_inputs(Tensors& tensors, std::int64_t bytes, int ranks) {
  const auto count = static_cast<std::ptrdiff_t>(bytes / 4);
  std::fill(tensors.full.begin(), tensors.full.begin() + count, 1.0f);
  std::fill(tensors.shard.begin(), tensors.shard.begin() + count / ranks, 1.0f);
}

/// What one rank does for all cases; rank 0 fills `times`. One rank, each in turn, comes late: the others sleep then,
/// as they do in a step.
void run_rank(World& world, std::vector<std::vector<double>>& times) {
  constexpr double kLate = 60e-6;
  std::vector<int> members(static_cast<std::size_t>(world.size()));
  std::iota(members.begin(), members.end(), 0);
  const auto communicator = world.communicator(members, 0);
  Tensors tensors;
  std::size_t at = 0;
  for (const CollectiveCase& c : kCases) {
    for (const std::int64_t bytes : kMessages) {
      std::vector<double> calls;
      for (int i = 0; i <= calls_of(bytes, world.size()); ++i) {
        write_inputs(tensors, bytes, world.size());
        if (i % world.size() == world.rank()) spin(kLate);
        const Clock::time_point came = call(*communicator, c, bytes, tensors);
        if (i > 0) calls.push_back(seconds_between(came, Clock::now()));
      }
      if (world.rank() == 0) times[at] = std::move(calls);
      ++at;
    }
  }
}

}  // namespace

std::vector<HostCollectiveTime> collective_times(int cores) {
  const AwakeCores awake(cores);
  std::vector<HostCollectiveTime> result;
  for (const int ranks : {2, 4, 8}) {
    std::vector<std::vector<double>> times(std::size(kCases) * std::size(kMessages));
    const auto worlds = make_thread_worlds(ranks);
    {
      std::vector<std::jthread> others;
      for (int rank = 1; rank < ranks; ++rank) {
        others.emplace_back([&, rank] { run_rank(*worlds[static_cast<std::size_t>(rank)], times); });
      }
      run_rank(*worlds[0], times);
    }
    std::size_t at = 0;
    for (const CollectiveCase& c : kCases) {
      HostCollectiveTime& time = result.emplace_back();
      time.collective = c.name;
      time.ranks = ranks;
      time.type = c.type;
      for (const std::int64_t bytes : kMessages) {
        time.messages.emplace_back(static_cast<double>(bytes));
        time.times.emplace_back(lower_quartile(times[at++]));
      }
    }
  }
  return result;
}

}  // namespace zeroplan
