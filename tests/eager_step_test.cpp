// Eager steps against what transformers and torch did: row by row (bytes of data/activations) and event by event.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "models/eager_step.h"
#include "models/error.h"
#include "tests/catch.h"
#include "tests/model_test_support.h"

namespace zp = zeroplan;

namespace {

std::filesystem::path data_file(const std::string& name) {
  return std::filesystem::path(ZEROPLAN_TESTS_DIR) / "data" / "activations" / name;
}

nlohmann::json small_models() {
  std::ifstream file(data_file("small_models.json"));
  return nlohmann::json::parse(file);
}

std::vector<std::string> small_names() {
  const nlohmann::json models = small_models();
  std::vector<std::string> names;
  for (auto model = models.begin(); model != models.end(); ++model) names.push_back(model.key());
  return names;
}

zp::ModelSpec small_model(const std::string& name) {
  return zp::read_model(small_models().at(name).dump(), "small_" + name + ".json");
}

zp::EagerOptions small_options() {
  zp::EagerOptions options;
  options.tokens = {2, 64};
  options.cpu_statistics = true;  // as the steps were recorded
  return options;
}

/// "llama ac=1 attn=eager".
zp::EagerOptions parse_options(std::istringstream& words) {
  zp::EagerOptions options = small_options();
  for (std::string word; words >> word;) {
    if (word == "ac=1") options.checkpointing = true;
    if (word == "attn=eager") options.attention = zp::EagerAttention::eager;
    if (word == "keep=1") options.keeps_output = true;
    if (word == "reent=1") options.reentrant = true;
    if (word == "dtype=fp32") options.type = zp::DType::fp32;
    if (word.starts_with("lora=")) options.lora_rank = std::stoll(word.substr(5));
  }
  return options;
}

std::string event_line(const zp::EagerEvent& event) {
  switch (event.kind) {
    case zp::EagerEventKind::alloc:
      return fmt::format("a {} {}", event.id, event.bytes);
    case zp::EagerEventKind::free:
      return fmt::format("f {}", event.id);
    case zp::EagerEventKind::gradient:
      return fmt::format("g {} {}\nf {}", event.id, event.storage, event.storage);
    case zp::EagerEventKind::forward_pre:
      return fmt::format("> {}", event.id);
    case zp::EagerEventKind::forward_post:
      return fmt::format("< {}", event.id);
    case zp::EagerEventKind::backward_pre:
      return fmt::format("}} {}", event.id);
    case zp::EagerEventKind::backward_post:
      return fmt::format("{{ {}", event.id);
    case zp::EagerEventKind::forward_end:
      return "fwd";
    case zp::EagerEventKind::backward_end:
      return "bwd";
    case zp::EagerEventKind::kernel:
    case zp::EagerEventKind::hold:
    case zp::EagerEventKind::let_go:
      break;
  }
  return "";
}

std::vector<std::string> event_lines(const zp::EagerStep& step) {
  std::vector<std::string> lines;
  for (const zp::EagerEvent& event : step.events) {
    std::istringstream text(event_line(event));
    for (std::string line; std::getline(text, line);) lines.push_back(line);
  }
  return lines;
}

struct Recorded {
  std::string name;
  zp::EagerOptions options;
  std::size_t parameters = 0, modules = 0;
  std::vector<std::string> lines;
};

Recorded read_recorded(const std::filesystem::path& path) {
  Recorded recorded;
  std::ifstream file(path);
  std::string line, word;
  std::getline(file, line);
  std::istringstream first(line);
  first >> recorded.name;
  recorded.options = parse_options(first);
  std::getline(file, line);
  std::istringstream second(line);
  second >> word >> recorded.parameters >> word >> recorded.modules;
  while (std::getline(file, line)) recorded.lines.push_back(line);
  // The recording marks the end of backward when its caller has dropped the output, the step when backward returns.
  if (recorded.options.keeps_output) std::iter_swap(recorded.lines.end() - 1, recorded.lines.end() - 2);
  return recorded;
}

std::vector<std::filesystem::path> recorded_files() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(data_file("steps"))) files.push_back(entry.path());
  std::ranges::sort(files);
  return files;
}

double error_percent(zp::Bytes value, double truth) { return 100 * (value.base() - truth) / truth; }

}  // namespace

