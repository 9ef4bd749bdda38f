#include "planner/lint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "models/deepspeed_keys.h"
#include "models/error.h"
#include "planner/export_deepspeed_choices.h"
#include "planner/export_parts.h"
#include "planner/lint_parts.h"
#include "planner/lint_report.h"
#include "tests/catch.h"
#include "tests/lint_support.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

}  // namespace

TEST_CASE("Values know their bytes, and the liberties of Hjson are read and remembered") {
  const std::string text =
      "\xEF\xBB\xBF{ // one\n  \"a\": [1, -2.5e3, true, null,], # two\n  \"b\": {\"c\": \"\\u00e9\\\"\"}, /* three\n "
      "*/ \"a\": 5e8,\n}";
  const ConfigText file = ConfigText::parse(text, "f");
  REQUIRE(file.root().members.size() == 3);
  CHECK(file.comments().size() == 3);
  CHECK(file.trailing_commas().size() == 2);
  CHECK(file.find("b.c")->value.text == "\xC3\xA9\"");
  CHECK(file.find("b.c")->line == 3);
  CHECK(file.root().members[2].repeated);
  CHECK(file.root().members[2].line == 4);
  CHECK(file.root().members[2].value.integer() == 500'000'000);
  for (const ConfigMember& member : file.root().members) {
    CHECK(text.substr(member.begin, member.key_end - member.begin) == "\"" + member.key + "\"");
  }
  const ConfigNode& list = file.root().members[0].value;
  CHECK(text.substr(list.begin, list.end - list.begin) == "[1, -2.5e3, true, null,]");
  CHECK(file.excerpt(file.find("b")->value) == "{\"c\": \"\\u00e9\\\"\"}");
}

