// The disk tier against fio: ninja disk_bench && build/.../disk_bench DIRECTORY [rounds]. The mix is the optimizer's:
// one half of the states is read while as much is written, in large blocks, past the page cache. In each round our
// engines and fio run one after the other, in changing order, so that a disk whose speed swings slows all of them; the
// medians of the rounds and of the rounds' ratios are printed. Needs 2 GiB of disk and fio (Debian: fio). The text of
// docs/benchmarks.md is this output.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "models/error.h"
#include "runtime/arena_memory.h"
#include "runtime/disk.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kMiB64 = std::int64_t{1} << 20;
constexpr std::int64_t kCall = 256 * kMiB64;  // states of a layer, moved by one call: a 7B model on 8 ranks has 300 MB
constexpr std::int64_t kSide = 512 * kMiB64;  // of the file, read or written
constexpr int kDepth = 32;
constexpr int kPasses = 4;                        // over each side in a run
constexpr double kMoved = 2.0 * kSide * kPasses;  // bytes of a run

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Our side: two threads, as the executor's streams are.
class Ours {
 public:
  Ours(const std::string& directory, DiskEngine engine, int block_mib, const ArenaMemory& arena) : arena_(arena) {
    DiskOptions options;
    options.directory = directory;
    options.engine = engine;
    options.block = block_mib * 1_MiB;
    options.queue_depth = kDepth;
    options.fixed_memory = {arena.all()};
    file_ = std::make_unique<DiskFile>(options, std::vector<std::int64_t>(2 * kSide / kCall, kCall));
    for (int buffer = 0; buffer < 2 * kSide / kCall; ++buffer) file_->write(buffer, 0, memory(0));
  }

  /// Bytes a second, both directions together.
  double run() {
    const auto start = Clock::now();
    std::exception_ptr failure;
    std::thread writer([&] {
      try {
        each_call([&](int buffer) { file_->write(buffer + static_cast<int>(kSide / kCall), 0, memory(0)); });
      } catch (...) {
        failure = std::current_exception();
      }
    });
    try {
      each_call([&](int buffer) { file_->read(buffer, 0, memory(1)); });
    } catch (...) {
      writer.join();
      throw;
    }
    writer.join();
    if (failure) std::rethrow_exception(failure);
    return kMoved / std::chrono::duration<double>(Clock::now() - start).count();
  }

  const DiskFile& file() const { return *file_; }

 private:
  std::span<std::byte> memory(int slot) const { return arena_.bytes(slot * kCall, kCall); }
  template <class Body>
  void each_call(const Body& body) {
    for (int pass = 0; pass < kPasses; ++pass) {
      for (int buffer = 0; buffer < kSide / kCall; ++buffer) body(buffer);
    }
  }

  const ArenaMemory& arena_;
  std::unique_ptr<DiskFile> file_;
};

// fio takes huge pages only where the administrator has set some aside.
std::int64_t free_huge_pages() {
  std::ifstream facts("/proc/meminfo");
  for (std::string line; std::getline(facts, line);) {
    if (line.starts_with("HugePages_Free:")) return std::stoll(line.substr(15));
  }
  return 0;
}

std::string fio_command(const std::string& directory, int block_mib, const char* memory) {
  const std::string job = fmt::format(" --size={} --loops={} --filename={}/fio.", kSide, kPasses, directory);
  return fmt::format(
             "fio --minimal --terse-version=3 --direct=1 --ioengine=io_uring --fixedbufs=1 --registerfiles=1 --bs={}M "
             "--iodepth={} --thread "
             "--invalidate=0 --iomem={} --scramble_buffers=0 --gtod_reduce=1",
             block_mib, kDepth, memory) +
         " --name=reads --rw=read" + job + "read --name=writes --rw=write" + job + "write";
}

std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields(1);
  for (const char c : line) {
    if (c == ';')
      fields.emplace_back();
    else
      fields.back() += c;
  }
  return fields;
}