TEST_CASE("A small model's step is the recorded one, event by event") {
  const std::vector<std::filesystem::path> files = recorded_files();
  REQUIRE(files.size() >= 35);
  for (const std::filesystem::path& path : files) {
    const Recorded recorded = read_recorded(path);
    INFO(path.filename().string());
    REQUIRE(recorded.lines.size() > 300);
    const zp::EagerStep step = zp::eager_step(small_model(recorded.name), recorded.options);
    CHECK(step.parameters.size() == recorded.parameters);
    CHECK(step.modules.size() == recorded.modules);
    const std::vector<std::string> lines = event_lines(step);
    const auto [ours, theirs] = std::ranges::mismatch(lines, recorded.lines);
    if (ours != lines.end() || theirs != recorded.lines.end()) {
      FAIL_CHECK(fmt::format("event {}: expected \"{}\", got \"{}\"", ours - lines.begin(),
                             theirs != recorded.lines.end() ? *theirs : "nothing",
                             ours != lines.end() ? *ours : "nothing"));
    }
  }
}

TEST_CASE("Saved bytes and peaks of every measured row are exact") {
  std::ifstream file(data_file("rows.jsonl"));
  int rows = 0, exact = 0;
  double worst = 0;
  for (std::string line; std::getline(file, line);) {
    const auto row = nlohmann::json::parse(line);
    zp::EagerOptions options;
    options.tokens = {row.at("mb").get<std::int64_t>(), row.at("seq").get<std::int64_t>()};
    options.checkpointing = row.at("ac") == 1;
    options.cpu_statistics = true;
    options.attention = row.at("attn") == "eager" ? zp::EagerAttention::eager : zp::EagerAttention::sdpa;
    const auto name = row.at("model").get<std::string>();
    INFO(fmt::format("{} {}x{} ac {} {}", name, options.tokens.batch, options.tokens.seq_len, row.at("ac").dump(),
                     row.at("attn").get<std::string>()));
    const zp::EagerPeaks peaks = zp::eager_peaks(zp::eager_step(zp::find_model(name), options));
    const double errors[] = {error_percent(peaks.saved, row.at("saved").get<double>()),
                             error_percent(peaks.forward, row.at("fwd_peak").get<double>()),
                             error_percent(peaks.backward, row.at("bwd_peak").get<double>())};
    for (const double error : errors) {
      CHECK(std::abs(error) <= 0.2);
      worst = std::max(worst, std::abs(error));
    }
    ++rows;
    exact += std::ranges::all_of(errors, [](double error) { return error == 0; });
  }
  WARN(fmt::format("{} rows, {} exact to the byte, worst {:.4f} %", rows, exact, worst));
  CHECK(rows == 433);
  CHECK(exact * 100 >= rows * 99);
}

TEST_CASE("Storages are born once, die once, and nothing is left") {
  for (const std::string& name : small_names()) {
    for (const bool checkpointing : {false, true}) {
      INFO(name << " checkpointing " << checkpointing);
      zp::EagerOptions options = small_options();
      options.checkpointing = checkpointing;
      options.attention = zp::EagerAttention::eager;
      const zp::EagerStep step = zp::eager_step(small_model(name), options);
      std::set<std::int32_t> live;
      std::vector<int> gradients(step.parameters.size());
      for (const zp::EagerEvent& event : step.events) {
        if (event.kind == zp::EagerEventKind::alloc) REQUIRE(live.insert(event.id).second);
        if (event.kind == zp::EagerEventKind::free) REQUIRE(live.erase(event.id) == 1);
        if (event.kind == zp::EagerEventKind::gradient) {
          REQUIRE(live.erase(event.storage) == 1);  // the engine's from here on
          ++gradients[static_cast<std::size_t>(event.id)];
        }
      }
      CHECK(live.empty());
      CHECK(std::ranges::all_of(gradients, [](int count) { return count == 1; }));
    }
  }
}

TEST_CASE("Hooks of a module come in pairs, and every layer has one block") {
  for (const std::string& name : small_names()) {
    INFO(name);
    zp::EagerOptions options = small_options();
    options.attention = zp::EagerAttention::eager;
    const zp::EagerStep step = zp::eager_step(small_model(name), options);
    std::vector<int> open;
    for (const zp::EagerEvent& event : step.events) {
      if (event.kind == zp::EagerEventKind::forward_pre) open.push_back(event.id);
      if (event.kind != zp::EagerEventKind::forward_post) continue;
      REQUIRE(!open.empty());
      CHECK(open.back() == event.id);
      open.pop_back();
    }
    CHECK(open.empty());
    std::map<int, int> blocks;
    for (const zp::EagerModule& module : step.modules) {
      if (module.is_block) ++blocks[module.layer];
    }
    CHECK(blocks.size() == static_cast<std::size_t>(small_model(name).num_layers));
    for (const auto& [layer, count] : blocks) {
      CHECK(layer >= 0);
      CHECK(count == 1);
    }
  }
}

