#include "runtime/exact_sum.h"

#include <cmath>
#include <limits>
#include <stdexcept>

namespace zeroplan {
namespace {

constexpr int kDigitBits = 16;
constexpr int kLowestExponent = -308;  // weight of digit 0's lowest bit
constexpr std::uint64_t kDigitMask = (1u << kDigitBits) - 1;
// Each term adds less than 2^16 to a digit: no digit overflows before so many.
constexpr std::uint32_t kTermsPerCarry = 1u << 30;

}  // namespace

void ExactSum::add(double term) {
  if (term == 0) return;
  if (!std::isfinite(term)) {
    not_finite_ = 1;
    return;
  }
  if (term < 0) throw std::logic_error("ExactSum: negative term");
  int exponent = 0;
  const double fraction = std::frexp(term, &exponent);  // term = fraction 2^exponent, fraction in [0.5, 1)
  constexpr int kMantissa = 53;
  auto mantissa = static_cast<std::uint64_t>(std::ldexp(fraction, kMantissa));
  int shift = exponent - kMantissa - kLowestExponent;
  if (shift < 0) {  // below the lowest digit: cut off
    if (shift <= -kMantissa) return;
    mantissa >>= -shift;
    shift = 0;
  }
  auto digit = static_cast<std::size_t>(shift / kDigitBits);
  if (digit + 4 >= digits_.size()) throw std::logic_error("ExactSum: term above 2^300");
  // The mantissa shifted within a digit spans up to 53 + 15 bits: low and high part.
  const int within = shift % kDigitBits;
  const std::uint64_t low = (mantissa << within) & 0xffffffffu;
  const std::uint64_t high = mantissa >> (32 - within);
  digits_[digit] += low & kDigitMask;
  digits_[digit + 1] += low >> kDigitBits;
  digits_[digit + 2] += high & kDigitMask;
  digits_[digit + 3] += (high >> kDigitBits) & kDigitMask;
  digits_[digit + 4] += high >> (2 * kDigitBits);
  if (++terms_ == kTermsPerCarry) carry();
}

void ExactSum::add(const ExactSum& other) {
  ExactSum carried = other;
  carried.carry();
  carry();
  for (std::size_t i = 0; i < digits_.size(); ++i) digits_[i] += carried.digits_[i];
  terms_ = 1;
  not_finite_ |= carried.not_finite_;
}

void ExactSum::carry() {
  std::uint64_t rest = 0;
  for (std::uint64_t& digit : digits_) {
    digit += rest;
    rest = digit >> kDigitBits;
    digit &= kDigitMask;
  }
  if (rest != 0) throw std::logic_error("ExactSum: overflow");
  terms_ = 0;
}

double ExactSum::value() const {
  if (not_finite_ != 0) return std::numeric_limits<double>::quiet_NaN();
  ExactSum carried = *this;
  carried.carry();
  // From the highest digit down; the first four non-zero digits hold at least 49 bits, the fifth rounds.
  double sum = 0;
  int used = 0;
  for (int i = kDigits - 2; i >= 0 && used < 5; --i) {
    const std::uint64_t digit = carried.digits_[static_cast<std::size_t>(i)];
    if (digit == 0 && used == 0) continue;
    sum += std::ldexp(static_cast<double>(digit), kDigitBits * i + kLowestExponent);
    ++used;
  }
  return sum;
}

void ExactSum::to_digits(std::span<float, kDigits> digits) const {
  ExactSum carried = *this;
  carried.carry();
  for (std::size_t i = 0; i < digits_.size(); ++i) digits[i] = static_cast<float>(carried.digits_[i]);
  digits[kDigits - 1] = static_cast<float>(carried.not_finite_);
}

ExactSum ExactSum::from_digits(std::span<const float, kDigits> digits) {
  ExactSum sum;
  for (std::size_t i = 0; i < sum.digits_.size(); ++i) sum.digits_[i] = static_cast<std::uint64_t>(digits[i]);
  sum.not_finite_ = digits[kDigits - 1] > 0 ? 1 : 0;
  sum.carry();
  return sum;
}

}  // namespace zeroplan
