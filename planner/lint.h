#pragma once
// The lint of a DeepSpeed configuration: what DeepSpeed 0.19 does with each key that is wrong, dead, contradictory or
// beyond the machine, and the corrected text. Rules are listed in lint_rules.cpp; docs/check.md is printed from there.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/config_text.h"
#include "models/deepspeed_config.h"
#include "models/machine_spec.h"
#include "models/model_spec.h"

namespace zeroplan {

enum class Severity : std::uint8_t {
  error,    // DeepSpeed refuses to start, runs out of memory, or does not do what the key says
  warning,  // it runs, but slower, larger, with other numerics, or without the key's effect
  note,     // worth knowing; nothing is wrong
};
std::string_view to_string(Severity severity);

/// What a rule reads beside the file.
enum class RuleNeeds : std::uint8_t { nothing, model, machine, both };

struct LintRule {
  std::string_view id;  // "misplaced-key-refused"
  Severity severity;
  RuleNeeds needs;
  std::string_view finds;        // what it looks for
  std::string_view consequence;  // what DeepSpeed 0.19 does
};
/// Every rule, grouped by subject.
std::span<const LintRule> lint_rules();

/// Replaces [begin, end) of the file.
struct TextEdit {
  std::size_t begin = 0, end = 0;
  std::string text;
};

struct Finding {
  const LintRule* rule = nullptr;
  std::string key;  // "zero_optimization.offload_optimizer.offload_param", "" for the file as a whole
  int line = 1;
  std::string message;          // what is there and what happens
  std::string fix;              // the corrected text or what to do; empty when there is nothing to do
  std::vector<TextEdit> edits;  // how --fix does it; empty: a person has to decide
  std::string adds;             // path of a key that the edits add, empty: none
};

/// What is checked. `model` and `machine` may be null: the rules that need them are skipped then. They and the file
/// outlive the answer.
struct CheckInput {
  const ConfigText& file;
  const ModelSpec* model = nullptr;
  const MachineSpec* machine = nullptr;
};

/// The typed configuration is what a prediction under DeepSpeed starts from (engine "deepspeed", a later step).
struct CheckAnswer {
  DeepSpeedConfig config;
  std::vector<Finding> findings;       // by line, then by rule
  std::vector<std::string> skipped;    // ids of rules that had no model or machine to work with
  std::vector<std::string> unchecked;  // sections whose keys are passed on and not in the catalog
  bool truncated = false;              // more findings than kMostFindings

  bool has_errors() const;
};

inline constexpr std::size_t kMostFindings = 1000;

/// Runs every rule that has what it needs. Never throws on the content of the file.
CheckAnswer check_deepspeed(const CheckInput& input);

/// The file with every finding that has edits corrected, again and again until none is left (one correction can uncover
/// the next), and what was corrected. What no edit touches keeps its bytes.
struct FixedText {
  std::string text;
  std::vector<std::string>
      corrections;  // one line each: "zero_optimization.grad_hooks [retired-key-refused]: remove it"
};
FixedText fix_deepspeed(const CheckInput& input);

}  // namespace zeroplan
