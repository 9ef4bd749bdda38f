#include "planner/row_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "models/deepspeed_keys.h"
#include "models/error.h"
#include "planner/check_parts.h"
#include "planner/row_values.h"

namespace zeroplan {
namespace {

/// A key at the top and the text of its value.
using Section = std::pair<std::string, std::string>;

/// The row's own text of an object's members, "" when it is not there.
std::string members_text(const ConfigText& row, std::string_view key) {
  const ConfigMember* member = row.find(key);
  if (member == nullptr || !member->value.is_object() || member->value.members.empty()) return "";
  const ConfigNode& node = member->value;
  return ", " + row.text().substr(node.begin + 1, node.end - node.begin - 2);
}

std::vector<Section> own_sections(const JsonValue& row, const ConfigText& file) {
  const JsonValue* clip = row.find("clip");
  std::vector<Section> sections{{"train_micro_batch_size_per_gpu", std::to_string(row_integer(row, "mb", 1))},
                                {"gradient_accumulation_steps", std::to_string(row_integer(row, "gas", 1))},
                                {"gradient_clipping", fmt::format("{}", clip == nullptr ? 1.0 : clip->as_real(0, 1e9))},
                                {"optimizer", R"({"type": "AdamW", "params": {"lr": 1e-5}})"},
                                {"zero_optimization", fmt::format(R"({{"stage": {}{}}})", row_integer(row, "stage", 0),
                                                                  members_text(file, "zero"))}};
  const std::string precision = row_text(row, "prec", "bf16");
  if (precision != "fp32")
    sections.emplace_back(precision, fmt::format(R"({{"enabled": true{}}})", members_text(file, "prec_opts")));
  return sections;
}

/// As dict.update().
void put(std::vector<Section>& sections, std::string key, std::string value) {
  const auto found = std::ranges::find(sections, key, &Section::first);
  if (found == sections.end()) {
    sections.emplace_back(std::move(key), std::move(value));
  } else {
    found->second = std::move(value);
  }
}

/// What optimizer.params hands on to torch.optim; the catalog has DeepSpeed's own.
bool read_by_torch(std::string_view path) {
  return path == "optimizer.params.foreach" || path == "optimizer.params.fused";
}

void check_known(const ConfigNode& node, const std::string& section) {
  const DeepspeedKeys& keys = DeepspeedKeys::catalog();
  for (const ConfigMember& member : node.members) {
    const std::string path = joined(section, member.key);
    if (keys.find(path) == nullptr && !keys.section(path) && !read_by_torch(path))
      throw InputError(fmt::format("{}: no key of DeepSpeed {} that a rule reads", path, keys.version()));
    if (member.value.is_object()) check_known(member.value, path);
  }
}

}  // namespace

ConfigText row_deepspeed_config(const JsonValue& row, std::string_view text) {
  const ConfigText file = ConfigText::parse(std::string(text), "row");
  std::vector<Section> sections = own_sections(row, file);
  if (const ConfigMember* extra = file.find("extra"); extra != nullptr) {
    for (const ConfigMember& member : extra->value.members) {
      const ConfigNode& node = member.value;
      put(sections, member.key, file.text().substr(node.begin, node.end - node.begin));
    }
  }
  std::string config;
  for (const auto& [key, value] : sections) {
    const std::string name = nlohmann::json(key).dump();
    config += fmt::format("{}{}: {}", config.empty() ? "{" : ", ", name, value);
  }
  ConfigText whole = ConfigText::parse(config + "}", "row");
  check_known(whole.root(), "");
  if (const std::string why = unmodelled_sections(whole); !why.empty()) throw InputError(why);
  return whole;
}

}  // namespace zeroplan
