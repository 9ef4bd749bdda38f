#pragma once
// The loop behind exponentials(), compiled once for each instruction set. Nothing here has external linkage or calls
// the standard library: see runtime/CMakeLists.txt. Without contraction every vector width gives the same bits.

#include <cstdint>

namespace zeroplan {

using ExponentialLoop = void(float* x, std::int64_t count, float scale, float shift);
ExponentialLoop exponentials_portable, exponentials_avx2, exponentials_avx512;

namespace {

/// Range reduction by ln 2 in two parts and the polynomial of the Cephes library (S. Moshier, expf).
inline void exponential_loop(float* x, std::int64_t count, float scale, float shift) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 x 2^23: adding it rounds to an integer in the low bits
  constexpr std::uint32_t kRoundBits = 0x4b400000u;
  for (std::int64_t i = 0; i < count; ++i) {
    const float exponent = x[i] * scale - shift;
    const float clamped = exponent > 88.3f ? 88.3f : exponent < -87.3f ? -87.3f : exponent;
    const float shifted = clamped * kLog2E + kRound;
    const float n = shifted - kRound;
    const float r = (clamped - n * kLn2High) - n * kLn2Low;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const float mantissa = p * (r * r) + r + 1.0f;
    const std::uint32_t power = __builtin_bit_cast(std::uint32_t, shifted) - kRoundBits + 127u;
    const float result = mantissa * __builtin_bit_cast(float, power << 23);
    x[i] = exponent < -87.3f ? 0.0f : result;
  }
}

}  // namespace
}  // namespace zeroplan