TEST_CASE("What is no JSON is refused with its line") {
  const std::pair<const char*, const char*> cases[] = {
      {"", "ds:1: the file is empty"},
      {"{\"a\": 1,\n\"b\": True}", "ds:2: True is no JSON"},
      {"{\"a\": NaN}", "NaN is no JSON"},
      {"{\"a\": 01}", "leading 0"},
      {"{\"a\": 1}\n}", "ds:2: expected the end"},
      {"{a: 1}", "expected a key in quotes"},
      {"{\"a\" 1}", "expected : behind the key"},
      {"{\"a\": 1 \"b\": 2}", "expected , or }"},
      {"{\"a\": \"x\n\"}", "closing quote"},
      {"{\"a\": \"\\ud800\"}", "surrogate"},
      {"{\"a\": \"\\x\"}", "escape"},
      {"{\"a\": 1 /* ", "not closed"},
      {"{\"a\": \"\xff\"}", "UTF-8"},
      {"{\"a\": 1.}", "expected a digit"},
      {"{\"a\": 5e8f}", "behind it"},
      {"{\"a\": bf16}", "expected a value"},
  };
  for (const auto& [text, message] : cases) {
    INFO(text);
    CHECK_THROWS_WITH(ConfigText::parse(text, "ds"), HasText(message));
  }
  CHECK_THROWS_AS(ConfigText::parse(std::string(100'000, '['), "deep"), InputError);
  CHECK_THROWS_AS(ConfigText::parse(std::string(4, '\0'), "nul"), InputError);
}

TEST_CASE("Known-good configurations have no error and no warning, and nothing to correct") {
  const std::vector<fs::path> paths = files_of("good");
  REQUIRE(paths.size() >= 20);
  for (const fs::path& path : paths) {
    const std::string name = path.filename().string();
    INFO(name);
    // 8 ranks; ZeRO++ is for several nodes.
    for (const bool sized : {false, true}) {
      const int nodes = name == "08_zeropp.json" ? 2 : 1;
      const Checked checked(read_file(path), sized ? "gpt2-xl" : "", sized ? "8xA100-80G" : "", nodes);
      for (const Finding& finding : checked.answer.findings) {
        const bool disks = finding.rule->id == "nvme-missing";  // of the machine, not of the file
        INFO(finding.line << " " << finding.rule->id << " " << finding.message);
        CHECK((finding.rule->severity == Severity::note || disks));
      }
      CHECK_FALSE(checked.answer.truncated);
    }
  }
}

TEST_CASE("A key that the deprecated shorthand reads is not called ignored") {
  const auto says = [](std::string_view text, std::string_view rule) {
    return std::ranges::any_of(Checked(std::string(text)).answer.findings,
                               [&](const Finding& finding) { return finding.rule->id == rule; });
  };
  const std::string shorthand = R"({"train_batch_size": 8, "zero_optimization": true, "allgather_size": 500000000})";
  CHECK(says(shorthand, "zero-as-bool"));
  CHECK_FALSE(says(shorthand, "unknown-key-ignored"));
  CHECK(says(R"({"train_batch_size": 8, "zero_optimization": {"stage": 1}, "allgather_size": 5})",
             "unknown-key-ignored"));
}

TEST_CASE("The batch identity is shown with its arithmetic") {
  const Checked train(
      R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8})", "",
      "2xA100-80G");
  REQUIRE(train.has("batch-identity"));
  CHECK_THAT(train.find("batch-identity")->message,
             HasText("train_batch_size is 8, but micro-batch x accumulation x ranks is 1 x 8 x 2 = 16"));
  CHECK(train.find("batch-identity")->fix == "\"train_batch_size\": 16");
  CHECK_THAT(train.fixed(), HasText("\"train_batch_size\": 16"));
  // Without --gpus: the number of ranks that it holds on, or that there is none.
  CHECK_THAT(
      Checked(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1})")
          .find("batch-ranks")
          ->message,
      HasText("on 4 ranks only"));
  CHECK(Checked(R"({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1})")
            .has("batch-no-ranks"));

  // DeepSpeed's own inference, for every small combination: an error exactly when its assertion would fail.
  for (int t = 0; t <= 17; ++t) {
    for (int m = 0; m <= 3; ++m) {
      for (int g = 0; g <= 3; ++g) {
        if (t == 0 && m == 0) continue;
        const auto member = [](const char* key, int value) {
          return value == 0 ? std::string() : fmt::format("\"{}\": {}, ", key, value);
        };
        const std::string text = "{" + member("train_batch_size", t) + member("train_micro_batch_size_per_gpu", m) +
                                 member("gradient_accumulation_steps", g) + "\"dump_state\": false}";
        constexpr int kRanks = 2;
        int T = t, M = m, G = g;
        if (t != 0 && m != 0 && g == 0) G = T / M / kRanks;
        if (t != 0 && m == 0 && g != 0) M = T / kRanks / G;
        if (t == 0) G = std::max(G, 1), T = M * G * kRanks;
        if (t != 0 && m == 0 && g == 0) G = 1, M = T / kRanks;
        const bool holds = T > 0 && M > 0 && G > 0 && T == M * G * kRanks;
        const Checked checked(text, "", "2xA100-80G");
        INFO(text);
        CHECK(checked.answer.has_errors() == !holds);
        if (!holds) CHECK_FALSE(Checked(checked.fixed(), "", "2xA100-80G").answer.has_errors());
      }
    }
  }
}

TEST_CASE("Both configurations of the 70B tutorial: what is wrong, and the corrected file") {
  const Checked train(read_file(kData / "bad/tutorial_70b_train.json"), "70B", "2xA100-80G");
  INFO(train.listing());
  CHECK(train.find("offload-nested")->line == 13);
  CHECK(train.find("batch-identity")->line == 2);
  CHECK(train.find("stage3-prefix")->line == 20);
  const std::string fixed = train.fixed();
  INFO(fixed);
  const Json json = Json::parse(fixed);
  CHECK(json["train_batch_size"] == 16);
  CHECK(json["zero_optimization"]["offload_param"] == Json({{"device", "cpu"}, {"pin_memory", true}}));
  CHECK(json["zero_optimization"]["offload_optimizer"] == Json({{"device", "cpu"}, {"pin_memory", true}}));
  CHECK(json["zero_optimization"]["sub_group_size"] == 1e9);
  // Moved with its own indentation, one level up.
  CHECK_THAT(fixed, HasText("    \"offload_param\": {\n      \"device\": \"cpu\",\n      \"pin_memory\": true\n    }"));

  const Checked comm(read_file(kData / "bad/tutorial_70b_comm.json"), "70B", "8xA100-80G");
  INFO(comm.listing());
  CHECK(comm.find("misspelt-key-ignored")->line == 3);
  REQUIRE(comm.has("buckets-uneven"));
  CHECK_THAT(comm.find("buckets-uneven")->message, HasText("1,000,000 elements (2 MB)"));
  CHECK(Json::parse(comm.fixed()).contains("communication_data_type"));
}

TEST_CASE("Memory of the host, the disks and the GPUs") {
  const std::string offload3 =
      zero(R"("stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"})");
  // 70B on 8 GPUs: 20 bytes a parameter on one node, 1285 GiB and the processes.
  const Checked small(offload3, "70B", "8xA100-80G");
  const HostBytes host = offloaded_host_bytes(small.answer.config, *small.model, *small.machine);
  const double elements = static_cast<double>(small.model->parameters());
  CHECK(host.exact.base() == Approx(20 * elements + 8 * 1.6 * kGiB).epsilon(1e-6));
  CHECK(host.rounded > host.exact);
  CHECK(small.has("host-memory") == (host.exact > small.machine->usable_dram()));
  CHECK(Checked(zero(R"("stage": 2)"), "70B", "8xA100-80G").has("states-exceed-gpu"));
  CHECK_FALSE(Checked(zero(R"("stage": 3)"), "7B", "8xA100-80G").has("states-exceed-gpu"));
  CHECK(Checked(zero(R"("stage": 3, "stage3_param_persistence_threshold": 1e9)"), "7B", "8xA100-80G")
            .has("persistence-memory"));
  CHECK(Checked(zero(R"("stage": 2, "reduce_bucket_size": 1e9)"), "gpt2", "8xA100-80G").has("bucket-above-model"));
  CHECK(Checked(zero(R"("stage": 2, "overlap_comm": true, "reduce_bucket_size": 2e9)"), "7B", "4xRTX-4090")
            .has("bucket-memory"));

  // DeepSpeed issue 3506: one tensor of 524,709,888 elements, a swap buffer of 1e8.
  const Checked nvme(zero(R"("stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/d", "buffer_size": 1e8})"),
                     "405B", "8xH100");
  INFO(nvme.listing());
  REQUIRE(nvme.has("param-buffer-small"));
  CHECK_FALSE(Checked(nvme.fixed(), "405B", "8xH100").has("param-buffer-small"));
}

TEST_CASE("Bytes in the step are those that were measured") {
  // deepspeed.md section 12: step peaks in bytes a parameter; the lower bound is below them, by less than a bucket and
  // the small parameters.
  const auto each = [](std::string_view text, int ranks) {
    const ConfigText file = ConfigText::parse(std::string(text), "f");
    constexpr std::int64_t kParameters = 16'857'701;
    return gpu_states(read_deepspeed_config(file), kParameters, ranks).bytes.base() / kParameters;
  };
  const std::string small = R"("reduce_bucket_size": 3000000)";
  const std::string adam = R"("optimizer": {"type": "AdamW"}, "zero_optimization": )";
  CHECK(each(with(adam + R"({"stage": 0})"), 4) == Approx(24.03).epsilon(0.01));
  CHECK(each(R"({"optimizer": {"type": "AdamW"}})", 4) == Approx(16.02).epsilon(0.01));
  CHECK(each(zero(R"("stage": 1, "overlap_comm": true, )" + small), 4) == Approx(7.16).epsilon(0.03));
  CHECK(
      each(
          with(
              R"("gradient_accumulation_steps": 2, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1})"),
          4) == Approx(13.15).epsilon(0.02));
  CHECK(each(zero(R"("stage": 3, "zero_hpz_partition_size": 2, "stage3_prefetch_bucket_size": 0, )" + small), 4) ==
        Approx(6.89).epsilon(0.02));
  CHECK(each(zero(R"("stage": 2, )" + small), 2) == Approx(12.16).epsilon(0.02));
  CHECK(each(zero(R"("stage": 2, )" + small), 8) == Approx(4.66).epsilon(0.04));
  CHECK(each(zero(R"("stage": 3, )" + small), 4) == Approx(5.89).epsilon(0.02));
  CHECK(each(zero(R"("stage": 3, "sub_group_size": 1000000, )" + small), 4) == Approx(4.76).epsilon(0.02));
  CHECK(each(zero(R"("stage": 3, )" + small), 8) == Approx(3.14).epsilon(0.02));
}

TEST_CASE("Findings are sorted by line, and every error says what to do") {
  for (const char* folder : {"good", "bad"}) {
    for (const fs::path& path : files_of(folder)) {
      const Checked checked(read_file(path), "70B", "8xA100-80G");
      CHECK(std::ranges::is_sorted(checked.answer.findings, {}, &Finding::line));
      for (const Finding& finding : checked.answer.findings) {
        INFO(finding.rule->id);
        CHECK_FALSE(finding.message.empty());
        if (finding.rule->severity == Severity::error) CHECK_FALSE(finding.fix.empty());
      }
      CHECK(Checked(read_file(path), "70B", "8xA100-80G").listing() == checked.listing());
    }
  }
}

TEST_CASE("A correction leaves the rest of the file alone") {
  const std::string text =
      "{\r\n  // the batch\r\n  \"train_micro_batch_size_per_gpu\": 2,   // kept\r\n  \"bf16\": {\"enabled\": "
      "true},\r\n"
      "  \"zero_optimization\": {\r\n    \"stage\": 3,\r\n    \"grad_hooks\": true, // gone with its remark\r\n"
      "    \"stage3_sub_group_size\": 1e9   // stays\r\n  }\r\n}\r\n";
  const std::string expected =
      "{\r\n  // the batch\r\n  \"train_micro_batch_size_per_gpu\": 2,   // kept\r\n  \"bf16\": {\"enabled\": "
      "true},\r\n"
      "  \"zero_optimization\": {\r\n    \"stage\": 3,\r\n"
      "    \"sub_group_size\": 1e9   // stays\r\n  }\r\n}\r\n";
  CHECK(Checked(text).fixed() == expected);
  CHECK(Checked(expected).fixed() == expected);
  // The last member goes, and the comma before it.
  CHECK(Checked(R"({"train_batch_size": 8, "zero_optimization": {"stage": 2, "grad_hooks": 1}})").fixed() ==
        R"({"train_batch_size": 8, "zero_optimization": {"stage": 2}})");
  CHECK(Checked(R"({"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": true}})").fixed() ==
        R"({"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})");
  CHECK(Checked(R"({"train_batch_size": 8, "offload_optimizer": {"device": "cpu"}, "zero_optimization": {"stage": 2}})")
            .fixed() ==
        R"({"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})");
}

