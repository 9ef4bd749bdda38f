#pragma once
// A sum of doubles that does not depend on the order of its terms: fixed point wide enough for the squares of floats.

#include <array>
#include <cstdint>
#include <span>

namespace zeroplan {

/// Sums non-negative terms up to 2^300 without rounding above 2^-308; smaller parts of a term are cut off, each term
/// for itself, which keeps the order out of the result. A term that is NaN or infinite makes value() NaN.
class ExactSum {
 public:
  /// The sum as digits of base 2^16, lowest first, in floats: an element-wise fp32 sum over up to 256 ranks is exact,
  /// so a plain all-reduce in any order adds ExactSums. The last digit is 1 after a term that was not finite.
  static constexpr int kDigits = 40;

  /// Throws std::logic_error for a negative term.
  void add(double term);
  void add(const ExactSum& other);
  /// The sum to within one unit in the last place of a double; a function of the exact sum alone.
  double value() const;

  void to_digits(std::span<float, kDigits> digits) const;
  static ExactSum from_digits(std::span<const float, kDigits> digits);

 private:
  void carry();

  std::array<std::uint64_t, kDigits - 1> digits_{};  // value = sum of digits_[i] 2^(16 i - 308)
  std::uint32_t terms_ = 0;                          // additions since the last carry
  std::uint32_t not_finite_ = 0;
};

}  // namespace zeroplan
