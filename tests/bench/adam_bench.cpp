// Speed of the host AdamW: ninja adam_bench && build/.../adam_bench [mebi parameters [threads...]]. In each round the
// three kernels run one after the other, so that a busy machine slows all of them; the medians over the rounds and of
// the rounds' ratios are printed. The text of docs/benchmarks.md is this output.

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "runtime/adam.h"
#include "runtime/numeric.h"

namespace zeroplan {
namespace {

/// Anonymous memory in 2 MiB pages where the kernel grants them, touched.
template <class T>
class Array {
 public:
  explicit Array(std::int64_t count) : size_(static_cast<std::size_t>(count) * sizeof(T)) {
    void* data = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    madvise(data, size_, MADV_HUGEPAGE);
    data_ = static_cast<T*>(data);
    std::fill(data_, data_ + count, T{});
  }
  ~Array() { munmap(data_, size_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T* data() { return data_; }

 private:
  std::size_t size_;
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

  AdamRange fused() {
    AdamRange r;
    r.count = count;
    r.gradient = gradient.data();
    r.master = master.data();
    r.first_moment = first.data();
    r.second_moment = second.data();
    r.weights = weights.data();
    return r;
  }
  /// The fp32 states, not one array: that could stay in a server's cache in part.
  void read_modify_write(ThreadPool& pool) {
    for (float* array : {master.data(), first.data(), second.data()}) {
      pool.for_ranges(count, kGrain, [&](std::int64_t begin, std::int64_t end) { scale(array + begin, end - begin); });
    }
  }
  void unfused(ThreadPool& pool) {
    pool.for_ranges(count, kGrain, [&](std::int64_t begin, std::int64_t end) {
      widen_all(gradient.data() + begin, wide_gradient.data() + begin, end - begin);
    });
    AdamRange r = fused();
    r.gradient = wide_gradient.data();
    r.gradient_type = DType::fp32;
    r.weights = nullptr;
    adam_step(scalars, r, pool);
    pool.for_ranges(count, kGrain, [&](std::int64_t begin, std::int64_t end) {
      narrow_all(master.data() + begin, weights.data() + begin, end - begin);
    });
  }
};

template <class Body>
double seconds(Body&& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

void compare(Bench& bench, int threads, int rounds) {
  constexpr double kFusedBytes = 28, kRmwBytes = 24;  // a parameter: 14 read + 14 written; 3 x (4 read + 4 written)
  ThreadPool pool(threads);
  std::vector<double> rmw, fused, unfused, of_stream, over_unfused;
  const auto n = static_cast<double>(bench.count);
  for (int round = 0; round < rounds; ++round) {
    rmw.push_back(seconds([&] { bench.read_modify_write(pool); }));
    fused.push_back(seconds([&] { adam_step(bench.scalars, bench.fused(), pool); }));
    unfused.push_back(seconds([&] { bench.unfused(pool); }));
    of_stream.push_back((kFusedBytes / fused.back()) / (kRmwBytes / rmw.back()));
    over_unfused.push_back(unfused.back() / fused.back());
  }
  fmt::print(
      "{} thread(s): read-modify-write {:.1f} GB/s; fused {:.3f} G param/s = {:.1f} GB/s; unfused {:.3f} G param/s\n",
      threads, n * kRmwBytes / median(rmw) * 1e-9, n / median(fused) * 1e-9, n * kFusedBytes / median(fused) * 1e-9,
      n / median(unfused) * 1e-9);
  fmt::print("  fused / read-modify-write bandwidth {:.2f}, fused / unfused speed {:.2f} (medians of {} rounds)\n",
             median(of_stream), median(over_unfused), rounds);
}

void paths(Bench& bench, int rounds) {
  ThreadPool pool(1);
  const auto rate = [&](const AdamRange& range, AdamPath path) {
    std::vector<double> times;
    for (int i = 0; i < rounds; ++i) times.push_back(seconds([&] { adam_step(bench.scalars, range, pool, path); }));
    return static_cast<double>(range.count) / median(times) * 1e-9;
  };
  for (const AdamPath path : adam_paths()) {
    AdamRange split = bench.fused(), narrow_moments = bench.fused();
    split.master = nullptr;
    split.remainder = bench.remainder.data();
    narrow_moments.moment_type = DType::bf16;
    if (path == AdamPath::scalar) split.count = narrow_moments.count = bench.count / 16;
    AdamRange plain = bench.fused();
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
  zeroplan::Bench bench(mebi << 20);
  fmt::print("{} Mi parameters\n", mebi);
  std::vector<int> threads{1, 2};
  if (argc > 2) threads.clear();
  for (int i = 2; i < argc; ++i) threads.push_back(std::max(1, std::atoi(argv[i])));
  for (const int count : threads) zeroplan::compare(bench, count, kRounds);
  zeroplan::paths(bench, 5);
}
