#pragma once
// Catch2, 2.13 (Debian 12) or 3: the one place that knows which.

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <string>

namespace zeroplan::tests {

using Catch::Matchers::WithinAbs;
using Catch::Matchers::WithinRel;

/// Matches a text that holds `part`: CHECK_THAT(text, HasText("GiB")), CHECK_THROWS_WITH(f(), HasText("expected")).
inline auto HasText(const std::string& part) {
#if __has_include(<catch2/catch_all.hpp>)
  return Catch::Matchers::ContainsSubstring(part);
#else
  return Catch::Matchers::Contains(part);
#endif
}

}  // namespace zeroplan::tests
