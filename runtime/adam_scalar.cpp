#include <bit>
#include <cmath>
#include <type_traits>

#include "runtime/adam_pass.h"
#include "runtime/numeric.h"

namespace zeroplan {
namespace {

struct Scalar {
  static constexpr int kLanes = 1;
  using V = float;
  using Half = std::uint16_t;

  static V load(const float* from) { return *from; }
  static void store(float* to, V value) { *to = value; }
  static Half load_half(const std::uint16_t* from) { return *from; }
  static void store_half(std::uint16_t* to, Half value) { *to = value; }
  static void stream_pair(std::uint16_t* to, Half low, Half high) {
    to[0] = low;
    to[1] = high;
  }
  static void fence() {}
  static void prefetch(const void*) {}

  static V set(float value) { return value; }
  static V mul(V a, V b) { return a * b; }
  static V fma(V a, V b, V c) { return std::fma(a, b, c); }
  static V div(V a, V b) { return a / b; }
  static V sqrt(V a) { return std::sqrt(a); }
  static V quiet(V a) { return a == a ? a : std::bit_cast<float>(0x7fc00000u); }

  static V from_bf16(Half half) { return widen(Bf16{half}); }
  static V from_fp16(Half half) { return widen(Fp16{half}); }
  static Half to_bf16(V value) { return narrow<Bf16>(value).bits; }
  static Half to_fp16(V value) { return narrow<Fp16>(value).bits; }
  static V join(Half high, Half low) {
    const auto remainder = static_cast<std::uint32_t>(static_cast<std::int32_t>(static_cast<std::int16_t>(low)));
    return std::bit_cast<float>((static_cast<std::uint32_t>(high) << 16) + remainder);
  }
  static Half split(V value, Half& low) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t high = (bits + 0x8000u) >> 16;
    low = static_cast<Half>(bits - (high << 16));
    return static_cast<Half>(high);
  }
};

}  // namespace

void adam_pass_scalar(const AdamScalars& scalars, const AdamRange& range, std::int64_t begin, std::int64_t end,
                      bool stream) {
  choose_gradient<Scalar>(scalars, range, begin, end, stream);
}

}  // namespace zeroplan
