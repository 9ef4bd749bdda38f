#include "planner/lint_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/deepspeed_keys.h"
#include "planner/check_prediction_report.h"
#include "planner/lint_parts.h"
#include "planner/report_layout.h"

namespace zeroplan {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kWidth = 110;

std::int64_t count_of(const CheckAnswer& answer, Severity severity) {
  return std::ranges::count_if(answer.findings, [&](const Finding& f) { return f.rule->severity == severity; });
}

Ink ink_of(Severity severity) {
  return severity == Severity::error ? Ink::bad : severity == Severity::warning ? Ink::bold : Ink::dim;
}

std::string needs_text(RuleNeeds needs) {
  switch (needs) {
    case RuleNeeds::nothing:
      return "";
    case RuleNeeds::model:
      return "--model";
    case RuleNeeds::machine:
      return "--gpus";
    case RuleNeeds::both:
      return "--model, --gpus";
  }
  return "";
}

}  // namespace

std::string plural(std::int64_t count, std::string_view word) {
  return fmt::format("{} {}{}", count, word, count == 1 ? "" : "s");
}

std::string printable_line(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}

std::string filled_lines(std::string_view text, std::string_view indent) {
  std::string result(indent);
  std::size_t column = indent.size();
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    const std::string_view word = text.substr(at, end - at);
    if (column + word.size() > kWidth && column > indent.size()) {
      result += "\n" + std::string(indent);
      column = indent.size();
    } else if (column > indent.size()) {
      result += ' ';
      ++column;
    }
    result += word;
    column += word.size();
    at = end + 1;
  }
  return result + "\n";
}

std::string report_check(const CheckInput& input, const CheckAnswer& answer, const ReportStyle& style) {
  std::string text;
  std::int64_t fixable = 0;
  for (const Finding& finding : answer.findings) {
    const std::string where = printable_line(finding.key);
    text +=
        fmt::format("{}:{}: {} {}{}\n", input.file.name(), finding.line,
                    inked(to_string(finding.rule->severity), ink_of(finding.rule->severity), style),
                    where.empty() ? "" : where + " ", inked(fmt::format("[{}]", finding.rule->id), Ink::dim, style));
    text += filled_lines(printable_line(finding.message), "    ");
    if (!finding.fix.empty()) text += filled_lines("fix: " + printable_line(finding.fix), "    ");
    text += "\n";
    fixable += finding.edits.empty() ? 0 : 1;
  }
  const std::int64_t errors = count_of(answer, Severity::error);
  text +=
      inked(fmt::format("{}, {}, {}", plural(errors, "error"), plural(count_of(answer, Severity::warning), "warning"),
                        plural(count_of(answer, Severity::note), "note")),
            errors > 0 ? Ink::bad : Ink::good, style);
  text += fmt::format(" by {} rules for DeepSpeed {}", lint_rules().size() - answer.skipped.size(),
                      DeepspeedKeys::catalog().version());
  if (fixable > 0) text += fmt::format("; --fix corrects {}", fixable);
  text += "\n";
  if (answer.truncated) text += fmt::format("more than {} findings: the rest is left out\n", kMostFindings);
  if (!answer.skipped.empty()) {
    text += filled_lines(
        fmt::format("{} not run without {}: {}", plural(static_cast<std::int64_t>(answer.skipped.size()), "rule"),
                    input.model == nullptr && input.machine == nullptr ? "--model and --gpus"
                    : input.model == nullptr                           ? "--model"
                                                                       : "--gpus",
                    fmt::join(answer.skipped, ", ")),
        "");
  }
  return text;
}

std::string finding_line(const ConfigText& file, const Finding& finding) {
  return printable_line(fmt::format("{}:{}: {}: {}{}{}", file.name(), finding.line, to_string(finding.rule->severity),
                                    finding.key, finding.key.empty() ? "" : ": ", finding.message));
}

std::string check_json(const CheckInput& input, const CheckAnswer& answer, const CheckPrediction* prediction) {
  Json findings = Json::array();
  for (const Finding& finding : answer.findings) {
    Json one{{"key", finding.key},
             {"line", finding.line},
             {"severity", to_string(finding.rule->severity)},
             {"rule", finding.rule->id},
             {"message", finding.message}};
    if (!finding.fix.empty()) one["fix"] = finding.fix;
    one["fixable"] = !finding.edits.empty();
    findings.push_back(std::move(one));
  }
  Json j{{"file", input.file.name()}, {"deepspeed", DeepspeedKeys::catalog().version()}};
  j["findings"] = std::move(findings);
  j["counts"] = {{"error", count_of(answer, Severity::error)},
                 {"warning", count_of(answer, Severity::warning)},
                 {"note", count_of(answer, Severity::note)}};
  j["skipped"] = answer.skipped;
  j["unchecked_sections"] = answer.unchecked;
  j["truncated"] = answer.truncated;
  if (prediction != nullptr) {
    j["prediction"] = Json::parse(prediction_json(*prediction));
    if (prediction->nearest) j["nearest"] = Json::parse(nearest_json(*prediction));
  }
  return j.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string rules_markdown() {
  std::string text =
      "| rule | severity | finds | what DeepSpeed 0.19 does | needs |\n| --- | --- | --- | --- | --- |\n";
  for (const LintRule& rule : lint_rules()) {
    text += fmt::format("| `{}` | {} | {} | {} | {} |\n", rule.id, to_string(rule.severity), rule.finds,
                        rule.consequence, needs_text(rule.needs));
  }
  return text;
}

}  // namespace zeroplan
