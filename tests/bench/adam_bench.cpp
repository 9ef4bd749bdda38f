// Speed of the host AdamW: ninja adam_bench && build/.../adam_bench [mebi parameters [threads...]]. The kernels take
// turns, slice by slice of a few milliseconds, so that a busy machine slows all of them; medians over the slices and of
// the ratios of neighbours in time are printed. The text of docs/benchmarks.md is this output.

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <ctime>
#include <new>
#include <string>
#include <vector>

#include "runtime/adam.h"
#include "runtime/numeric.h"

namespace zeroplan {
namespace {

/// Anonymous memory in 2 MiB pages where the kernel grants them, touched. It can be moved within its mapping: arrays of
/// 2^k elements otherwise lie powers of two apart and ask for the same banks of DRAM at the same time.
template <class T>
class Array {
 public:
  explicit Array(std::int64_t count) : size_(static_cast<std::size_t>(count) * sizeof(T) + kRoom) {
    void* data = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    madvise(data, size_, MADV_HUGEPAGE);
    start_ = data_ = static_cast<T*>(data);
    std::fill(data_, data_ + size_ / sizeof(T), T{});
  }
  void begin_at(std::size_t bytes) { data_ = start_ + bytes / sizeof(T); }
  ~Array() { munmap(start_, size_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T* data() { return data_; }

 private:
  static constexpr std::size_t kRoom = std::size_t{1} << 20;
  std::size_t size_;
  T* start_ = nullptr;
  T* data_ = nullptr;
};

// The rivals get the widest vectors of the machine, chosen at run time.
#if defined(__x86_64__)
#define ZEROPLAN_WIDEST __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define ZEROPLAN_WIDEST
#endif

ZEROPLAN_WIDEST void scale(float* x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) x[i] = x[i] * 0.999f + 1e-3f;
}
ZEROPLAN_WIDEST void scale_three(float* x, float* y, float* z, std::int64_t count) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    x[i] = x[i] * 0.999f + 1e-3f;
    y[i] = y[i] * 0.999f + 1e-3f;
    z[i] = z[i] * 0.999f + 1e-3f;
  }
}
ZEROPLAN_WIDEST void widen_all(const std::uint16_t* from, float* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = std::bit_cast<float>(static_cast<std::uint32_t>(from[i]) << 16);
}
ZEROPLAN_WIDEST void narrow_all(const float* from, std::uint16_t* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(from[i]);
    to[i] = static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

constexpr std::int64_t kGrain = 1 << 14;

struct Bench {
  std::int64_t count;
  Array<std::uint16_t> gradient, weights;
  Array<float> wide_gradient, master, first, second;
  Array<std::int16_t> remainder;
  AdamScalars scalars = adam_scalars({}, 10, 1.0);

  explicit Bench(std::int64_t n)
      : count(n), gradient(n), weights(n), wide_gradient(n), master(n), first(n), second(n), remainder(n) {
    for (std::int64_t i = 0; i < n; ++i) {
      gradient.data()[i] = narrow<Bf16>(static_cast<float>(i % 1000 - 500) * 1e-4f).bits;
      master.data()[i] = static_cast<float>(i % 777 - 388) * 1e-3f;
      second.data()[i] = 1e-4f;
    }
  }

  /// Each array begins `step` bytes further into its pages than the one before.
  void place(std::size_t step) {
    gradient.begin_at(0);
    master.begin_at(step);
    first.begin_at(2 * step);
    second.begin_at(3 * step);
    weights.begin_at(4 * step);
    wide_gradient.begin_at(5 * step);
    remainder.begin_at(6 * step);
  }

  AdamRange fused(std::int64_t begin, std::int64_t end) {
    AdamRange r;
    r.count = end - begin;
    r.gradient = gradient.data() + begin;
    r.master = master.data() + begin;
    r.first_moment = first.data() + begin;
    r.second_moment = second.data() + begin;
    r.weights = weights.data() + begin;
    return r;
  }
  void adam(std::int64_t begin, std::int64_t end, ThreadPool& pool) { adam_step(scalars, fused(begin, end), pool); }
  /// The fp32 states one after the other: one array read and written at a time, as the probe does.
  void one_stream(std::int64_t begin, std::int64_t end, ThreadPool& pool) {
    for (float* array : {master.data(), first.data(), second.data()}) {
      pool.for_ranges(end - begin, kGrain,
                      [&](std::int64_t from, std::int64_t to) { scale(array + begin + from, to - from); });
    }
  }
  /// The three at once, as the update has them.
  void three_streams(std::int64_t begin, std::int64_t end, ThreadPool& pool) {
    pool.for_ranges(end - begin, kGrain, [&](std::int64_t from, std::int64_t to) {
      scale_three(master.data() + begin + from, first.data() + begin + from, second.data() + begin + from, to - from);
    });
  }
  void unfused(std::int64_t begin, std::int64_t end, ThreadPool& pool) {
    pool.for_ranges(end - begin, kGrain, [&](std::int64_t from, std::int64_t to) {
      widen_all(gradient.data() + begin + from, wide_gradient.data() + begin + from, to - from);
    });
    AdamRange r = fused(begin, end);
    r.gradient = wide_gradient.data() + begin;
    r.gradient_type = DType::fp32;
    r.weights = nullptr;
    adam_step(scalars, r, pool);
    pool.for_ranges(end - begin, kGrain, [&](std::int64_t from, std::int64_t to) {
      narrow_all(master.data() + begin + from, weights.data() + begin + from, to - from);
    });
  }
};

/// Processor time of all threads of this process.
double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// What the body takes on so many cores of its own: other programs' turns do not count, their use of the memory does.
template <class Body>
double seconds(int threads, Body&& body) {
  const double begin = processor_seconds();
  body();
  return (processor_seconds() - begin) / threads;
}

double median(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

/// A slice is long against waking the threads and, with the slices between two visits, larger than the caches.
constexpr std::int64_t kSlice = std::int64_t{1} << 22;

void compare(Bench& bench, int threads, int rounds) {
  constexpr double kFusedBytes = 28, kRmwBytes = 24;  // a parameter: 14 read + 14 written; 3 x (4 read + 4 written)
  constexpr int kKernels = 4;
  using Kernel = void (Bench::*)(std::int64_t, std::int64_t, ThreadPool&);
  constexpr Kernel kernels[kKernels] = {&Bench::adam, &Bench::one_stream, &Bench::three_streams, &Bench::unfused};
  ThreadPool pool(threads);
  std::vector<double> times[kKernels], over_one, over_three, over_unfused;
  const std::int64_t slices = bench.count / kSlice;
  for (std::int64_t turn = 0; turn < rounds * slices; ++turn) {
    double took[kKernels];
    for (int k = 0; k < kKernels; ++k) {
      // Each kernel is elsewhere: what the one before left in the caches is not its own.
      const int kernel = static_cast<int>((k + turn) % kKernels);
      const std::int64_t begin = (turn + k * slices / kKernels) % slices * kSlice;
      took[kernel] = seconds(threads, [&] { (bench.*kernels[kernel])(begin, begin + kSlice, pool); });
      times[kernel].push_back(took[kernel]);
    }
    over_one.push_back(kFusedBytes / took[0] / (kRmwBytes / took[1]));
    over_three.push_back(kFusedBytes / took[0] / (kRmwBytes / took[2]));
    over_unfused.push_back(took[3] / took[0]);
  }
  const auto rate = [&](int kernel) { return static_cast<double>(kSlice) / median(times[kernel]) * 1e-9; };
  fmt::print(
      "{} thread(s): read-modify-write {:.1f} GB/s, of three arrays at once {:.1f}; fused {:.3f} G param/s = {:.1f} "
      "GB/s; unfused {:.3f} G param/s\n",
      threads, kRmwBytes * rate(1), kRmwBytes * rate(2), rate(0), kFusedBytes * rate(0), rate(3));
  fmt::print(
      "  fused / read-modify-write bandwidth {:.2f}, of three at once {:.2f}; fused / unfused speed {:.2f} (medians "
      "of {} turns)\n",
      median(over_one), median(over_three), median(over_unfused), over_one.size());
}

void paths(Bench& bench, int rounds) {
  ThreadPool pool(1);
  const auto rate = [&](const AdamRange& range, AdamPath path) {
    std::vector<double> times;
    for (int i = 0; i < rounds; ++i) times.push_back(seconds(1, [&] { adam_step(bench.scalars, range, pool, path); }));
    return static_cast<double>(range.count) / median(times) * 1e-9;
  };
  for (const AdamPath path : adam_paths()) {
    AdamRange split = bench.fused(0, bench.count), narrow_moments = split;
    split.master = nullptr;
    split.remainder = bench.remainder.data();
    narrow_moments.moment_type = DType::bf16;
    if (path == AdamPath::scalar) split.count = narrow_moments.count = bench.count / 16;
    AdamRange plain = bench.fused(0, bench.count);
    plain.count = split.count;
    fmt::print("{:8} 1 thread: fp32 states {:.3f}, bf16 moments {:.3f}, split master {:.3f} G param/s\n",
               to_string(path), rate(plain, path), rate(narrow_moments, path), rate(split, path));
  }
}

}  // namespace
}  // namespace zeroplan

int main(int argc, char** argv) {
  const std::int64_t mebi = argc > 1 ? std::atoll(argv[1]) : 64;
  constexpr int kRounds = 15;
  constexpr std::size_t kApart = 4096 + 320;  // bytes: neither the same page offset nor the same lines
  zeroplan::Bench bench(mebi << 20);
  fmt::print("{} Mi parameters\n", mebi);
  std::vector<int> threads{1, 2};
  if (argc > 2) threads.clear();
  for (int i = 2; i < argc; ++i) threads.push_back(std::max(1, std::atoi(argv[i])));
  for (const std::size_t step : {std::size_t{0}, kApart}) {
    bench.place(step);
    fmt::print("arrays {}\n", step == 0 ? "at equal offsets of their pages" : "at offsets of their own");
    for (const int count : threads) zeroplan::compare(bench, count, kRounds);
  }
  zeroplan::paths(bench, 5);
}
