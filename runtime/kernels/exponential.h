#pragma once
// e^x with the same bits on every machine, which std::exp has not.

#include <cstdint>

namespace zeroplan {

/// x[i] = e^(x[i] scale - shift) for `count` elements. fp32: within 3 units in the last place of the exact result for
/// the rounded exponent; 0 for exponents below -87.3 (results under the smallest normal number), those above 88.3 count
/// as 88.3.
void exponentials(float* x, std::int64_t count, float scale, float shift);
void exponentials(double* x, std::int64_t count, double scale, double shift);

}  // namespace zeroplan
