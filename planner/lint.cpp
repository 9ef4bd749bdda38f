#include "planner/lint.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <tuple>

#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

const LintRule& rule_named(std::string_view id) {
  const auto found = std::ranges::find(lint_rules(), id, &LintRule::id);
  if (found == lint_rules().end()) throw std::logic_error(fmt::format("no lint rule {}", id));
  return *found;
}

bool can_run(const LintRule& rule, const CheckInput& input) {
  const bool needs_model = rule.needs == RuleNeeds::model || rule.needs == RuleNeeds::both;
  const bool needs_machine = rule.needs == RuleNeeds::machine || rule.needs == RuleNeeds::both;
  return (!needs_model || input.model != nullptr) && (!needs_machine || input.machine != nullptr);
}

/// None at all, "auto" (which is stage 0), or a stage that there is.
bool has_stage(const ConfigText& file) {
  const ConfigMember* stage = file.find("zero_optimization.stage");
  if (stage == nullptr || stage->value.is_auto()) return true;
  const auto number = coerced_integer(stage->value);
  return number && *number >= 0 && *number <= 3;
}

/// Before or behind, never into. What is inserted begins with a comma for the member before it: not where that one is
/// changed, nor twice at one place.
bool overlap(const TextEdit& a, const TextEdit& b) {
  if (a.begin == a.end && b.begin == b.end) return a.begin == b.begin;
  if (a.begin == a.end) return b.begin < a.begin && a.begin <= b.end;
  if (b.begin == b.end) return a.begin < b.begin && b.begin <= a.end;
  return a.begin < b.end && b.begin < a.end;
}

/// As many corrections as do not touch each other.
std::vector<TextEdit> compatible_edits(const std::vector<Finding>& findings, std::vector<std::string>& corrections) {
  std::vector<TextEdit> chosen;
  std::set<std::string> added;
  for (const Finding& finding : findings) {
    if (finding.edits.empty()) continue;
    if (!finding.adds.empty() && added.contains(finding.adds)) continue;
    const bool clash = std::ranges::any_of(finding.edits, [&](const TextEdit& edit) {
      return std::ranges::any_of(chosen, [&](const TextEdit& other) { return overlap(edit, other); });
    });
    if (clash) continue;
    chosen.insert(chosen.end(), finding.edits.begin(), finding.edits.end());
    if (!finding.adds.empty()) added.insert(finding.adds);
    corrections.push_back(
        fmt::format("{}{}[{}]: {}", finding.key, finding.key.empty() ? "" : " ", finding.rule->id, finding.fix));
  }
  return chosen;
}

}  // namespace

Linter::Linter(const CheckInput& input)
    : file(input.file),
      keys(DeepspeedKeys::catalog()),
      model(input.model),
      machine(input.machine),
      config(read_deepspeed_config(
          input.file, input.model == nullptr ? std::nullopt : std::optional<std::int64_t>(input.model->hidden))) {}

int Linter::line_of(std::string_view path) const {
  for (; !path.empty(); path = section_of(path)) {
    if (const ConfigMember* member = find(path)) return member->line;
  }
  return file.root().line;
}

Finding& Linter::report(std::string_view rule, std::string path, std::string message, std::string fix) {
  const int line = line_of(path);
  return report_at(rule, std::move(path), line, std::move(message), std::move(fix));
}

Finding& Linter::report_at(std::string_view rule, std::string path, int line, std::string message, std::string fix) {
  Finding finding{&rule_named(rule), std::move(path), line, std::move(message), std::move(fix), {}, {}};
  if (findings_.size() >= kMostFindings) {
    truncated_ = true;
    return dropped_ = std::move(finding);
  }
  return findings_.emplace_back(std::move(finding));
}

const ConfigNode* Linter::value(std::string_view path) const {
  const ConfigMember* member = find(path);
  return member == nullptr ? nullptr : &member->value;
}

bool Linter::is_true(std::string_view path) const {
  const ConfigNode* node = value(path);
  return node != nullptr && coerced_bool(*node).value_or(false);
}

bool Linter::is_false(std::string_view path) const {
  const ConfigNode* node = value(path);
  return node != nullptr && !coerced_bool(*node).value_or(true);
}

std::string Linter::shown(std::string_view path) const {
  const ConfigNode* node = value(path);
  return node == nullptr ? "" : file.excerpt(*node);
}

std::optional<std::int64_t> Linter::data_parallel() const {
  // Pipeline stages are a matter of the script.
  if (machine == nullptr || has("pipeline")) return std::nullopt;
  const ConfigNode* tensor = value("tensor_parallel.autotp_size");
  const std::int64_t split = tensor == nullptr ? 1 : coerced_integer(*tensor).value_or(1);
  return std::max<std::int64_t>(1, machine->ranks() / config.sequence_parallel / std::max<std::int64_t>(1, split));
}

CheckAnswer Linter::take() {
  std::ranges::stable_sort(findings_, {}, [](const Finding& finding) {
    return std::tuple(finding.line, finding.rule - lint_rules().data());
  });
  CheckAnswer answer;
  answer.config = config;
  answer.findings = std::move(findings_);
  answer.unchecked = std::move(unchecked);
  answer.truncated = truncated_;
  return answer;
}

bool CheckAnswer::has_errors() const {
  return std::ranges::any_of(findings, [](const Finding& f) { return f.rule->severity == Severity::error; });
}

CheckAnswer check_deepspeed(const CheckInput& input) {
  Linter lint(input);
  lint_syntax(lint);
  if (input.file.root().is_object()) {
    lint_keys(lint);
    lint_batch(lint);
    lint_optimizer(lint);
    // With a stage that DeepSpeed refuses the rest would be guessed.
    if (has_stage(input.file)) {
      lint_precision(lint);
      lint_stage(lint);
      lint_offload(lint);
      lint_parallel(lint);
      lint_memory(lint);
    }
  }
  CheckAnswer answer = lint.take();
  for (const LintRule& rule : lint_rules()) {
    if (!can_run(rule, input)) answer.skipped.emplace_back(rule.id);
  }
  return answer;
}

FixedText fix_deepspeed(const CheckInput& input) {
  FixedText fixed{input.file.text(), {}};
  ConfigText file = ConfigText::parse(fixed.text, input.file.name());
  // Each round settles at least the first correction; what it uncovers comes in the next.
  constexpr int kMostRounds = 50;
  for (int round = 0; round < kMostRounds; ++round) {
    const CheckAnswer answer = check_deepspeed({file, input.model, input.machine});
    const std::vector<TextEdit> edits = compatible_edits(answer.findings, fixed.corrections);
    if (edits.empty()) break;
    fixed.text = edited(file, edits);
    file = ConfigText::parse(fixed.text, input.file.name());
  }
  return fixed;
}

}  // namespace zeroplan
