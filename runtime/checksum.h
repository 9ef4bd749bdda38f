#pragma once
// Checksums of what we write to disk, from their published specifications.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace zeroplan {

/// XXH64 in a stream (xxHash specification, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md):
/// `xxhsum -H64` prints the same. Against damage, not against forgery.
class Xxh64 {
 public:
  explicit Xxh64(std::uint64_t seed = 0);
  void update(std::span<const std::byte> bytes);
  /// Of everything so far; update() may go on.
  std::uint64_t digest() const;

 private:
  void stripe(const std::byte* bytes);

  std::array<std::uint64_t, 4> lanes_;
  std::array<std::byte, 32> tail_{};
  std::size_t tail_size_ = 0;
  std::uint64_t seed_;
  std::uint64_t length_ = 0;
};
std::uint64_t xxh64(std::span<const std::byte> bytes, std::uint64_t seed = 0);

/// CRC-32 of ISO 3309 (zlib.crc32 of Python): for short headers that scripts write.
std::uint32_t crc32(std::span<const std::byte> bytes);

/// 16 hexadecimal digits: "ef46db3751d8e999".
std::string checksum_text(std::uint64_t checksum);

}  // namespace zeroplan
