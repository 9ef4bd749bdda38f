#include "runtime/checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include <fmt/format.h>

namespace zeroplan {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian, and read in place");

// The specification's five primes.
constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87u;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Fu;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9u;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63u;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5u;

template <class Word>
std::uint64_t load(const std::byte* bytes) {
  Word word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

std::uint64_t round_of(std::uint64_t lane, std::uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

std::uint64_t merge(std::uint64_t hash, std::uint64_t lane) { return (hash ^ round_of(0, lane)) * kPrime1 + kPrime4; }

std::uint64_t mix_tail(std::uint64_t hash, std::span<const std::byte> rest) {
  const std::byte* at = rest.data();
  const std::byte* const end = at + rest.size();
  for (; end - at >= 8; at += 8) {
    hash = std::rotl(hash ^ round_of(0, load<std::uint64_t>(at)), 27) * kPrime1 + kPrime4;
  }
  if (end - at >= 4) {
    hash = std::rotl(hash ^ load<std::uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    at += 4;
  }
  for (; at != end; ++at) hash = std::rotl(hash ^ load<std::uint8_t>(at) * kPrime5, 11) * kPrime1;
  return hash;
}

std::uint64_t avalanche(std::uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace

Xxh64::Xxh64(std::uint64_t seed)
    : lanes_{seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1}, seed_(seed) {}

void Xxh64::stripe(const std::byte* bytes) {
  for (std::size_t i = 0; i < lanes_.size(); ++i) lanes_[i] = round_of(lanes_[i], load<std::uint64_t>(bytes + 8 * i));
}

void Xxh64::update(std::span<const std::byte> bytes) {
  length_ += bytes.size();
  if (tail_size_ > 0) {
    const std::size_t taken = std::min(bytes.size(), tail_.size() - tail_size_);
    std::copy_n(bytes.begin(), taken, tail_.begin() + static_cast<std::ptrdiff_t>(tail_size_));
    tail_size_ += taken;
    bytes = bytes.subspan(taken);
    if (tail_size_ < tail_.size()) return;
    stripe(tail_.data());
    tail_size_ = 0;
  }
  for (; bytes.size() >= tail_.size(); bytes = bytes.subspan(tail_.size())) stripe(bytes.data());
  std::copy(bytes.begin(), bytes.end(), tail_.begin());
  tail_size_ = bytes.size();
}

std::uint64_t Xxh64::digest() const {
  std::uint64_t hash = seed_ + kPrime5;
  if (length_ >= tail_.size()) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) + std::rotl(lanes_[3], 18);
    for (const std::uint64_t lane : lanes_) hash = merge(hash, lane);
  }
  return avalanche(mix_tail(hash + length_, std::span(tail_).first(tail_size_)));
}

std::uint64_t xxh64(std::span<const std::byte> bytes, std::uint64_t seed) {
  Xxh64 hash(seed);
  hash.update(bytes);
  return hash.digest();
}

std::uint32_t crc32(std::span<const std::byte> bytes) {
  std::uint32_t crc = ~0u;
  for (const std::byte byte : bytes) {
    crc ^= static_cast<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0xEDB88320u : 0u);
  }
  return ~crc;
}

std::string checksum_text(std::uint64_t checksum) { return fmt::format("{:016x}", checksum); }

}  // namespace zeroplan
