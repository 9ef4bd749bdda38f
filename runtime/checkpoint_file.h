#pragma once
// One rank's file of a checkpoint: header, chunks of states, index, footer (docs/files.md, "Checkpoints"). The index
// holds a checksum of every chunk, and the manifest a checksum of header, index and footer.

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "models/units.h"
#include "runtime/atomic_file.h"
#include "runtime/checkpoint.h"

namespace zeroplan {

/// Most elements of a chunk: 1.5 MiB with fp32 moments. What is read is checked chunk by chunk.
inline constexpr std::int64_t kChunkElements = std::int64_t{1} << 17;

/// `count` elements of a block: master, first and second moments one after the other at `offset`.
struct StateChunk {
  std::uint32_t block = 0, reserved = 0;
  std::int64_t begin = 0, count = 0, offset = 0;
  std::uint64_t checksum = 0;  // XXH64 of the three arrays

  std::int64_t end() const { return begin + count; }
};
static_assert(sizeof(StateChunk) == 40);

struct StateFileHeader {
  std::array<char, 8> magic{'Z', 'P', 'S', 'T', 'A', 'T', 'E', 'S'};
  std::uint32_t version = 1;
  std::uint32_t bytes_per_moment = 4;
  std::int64_t step = 0;
  std::uint32_t rank = 0, reserved = 0;
};
static_assert(sizeof(StateFileHeader) == 32);

struct StateFileFooter {
  std::int64_t index_offset = 0, chunks = 0;
  std::array<char, 8> magic{'Z', 'P', 'S', 'T', 'A', 'E', 'N', 'D'};
};
static_assert(sizeof(StateFileFooter) == 24);

/// A file as the manifest names it.
struct NamedFile {
  std::string name;
  std::int64_t bytes = 0;
  std::uint64_t checksum = 0;  // XXH64 of header, index and footer
  friend bool operator==(const NamedFile&, const NamedFile&) = default;
};

/// "rank-00003.zpc".
std::string state_file_name(int rank);

class StateFileWriter {
 public:
  StateFileWriter(const std::filesystem::path& directory, const StateFileHeader& header);
  /// Spans as CheckpointWriter::add(), cut into chunks.
  void add(const FlatRange& range, std::span<const float> master, std::span<const std::byte> first,
           std::span<const std::byte> second);
  NamedFile finish();
  /// What was added, neighbours joined when they came one after the other.
  const std::vector<FlatRange>& ranges() const { return ranges_; }

 private:
  StateFileHeader header_;
  AtomicFile file_;
  std::vector<StateChunk> index_;
  std::vector<FlatRange> ranges_;
};

/// Header, index and footer are read and checked at once; no descriptor stays open, a job may have thousands of files.
/// InputError names file, offset and what is wrong. Reading is thread-safe.
class StateFile {
 public:
  StateFile(const std::filesystem::path& directory, const NamedFile& named, const StateFileHeader& expected);
  std::span<const StateChunk> chunks() const { return index_; }
  /// Reads a chunk into `into` (resized) and checks it.
  void read(const StateChunk& chunk, std::vector<std::byte>& into) const;

 private:
  void read_index(const InputFile& file, const NamedFile& named, const StateFileHeader& header);
  void check(const StateChunk& chunk, std::int64_t size, std::int64_t& next) const;

  std::filesystem::path path_;
  std::int64_t bytes_per_element_ = 0;
  std::vector<StateChunk> index_;
};

}  // namespace zeroplan
