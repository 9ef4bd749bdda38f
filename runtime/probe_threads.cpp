#include "runtime/probe_threads.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <span>
#include <stdexcept>
#include <stop_token>
#include <thread>

#include "runtime/adam.h"
#include "runtime/kernels/kernels.h"
#include "runtime/probe_fit.h"
#include "runtime/thread_clock.h"
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

constexpr std::size_t kPieceRuns = 128;    // of 0.1 to 0.7 ms
constexpr std::size_t kProductRuns = 600;  // of 0.1 to 0.3 ms: long enough for the clock to settle

}  // namespace

namespace {

/// The optimizer's arrays of one thread: four streams that are read, three that are written.
struct States {
  explicit States(std::size_t count) : gradient(count, 0.01f), master(count, 0.5f), first(count), second(count) {}
  void update(std::size_t begin, std::size_t count) {
    AdamRange range;
    range.count = static_cast<std::int64_t>(count);
    range.gradient = gradient.data() + begin;
    range.gradient_type = DType::fp32;
    range.master = master.data() + begin;
    range.first_moment = first.data() + begin;
    range.second_moment = second.data() + begin;
    ThreadPool alone(1);
    adam_step(adam_scalars({}, 1, 1.0), range, alone);
  }
  std::vector<float> gradient, master, first, second;
};
constexpr double kUpdateBytes = 7.0 * sizeof(float);  // an element, read and written

}  // namespace

// Each thread updates arrays that are larger than caches, a piece at a time.
std::vector<HostMemoryRate> memory_rates(int cores) {
  constexpr std::size_t kPiece = 1 << 16, kMostPieces = 128, kFewestPieces = 16, kPiecesOfAll = 512;
  const std::size_t pieces = std::clamp(kPiecesOfAll / static_cast<std::size_t>(cores), kFewestPieces, kMostPieces);
  std::vector<States> states(static_cast<std::size_t>(cores), States(pieces * kPiece));
  std::vector<HostMemoryRate> rates;
  for (const int threads : probed_threads(cores)) {
    const double seconds = busy_seconds(threads, kPieceRuns, [&](int thread, std::size_t i) {
      states[static_cast<std::size_t>(thread)].update(i % pieces * kPiece, kPiece);
    });
    rates.push_back({threads, BytesPerSecond(threads * kUpdateBytes * static_cast<double>(kPiece) / seconds)});
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
    const double seconds = busy_seconds(threads, kProductRuns, [&](int thread, std::size_t) {
      ThreadPool pool(1);
      linear_forward<float>(x, parts, kWidth, y[static_cast<std::size_t>(thread)], pool);
    });
    if (threads == 1) alone = seconds;
    result.push_back({threads, std::clamp(threads * alone / seconds, 1.0, static_cast<double>(threads))});
  }
  return result;
}

namespace {

enum class Collective : std::uint8_t { all_gather, reduce_scatter, all_reduce };
struct CollectiveCase {
  Collective collective;
  const char* name;
  DType type;
};
constexpr CollectiveCase kCases[] = {{Collective::all_gather, "all-gather", DType::u8},
                                     {Collective::reduce_scatter, "reduce-scatter", DType::bf16},
                                     {Collective::reduce_scatter, "reduce-scatter", DType::fp16},
                                     {Collective::reduce_scatter, "reduce-scatter", DType::fp32},
                                     {Collective::all_reduce, "all-reduce", DType::bf16},
                                     {Collective::all_reduce, "all-reduce", DType::fp16},
                                     {Collective::all_reduce, "all-reduce", DType::fp32}};
constexpr std::int64_t kMessages[] = {256, 1 << 14, 1 << 17, 1 << 20, 1 << 23};  // bytes, divisible among 8 ranks
constexpr std::int64_t kLargestMessage = 1 << 23;
constexpr int kCalls = 24;
constexpr std::int64_t kManyBytes = std::int64_t{64} << 20;  // that all calls of one case move

int calls_of(std::int64_t bytes, int ranks) {
  return static_cast<int>(std::clamp<std::int64_t>(kManyBytes / (bytes * ranks), 4, kCalls));
}

/// One rank's tensors: each call takes others than the one before, as in a step.
class Tensors {
 public:
  void advance(std::int64_t bytes) {
    constexpr std::int64_t kTensors = 8;  // a large model's do not stay in caches, a small one's do
    const std::int64_t each = bytes / 4, used = std::min(kElements, kTensors * each);
    first_ = first_ + 2 * each > used ? 0 : first_ + each;
  }
  TensorView full(std::int64_t bytes, DType type) { return {full_.data() + first_, bytes / size_of(type), type}; }
  TensorView shard(std::int64_t bytes, DType type, int ranks) {
    return {shard_.data() + first_, bytes / size_of(type) / ranks, type};
  }

 private:
  static constexpr std::int64_t kElements = 4 * kLargestMessage / 4;
  std::vector<float> full_ = std::vector<float>(kElements), shard_ = std::vector<float>(kElements);
  std::int64_t first_ = 0;
};

void write(TensorView tensor) {
  std::fill_n(static_cast<std::byte*>(tensor.data), tensor.count * size_of(tensor.dtype), std::byte{});
}

Clock::time_point call(Communicator& communicator, const CollectiveCase& c, TensorView full, TensorView shard) {
  switch (c.collective) {
    case Collective::all_gather:
      return communicator.all_gather(shard, full);
    case Collective::reduce_scatter:
      return communicator.reduce_scatter(full, shard);
    case Collective::all_reduce:
      return communicator.all_reduce(full);
  }
  throw std::logic_error("probe: unknown collective");
}

/// What one rank does for all cases; rank 0 fills `times`. One rank, each in turn, comes late: the others sleep then,
/// as they do in a step. What a rank gives it has written just before.
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
        tensors.advance(bytes);
        const TensorView full = tensors.full(bytes, c.type), shard = tensors.shard(bytes, c.type, world.size());
        write(c.collective == Collective::all_gather ? shard : full);
        if (i % world.size() == world.rank()) spin(kLate);
        const Clock::time_point came = call(*communicator, c, full, shard);
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
