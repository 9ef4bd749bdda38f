// plan.json: exact round trips, strictness, and no mutation that does more than an InputError. check_plan()'s rules.

#include "models/plan.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "models/error.h"
#include "tests/catch.h"
#include "tests/random_plan.h"

namespace zeroplan::tests {
namespace {

using Json = nlohmann::ordered_json;

PlanFile random_file(Random& random) {
  PlanFile file;
  file.model = random_readable_model(random);
  file.machine = random_machine(random);
  file.plan = random_plan(random, file.model, file.machine.ranks(), file.machine.gpus_per_node);
  return file;
}

/// A small file to break.
std::string sample_text() {
  PlanFile file;
  file.model = find_model("llama-3.2-1b");
  file.machine = machine_for(parse_gpu_request("4xA100-80G"), 1);
  file.plan.ranks = file.plan.shard_ranks = 4;
  file.plan.zero_stage = 3;
  const int blocks = static_cast<int>(file.model.sequence.size());
  file.plan.optimizer = Placement::all(Tier::host, blocks);
  file.plan.parameters = Placement::all(Tier::hbm, blocks);
  return write_plan(file);
}

/// The message of the InputError that reading `text` ends in; empty when it reads.
std::string refusal(const std::string& text) {
  try {
    (void)read_plan(text, "plan.json");
    return "";
  } catch (const InputError& e) {
    return e.what();
  }
}

std::string changed(const std::string& pointer, const Json& value) {
  Json j = Json::parse(sample_text());
  j[Json::json_pointer(pointer)] = value;
  return j.dump(2);
}

std::string without(const std::string& parent, const std::string& key) {
  Json j = Json::parse(sample_text());
  j[Json::json_pointer(parent)].erase(key);
  return j.dump(2);
}

std::string mutated(std::string text, Random& random) {
  static const std::vector<std::string> kTokens{"0",       "-1",        "1e308",   "99999999999999999999",
                                                "null",    "true",      "\"\"",    "[]",
                                                "{}",      "4.5",       "\"gpu\"", "NaN",
                                                "\\u0000", "\"80GiB\"", ",",       ":",
                                                "}",       "]"};
  const auto changes = random.between(1, 3);
  for (int c = 0; c < changes; ++c) {
    const auto last = static_cast<std::int64_t>(text.size()) - 1;
    if (last < 1) return text;
    const auto at = static_cast<std::size_t>(random.between(0, last));
    switch (random.between(0, 5)) {
      case 0:
        text[at] = static_cast<char>(random.between(0, 255));
        break;
      case 1:
        text.erase(at, static_cast<std::size_t>(random.between(1, 20)));
        break;
      case 2:
        text.insert(at, random.pick(kTokens));
        break;
      case 3:
        text.resize(random.chance(20) ? at : text.size());
        break;
      case 4: {  // a number or word becomes another token
        auto begin = text.find(": ", at);
        if (begin == std::string::npos) break;
        begin += 2;
        const auto end = text.find_first_of(",\n", begin);
        text.replace(begin, end == std::string::npos ? end : end - begin, random.pick(kTokens));
        break;
      }
      default: {  // a line twice
        const auto begin = text.rfind('\n', at);
        const auto end = text.find('\n', at);
        if (begin != std::string::npos && end != std::string::npos) text.insert(end, text.substr(begin, end - begin));
      }
    }
  }
  return text;
}

Plan small_plan(const ModelSpec& model) {
  Plan p;
  p.ranks = p.shard_ranks = 4;
  p.zero_stage = 3;
  p.optimizer = p.parameters = Placement::all(Tier::hbm, static_cast<int>(model.sequence.size()));
  return p;
}

}  // namespace

TEST_CASE("Random plan files read back exactly and write the same bytes") {
  Random random(71);
  for (int i = 0; i < 300; ++i) {
    const PlanFile file = random_file(random);
    const std::string text = write_plan(file);
    PlanFile read;
    REQUIRE_NOTHROW(read = read_plan(text, "plan.json"));
    INFO(text.substr(0, 2000));
    REQUIRE(read.plan == file.plan);
    REQUIRE(read.machine == file.machine);
    REQUIRE(read.model.name == file.model.name);
    REQUIRE(read.model.sequence == file.model.sequence);
    REQUIRE(read.model.parameters() == file.model.parameters());
    REQUIRE(write_plan(read) == text);
  }
}

TEST_CASE("An unknown key is refused with line and nearest key") {
  const std::string message = refusal(changed("/plan/zero_stag", 3));
  CHECK_THAT(message, HasText("plan.json:"));
  CHECK_THAT(message, HasText("zero_stag"));
  CHECK_THAT(message, HasText("zero_stage"));
}

TEST_CASE("Every key of the plan is needed and checked for its type") {
  const Json sample = Json::parse(sample_text());
  for (const std::string parent : {"", "/plan", "/plan/precision", "/plan/optimizer", "/plan/parameters", "/model"}) {
    for (const auto& [key, value] : sample[Json::json_pointer(parent)].items()) {
      INFO(parent << "/" << key);
      if (key != "state_bytes_per_parameter") CHECK_THAT(refusal(without(parent, key)), HasText(key));
      const Json wrong = value.is_string() || value.is_object() ? Json(17) : Json("seventeen");
      const std::string message = refusal(changed(parent + "/" + key, wrong));
      CHECK_THAT(message, HasText("plan.json"));
      CHECK_THAT(message, HasText(key));
    }
  }
}

TEST_CASE("Values out of range and contradictions name the field") {
  struct Change {
    const char* pointer;
    Json value;
    const char* named;
  };
  const std::vector<Change> changes{
      {"/schema", 2, "schema"},
      {"/plan/zero_stage", 4, "zero_stage"},
      {"/plan/zero_stage", -1, "zero_stage"},
      {"/plan/micro_batch", 0, "micro_batch"},
      {"/plan/accumulation", -3, "accumulation"},
      {"/plan/seq_len", 1e30, "seq_len"},
      {"/plan/seq_len", 4096.5, "seq_len"},
      {"/plan/shard_ranks", 3, "shard_ranks"},
      {"/plan/ranks", 8, "ranks"},
      {"/plan/prefetch_layers", 4, "prefetch_layers"},
      {"/plan/recompute", "some", "recompute"},
      {"/plan/recompute_layers", 2, "recompute_layers"},
      {"/plan/gradients", "nvme", "gradients"},
      {"/plan/optimizer/host", 3, "optimizer"},
      {"/plan/clip_norm", -1, "clip_norm"},
      {"/plan/precision/weights", "fp8", "weights"},
      {"/plan/precision/master", false, "precision"},
      {"/plan/loss_scaling", "dynamic", "loss_scaling"},
      {"/plan/state_bytes_per_parameter", 16, "state_bytes_per_parameter"},
  };
  for (const Change& change : changes) {
    const std::string message = refusal(changed(change.pointer, change.value));
    INFO(change.pointer << " = " << change.value.dump() << ": " << message);
    CHECK_THAT(message, HasText("plan.json"));
    CHECK_THAT(message, HasText(change.named));
    CHECK(message.find('\n') == std::string::npos);
  }
}

TEST_CASE("A shard group that is neither a part of a node nor whole nodes is refused") {
  PlanFile file;
  file.model = find_model("llama-3.2-1b");
  file.machine = machine_for(parse_gpu_request("8xH100"), 3);
  file.plan = small_plan(file.model);
  file.plan.ranks = 24;
  for (const int group : {1, 2, 4, 8, 24}) {
    file.plan.shard_ranks = group;
    CHECK(refusal(write_plan(file)).empty());
  }
  for (const int group : {3, 6, 12}) {
    file.plan.shard_ranks = group;
    CHECK_THAT(refusal(write_plan(file)), HasText("shard_ranks"));
  }
}

TEST_CASE("5000 mutations of plan files end in an InputError or a plan") {
  Random random(72);
  std::vector<std::string> texts{sample_text()};
  for (int i = 0; i < 20; ++i) texts.push_back(write_plan(random_file(random)));
  int refused = 0;
  for (int i = 0; i < 5000; ++i) {
    const std::string text = mutated(random.pick(texts), random);
    INFO(text);
    std::string message;
    REQUIRE_NOTHROW(message = refusal(text));
    refused += message.empty() ? 0 : 1;
    if (!message.empty()) REQUIRE_THAT(message, HasText("plan.json"));
  }
  CHECK(refused > 2500);
}

/// Whether check_plan() refuses the small plan of this engine after a change.
template <class Change>
bool refuses(const ModelSpec& model, Engine engine, Change change) {
  Plan p = small_plan(model);
  p.engine = engine;
  change(p);
  try {
    check_plan(p, model, "p");
    return false;
  } catch (const InputError&) {
    return true;
  }
}

TEST_CASE("Rules of a plan") {
  const ModelSpec model = find_model("llama-3.2-1b");
  const auto refused = [&](auto change) { return refuses(model, Engine::zeroplan, change); };
  const int blocks = static_cast<int>(model.sequence.size());
  CHECK_FALSE(refused([](Plan&) {}));
  CHECK(refused([&](Plan& p) { p.zero_stage = 2, p.parameters = Placement::all(Tier::host, blocks); }));
  CHECK(refused([&](Plan& p) { p.parameters = Placement::all(Tier::host, blocks); }));
  CHECK(refused([](Plan& p) { p.zero_stage = 0; }));
  CHECK(refused([](Plan& p) { p.gradients = Tier::host; }));
  CHECK(refused([](Plan& p) { p.reduce_each = ReduceEach::step; }));
  CHECK(refused([](Plan& p) { p.precision.weights = DType::fp16, p.precision.gradients = DType::fp16; }));
  CHECK(refused([](Plan& p) { p.precision.states = DType::fp16; }));
  CHECK(refused([](Plan& p) { p.clip_norm = std::numeric_limits<double>::quiet_NaN(); }));
  CHECK(refused([](Plan& p) { p.clip_norm = std::numeric_limits<double>::infinity(); }));
  CHECK(refused([](Plan& p) { p.recompute = Recompute::full; }));
  CHECK(refused([](Plan& p) { p.recompute = Recompute::full, p.recompute_layers = 17; }));
}

TEST_CASE("A plan of another engine has only what that engine can follow") {
  const ModelSpec model = find_model("llama-3.2-1b");
  const int blocks = static_cast<int>(model.sequence.size()), layers = static_cast<int>(model.num_layers);
  const auto refused = [&](Engine engine, auto change) { return refuses(model, engine, change); };
  const auto host = [&](Plan& p) { p.optimizer = p.parameters = Placement::all(Tier::host, blocks); };
  for (const Engine engine : {Engine::deepspeed, Engine::fsdp2}) {
    CAPTURE(to_string(engine));
    CHECK_FALSE(refused(engine, [](Plan&) {}));
    CHECK_FALSE(refused(engine, [&](Plan& p) { p.recompute = Recompute::full, p.recompute_layers = layers; }));
    CHECK_FALSE(refused(engine, [&](Plan& p) {
      host(p), p.update = UpdateOn::host;
      if (engine == Engine::fsdp2) p.adam = AdamForm::loop;
    }));
    CHECK(refused(engine, [&](Plan& p) { p.recompute = Recompute::selective, p.recompute_layers = layers; }));
    CHECK(refused(engine, [&](Plan& p) { p.recompute = Recompute::full, p.recompute_layers = layers - 1; }));
    CHECK(refused(engine, [&](Plan& p) { p.optimizer.hbm = blocks - 1, p.optimizer.host = 1; }));
    CHECK(refused(engine, [&](Plan& p) { host(p), p.update = UpdateOn::host, p.gradients = Tier::host; }));
    CHECK(refused(engine, [&](Plan& p) { p.precision.states = DType::bf16; }));
    CHECK(refused(engine, [&](Plan& p) { p.precision.split_master = true; }));
    const bool alone =
        refused(engine, [&](Plan& p) { p.optimizer = Placement::all(Tier::host, blocks), p.update = UpdateOn::host; });
    CHECK(alone == (engine == Engine::fsdp2));
    const bool nvme = refused(engine, [&](Plan& p) {
      p.optimizer = p.parameters = Placement::all(Tier::nvme, blocks), p.update = UpdateOn::host;
    });
    CHECK(nvme == (engine == Engine::fsdp2));
  }
}

TEST_CASE("The form of AdamW and the allocator's settings are kept, and belong to the engines that have them") {
  PlanFile file = read_plan(sample_text(), "plan.json");
  const int blocks = file.plan.optimizer.total();
  file.plan.engine = Engine::fsdp2;
  file.plan.optimizer = Placement::all(Tier::hbm, blocks);
  for (const AdamForm form : {AdamForm::fused, AdamForm::foreach, AdamForm::loop}) {
    file.plan.adam = form;
    file.plan.allocator_conf = "roundup_power2_divisions:[256:1,>:8],expandable_segments:True";
    CHECK(read_plan(write_plan(file), "plan.json").plan == file.plan);
  }
  const auto refused = [&](const char* part) {
    CHECK_THROWS_WITH(check_plan(file.plan, file.model, "p"), Catch::Matchers::Contains(part));
  };
  file.plan.allocator_conf = "x'; rm -rf /";
  refused("allocator_conf");
  file.plan.allocator_conf.clear();
  file.plan.optimizer = file.plan.parameters = Placement::all(Tier::host, blocks);
  file.plan.adam = AdamForm::foreach;
  refused("adam: expected \"loop\"");
  file.plan.engine = Engine::zeroplan;
  refused("adam: expected \"fused\"");
  file.plan.adam = AdamForm::fused;
  file.plan.allocator_conf = "expandable_segments:True";
  refused("allocator_conf: expected none");
  // Files of before: fused on the GPU, the loop on the host.
  file.plan.allocator_conf.clear();
  file.plan.engine = Engine::fsdp2;
  file.plan.adam = AdamForm::loop;
  Json old = Json::parse(write_plan(file));
  old["plan"].erase("adam");
  CHECK(read_plan(old.dump(), "plan.json").plan.adam == AdamForm::loop);
  CHECK_THAT(refusal(changed("/plan/adam", "fused")), Catch::Matchers::Contains("no such key but with"));
}

TEST_CASE("State bytes a parameter follow from the precision") {
  Precision p;
  CHECK(p.state_bytes_per_parameter() == 14);
  p.split_master = true;
  CHECK(p.state_bytes_per_parameter() == 12);
  p.split_master = false, p.states = DType::bf16;
  CHECK(p.state_bytes_per_parameter() == 10);
  CHECK(p.optimizer_bytes_per_parameter() == 8);
  p = {DType::fp32, false, false, DType::fp32, DType::fp32, DType::fp32};
  CHECK(p.state_bytes_per_parameter() == 12);
}

TEST_CASE("A plan is described in one line") {
  const ModelSpec model = find_model("llama-3.2-1b");
  Plan p = small_plan(model);
  CHECK(describe(p) == "ZeRO-3, micro-batch 1 x 1");
  p.optimizer = {0, 10, 8};
  p.recompute = Recompute::full, p.recompute_layers = 16;
  CHECK(describe(p) == "ZeRO-3, optimizer on host 10/18 + NVMe 8/18, full recompute of 16 layers, micro-batch 1 x 1");
}

}  // namespace zeroplan::tests
