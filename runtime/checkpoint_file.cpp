#include "runtime/checkpoint_file.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "models/error.h"
#include "runtime/checksum.h"

namespace zeroplan {
namespace {

template <class T>
std::span<const std::byte> bytes_of_value(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

[[noreturn]] void refuse(const std::filesystem::path& path, std::string_view message) {
  throw InputError(fmt::format("{}: {}", path.string(), message));
}

std::int64_t bytes_per_element(const StateFileHeader& header) { return 4 + 2 * std::int64_t{header.bytes_per_moment}; }

std::uint64_t checksum_of_frame(const StateFileHeader& header, std::span<const StateChunk> index,
                                const StateFileFooter& footer) {
  Xxh64 hash;
  hash.update(bytes_of_value(header));
  hash.update(std::as_bytes(index));
  hash.update(bytes_of_value(footer));
  return hash.digest();
}

}  // namespace

std::string state_file_name(int rank) { return fmt::format("rank-{:05}.zpc", rank); }

// --- writing -----------------------------------------------------------------------------------------

StateFileWriter::StateFileWriter(const std::filesystem::path& directory, const StateFileHeader& header)
    : header_(header), file_(directory / state_file_name(static_cast<int>(header.rank))) {
  file_.write(bytes_of_value(header_));
}

void StateFileWriter::add(const FlatRange& range, std::span<const float> master, std::span<const std::byte> first,
                          std::span<const std::byte> second) {
  for (std::int64_t done = 0; done < range.count(); done += kChunkElements) {
    const std::int64_t count = std::min(kChunkElements, range.count() - done);
    const auto moment_at = static_cast<std::size_t>(done * header_.bytes_per_moment);
    const auto moment_bytes = static_cast<std::size_t>(count * header_.bytes_per_moment);
    const std::array<std::span<const std::byte>, 3> arrays = {
        std::as_bytes(master.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(count))),
        first.subspan(moment_at, moment_bytes), second.subspan(moment_at, moment_bytes)};
    StateChunk chunk{static_cast<std::uint32_t>(range.block), 0, range.begin + done, count, file_.size(), 0};
    Xxh64 hash;
    for (const auto bytes : arrays) {
      hash.update(bytes);
      file_.write(bytes);
    }
    chunk.checksum = hash.digest();
    index_.push_back(chunk);
  }
  if (range.count() <= 0) return;
  if (!ranges_.empty() && ranges_.back().block == range.block && ranges_.back().end == range.begin) {
    ranges_.back().end = range.end;
  } else {
    ranges_.push_back(range);
  }
}

NamedFile StateFileWriter::finish() {
  StateFileFooter footer;
  footer.index_offset = file_.size();
  footer.chunks = std::ssize(index_);
  file_.write(std::as_bytes(std::span(index_)));
  file_.write(bytes_of_value(footer));
  const NamedFile named{state_file_name(static_cast<int>(header_.rank)), file_.size(),
                        checksum_of_frame(header_, index_, footer)};
  file_.commit();
  return named;
}

// --- reading -----------------------------------------------------------------------------------------

StateFile::StateFile(const std::filesystem::path& directory, const NamedFile& named, const StateFileHeader& expected)
    : path_(directory / named.name) {
  const InputFile file(path_);
  if (file.size() != named.bytes) {
    refuse(path_, fmt::format("{}: expected {} bytes, found {}",
                              file.size() < named.bytes ? "truncated" : "longer than the manifest says", named.bytes,
                              file.size()));
  }
  if (file.size() < std::int64_t{sizeof(StateFileHeader) + sizeof(StateFileFooter)}) refuse(path_, "too short");
  StateFileHeader header;
  file.read(0, std::as_writable_bytes(std::span(&header, 1)));
  if (header.magic != expected.magic) refuse(path_, "expected \"ZPSTATES\" at offset 0");
  bytes_per_element_ = bytes_per_element(expected);
  read_index(file, named, header);
  if (std::memcmp(&header, &expected, sizeof(header)) != 0) {
    refuse(path_, fmt::format("its header is of version {}, rank {}, step {} and {} bytes a moment; the manifest's are "
                              "version {}, rank {}, step {} and {}",
                              header.version, header.rank, header.step, header.bytes_per_moment, expected.version,
                              expected.rank, expected.step, expected.bytes_per_moment));
  }
}

void StateFile::read_index(const InputFile& file, const NamedFile& named, const StateFileHeader& header) {
  const std::int64_t footer_at = file.size() - std::int64_t{sizeof(StateFileFooter)};
  StateFileFooter footer;
  file.read(footer_at, std::as_writable_bytes(std::span(&footer, 1)));
  const bool inside = footer.index_offset >= std::int64_t{sizeof(StateFileHeader)} && footer.index_offset <= footer_at;
  const std::int64_t room = inside ? footer_at - footer.index_offset : 0;
  if (footer.magic != StateFileFooter{}.magic || !inside || room % std::int64_t{sizeof(StateChunk)} != 0 ||
      footer.chunks != room / std::int64_t{sizeof(StateChunk)}) {
    refuse(path_, fmt::format("damaged footer at offset {}", footer_at));
  }
  index_.resize(static_cast<std::size_t>(footer.chunks));
  file.read(footer.index_offset, std::as_writable_bytes(std::span(index_)));
  const std::uint64_t found = checksum_of_frame(header, index_, footer);
  if (found != named.checksum) {
    refuse(path_, fmt::format("header or index (offset {}) damaged: expected checksum {}, found {}",
                              footer.index_offset, checksum_text(named.checksum), checksum_text(found)));
  }
  std::int64_t next = sizeof(StateFileHeader);
  for (const StateChunk& chunk : index_) check(chunk, file.size(), next);
  if (next != footer.index_offset) refuse(path_, "its index leaves bytes out");
}

/// Chunks stand one after the other from `next` on.
void StateFile::check(const StateChunk& chunk, std::int64_t size, std::int64_t& next) const {
  const bool good = chunk.begin >= 0 && chunk.count > 0 && chunk.count <= kChunkElements && chunk.offset == next &&
                    chunk.begin <= std::int64_t{1} << 60 && next < size;
  if (!good) refuse(path_, fmt::format("its index has a chunk of {} elements at offset {}", chunk.count, chunk.offset));
  next += chunk.count * bytes_per_element_;
}

void StateFile::read(const StateChunk& chunk, std::vector<std::byte>& into) const {
  into.resize(static_cast<std::size_t>(chunk.count * bytes_per_element_));
  InputFile(path_).read(chunk.offset, into);
  const std::uint64_t found = xxh64(into);
  if (found != chunk.checksum) {
    refuse(path_, fmt::format("damaged: expected checksum {} of {} bytes at offset {}, found {}",
                              checksum_text(chunk.checksum), into.size(), chunk.offset, checksum_text(found)));
  }
}

}  // namespace zeroplan
