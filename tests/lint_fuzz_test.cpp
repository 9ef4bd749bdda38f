// Laws of check on configurations that are changed at random.

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "models/deepspeed_keys.h"
#include "models/error.h"
#include "planner/lint_parts.h"
#include "planner/lint_report.h"
#include "tests/catch.h"
#include "tests/lint_support.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

using Json = nlohmann::ordered_json;

/// Configurations with random accidents.
class Mutations {
 public:
  explicit Mutations(unsigned seed) : random_(seed) {}

  std::string mutated(const std::string& text) {
    if (pick(4) == 0) return bytes(text);
    Json json = Json::parse(text, nullptr, false, true);
    if (json.is_discarded()) return bytes(text);
    for (int i = 0, count = 1 + pick(6); i < count; ++i) accident(json, json, 0);
    return json.dump(pick(2) == 0 ? 2 : -1);
  }

 private:
  int pick(int count) { return std::uniform_int_distribution<int>(0, count - 1)(random_); }

  std::string bytes(std::string text) {
    for (int i = 0, count = 1 + pick(5); i < count && !text.empty(); ++i) {
      const auto at = static_cast<std::size_t>(pick(static_cast<int>(text.size())));
      constexpr std::string_view kBytes = "{}[],:\"0123456789.eE-truefalsn#/* \n\xff\\";
      const char byte = kBytes[static_cast<std::size_t>(pick(static_cast<int>(kBytes.size())))];
      switch (pick(3)) {
        case 0:
          text[at] = byte;
          break;
        case 1:
          text.erase(at, 1);
          break;
        default:
          text.insert(at, 1, byte);
      }
    }
    return text;
  }

  Json value() {
    switch (pick(14)) {
      case 0:
        return nullptr;
      case 1:
        return true;
      case 2:
        return false;
      case 3:
        return "auto";
      case 4:
        return "5e8";
      case 5:
        return -1;
      case 6:
        return 1e300;
      case 7:
        return 0.5;
      case 8:
        return Json::object();
      case 9:
        return Json::array({1, "x"});
      case 10:
        return Json::object({{"device", "nvme"}, {"enabled", true}});
      case 11:
        return 3;
      case 12:
        return "cpu";
      default:
        return std::int64_t{1} << 62;
    }
  }

  std::string name() {
    const auto keys = DeepspeedKeys::catalog().keys();
    const DeepspeedKey& key = keys[static_cast<std::size_t>(pick(static_cast<int>(keys.size())))];
    std::string text(pick(3) == 0 && !key.alias.empty() ? std::string_view(key.alias) : key.leaf());
    switch (pick(5)) {
      case 0:
        text.erase(static_cast<std::size_t>(pick(static_cast<int>(text.size()))), 1);
        break;
      case 1:
        text = "stage3_" + text;
        break;
      case 2:
        text = key.path;
        break;
      default:
        break;
    }
    return text;
  }

  void accident(Json& root, Json& node, int depth) {
    if (!node.is_object() || node.empty() || depth > 4) return;
    auto at = node.begin();
    std::advance(at, pick(static_cast<int>(node.size())));
    if (at.value().is_object() && pick(3) != 0) return accident(root, at.value(), depth + 1);
    const std::string key = at.key();
    switch (pick(6)) {
      case 0:
        node.erase(key);
        break;
      case 1:
        node[key] = value();
        break;
      case 2:
        node[name()] = value();
        break;
      case 3: {  // renamed
        Json held = node[key];
        node.erase(key);
        node[name()] = held;
        break;
      }
      case 4: {  // moved to the top
        Json held = node[key];
        node.erase(key);
        root[key] = held;
        break;
      }
      default:
        if (node.contains("stage")) {
          node["stage"] = pick(4);
        } else {
          node[key] = value();
        }
    }
  }

  std::mt19937 random_;
};

/// Runs every law on one text; false when it is no JSON.
bool holds_laws(const std::string& text, const ModelSpec* model, const MachineSpec* machine) {
  std::optional<ConfigText> file;
  try {
    file = ConfigText::parse(text, "f");
  } catch (const InputError&) {
    return false;
  }
  const CheckInput input{*file, model, machine};
  const CheckAnswer answer = check_deepspeed(input);
  CHECK(std::ranges::is_sorted(answer.findings, {}, &Finding::line));
  for (const Finding& finding : answer.findings) {
    INFO(finding.rule->id);
    CHECK_FALSE(finding.message.empty());
    if (finding.rule->severity == Severity::error) CHECK_FALSE(finding.fix.empty());
  }
  const std::string report = report_check(input, answer, {});
  CHECK(report == report_check(input, check_deepspeed(input), {}));
  CHECK_FALSE(Json::parse(check_json(input, answer)).at("findings").is_null());
  const std::string fixed = fix_deepspeed(input).text;
  const ConfigText again = ConfigText::parse(fixed, "f");
  const CheckInput corrected{again, model, machine};
  for (const Finding& finding : check_deepspeed(corrected).findings) {
    INFO(finding.rule->id << " " << finding.message << "\n" << fixed);
    CHECK(finding.edits.empty());
  }
  CHECK(fix_deepspeed(corrected).text == fixed);
  return true;
}

void fuzz(unsigned seed, int rounds) {
  std::vector<std::string> texts;
  for (const char* folder : {"good", "bad"}) {
    for (const std::filesystem::path& path : files_of(folder)) texts.push_back(read_file(path));
  }
  Mutations mutations(seed);
  const ModelSpec model = find_model("7B");
  const MachineSpec machine = machine_for(parse_gpu_request("8xA100-80G"), 2);
  int parsed = 0;
  for (int i = 0; i < rounds; ++i) {
    const std::string text = mutations.mutated(texts[static_cast<std::size_t>(i) % texts.size()]);
    INFO(text);
    parsed += holds_laws(text, i % 2 == 0 ? &model : nullptr, i % 3 != 0 ? &machine : nullptr) ? 1 : 0;
  }
  CHECK(parsed > rounds / 2);
}

}  // namespace

TEST_CASE("Mutated configurations: no crash, sorted and equal findings, corrections that settle") { fuzz(1, 600); }

TEST_CASE("Many mutated configurations", "[.slow]") { fuzz(20261130, 20000); }