TEST_CASE("What zeroplan writes for DeepSpeed is clean, and both sides count the same host memory") {
  int exported = 0;
  for (const auto& [name, gpus, nodes] :
       {std::tuple("7B", "8xH100", 1), std::tuple("70B", "8xA100-80G", 2), std::tuple("gpt2-xl", "4xA100-80G", 1)}) {
    const ModelSpec model = find_model(name);
    const MachineSpec machine = machine_for(parse_gpu_request(gpus), nodes);
    const int blocks = static_cast<int>(model.sequence.size());
    for (int i = 0; i < 4 * 3 * 3 * 2 * 2; ++i) {
      Plan plan;
      plan.ranks = machine.ranks();
      plan.zero_stage = i % 4;
      plan.shard_ranks = plan.zero_stage == 0 ? 1 : plan.ranks;
      plan.optimizer = Placement::all(static_cast<Tier>(i / 4 % 3), blocks);
      plan.parameters = Placement::all(static_cast<Tier>(i / 12 % 3), blocks);
      plan.gradients = i / 36 % 2 == 0 ? Tier::hbm : Tier::host;
      plan.accumulation = 1 + i / 72 * 3;
      if (i / 72 % 2 == 1) plan.precision.accumulation = DType::fp32;
      try {
        check_plan(plan, model, "test");
      } catch (const InputError&) {
        continue;
      }
      Prediction prediction;
      const ExportSubject subject{plan, model, machine, prediction, 0.05};
      const ConfigText file = ConfigText::parse(export_deepspeed(subject).json, "deepspeed.json");
      const CheckInput input{file, &model, &machine};
      const CheckAnswer answer = check_deepspeed(input);
      INFO(file.text());
      const std::set<std::string_view> sizes = {"states-exceed-gpu", "host-memory",   "host-pinned-rounding",
                                                "nvme-missing",      "nvme-capacity", "hpz-one-node"};
      for (const Finding& finding : answer.findings) {
        INFO(finding.rule->id << " " << finding.message);
        CHECK((finding.rule->severity == Severity::note || sizes.contains(finding.rule->id)));
      }
      std::vector<std::string> notes;
      const DeepspeedChoices choices = choose_deepspeed(subject, notes);
      if (choices.optimizer == Tier::hbm && choices.parameters == Tier::hbm) continue;
      // The exporter counts 2.0 GiB a process and the gradients that accumulate on the host, the lint the least there
      // is.
      const double theirs = deepspeed_host_need(subject, choices).exact.base();
      const double ours = offloaded_host_bytes(answer.config, model, machine).exact.base();
      const double process = 0.4 * kGiB * machine.gpus_per_node;
      CHECK(ours <= theirs);
      if (choices.parameters != Tier::nvme && plan.accumulation == 1)
        CHECK(theirs - ours == Approx(process).epsilon(1e-3).margin(1e-4 * theirs));
      ++exported;
    }
  }
  CHECK(exported > 20);
}

