#pragma once

#include <string>

namespace zeroplan {

/// A value that nobody gave: printed with every result that used it (spec section 3).
struct Assumption {
  std::string what;    // "sequence length"
  std::string value;   // "4096"
  std::string source;  // "default: the smaller of 4096 and the model's maximum"
  friend bool operator==(const Assumption&, const Assumption&) = default;
};

}  // namespace zeroplan