TEST_CASE("Checkpointing saves less and does the forward's products again") {
  zp::EagerOptions options = small_options();
  const zp::ModelSpec model = small_model("llama");
  const zp::EagerStep plain = zp::eager_step(model, options);
  options.checkpointing = true;
  const zp::EagerStep again = zp::eager_step(model, options);
  CHECK(zp::eager_peaks(again).saved < zp::eager_peaks(plain).saved);
  const auto products = [](const zp::EagerStep& step, zp::Pass pass) {
    return std::ranges::count_if(step.events, [&](const zp::EagerEvent& event) {
      if (event.kind != zp::EagerEventKind::kernel) return false;
      const zp::Compute& work = step.works[static_cast<std::size_t>(event.id)];
      return work.pass == pass && std::holds_alternative<zp::Gemm>(work.kernel);
    });
  };
  CHECK(products(plain, zp::Pass::recompute) == 0);
  // seven linears a layer; the last one is not run again: nothing after it is needed
  CHECK(products(again, zp::Pass::recompute) == 2 * 6);
  CHECK(products(plain, zp::Pass::forward) == products(again, zp::Pass::forward));
  CHECK(products(plain, zp::Pass::backward) == products(again, zp::Pass::backward));
}

TEST_CASE("Parameters of the full models are those that the catalog counts") {
  for (const std::string name : {"llama-2-7b", "qwen2.5-7b", "gpt2-xl", "opt-6.7b", "pythia-1.4b", "gemma-2-9b"}) {
    INFO(name);
    const zp::ModelSpec model = zp::find_model(name);
    zp::EagerOptions options;
    options.tokens = {1, 128};
    std::int64_t total = 0;
    for (const zp::EagerParameter& parameter : zp::eager_step(model, options).parameters) total += parameter.elements;
    CHECK(total == model.parameters());
  }
}

TEST_CASE("LayerNorm's statistics are fp32 on CUDA: 4 bytes a token and norm more than the recorded ones") {
  zp::EagerOptions options = small_options();
  options.tokens = {2, 512};
  const double tokens = 2 * 512;
  const auto saved = [&](const zp::ModelSpec& model, bool cpu) {
    options.cpu_statistics = cpu;
    return zp::eager_peaks(zp::eager_step(model, options)).saved.base();
  };
  const zp::ModelSpec gpt2 = zp::find_model("gpt2");
  const double norms = 2.0 * static_cast<double>(gpt2.num_layers) + 1;  // two a block and the last one
  CHECK(saved(gpt2, false) - saved(gpt2, true) == norms * 2 * (4 - 2) * tokens);
  const zp::ModelSpec llama = small_model("llama");  // RMSNorm is written out in operations
  CHECK(saved(llama, false) == saved(llama, true));
  options.type = zp::DType::fp32;
  CHECK(saved(gpt2, false) == saved(gpt2, true));
}

TEST_CASE("Products that add their bias are told from others") {
  const auto biased = [](const zp::ModelSpec& model, bool zero3) {
    zp::EagerOptions options = small_options();
    options.zero3 = zero3;
    return std::ranges::count(zp::eager_step(model, options).events, true, &zp::EagerEvent::adds_bias);
  };
  const zp::ModelSpec qwen = zp::find_model("qwen2.5-0.5b");
  CHECK(biased(qwen, false) == 3 * qwen.num_layers);  // query, key and value
  CHECK(biased(qwen, true) == 0);                     // DeepSpeed's own linear adds it afterwards
  CHECK(biased(small_model("llama"), false) == 0);
  const zp::ModelSpec gpt2 = zp::find_model("gpt2");
  CHECK(biased(gpt2, true) == 4 * gpt2.num_layers);  // Conv1D calls addmm itself
}

TEST_CASE("What has no eager graph is refused by name") {
  zp::EagerOptions options = small_options();
  CHECK_THROWS_AS(zp::eager_step(zp::find_model("dbrx"), options), zp::InputError);
  CHECK_THROWS_WITH(zp::eager_step(zp::find_model("dbrx"), options), zeroplan::tests::HasText("dbrx"));
  options.lora_rank = 8;
  CHECK_THROWS_WITH(zp::eager_step(zp::find_model("mixtral-8x7b"), options), zeroplan::tests::HasText("LoRA"));
  options.lora_rank = -1;
  CHECK_THROWS_AS(zp::eager_step(small_model("llama"), options), zp::InputError);
  options.lora_rank = 0;
  options.type = zp::DType::u8;
  CHECK_THROWS_AS(zp::eager_step(small_model("llama"), options), zp::InputError);
  options.type = zp::DType::bf16;
  options.tokens = {0, 64};
  CHECK_THROWS_AS(zp::eager_step(small_model("llama"), options), zp::InputError);
}
