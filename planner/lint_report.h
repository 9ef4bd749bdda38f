#pragma once
// The answer of `check` for people, as JSON, and the table of rules for docs/check.md.

#include <string>
#include <string_view>

#include "planner/check_prediction.h"
#include "planner/lint.h"
#include "planner/report.h"

namespace zeroplan {

/// One finding a paragraph (file:line, rule, key, consequence, fix), then a summary. `fixable` findings are told apart.
std::string report_check(const CheckInput& input, const CheckAnswer& answer, const ReportStyle& style);

/// With '?' for control characters: keys of a file would reach the terminal.
std::string printable_line(std::string text);

/// Words filled into lines of 110 columns, each behind the indentation.
std::string filled_lines(std::string_view text, std::string_view indent);

/// The finding on one line: "file:12: error: key: message".
std::string finding_line(const ConfigText& file, const Finding& finding);

/// {"file", "findings": [{"key", "line", "severity", "rule", "message", "fix", "fixable"}], "counts", "skipped",
/// "unchecked_sections", "truncated"}. A finding without anything to do has no "fix". With a prediction also
/// "prediction" and "nearest" (check_prediction_report.h).
std::string check_json(const CheckInput& input, const CheckAnswer& answer, const CheckPrediction* prediction = nullptr);

/// Markdown: the rules, grouped as in the table.
std::string rules_markdown();

}  // namespace zeroplan
