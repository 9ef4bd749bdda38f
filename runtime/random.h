#pragma once
// Random numbers as a function of (key, index): no state, the same bits on every machine, rank and thread.

#include <cstdint>

namespace zeroplan {

/// The finaliser of SplitMix64 (Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", 2014, with the
/// constants of Vigna's splitmix64.c, public domain).
constexpr std::uint64_t mix64(std::uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}
/// Output `index` of the SplitMix64 generator whose state starts at `key`.
constexpr std::uint64_t random_bits(std::uint64_t key, std::uint64_t index) {
  return mix64(key + (index + 1) * 0x9e3779b97f4a7c15u);
}
/// A key for stream `stream` below `key`.
constexpr std::uint64_t random_key(std::uint64_t key, std::uint64_t stream) {
  return mix64(random_bits(key, stream) ^ 0xd1b54a32d192ed03u);
}
/// Uniform in (0, 1): the middles of 2^52 equal intervals, exact, so never 0 or 1.
constexpr double uniform(std::uint64_t bits) { return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52; }

}  // namespace zeroplan
