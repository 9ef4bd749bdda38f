#include "planner/lint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "models/deepspeed_keys.h"
#include "models/error.h"
#include "planner/export_deepspeed_choices.h"
#include "planner/export_parts.h"
#include "planner/lint_parts.h"
#include "planner/lint_report.h"
#include "tests/catch.h"

using namespace zeroplan;
using zeroplan::tests::HasText;

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

const fs::path kData = fs::path(ZEROPLAN_TESTS_DIR) / "data/lint";

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
  bool has(std::string_view rule) const { return find(rule) != nullptr; }
  std::string fixed() const { return fix_deepspeed(input()).text; }
  std::string listing() const {
    std::string text;
    for (const Finding& f : answer.findings) text += fmt::format("{}:{} {} {}\n", f.line, f.rule->id, f.key, f.message);
    return text;
  }
};

/// A whole configuration around what is tested, on one line.
std::string with(std::string_view members) {
  return fmt::format(R"({{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": true}}, {}}})", members);
}
std::string zero(std::string_view members) { return with(fmt::format(R"("zero_optimization": {{{}}})", members)); }

std::vector<fs::path> files_of(const char* folder) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(kData / folder)) paths.push_back(entry.path());
  std::ranges::sort(paths);
  return paths;
}

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

TEST_CASE("Every wrong key of the reference is caught with its consequence") {
  struct Case {
    const char* key;  // as the reference names it
    std::string text;
    const char* rule;
    std::vector<const char*> says;
  };
  const auto batch = [](std::string_view members) {
    return fmt::format(R"({{"bf16": {{"enabled": true}}, {}}})", members);
  };
  const std::string offload = R"("stage": 3, "offload_optimizer": {"device": "cpu", )";
  const std::string param = R"("stage": 3, "offload_param": {"device": "cpu", )";
  const Case cases[] = {
      {"zero_optimization.stage3_sub_group_size",
       zero(R"("stage": 3, "stage3_sub_group_size": 1e9)"),
       "stage3-prefix",
       {"ValidationError"}},
      {"zero_optimization.stage3_reduce_bucket_size",
       zero(R"("stage": 3, "stage3_reduce_bucket_size": 1e8)"),
       "stage3-prefix",
       {"ValidationError"}},
      {"zero_optimization.cpu_offload_params (plural)",
       zero(R"("stage": 3, "cpu_offload_params": true)"),
       "misspelt-key-refused",
       {"ValidationError", "offload_param"}},
      {"zero_optimization.grad_hooks",
       zero(R"("stage": 3, "grad_hooks": true)"),
       "retired-key-refused",
       {"ValidationError", "documentation"}},
      {"zero_optimization.aio",
       zero(R"("stage": 3, "aio": {"block_size": 1048576})"),
       "misplaced-key-refused",
       {"ValidationError", "the top level"}},
      {"zero_optimization.zero3_init_flag",
       zero(R"("stage": 3, "zero3_init_flag": true)"),
       "accelerate-key-refused",
       {"ValidationError", "accelerate"}},
      {"zero_optimization.offload_optimizer.offload_param",
       zero(offload + R"("offload_param": {"device": "cpu"}})"),
       "offload-nested",
       {"ValidationError", "siblings"}},
      {"zero_optimization.offload_optimizer.buffer_size / max_in_cpu",
       zero(offload + R"("buffer_size": 1e8})"),
       "misplaced-key-refused",
       {"ValidationError", "offload_param"}},
      {"zero_optimization.offload_optimizer.buffer_size / max_in_cpu",
       zero(offload + R"("max_in_cpu": 1e9})"),
       "misplaced-key-refused",
       {"ValidationError", "offload_param"}},
      {"zero_optimization.offload_optimizer.pipeline",
       zero(offload + R"("pipeline": true})"),
       "retired-key-refused",
       {"ValidationError", "pipeline_read"}},
      {"zero_optimization.offload_param.pipeline_read",
       zero(param + R"("pipeline_read": true})"),
       "misplaced-key-refused",
       {"ValidationError", "offload_optimizer"}},
      {"offload_optimizer / offload_param at top level",
       with(R"("offload_optimizer": {"device": "cpu"})"),
       "misplaced-key-ignored",
       {"ignores it silently", "no offload happens"}},
      {"offload_optimizer / offload_param at top level",
       with(R"("offload_param": {"device": "cpu"})"),
       "misplaced-key-ignored",
       {"ignores it silently", "no offload happens"}},
      {"communication_data_exchange (top level)",
       with(R"("communication_data_exchange": "fp16")"),
       "misspelt-key-ignored",
       {"ignores it silently"}},
      {"grad_accum_dtype (top level)",
       with(R"("grad_accum_dtype": "fp32")"),
       "misplaced-key-ignored",
       {"ignores it silently", "data_types"}},
      {"data_types.foo", with(R"("data_types": {"foo": 1})"), "unknown-key-ignored", {"ignores it silently"}},
      {"aio.thread_count", with(R"("aio": {"thread_count": 1})"), "renamed-key", {"ignores it silently"}},
      {"round_robin_gradients at stage 3",
       zero(R"("stage": 3, "round_robin_gradients": true)"),
       "round-robin-stage-3",
       {"no effect"}},
      {"offload_param at stage 2",
       zero(R"("stage": 2, "offload_param": {"device": "cpu"})"),
       "offload-param-below-3",
       {"accepted", "no effect"}},
      {"offload_optimizer.device=nvme at stage 2",
       zero(R"("stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/d"})"),
       "nvme-below-3",
       {"behaves as cpu"}},
      {"allgather_bucket_size at stage 3, or stage3_* at stages 1-2",
       zero(R"("stage": 3, "allgather_bucket_size": 2e8)"),
       "unread-key-default",
       {"no effect"}},
      {"allgather_bucket_size at stage 3, or stage3_* at stages 1-2",
       zero(R"("stage": 2, "stage3_max_live_parameters": 1e8)"),
       "stage3-key-below-3",
       {"accepted", "no effect"}},
      {"allgather_partitions=false",
       zero(R"("stage": 2, "allgather_partitions": false)"),
       "unread-key",
       {"accepted", "no effect"}},
      {"bf16.loss_scale, bf16.check_overflow, fp16.opt_level",
       batch(R"("train_batch_size": 8, "bf16": {"enabled": true, "loss_scale": 0})"),
       "duplicate-key",
       {"ValueError"}},
      {"bf16.loss_scale, bf16.check_overflow, fp16.opt_level",
       R"({"train_batch_size": 8, "bf16": {"enabled": true, "loss_scale": 0}})",
       "retired-key-refused",
       {"ValidationError"}},
      {"bf16.loss_scale, bf16.check_overflow, fp16.opt_level",
       R"({"train_batch_size": 8, "bf16": {"enabled": true, "check_overflow": true}})",
       "misspelt-key-refused",
       {"ValidationError"}},
      {"bf16.loss_scale, bf16.check_overflow, fp16.opt_level",
       with(R"("fp16": {"enabled": false, "opt_level": "O2"})"),
       "retired-key-refused",
       {"ValidationError"}},
      {"bf16: true", R"({"train_batch_size": 8, "bf16": true})", "section-not-object", {"TypeError"}},
      {"both bf16 and bfloat16", with(R"("bfloat16": {"enabled": false})"), "bfloat16-and-bf16", {"ignored"}},
      {"zero_optimization: \"auto\" or null",
       with(R"("zero_optimization": "auto")"),
       "section-not-object",
       {"TypeError"}},
      {"zero_optimization: \"auto\" or null",
       with(R"("zero_optimization": null)"),
       "section-not-object",
       {"TypeError"}},
      {"stage: \"auto\"", zero(R"("stage": "auto")"), "auto-stage", {"silently", "stage 0"}},
      {"reduce_bucket_size: \"5e8\" (string)",
       zero(R"("stage": 2, "reduce_bucket_size": "5e8")"),
       "number-as-text",
       {"ValidationError"}},
      {"sub_group_size written as 1e9 float", zero(R"("stage": 3, "sub_group_size": 1e9)"), "", {}},
      {"train_batch_size / micro / gas = \"auto\" outside HF",
       batch(R"("train_batch_size": "auto")"),
       "auto-needs-trainer",
       {"train_batch_size", "TypeError"}},
      {"train_batch_size / micro / gas = \"auto\" outside HF",
       batch(R"("train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto")"),
       "auto-needs-trainer",
       {"gradient_accumulation_steps", "TypeError"}},
      {"gradient_clipping = \"auto\" outside HF",
       with(R"("gradient_clipping": "auto")"),
       "auto-needs-trainer",
       {"gradient_clipping fails in the first step"}},
      {"stage3_max_live_parameters / stage3_max_reuse_distance = \"auto\"",
       zero(R"("stage": 3, "stage3_max_live_parameters": "auto")"),
       "auto-dropped",
       {"drops it and takes 1000000000"}},
      {"stage3_max_live_parameters / stage3_max_reuse_distance = \"auto\"",
       zero(R"("stage": 3, "stage3_max_reuse_distance": "auto")"),
       "auto-dropped",
       {"drops it and takes 1000000000"}},
      {"offload_optimizer.device=\"gpu\"",
       zero(R"("stage": 2, "offload_optimizer": {"device": "gpu"})"),
       "bad-choice",
       {"ValidationError"}},
      {"offload_optimizer: true",
       zero(R"("stage": 2, "offload_optimizer": true)"),
       "section-not-object",
       {"ValidationError"}},
      {"prefetch_bucket_size and stage3_prefetch_bucket_size together",
       zero(R"("stage": 3, "prefetch_bucket_size": 1e7, "stage3_prefetch_bucket_size": 1e7)"),
       "alias-pair",
       {"ValidationError"}},
      {"cpu_offload with offload_optimizer",
       zero(R"("stage": 2, "cpu_offload": true, "offload_optimizer": {"device": "cpu"})"),
       "deprecated-with-new",
       {"AssertionError"}},
      {"optimizer.params.max_grad_norm",
       with(R"("optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}})"),
       "max-grad-norm",
       {"ValueError at engine start"}},
      {"zero_quantized_weight (singular)",
       zero(R"("stage": 3, "zero_quantized_weight": true)"),
       "misspelt-key-refused",
       {"ValidationError", "zero_quantized_weights"}},
  };
  std::set<std::string> open;
  const Json reference = Json::parse(read_file(kData / "wrong_keys.json"));
  for (const Json& entry : reference.at("wrong_keys")) open.insert(entry.at("key").get<std::string>());
  for (const Case& c : cases) {
    INFO(c.key);
    const Checked checked(c.text);
    INFO(checked.listing());
    open.erase(c.key);
    if (*c.rule == '\0') {
      CHECK_FALSE(checked.answer.has_errors());
      continue;
    }
    const Finding* finding = checked.find(c.rule);
    REQUIRE(finding != nullptr);
    for (const char* part : c.says) CHECK_THAT(finding->message, HasText(part));
  }
  INFO("wrong keys of the reference without a case");
  CHECK(open == std::set<std::string>());
}