// Bytes a second, both jobs together, over the time of the longer one (fio's own clock, start-up not counted).
double run_fio(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  if (!pipe) throw DeviceError("popen");
  double moved = 0, longest = 0;
  std::string line;
  for (int c; (c = std::fgetc(pipe.get())) != EOF;) {
    if (c != '\n') {
      line += static_cast<char>(c);
      continue;
    }
    // HOWTO, "Terse output", version 3: KiB of reads, ..., their milliseconds; the same for writes 41 fields later.
    const std::vector<std::string> fields = fields_of(line);
    line.clear();
    if (fields.size() < 50 || fields[0] != "3") continue;
    for (const std::size_t first : {5, 46}) {
      moved += std::stod(fields[first]) * kKiB;
      longest = std::max(longest, std::stod(fields[first + 3]) * 1e-3);
    }
  }
  if (moved != kMoved) throw DeviceError(fmt::format("fio moved {} bytes, not {}: {}", moved, kMoved, command));
  return moved / longest;
}

void compare(const std::string& directory, int block_mib, int rounds, const ArenaMemory& huge,
             const ArenaMemory& small) {
  Ours uring(directory, DiskEngine::uring, block_mib, huge);
  Ours like_fio(directory, DiskEngine::uring, block_mib, small);
  Ours threads(directory, DiskEngine::threads, block_mib, huge);
  const std::vector<std::pair<std::string, std::function<double()>>> rivals{
      {"io_uring", [&] { return uring.run(); }},
      {"io_uring, memory in small pages", [&] { return like_fio.run(); }},
      {"threads", [&] { return threads.run(); }},
      {"fio, memory in small pages", [&] { return run_fio(fio_command(directory, block_mib, "mmap")); }},
      {"fio", [&] { return run_fio(fio_command(directory, block_mib, "shmhuge")); }}};
  for (const auto& [name, run] : rivals) run();  // makes fio's files
  std::vector<std::vector<double>> rate(rivals.size()), ratio(rivals.size());
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < rivals.size(); ++i) {
      const std::size_t rival = (i + static_cast<std::size_t>(round)) % rivals.size();
      rate[rival].push_back(rivals[rival].second());
    }
    for (std::size_t i = 0; i < rivals.size(); ++i) ratio[i].push_back(rate[i].back() / rate.back().back());
  }
  for (std::size_t i = 0; i < rivals.size(); ++i) {
    const auto [least, most] = std::ranges::minmax(rate[i]);
    fmt::print("| {} MiB | {} | {:.2f} GB/s | {:.2f}-{:.2f} | {:.0f} % |\n", block_mib, rivals[i].first,
               median(rate[i]) / kGB, least / kGB, most / kGB, 100 * median(ratio[i]));
  }
  std::fflush(stdout);
}

ArenaMemory make_memory(bool huge_pages) {
  ArenaMemory arena(Bytes(2.0 * kCall), {"pinned", kDiskAlignment, huge_pages});
  arena.mark_used(0, arena.size());
  arena.pin();
  // Like fio's, nothing that a disk could shrink.
  std::mt19937_64 random(1);
  std::ranges::generate(arena.all(), [&] { return static_cast<std::byte>(random()); });
  return arena;
}

int bench(const std::string& directory, int rounds) {
  constexpr int kHugePages = 160;  // 2 x 32 x 4 MiB and a little
  if (free_huge_pages() < kHugePages)
    throw DeviceError(fmt::format("fio needs {0} huge pages: sysctl vm.nr_hugepages={0}", kHugePages));
  const ArenaMemory huge = make_memory(true), small = make_memory(false);
  {
    const Ours probe(directory, DiskEngine::uring, 1, huge);
    for (const std::string& note : probe.file().notes()) fmt::print("{}\n", note);
  }
  fmt::print(
      "{}\n\n| blocks, {} in flight each way | engine | read + written, median of {} | range | ratio to fio, median "
      "of rounds |\n| --- | --- | --- | --- | --- |\n",
      fio_command(directory, 1, "shmhuge"), kDepth, rounds);
  for (const int block_mib : {1, 2, 4}) compare(directory, block_mib, rounds, huge, small);
  for (const char* name : {"/fio.read", "/fio.write"}) std::filesystem::remove(directory + name);
  return 0;
}

}  // namespace
}  // namespace zeroplan

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    fmt::print(stderr, "usage: disk_bench DIRECTORY [rounds]\n");
    return 2;
  }
  try {
    return zeroplan::bench(argv[1], argc > 2 ? std::atoi(argv[2]) : 7);
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 3;
  }
}