TEST_CASE("Large and hostile files take no time") {
  constexpr int kMany = 40'000;
  const auto repeated = [](auto member) {
    std::string text;
    for (int i = 0; i < kMany; ++i) text += fmt::format(", {}", member(i));
    return text;
  };
  const std::string start = R"({"train_batch_size": 8)";
  const std::string unknown = repeated([](int i) { return fmt::format(R"("gradient_accumulatoin_{}": {})", i, i); });
  const std::string equal = repeated([](int) { return R"("steps_per_print": 1)"; });
  const std::string commas = repeated([](int) { return "[1,]"; });
  const std::string files[] = {start + unknown + "}", start + unknown + equal + "}",
                               start + R"(, "x": [0)" + commas + "]}",
                               start + R"(, "optimizer": {"type": "AdamW", "params": {"lr": 1)" + unknown + "}}}",
                               start + R"(, "zero_optimization": {"stage": 3)" + unknown + "}}"};
  for (const std::string& text : files) {
    const Checked checked(text);
    CHECK(checked.answer.truncated);
    CHECK(checked.answer.findings.size() == kMostFindings);
  }
  CHECK(ConfigText::parse(Checked(files[2]).fixed(), "f").trailing_commas().empty());
}

TEST_CASE("docs/check.md lists every rule as the code has it") {
  CHECK(lint_rules().size() >= 60);
  std::set<std::string_view> ids;
  for (const LintRule& rule : lint_rules()) CHECK(ids.insert(rule.id).second);
  const fs::path path = fs::path(ZEROPLAN_SOURCE_DIR) / "docs/check.md";
  const std::string begin = "<!-- rules -->\n", end = "<!-- /rules -->";
  std::string page = read_file(path);
  const std::size_t from = page.find(begin), to = page.find(end);
  REQUIRE(from != std::string::npos);
  REQUIRE(to != std::string::npos);
  if (std::getenv("ZEROPLAN_UPDATE_GOLDEN") != nullptr) {
    page.replace(from + begin.size(), to - from - begin.size(), rules_markdown());
    std::ofstream(path, std::ios::binary) << page;
  } else {
    CHECK(page.substr(from + begin.size(), to - from - begin.size()) == rules_markdown());
  }
}
