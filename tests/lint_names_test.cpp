// What unknown keys were meant to be, and numbers as Python reads them.

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "models/deepspeed_keys.h"
#include "planner/export_parts.h"
#include "planner/lint.h"
#include "planner/lint_parts.h"
#include "tests/catch.h"
#include "tests/lint_support.h"

using namespace zeroplan;
using zeroplan::tests::Checked;
using zeroplan::tests::HasText;

namespace {

/// {"a": {"b": VALUE}} for "a.b".
std::string nested(std::string_view path, std::string_view value) {
  const std::size_t dot = path.find('.');
  if (dot == std::string_view::npos) return fmt::format(R"({{"{}": {}}})", path, value);
  return fmt::format(R"({{"{}": {}}})", path.substr(0, dot), nested(path.substr(dot + 1), value));
}

std::vector<std::string> words_of(std::string_view name) {
  std::vector<std::string> words{""};
  for (const char c : name) {
    if (c == '_') {
      words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  return words;
}

/// How people shorten words of DeepSpeed's keys, and write out those that it shortens.
const std::multimap<std::string, std::string> kOtherForms = {
    {"parameters", "params"},    {"parameters", "param"},   {"param", "parameter"},    {"params", "parameters"},
    {"gradients", "grads"},      {"gradient", "grad"},      {"grads", "gradients"},    {"grad", "gradient"},
    {"accumulation", "accum"},   {"accumulation", "acc"},   {"accum", "accumulation"}, {"optimizer", "optim"},
    {"optimizer", "opt"},        {"opt", "optimizer"},      {"optimization", "opt"},   {"optimization", "optim"},
    {"communication", "comm"},   {"comm", "communication"}, {"checkpointing", "ckpt"}, {"checkpoint", "ckpt"},
    {"checkpoints", "ckpts"},    {"distance", "dist"},      {"threshold", "thresh"},   {"persistence", "persist"},
    {"partitions", "parts"},     {"partition", "part"},     {"activation", "act"},     {"activations", "acts"},
    {"contiguous", "contig"},    {"buffer", "buf"},         {"bucket", "bkt"},         {"count", "cnt"},
    {"prefetch", "pref"},        {"memory", "mem"},         {"number", "num"},         {"num", "number"},
    {"max", "maximum"},          {"min", "minimum"},        {"profile", "prof"},       {"prof", "profile"},
    {"initial", "init"},         {"window", "win"},         {"precision", "prec"},     {"sequential", "seq"},
    {"config", "configuration"}, {"synchronize", "sync"},   {"quantized", "quant"},    {"weights", "wts"},
    {"warmup", "warm"},          {"perc", "percent"},       {"allgather", "allgath"},  {"boundary", "bound"},
    {"parallel", "par"},         {"vocabulary", "vocab"},   {"interval", "int"},       {"experiment", "exp"}};

/// The name with every word that has one in another form, one form at a time.
std::set<std::string> other_forms(std::string_view name) {
  std::set<std::string> forms;
  const std::vector<std::string> words = words_of(name);
  for (std::size_t i = 0; i < words.size(); ++i) {
    const auto [first, last] = kOtherForms.equal_range(words[i]);
    for (auto form = first; form != last; ++form) {
      std::vector<std::string> changed = words;
      std::ranges::replace(changed, words[i], form->second);
      forms.insert(fmt::format("{}", fmt::join(changed, "_")));
    }
  }
  return forms;
}

/// The name without one of its words, where it has three at least.
std::set<std::string> shorter_forms(std::string_view name) {
  std::set<std::string> forms;
  const std::vector<std::string> words = words_of(name);
  for (std::size_t i = 0; words.size() >= 3 && i < words.size(); ++i) {
    std::vector<std::string> changed = words;
    changed.erase(changed.begin() + static_cast<std::ptrdiff_t>(i));
    forms.insert(fmt::format("{}", fmt::join(changed, "_")));
  }
  return forms;
}

bool knows(const DeepspeedKeys& keys, const std::string& path) {
  return keys.find(path) != nullptr || keys.find_wrong(path) != nullptr;
}

/// Keys in sections whose unknown keys are looked at.
std::vector<const DeepspeedKey*> checked_keys(const DeepspeedKeys& keys) {
  std::vector<const DeepspeedKey*> checked;
  for (const DeepspeedKey& key : keys.keys()) {
    const auto policy = keys.section(key.section());
    if (policy && *policy != UnknownKey::unlisted) checked.push_back(&key);
  }
  return checked;
}

}  // namespace

TEST_CASE("Every key of DeepSpeed is recognised in its usual abbreviations") {
  const DeepspeedKeys& keys = DeepspeedKeys::catalog();
  int tried = 0;
  for (const DeepspeedKey* key : checked_keys(keys)) {
    for (const std::string& form : other_forms(key->leaf())) {
      const std::string path = joined(key->section(), form);
      // Another key's very name, here or (as compile.offload_param) elsewhere.
      if (knows(keys, path) || !keys.with_leaf(form).empty()) continue;
      ++tried;
      const Checked checked(nested(path, key->type == ConfigType::object ? "{}" : "1"));
      const Finding* finding = checked.at(path);
      INFO(path);
      REQUIRE(finding != nullptr);
      CHECK(finding->rule->id.starts_with("misspelt-key"));
      CHECK_THAT(finding->message, HasText(fmt::format("Meant is {}.", key->leaf())));
      if (key->instead.empty()) CHECK_THAT(checked.fixed(), HasText(fmt::format("\"{}\"", key->leaf())));
    }
  }
  CHECK(tried > 100);
}

TEST_CASE("A word left out of a key leaves it open at most between keys that all fit") {
  const DeepspeedKeys& keys = DeepspeedKeys::catalog();
  int tried = 0, open = 0;
  for (const DeepspeedKey* key : checked_keys(keys)) {
    if (!key->instead.empty()) continue;
    for (const std::string& form : shorter_forms(key->leaf())) {
      const std::string path = joined(key->section(), form);
      if (knows(keys, path) || !keys.with_leaf(form).empty()) continue;
      if (path == "data_type") continue;  // one letter from data_types
      ++tried;
      const Checked checked(nested(path, key->type == ConfigType::object ? "{}" : "1"));
      const Finding* finding = checked.at(path);
      INFO(path);
      REQUIRE(finding != nullptr);
      if (finding->rule->id.starts_with("unknown-key")) {
        ++open;
        CHECK_THAT(finding->fix, HasText(std::string(key->leaf())) && HasText(" or "));
        CHECK(finding->edits.empty());
      } else {
        CHECK_THAT(finding->message, HasText(fmt::format("Meant is {}.", key->leaf())));
      }
    }
  }
  CHECK(tried > 150);
  CHECK(open < tried / 5);
}

TEST_CASE("Names that are not near are not guessed") {
  const std::vector<std::string> names = {"stage3_max_live_parameters", "reduce_bucket_size", "allgather_bucket_size",
                                          "stage", "optimizer"};
  CHECK(meant_name("stage3_max_live_params", names) == "stage3_max_live_parameters");
  CHECK(meant_name("max_live_params", names) == "stage3_max_live_parameters");
  CHECK(meant_name("stage2_max_live_params", names).empty());  // digits say something of their own
  CHECK(meant_name("reduce_bs", names).empty());
  CHECK(meant_names("bucket_size", names) == std::vector<std::string>{"reduce_bucket_size", "allgather_bucket_size"});
  CHECK(meant_name("bucket_size", names).empty());
  CHECK(meant_name("opt", names) == "optimizer");
  for (const char* other : {"", "_", "size", "bucket", "live", "max", "op", "parameters", "size_bucket_reduce",
                            "reduce_bucket_size_of_the_model", "steps", "model_name"}) {
    CHECK(meant_names(other, names).empty());
  }
  CHECK(meant_name("train_bs", {"train_batch_size"}) == "train_batch_size");
  CHECK(meant_names(std::string(100'000, 'a'), names).empty());
  CHECK(meant_names(std::string(100'000, '_'), names).empty());
}

TEST_CASE("A script's own value is no section of DeepSpeed cut short") {
  for (const char* own : {R"("date": "2026-12-01")", R"("time": 3)", R"("data": "corpus")", R"("ampere": true)"}) {
    const std::string text = fmt::format("{{\"train_batch_size\": 8, {}}}", own);
    const Checked checked(text);
    INFO(text);
    CHECK(std::ranges::none_of(checked.answer.findings,
                               [](const Finding& finding) { return finding.rule->id.starts_with("misspelt-key"); }));
    CHECK_THAT(checked.fixed(), HasText(own));
  }
  CHECK_THAT(Checked(R"({"time": {}})").fixed(), HasText("\"timers\""));
}

TEST_CASE("Capitals part words as underscores do") {
  CHECK_THAT(Checked(R"({"trainMicroBatchSizePerGpu": 1})").fixed(), HasText("\"train_micro_batch_size_per_gpu\": 1"));
  CHECK_THAT(Checked(R"({"zeroOptimization": {"stage": 1}})").fixed(), HasText("\"zero_optimization\""));
  CHECK_THAT(Checked(R"({"trainingParameters": {}})").fixed(), HasText("\"trainingParameters\""));
}

TEST_CASE("No correction proposes a key that stands there already") {
  struct Case {
    const char* members;  // of zero_optimization
    const char* wrong;    // goes
    const char* there;    // stays
  };
  const Case cases[] = {
      {R"("stage3_max_live_params": 1e9, "stage3_max_live_parameters": 1e8)", "stage3_max_live_params",
       "stage3_max_live_parameters"},
      {R"("stage3_max_live_params": 1e9, "max_live_parameters": 1e8)", "stage3_max_live_params", "max_live_parameters"},
      {R"("reduce_bucket_sise": 1e9, "reduce_bucket_size": 1e8)", "reduce_bucket_sise", "reduce_bucket_size"},
      {R"("stage3_sub_group_size": 1e9, "sub_group_size": 1e8)", "stage3_sub_group_size", "sub_group_size"},
      {R"("Sub_Group_Size": 1e9, "sub_group_size": 1e8)", "Sub_Group_Size", "sub_group_size"},
      {R"("stage3_gather_16bit_weights_on_save": true, "stage3_gather_16bit_weights_on_model_save": true)",
       "stage3_gather_16bit_weights_on_save", "stage3_gather_16bit_weights_on_model_save"},
      {R"("cpu_offlod": true, "offload_optimizer": {"device": "cpu"})", "cpu_offlod", "offload_optimizer"},
  };
  for (const Case& c : cases) {
    const Checked checked(
        fmt::format("{{\"train_batch_size\": 8,\n\"zero_optimization\": {{\"stage\": 3,\n{}}}}}", c.members));
    const std::string path = joined("zero_optimization", c.wrong);
    INFO(path);
    const Finding* finding = checked.at(path);
    REQUIRE(finding != nullptr);
    CHECK(finding->fix == fmt::format("remove it: {} is set on line 3", c.there));
    const Checked after(checked.fixed());
    CHECK(after.file.find(path) == nullptr);
    CHECK(after.file.find("zero_optimization") != nullptr);
    for (const Finding& left : after.answer.findings) CHECK(left.rule->severity != Severity::error);
  }
}

TEST_CASE("A misspelt section beside the right one goes, and so does a key with dots") {
  const Checked checked(
      "{\"train_batch_size\": 8,\n \"zero_optimization\": {\"stage\": 3},\n \"zero_optimisation\": {\"stage\": 2},\n"
      " \"zero_optimization.stage\": 1,\n \"grad_clip\": 1.0,\n \"gradient_clipping\": 0.5,\n"
      " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-4, \"learning_rate\": 1e-3}}}");
  CHECK(checked.at("zero_optimisation")->fix == "remove it: zero_optimization is set on line 2");
  CHECK(checked.at("zero_optimization.stage", "dotted-key")->fix ==
        "remove it: zero_optimization.stage is set on line 2");
  CHECK(checked.at("grad_clip")->fix == "remove it: gradient_clipping is set on line 6");
  CHECK(checked.at("optimizer.params.learning_rate")->fix == "remove it: lr is set on line 7");
  CHECK(checked.fixed() ==
        "{\"train_batch_size\": 8,\n \"zero_optimization\": {\"stage\": 3},\n \"gradient_clipping\": 0.5,\n"
        " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-4}}}");
}

TEST_CASE("Integers have no bound in Python, and what is too large is found without a false claim") {
  const auto finding_of = [](std::string_view path, std::string_view value, std::string_view rule) {
    const Checked checked(nested(path, value));
    const Finding* finding = checked.at(path, rule);
    return finding == nullptr ? std::string() : finding->message;
  };
  const std::string digits32 = "1" + std::string(32, '0');
  for (const std::string& value :
       {std::string("9223372036854775807"), std::string("9223372036854775808"), std::string("18446744073709551616"),
        digits32, std::string("1e32"), std::string("2e9")}) {
    for (const char* key : {"train_micro_batch_size_per_gpu", "train_batch_size"}) {
      INFO(key << " " << value);
      const Checked checked(nested(key, value));
      REQUIRE(checked.at(key, "batch-huge") != nullptr);
      CHECK_THAT(checked.at(key)->message, HasText(value.substr(0, 40)));
      for (const Finding& finding : checked.answer.findings)
        CHECK(finding.message.find("TypeError") == std::string::npos);
      CHECK(checked.at(key, "fractional-integer") == nullptr);
      CHECK(checked.at(key, "integer-beyond-64-bits") == nullptr);
    }
  }
  CHECK(finding_of("train_batch_size", "1073741824", "batch-huge").empty());

  // Guarded sections: digits are taken, a float from 2^63 on is not (tried with pydantic 2.13.4).
  const char* bucket = "zero_optimization.reduce_bucket_size";
  CHECK_THAT(finding_of(bucket, "9223372036854775808", "integer-beyond-64-bits"), HasText("DeepSpeed takes it"));
  CHECK(finding_of(bucket, "9223372036854775808", "fractional-integer").empty());
  CHECK(finding_of(bucket, "9223372036854775807", "integer-beyond-64-bits").empty());
  CHECK(finding_of(bucket, "9.2e18", "fractional-integer").empty());
  CHECK_THAT(finding_of(bucket, "9.3e18", "fractional-integer"), HasText("ValidationError"));
  CHECK_THAT(finding_of(bucket, "8.5", "fractional-integer"), HasText("ValidationError"));
  CHECK_THAT(finding_of("train_batch_size", "8.5", "fractional-integer"), HasText("DeepSpeed calculates with a float"));

  // hjson stops at infinity and Python at 4,301 digits, wherever they stand.
  for (const char* path : {"train_batch_size", "gradient_clipping", "optimizer.params.lr", "mine.own"}) {
    CHECK_THAT(finding_of(path, "1e400", "number-unreadable"), HasText("OverflowError"));
    CHECK_THAT(finding_of(path, "[1, -1e400]", "number-unreadable"), HasText("-1e400"));
    CHECK_THAT(finding_of(path, std::string(4301, '9'), "number-unreadable"), HasText("ValueError"));
    CHECK(finding_of(path, "-" + std::string(4300, '9'), "number-unreadable").empty());
  }
  // In quotes and converted: the digits themselves, which a double would not keep.
  const Checked quoted(
      R"({"train_batch_size": 8, "zero_optimization": {"stage": 3, "max_live_parameters": "9223372036854775807"}})");
  CHECK_THAT(quoted.fixed(), HasText(R"("stage3_max_live_parameters": 9223372036854775807)"));
}

TEST_CASE("One is no plural, and what is less than is shown is not nothing") {
  const MachineSpec eight = machine_for(parse_gpu_request("8xH100"), 1),
                    one = machine_for(parse_gpu_request("1xH100"), 1);
  const auto inferred = [](const char* text, const MachineSpec& machine) {
    const ConfigText file = ConfigText::parse(text, "ds.json");
    for (const Finding& finding : check_deepspeed({file, nullptr, &machine}).findings) {
      if (finding.rule->id == "batch-inferred") return finding.message;
    }
    return std::string();
  };
  CHECK_THAT(inferred(R"({"train_batch_size": 8})", eight), HasText("8 / 8 ranks = 1 sample a GPU at once"));
  CHECK_THAT(inferred(R"({"train_batch_size": 8})", one), HasText("8 / 1 rank = 8 samples a GPU at once"));
  CHECK_THAT(inferred(R"({"train_micro_batch_size_per_gpu": 2})", one), HasText("2 x 1 x 1 rank = 2."));
  CHECK(noted_gib(Bytes()) == "0.0 GiB");
  CHECK(noted_gib(1_MiB) == "less than 0.1 GiB");
  CHECK(noted_gib(0.06_GiB) == "0.1 GiB");
}