TEST_CASE("Contradictions that DeepSpeed checks are found before it does") {
  struct Case {
    std::string text;
    const char* rule;
    int nodes = 1;
  };
  const auto optimizer = [](std::string_view type, std::string_view members) {
    return with(fmt::format(R"("optimizer": {{"type": "{}", "params": {{"lr": 1e-4}}}}, "zero_optimization": {{{}}})",
                            type, members));
  };
  const std::string half = R"({"train_batch_size": 8, "fp16": {"enabled": true)";
  const Case cases[] = {
      {with(R"("fp16": {"enabled": true})"), "fp16-and-bf16"},
      {half + R"(, "fp16_master_weights_and_grads": true}})", "master-stage-0"},
      {half + R"(, "fp16_master_weights_and_grads": true}, "zero_optimization": {"stage": 2}})",
       "master-needs-offload"},
      {R"({"train_batch_size": 8, "bf16": {"enabled": true, "bf16_optimizer_states": true}, "zero_optimization": {"stage": 2}})",
       "states-need-master"},
      {half + R"(, "loss_scale": 128, "loss_scale_window": 100}})", "static-loss-scale"},
      {half + R"(, "loss_scale": -1}})", "out-of-range"},
      {half + R"(, "loss_scale": true}})", "wrong-type"},
      {zero(R"("stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5})"), "ratio-below-3"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5})"), "ratio-sub-groups"},
      {with(R"("gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3})"), "allreduce-sum"},
      {with(R"("communication_data_type": "int8")"), "bad-choice"},
      {with(R"("checkpoint": {"tag_validation": "maybe"})"), "bad-choice"},
      {with(R"("data_types": {"param_dtype": "fp16"})"), "param-dtype"},
      {with(R"("data_types": {"grad_accum_dtype": "fp32"})"), "grad-accum-stage-0"},
      {with(R"("data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1})"), "grad-accum-stage-1"},
      {with(R"("data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 3})"), "grad-accum-stage-3"},
      {with(
           R"("data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}})"),
       "nvme-dropped"},
      {with(R"("amp": {"enabled": true}, "zero_optimization": {"stage": 1})"), "amp-with-zero"},
      {with(R"("amp": {"opt_level": "O1"})"), "amp-without-enabled"},
      {optimizer("SGD", R"("stage": 2)"), "optimizer-untested"},
      {optimizer("sgd", R"("stage": 0)"), "optimizer-case"},
      {optimizer("AdamWW", R"("stage": 0)"), "optimizer-unknown"},
      {optimizer("OneBitAdam", R"("stage": 1)"), "optimizer-onebit-zero"},
      {optimizer("Muon", R"("stage": 3)"), "muon-stage-3"},
      {optimizer("Muon", R"("stage": 2, "offload_optimizer": {"device": "cpu"})"), "muon-offload"},
      {zero(R"("stage": 2, "legacy_stage1": true)"), "legacy-stage1"},
      {with(R"("prescale_gradients": true, "zero_optimization": {"stage": 2})"), "prescale-reduce-scatter"},
      {with(R"("gradient_predivide_factor": 2.0, "zero_optimization": {"stage": 3})"), "prescale-reduce-scatter"},
      {zero(R"("stage": 2, "allgather_bucket_size": 499999999)"), "allgather-bucket-odd"},
      {zero(R"("stage": 2, "zenflow": {"topk_ratio": 0.1})"), "zenflow-offload"},
      {zero(R"("stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"offload": true})"), "zenflow-overlap"},
      {with(
           R"("torch_autocast": {"enabled": true}, "zero_optimization": {"stage": 3, "zero_quantized_weights": true})"),
       "autocast-with-qwz"},
      {zero(R"("stage": 3, "zero_hpz_partition_size": 3)"), "hpz-divides"},
      {zero(R"("stage": 3, "zero_hpz_partition_size": 64)"), "hpz-above-ranks"},
      {zero(R"("stage": 3, "zero_hpz_partition_size": 4)"), "hpz-one-node"},
      {zero(R"("stage": 3, "zero_hpz_partition_size": 16)"), "hpz-across-nodes", 4},
      {zero(R"("stage": 3, "zero_quantized_gradients": true)"), "qgz-one-node"},
      {zero(R"("stage": 3, "zero_quantized_gradients": true)"), "qgz-bf16", 2},
      {zero(R"("stage": 3, "zeropp_loco_param": {"err_beta": 0.8})"), "loco-dead"},
      {zero(R"("stage": 3, "zero_quantized_gradients": true, "zeropp_loco_param": {"err_beta": 0.8})"), "loco-keys"},
      {zero(R"("stage": 3, "mics_shard_size": 3)"), "mics-divides"},
      {zero(R"("stage": 3, "mics_shard_size": 4, "offload_optimizer": {"device": "cpu"})"), "mics-offload"},
      {zero(R"("stage": 3, "mics_shard_size": 4)"), "mics-removed"},
      {zero(R"("stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": true)"), "mics-hierarchical-node",
       2},
      {zero(R"("stage": 3, "mics_shard_size": 4, "offload_param": {"device": "cpu"})"), "mics-offload-param"},
      {zero(R"("stage": 3, "mics_shard_size": 4, "zero_quantized_weights": true)"), "mics-dead"},
      {zero(R"("stage": 3, "mics_shard_size": 4, "zero_hpz_partition_size": 2)"), "mics-dead"},
      {with(R"("elasticity": {"enabled": false})"), "removed-later"},
      {zero(R"("stage": 3, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024})"), "removed-later"},
      {zero(R"("stage": 2, "zero_hpz_partition_size": 8)"), "stage3-key-below-3"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "nvme"})"), "nvme-path-missing"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "scratch"})"), "nvme-path-relative"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/dev/shm/x"})"), "nvme-path-memory"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d", "buffer_count": 2})"),
       "swap-buffers-few"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d", "pipeline_read": true})"),
       "swap-buffers-pipeline"},
      {zero(R"("stage": 2, "offload_optimizer": {"pin_memory": true})"), "offload-without-device"},
      {zero(R"("overlap_comm": true)"), "stage-missing"},
      {zero(R"("stage": 4)"), "out-of-range"},
      {zero(R"("stage": 3, "stage3_prefetch_bucket_size": 15099494.4)"), "fractional-integer"},
      {zero(R"("stage": 3, "sub_group_size": -1)"), "out-of-range"},
      {zero(R"("stage": 2, "reduce_bucket_size": null)"), "null-value"},
      {zero(R"("stage": 3, "prefetch_bucket_size": "auto")"), "auto-alias"},
      {R"({"train_batch_size": "8"})", "number-as-text"},
      {with(R"("steps_per_print": "auto")"), "auto-literal"},
      {with(R"("wall_clock_breakdown": "false")"), "bool-as-text"},
      {with(R"("elasticity": {"enabled": true})"), "batch-elasticity"},
      {with(R"("zero_optimization.stage": 2)"), "dotted-key"},
      {with(R"("Zero_Optimization": {"stage": 2})"), "wrong-case-key"},
      {with(R"("gradient_clipp1ng": 1.0)"), "misspelt-key-ignored"},
      {zero(R"("stage": 3, "stage3_param_persitence_threshold": 1e5)"), "misspelt-key-refused"},
      {with(R"("activation_checkpointing": {"contiguous_memory_optimization": true})"), "contiguous-checkpoints"},
      {with(R"("optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-4}})"), "optimizer-param-unknown"},
      {with(R"("optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}})"), "number-as-text"},
      {with(R"("optimizer": {"type": "AdamW", "params": {"betas": [0.9]}})"), "betas-shape"},
      {with(R"("optimizer": {"params": {"lr": 1e-4}})"), "optimizer-without-type"},
      {with(R"("scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}})"),
       "scheduler-param-missing"},
      {with(R"("scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 10}})"), "scheduler-param-unknown"},
      {with(R"("scheduler": {"type": "cosine"})"), "scheduler-unknown"},
      {with(R"("sparse_attention": {"mode": "odd"})"), "sparse-attention-mode"},
      {with(R"("scheduler": {"type": "WarmupLR", "params": {"warmup_type": "Linear"}})"), "scheduler-warmup-type"},
      {zero(R"("stage": 3, "zero_quantized_gradients": true, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024})"),
       "loco-memory"},
      {zero(R"("stage": 3)"), "default-bucket"},
      {zero(R"("stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d"})"), "swap-buffers-locked"},
      {zero(
           R"("stage": 3, "sub_group_size": 1e9, "offload_param": {"device": "nvme", "nvme_path": "/d"}, "offload_optimizer": {"device": "nvme", "nvme_path": "/d", "fast_init": true})"),
       "fast-init-buffer"},
      {with(
           R"("aio": {"block_size": 1073741824}, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/d"}})"),
       "aio-block-large"},
      {"[1, 2]", "top-level-shape"},
      {R"({"gradient_accumulation_steps": 2})", "batch-missing"},
      {R"({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2})", "batch-identity"},
  };
  for (const Case& c : cases) {
    INFO(c.rule << "\n" << c.text);
    const Checked checked(c.text, "7B", "8xA100-80G", c.nodes);
    INFO(checked.listing());
    CHECK(checked.has(c.rule));
  }
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

namespace {

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
    for (const fs::path& path : files_of(folder)) texts.push_back(read_file(path));
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
