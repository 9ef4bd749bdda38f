#pragma once
// The tables of `zeroplan validate` beside those of an earlier run: what got worse, and what cannot be compared.

#include <string>
#include <string_view>
#include <vector>

#include "planner/validate.h"

namespace zeroplan {

/// A figure that is larger now, where smaller is better; or rows that are no longer predicted, where it is smaller.
struct Regression {
  std::string source, quantity, group;
  std::string figure;  // "mape" and "max" in percent; "n", "called_too_large", "called_fitting" count rows
  double earlier = 0, now = 0;
};

struct EarlierComparison {
  int figures = 0;  // compared
  std::vector<Regression> regressions;
  /// Tables of the same source that are of more rows now (errors of other rows), and sources that only one run read.
  std::vector<std::string> not_compared;
};

/// Compares with `earlier`, the text of an earlier validation_json(); `name` is how errors call it. Sources are matched
/// by the name of their file without its folder. Predictions are deterministic, so a figure that grew by more than the
/// rounding of another machine's mathematics library (1e-6 of a percent) is a regression. Throws InputError on a text
/// that is no such document, and when nothing in it can be compared.
EarlierComparison compare_with_earlier(const Validation& validation, std::string_view earlier, const std::string& name);

/// For people, after validation_text().
std::string earlier_text(const EarlierComparison& comparison, const std::string& name);

}  // namespace zeroplan
