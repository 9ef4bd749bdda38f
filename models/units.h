#pragma once
// Quantities that carry their dimension in the type. GB is 10^9 and GiB is 2^30, always.

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace zeroplan {

/// A double tagged with its dimension bytes^B flops^F seconds^T. Exact for byte counts up to 2^53.
template <int B, int F, int T>
class Quantity {
 public:
  constexpr Quantity() = default;
  constexpr explicit Quantity(double base) : base_(base) {}
  /// The value in base units: bytes, flops, seconds, bytes/s, flops/s.
  constexpr double base() const { return base_; }

  friend constexpr auto operator<=>(Quantity, Quantity) = default;
  friend constexpr Quantity operator+(Quantity a, Quantity b) { return Quantity(a.base_ + b.base_); }
  friend constexpr Quantity operator-(Quantity a, Quantity b) { return Quantity(a.base_ - b.base_); }
  friend constexpr Quantity operator*(Quantity a, double factor) { return Quantity(a.base_ * factor); }
  friend constexpr Quantity operator*(double factor, Quantity a) { return Quantity(a.base_ * factor); }
  friend constexpr Quantity operator/(Quantity a, double divisor) { return Quantity(a.base_ / divisor); }
  constexpr Quantity& operator+=(Quantity other) {
    base_ += other.base_;
    return *this;
  }
  constexpr Quantity& operator-=(Quantity other) {
    base_ -= other.base_;
    return *this;
  }

 private:
  double base_ = 0;
};

template <int B1, int F1, int T1, int B2, int F2, int T2>
constexpr auto operator*(Quantity<B1, F1, T1> a, Quantity<B2, F2, T2> b) {
  return Quantity<B1 + B2, F1 + F2, T1 + T2>(a.base() * b.base());
}

/// The ratio of two equal dimensions is a plain number.
template <int B1, int F1, int T1, int B2, int F2, int T2>
constexpr auto operator/(Quantity<B1, F1, T1> a, Quantity<B2, F2, T2> b) {
  if constexpr (B1 == B2 && F1 == F2 && T1 == T2) {
    return a.base() / b.base();
  } else {
    return Quantity<B1 - B2, F1 - F2, T1 - T2>(a.base() / b.base());
  }
}

using Bytes = Quantity<1, 0, 0>;
using BytesPerSecond = Quantity<1, 0, -1>;
using Seconds = Quantity<0, 0, 1>;
using Flops = Quantity<0, 1, 0>;
using FlopsPerSecond = Quantity<0, 1, -1>;

template <class A, class B>
concept Addable = requires(A a, B b) {
  a + b;
};
static_assert(std::is_same_v<decltype(Bytes{} / BytesPerSecond{}), Seconds>);
static_assert(!Addable<Bytes, Seconds> && !std::is_convertible_v<double, Bytes>);

inline constexpr double kKiB = 1024.0;
inline constexpr double kMiB = 1024.0 * kKiB;
inline constexpr double kGiB = 1024.0 * kMiB;
inline constexpr double kTiB = 1024.0 * kGiB;
inline constexpr double kGB = 1e9;

inline namespace literals {
constexpr Bytes operator""_B(unsigned long long v) { return Bytes(static_cast<double>(v)); }
constexpr Bytes operator""_KiB(unsigned long long v) { return Bytes(static_cast<double>(v) * kKiB); }
constexpr Bytes operator""_MiB(unsigned long long v) { return Bytes(static_cast<double>(v) * kMiB); }
constexpr Bytes operator""_GiB(unsigned long long v) { return Bytes(static_cast<double>(v) * kGiB); }
constexpr Bytes operator""_GiB(long double v) { return Bytes(static_cast<double>(v) * kGiB); }
constexpr Bytes operator""_GB(unsigned long long v) { return Bytes(static_cast<double>(v) * kGB); }
constexpr BytesPerSecond operator""_GBps(long double v) { return BytesPerSecond(static_cast<double>(v) * 1e9); }
constexpr BytesPerSecond operator""_GBps(unsigned long long v) { return BytesPerSecond(static_cast<double>(v) * 1e9); }
constexpr FlopsPerSecond operator""_TFLOPS(long double v) { return FlopsPerSecond(static_cast<double>(v) * 1e12); }
constexpr Seconds operator""_us(long double v) { return Seconds(static_cast<double>(v) * 1e-6); }
constexpr Seconds operator""_ms(long double v) { return Seconds(static_cast<double>(v) * 1e-3); }
constexpr Seconds operator""_s(long double v) { return Seconds(static_cast<double>(v)); }
}  // namespace literals

/// Element types of tensors. The order is only for tables.
enum class DType : std::uint8_t { bf16, fp16, fp32, u8, i32, i64 };

/// The size of one element in bytes.
constexpr int size_of(DType type) {
  switch (type) {
    case DType::bf16:
    case DType::fp16:
      return 2;
    case DType::fp32:
    case DType::i32:
      return 4;
    case DType::u8:
      return 1;
    case DType::i64:
      return 8;
  }
  return 0;
}

/// The one place where elements become bytes.
constexpr Bytes bytes_of(std::int64_t count, DType type) { return Bytes(static_cast<double>(count) * size_of(type)); }

/// "bf16", "fp16", "fp32", ...
std::string_view to_string(DType type);

// --- text ---------------------------------------------------------------------------------------
// Parsers throw InputError (error.h) that names what was expected; `what` is the flag or field, e.g.
// "--host-memory". Whole text or nothing; a missing unit is an error, never a guess.

/// "80GB" is 80e9 bytes, "80GiB" is 80 x 2^30; also KB/KiB/MB/MiB/TB/TiB/B, decimals, one space.
Bytes parse_bytes(std::string_view text, std::string_view what);
/// "6.5GB/s", "3.35 TB/s", "400Gb/s" (bits; "Gbps" too).
BytesPerSecond parse_rate(std::string_view text, std::string_view what);
/// "989 TFLOPS", "1.2 PFLOPS", "19.5 TFLOP/s".
FlopsPerSecond parse_flop_rate(std::string_view text, std::string_view what);
/// "1.5us", "3 ms", "2s".
Seconds parse_seconds(std::string_view text, std::string_view what);
/// Plain integer in [low, high]; refuses signs other than '-', blanks, overflow and fractions.
std::int64_t parse_integer(std::string_view text, std::string_view what, std::int64_t low, std::int64_t high);

/// GiB with one decimal: "771.4 GiB". Spec section 3: sizes are printed so.
std::string format_gib(Bytes value);
/// s/ms/us with three significant digits: "1.24 s", "12.4 ms", "950 us".
std::string format_seconds(Seconds value);
/// "235 GB/s", three significant digits.
std::string format_rate(BytesPerSecond value);
/// The text form that files carry and parse_bytes reads back to the same value: the largest binary or decimal
/// unit that is exact with few digits, else "<n>B".
std::string to_text(Bytes value);
/// As to_text(Bytes): "2039 GB/s".
std::string to_text(BytesPerSecond value);
/// As to_text(Bytes): "312 TFLOPS".
std::string to_text(FlopsPerSecond value);
/// As to_text(Bytes): "3.4 us".
std::string to_text(Seconds value);
/// 68,976,648,192
std::string format_count(std::int64_t value);

}  // namespace zeroplan
