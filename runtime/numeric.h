#pragma once
// 16-bit floating point on the host: storage types and exact conversions, the same bits on every machine. Kernels read
// and write these types and compute in Wide<T>.

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "models/units.h"

namespace zeroplan {

struct Bf16 {
  std::uint16_t bits = 0;
};
struct Fp16 {
  std::uint16_t bits = 0;
};
static_assert(sizeof(Bf16) == 2 && sizeof(Fp16) == 2);

/// What a kernel computes in: fp32 for stored fp32, bf16 and fp16; fp64 for fp64, which only tests use.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr float widen(Bf16 value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }
constexpr float widen(float value) { return value; }
constexpr double widen(double value) { return value; }

/// Exact, denormals included. A signalling NaN keeps its bits.
constexpr float widen(Fp16 value) {
  const std::uint32_t magnitude = static_cast<std::uint32_t>(value.bits & 0x7fffu) << 13;
  // 2^112 moves the exponent's bias from 15 to 127, and turns denormals into normal numbers.
  std::uint32_t bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  if (magnitude >= 0x0f800000u) bits = magnitude | 0x7f800000u;  // infinities and NaN
  return std::bit_cast<float>(bits | static_cast<std::uint32_t>(value.bits & 0x8000u) << 16);
}

/// Converts from Wide<T> to T: nearest, ties to even; too large becomes infinity; every NaN becomes the quiet NaN
/// 0x7fc0 (bf16) or 0x7e00 (fp16).
template <class T>
constexpr T narrow(Wide<T> value);

template <>
constexpr Bf16 narrow<Bf16>(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

template <>
constexpr Fp16 narrow<Fp16>(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: drop 13 bits, rounding; a carry runs into the exponent as it should.
  const std::uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 0.5 aligns the last kept bit with the last bit of the sum, so the addition rounds.
  const std::uint32_t denormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<std::uint32_t>(0.5f);
  std::uint32_t result = magnitude < 0x38800000u ? denormal : normal;
  if (magnitude >= 0x47800000u) result = 0x7c00u;  // 65536 and above
  result |= sign;
  if (magnitude > 0x7f800000u) result = 0x7e00u;
  return {static_cast<std::uint16_t>(result)};
}

template <>
constexpr float narrow<float>(float value) {
  return value;
}
template <>
constexpr double narrow<double>(double value) {
  return value;
}

/// The storage type of a DType as a C++ type: with_storage(DType::bf16, [](auto tag) { using T = decltype(tag)::Type;
/// ... }).
template <class T>
struct Storage {
  using Type = T;
};
/// Calls `use` with Storage<Bf16>, Storage<Fp16> or Storage<float>. Throws std::logic_error for integer types.
template <class Use>
decltype(auto) with_storage(DType type, Use&& use);

[[noreturn]] void refuse_storage(DType type);

template <class Use>
decltype(auto) with_storage(DType type, Use&& use) {
  switch (type) {
    case DType::bf16:
      return std::forward<Use>(use)(Storage<Bf16>{});
    case DType::fp16:
      return std::forward<Use>(use)(Storage<Fp16>{});
    case DType::fp32:
      return std::forward<Use>(use)(Storage<float>{});
    case DType::u8:
    case DType::i32:
    case DType::i64:
      break;
  }
  refuse_storage(type);
}

}  // namespace zeroplan
