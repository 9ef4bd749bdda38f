#include "runtime/probe_disk.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "models/error.h"
#include "runtime/disk.h"
#include "runtime/probe_fit.h"

namespace zeroplan {
namespace {

struct Way {
  Bytes block;
  int depth;
};
const Way kWays[] = {{64_KiB, 1}, {64_KiB, 16}, {1_MiB, 1}, {1_MiB, 8}, {1_MiB, 32}};
constexpr std::int64_t kPiece = 16 << 20;  // timed at once
constexpr int kPieces = 4;

/// Memory that O_DIRECT accepts.
class AlignedMemory {
 public:
  explicit AlignedMemory(std::size_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(kDiskAlignment, bytes))), bytes_(bytes) {
    if (data_ == nullptr) throw DeviceError("probe: no memory for the disk's buffer");
    std::fill(data_, data_ + bytes, std::byte{1});
  }
  ~AlignedMemory() { std::free(data_); }
  AlignedMemory(const AlignedMemory&) = delete;
  AlignedMemory& operator=(const AlignedMemory&) = delete;
  std::span<std::byte> all() { return {data_, bytes_}; }

 private:
  std::byte* data_;
  std::size_t bytes_;
};

/// Median rate over the pieces of the file.
template <class Move>
BytesPerSecond median_rate(Move move) {
  std::vector<double> seconds;
  for (int i = 0; i < kPieces; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    move(i * kPiece);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return BytesPerSecond(std::round(static_cast<double>(kPiece) / median_of(std::move(seconds))));
}

}  // namespace

DiskProbe probe_disk(const std::string& directory) {
  DiskProbe probe;
  AlignedMemory memory(kPiece);
  BytesPerSecond read, write;
  for (const Way& way : kWays) {
    DiskOptions options;
    options.directory = directory;
    options.block = way.block;
    options.queue_depth = way.depth;
    options.fixed_memory = {memory.all()};
    const std::int64_t size = kPieces * kPiece;
    DiskFile file(options, {&size, 1});
    // How the engine copes is its business, unless the figures are of something else.
    const bool other = file.engine() != DiskEngine::uring || !file.direct();
    if (other && probe.notes.empty()) probe.notes = file.notes();
    const BytesPerSecond writes = median_rate([&](std::int64_t at) { file.write(0, at, memory.all()); });
    const BytesPerSecond reads = median_rate([&](std::int64_t at) { file.read(0, at, memory.all()); });
    probe.rates.push_back({"read", way.block, way.depth, reads});
    probe.rates.push_back({"write", way.block, way.depth, writes});
    read = std::max(read, reads);
    write = std::max(write, writes);
  }
  constexpr double kUsable = 0.9;  // of the free space: others need some too
  const double free = static_cast<double>(std::filesystem::space(directory).available);
  probe.drive = {1, Bytes(std::floor(kUsable * free / kMiB) * kMiB), read, write};
  return probe;
}

}  // namespace zeroplan
