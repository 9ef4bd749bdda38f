#pragma once
// What the tests of check share: a configuration with what it is checked against, and the files of tests/data/lint.

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/lint.h"

namespace zeroplan::tests {

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline const std::filesystem::path kData = std::filesystem::path(ZEROPLAN_TESTS_DIR) / "data/lint";

/// A file with what it is checked against.
struct Checked {
  ConfigText file;
  std::optional<ModelSpec> model;
  std::optional<MachineSpec> machine;
  CheckAnswer answer;

  explicit Checked(std::string text, const std::string& model_name = "", const std::string& gpus = "", int nodes = 1)
      : file(ConfigText::parse(std::move(text), "ds.json")) {
    if (!model_name.empty()) model = find_model(model_name);
    if (!gpus.empty()) machine = machine_for(parse_gpu_request(gpus), nodes);
    answer = check_deepspeed(input());
  }
  CheckInput input() const { return {file, model ? &*model : nullptr, machine ? &*machine : nullptr}; }
  const Finding* find(std::string_view rule) const {
    for (const Finding& finding : answer.findings) {
      if (finding.rule->id == rule) return &finding;
    }
    return nullptr;
  }
  /// The first finding at a path, of that rule or of any.
  const Finding* at(std::string_view path, std::string_view rule = "") const {
    for (const Finding& finding : answer.findings) {
      if (finding.key == path && (rule.empty() || finding.rule->id == rule)) return &finding;
    }
    return nullptr;
  }
  bool has(std::string_view rule) const { return find(rule) != nullptr; }
  std::string fixed() const { return fix_deepspeed(input()).text; }
  std::string listing() const {
    std::string text;
    for (const Finding& f : answer.findings) text += fmt::format("{}:{} {} {}\n", f.line, f.rule->id, f.key, f.message);
    return text;
  }
};

/// A whole configuration around what is tested, on one line.
inline std::string with(std::string_view members) {
  return fmt::format(R"({{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": true}}, {}}})", members);
}
inline std::string zero(std::string_view members) {
  return with(fmt::format(R"("zero_optimization": {{{}}})", members));
}

inline std::vector<std::filesystem::path> files_of(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(kData / folder)) paths.push_back(entry.path());
  std::ranges::sort(paths);
  return paths;
}

}  // namespace zeroplan::tests
