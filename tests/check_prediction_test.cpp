// What `check` predicts of a DeepSpeed configuration, and the nearest configuration that fits or is faster.

#include "planner/check_prediction.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "models/error.h"
#include "planner/check_parts.h"
#include "planner/check_prediction_report.h"
#include "tests/catch.h"

using namespace zeroplan;
using Json = nlohmann::ordered_json;

namespace {

const std::string kTests = ZEROPLAN_TESTS_DIR;

std::string read(const std::string& path) {
  std::ifstream in(path);
  REQUIRE(in);
  return {std::istreambuf_iterator<char>(in), {}};
}

MachineSpec machine_of(const std::string& gpus, std::optional<Bytes> host = std::nullopt) {
  MachineSpec machine = machine_for(parse_gpu_request(gpus), 1);
  if (host) set_host_memory(machine, *host);
  return machine;
}

CheckPrediction predicted(const std::string& text, const ModelSpec& model, const MachineSpec& machine,
                          const CheckWorkload& flags = {}) {
  const ConfigText file = ConfigText::parse(text, "ds.json");
  const CheckInput input{file, &model, &machine};
  return predict_check(input, check_deepspeed(input), flags);
}

CheckWorkload of_tokens(std::int64_t seq_len, bool checkpointing = false) {
  CheckWorkload flags;
  flags.seq_len = seq_len;
  flags.checkpointing = checkpointing;
  return flags;
}

bool missing(const CheckPrediction& p, std::string_view part, std::string_view word) {
  return std::ranges::any_of(
      p.run.missing, [&](const NotPredicted& m) { return m.part == part && m.why.find(word) != std::string::npos; });
}

/// The changes that belong together: one turn of a knob.
std::string knob_of(const KeyChange& change) {
  const std::string& key = change.key;
  if (key == "train_micro_batch_size_per_gpu" || key == "gradient_accumulation_steps") return "micro-batch";
  if (key.find("pin_memory") != std::string::npos && !change.from.empty()) return "pinned";
  if (key.find("offload_optimizer") != std::string::npos) return "optimizer";
  if (key.find("offload_param") != std::string::npos) return "parameters";
  if (key.find("stage3_") != std::string::npos) return "gathers";
  return key;
}

/// The file with the changes made by hand, without those of one knob. Independent of ConfigDraft.
struct Edited {
  DeepSpeedConfig config;
  EngineWorkload workload;
};
Edited edited(const std::string& text, const CheckPrediction& p, const std::string& without = "") {
  Json json = Json::parse(text);
  Edited result;
  result.workload = p.run.workload;
  for (const KeyChange& change : p.nearest->changes) {
    if (knob_of(change) == without) continue;
    if (change.in_script) {
      result.workload.checkpointing = change.to == "true";
      continue;
    }
    std::string pointer = "/" + change.key;
    std::ranges::replace(pointer, '.', '/');
    json[Json::json_pointer(pointer)] = Json::parse(change.to);
  }
  result.config = read_deepspeed_config(ConfigText::parse(json.dump(), "edited.json"));
  if (json.contains("train_micro_batch_size_per_gpu") && without != "micro-batch") {
    result.workload.tokens.batch = result.config.micro_batch.value_or(1);
    result.workload.accumulation = result.config.accumulation.value_or(1);
  }
  return result;
}

std::string config_text(const std::string& zero, int micro, int accumulation) {
  return fmt::format(
      R"({{"train_micro_batch_size_per_gpu": {}, "gradient_accumulation_steps": {}, "bf16": {{"enabled": true}},
          "optimizer": {{"type": "AdamW"}}, "zero_optimization": {{{}}}}})",
      micro, accumulation, zero);
}

const std::vector<std::string>& zeros() {
  static const std::vector<std::string> list{
      R"("stage": 0)",
      R"("stage": 1, "overlap_comm": true)",
      R"("stage": 2)",
      R"("stage": 2, "overlap_comm": true, "offload_optimizer": {"device": "cpu"})",
      R"("stage": 3, "stage3_prefetch_bucket_size": 5e7)",
      R"("stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": false}, "offload_param": {"device": "cpu"})"};
  return list;
}

}  // namespace

TEST_CASE("The nearest configuration, applied by hand, gives the memory and time that was promised") {
  const ModelSpec model = find_model("smollm2-135m");
  MachineSpec machine = machine_of("4xA100-80G", 64_GiB);
  int fitting = 0, faster = 0;
  for (const double gib : {1.5, 40.0}) {
    machine.gpu.memory = Bytes(gib * kGiB) + 2_GiB;  // context, libraries and NCCL take about that
    for (const std::string& zero : zeros()) {
      const std::string text = config_text(zero, 4, 2);
      const CheckPrediction p = predicted(text, model, machine, of_tokens(512));
      INFO(gib << " GiB, " << zero);
      REQUIRE(p.run.memory);
      if (!p.run.fits_well()) REQUIRE(p.nearest);
      if (!p.nearest || !p.nearest->result) continue;
      const RunPrediction& then = *p.nearest->result;
      CHECK(then.fits_well());
      CHECK(then.global_batch() == p.run.global_batch());
      const Edited by_hand = edited(text, p);
      CHECK(by_hand.workload.tokens.batch == then.workload.tokens.batch);
      EngineFitter fitter(model, machine, 0.05);
      const EngineFit fit = fitter.deepspeed(by_hand.config, by_hand.workload);
      CHECK(fit.allocated == then.memory->allocated);
      CHECK(fit.reserved == then.memory->reserved);
      CHECK(fit.host == then.memory->host);
      if (p.nearest->aim == NearestAim::fits) {
        ++fitting;
        CHECK_FALSE(p.run.fits_well());
      } else {
        ++faster;
        CHECK(p.run.fits_well());
        CHECK(then.time->step <= p.run.time->step * 0.95);
      }
    }
  }
  CHECK(fitting > 5);
  CHECK(faster > 5);
}

TEST_CASE("No change of the nearest configuration that fits can be left out") {
  const ModelSpec model = find_model("smollm2-135m");
  MachineSpec machine = machine_of("4xA100-80G", 64_GiB);
  int several = 0;
  for (const double gib : {0.9, 1.8}) {
    machine.gpu.memory = Bytes(gib * kGiB) + 2_GiB;
    for (const std::string& zero : {zeros()[1], zeros()[4]}) {
      const std::string text = config_text(zero, 8, 1);
      const CheckPrediction p = predicted(text, model, machine, of_tokens(512));
      if (!p.nearest || p.nearest->aim != NearestAim::fits || !p.nearest->result) continue;
      std::set<std::string> knobs;
      for (const KeyChange& change : p.nearest->changes) knobs.insert(knob_of(change));
      if (knobs.size() > 1) ++several;
      for (const std::string& knob : knobs) {
        INFO(gib << " GiB, " << zero << ", without " << knob);
        const Edited less = edited(text, p, knob);
        EngineFitter fitter(model, machine, 0.05);
        CHECK_FALSE(fitter.deepspeed(less.config, less.workload).fits_in_step());
      }
    }
  }
  CHECK(several > 0);
}

TEST_CASE("Batch sizes are worked out as DeepSpeed does") {
  const ModelSpec model = find_model("smollm2-135m");
  const MachineSpec machine = machine_of("4xA100-80G");
  struct Case {
    std::string keys;
    std::int64_t micro, accumulation;
    bool assumed;  // something had to be
  };
  const std::vector<Case> cases{
      {R"("train_batch_size": 64, "train_micro_batch_size_per_gpu": 4)", 4, 4, false},
      {R"("train_batch_size": 64, "gradient_accumulation_steps": 2)", 8, 2, false},
      {R"("train_batch_size": 64)", 16, 1, true},
      {R"("train_micro_batch_size_per_gpu": 3)", 3, 1, true},
      {R"("train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5)", 3, 5, false},
      {R"("train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto")", 1, 1, true},
      {R"("train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8)", 1, 8, false}};
  for (const Case& c : cases) {
    INFO(c.keys);
    const CheckPrediction p =
        predicted(R"({"bf16": {"enabled": true}, )" + c.keys + "}", model, machine, of_tokens(64));
    CHECK(p.run.workload.tokens.batch == c.micro);
    CHECK(p.run.workload.accumulation == c.accumulation);
    const bool assumed = std::ranges::any_of(p.assumptions, [](const Assumption& a) {
      return a.what == "batch" || a.what == "micro-batch" || a.what == "gradient accumulation";
    });
    if (c.keys != R"("train_batch_size": 64)") CHECK(assumed == c.assumed);
  }
}

TEST_CASE("Flags give the batch that the file leaves open, and do not contradict it") {
  const ModelSpec model = find_model("smollm2-135m");
  const MachineSpec machine = machine_of("4xA100-80G");
  const std::string open = R"({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"})";
  CheckWorkload flags = of_tokens(64);
  flags.micro_batch = 2;
  flags.global_batch = 32;
  const CheckPrediction p = predicted(open, model, machine, flags);
  CHECK(p.run.workload.tokens.batch == 2);
  CHECK(p.run.workload.accumulation == 4);
  CHECK_THROWS_AS(predicted(R"({"train_micro_batch_size_per_gpu": 1})", model, machine, flags), InputError);
  flags.global_batch = 33;
  CHECK_THROWS_AS(predicted(open, model, machine, flags), InputError);
}

TEST_CASE("What no rule covers is named and left out") {
  const ModelSpec dense = find_model("smollm2-135m");
  const MachineSpec machine = machine_of("8xA100-80G");
  struct Case {
    std::string config, memory, time;  // words of the reasons; empty: predicted
  };
  const std::vector<Case> cases{
      {config_text(R"("stage": 3, "mics_shard_size": 4)", 1, 1), "", ""},
      {config_text(R"("stage": 3, "mics_shard_size": 3)", 1, 1), "mics_shard_size", "mics_shard_size"},
      {config_text(R"("stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": true)", 1, 1),
       "several nodes", "several nodes"},
      {config_text(R"("stage": 3, "zero_quantized_weights": true)", 1, 1), "", ""},
      {config_text(R"("stage": 3, "zero_hpz_partition_size": 4)", 1, 1), "", ""},
      {config_text(R"("stage": 3, "zero_quantized_gradients": true)", 1, 1), "", ""},
      {R"({"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}})", "autotp_size", "autotp_size"},
      {R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "compile": {"deepcompile": true}})",
       "deepcompile", "deepcompile"},
      {R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Lion"}})", "optimizer.type", "optimizer.type"},
      {config_text(R"("stage": 2)", 1, 1), "", ""}};
  for (const Case& c : cases) {
    INFO(c.config);
    const CheckPrediction p = predicted(c.config, dense, machine, of_tokens(256));
    CHECK(p.run.memory.has_value() == c.memory.empty());
    CHECK(p.run.time.has_value() == c.time.empty());
    if (!c.memory.empty()) CHECK(missing(p, "memory", c.memory));
    if (!c.time.empty()) CHECK(missing(p, "time", c.time));
    const Json json = Json::parse(prediction_json(p));
    CHECK(json.contains("gpu") == c.memory.empty());
    CHECK(json.contains("host") == c.memory.empty());
    CHECK(json.contains("time") == c.time.empty());
    const std::size_t reasons = (c.memory.empty() ? 0U : 1U) + (c.time.empty() ? 0U : 1U);
    CHECK(json.at("not_predicted").size() == reasons);
  }
  // Without a memory prediction nothing says that it does not fit.
  CHECK_FALSE(predicted(cases[0].config, dense, machine, of_tokens(256)).run.does_not_fit());
}

TEST_CASE("Families: experts have memory and a step time by mechanism, ChatGLM a step time and no memory") {
  const MachineSpec machine = machine_of("8xA100-80G");
  const std::string text = config_text(R"("stage": 3, "offload_optimizer": {"device": "cpu"})", 1, 1);
  const CheckPrediction experts = predicted(text, find_model("mixtral-8x7b"), machine, of_tokens(256, true));
  CHECK(experts.run.memory);
  CHECK(experts.run.time);
  const CheckPrediction glm = predicted(text, find_model("glm-4-9b"), machine, of_tokens(256, true));
  // Until ChatGLM has an eager graph.
  CHECK(missing(glm, "memory", "chatglm") == !glm.run.memory.has_value());
  CHECK(glm.run.time);
  if (!glm.run.memory) CHECK_FALSE(glm.nearest);
}

TEST_CASE("A batch beyond what is modelled is named") {
  const CheckPrediction p =
      predicted(R"({"train_micro_batch_size_per_gpu": 1000000, "gradient_accumulation_steps": 1e18})",
                find_model("smollm2-135m"), machine_of("8xA100-80G"), of_tokens(8192));
  CHECK(missing(p, "memory", "beyond"));
  CHECK(missing(p, "time", "beyond"));
  for (const char* key : {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"}) {
    CAPTURE(key);
    const std::string other =
        std::string(key) == "gradient_accumulation_steps" ? R"("train_micro_batch_size_per_gpu": 1, )" : "";
    const CheckPrediction alone = predicted("{" + other + "\"" + key + "\": 1e18}", find_model("smollm2-135m"),
                                            machine_of("8xA100-80G"), of_tokens(16));
    CHECK(missing(alone, "memory", key));
    CHECK(missing(alone, "time", key));
    CHECK(std::ranges::none_of(alone.assumptions, [](const Assumption& a) { return a.what == "micro-batch"; }));
  }
}

TEST_CASE("Keys that only stage 3 reads change nothing at stage 2") {
  const ModelSpec model = find_model("smollm2-135m");
  const MachineSpec machine = machine_of("8xA100-80G");
  const auto run = [&](const std::string& keys) {
    return predicted(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
                         "zero_optimization": {"stage": 2)" +
                         keys + "}}",
                     model, machine, of_tokens(512))
        .run;
  };
  const RunPrediction plain = run("");
  for (const std::string key : {"\"zero_quantized_weights\": true", "\"zero_quantized_gradients\": true",
                                "\"zero_hpz_partition_size\": 8", "\"mics_shard_size\": 4"}) {
    CAPTURE(key);
    const RunPrediction with = run(", " + key);
    REQUIRE(with.time);
    REQUIRE(with.memory);
    CHECK(with.time->step == plain.time->step);
    CHECK(with.memory->allocated == plain.memory->allocated);
  }
}

TEST_CASE("Without SDPA for a family its steps take the time of unfused attention") {
  const ModelSpec model = find_model("bloom-560m");
  const MachineSpec machine = machine_of("8xA100-80G");
  CheckPredictor predictor(model, machine, {});
  const ConfigText file = ConfigText::parse(R"({"bf16": {"enabled": true}})", "ds.json");
  const DeepSpeedConfig config = read_deepspeed_config(file, model.hidden);
  EngineWorkload w;
  w.tokens = {8, 2048};
  w.ranks = machine.ranks();
  w.type = DType::bf16;
  std::string why;
  const Seconds usual = predictor.time(config, w, why).value().step;
  w.attention = EagerAttention::eager;
  CHECK(predictor.time(config, w, why).value().step == usual);
  w.attention = EagerAttention::sdpa;
  CHECK(predictor.time(config, w, why).value().step < usual);
}

TEST_CASE("Adapters take less memory and time than training all") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = machine_of("4xA100-80G");
  for (const char* zero : {R"("stage": 2)", R"("stage": 3)"}) {
    CheckWorkload flags = of_tokens(4096, true);
    const CheckPrediction all = predicted(config_text(zero, 1, 1), model, machine, flags);
    flags.lora_rank = 16;
    const CheckPrediction adapters = predicted(config_text(zero, 1, 1), model, machine, flags);
    REQUIRE(all.run.memory);
    REQUIRE(adapters.run.memory);
    CHECK(adapters.run.memory->allocated < all.run.memory->allocated);
    REQUIRE(adapters.run.time);
    // The host is slower: adapters are more modules.
    CHECK(adapters.run.time->compute < all.run.time->compute);
    CHECK(adapters.run.time->optimizer < all.run.time->optimizer);
  }
}

TEST_CASE("A file that DeepSpeed refuses is predicted as --fix corrects it") {
  const ModelSpec model = find_model("70B");
  const MachineSpec machine = machine_of("8xA100-80G", 4096_GiB);
  const std::string train = read(kTests + "/data/lint/bad/tutorial_70b_train.json");
  const CheckPrediction p = predicted(train, model, machine, of_tokens(4096, true));
  CHECK(p.corrected);
  REQUIRE(p.run.memory);
  // With the misplaced offload_param at its own place: weights are not on the GPU.
  CHECK(p.run.memory->fits());
  CHECK(p.run.memory->prediction.memory.steps.back().after < 2_GiB);
  CHECK(p.run.memory->host > Bytes(12.0 * static_cast<double>(model.parameters())));

  const std::string comm = read(kTests + "/data/lint/bad/tutorial_70b_comm.json");
  const CheckPrediction stage2 = predicted(comm, model, machine, of_tokens(4096, true));
  CHECK(stage2.run.does_not_fit());
  // Weights alone: 2 bytes of each parameter on every GPU.
  CHECK(stage2.run.memory->allocated > bytes_of(model.parameters(), DType::fp16));
  REQUIRE(stage2.nearest);
  REQUIRE(stage2.nearest->result);
  CHECK(std::ranges::any_of(stage2.nearest->changes,
                            [](const KeyChange& c) { return c.key == "zero_optimization.stage" && c.to == "3"; }));
}

TEST_CASE("Nothing that fits: the search says so") {
  const ModelSpec model = find_model("70B");
  const CheckPrediction p = predicted(config_text(R"("stage": 2)", 1, 1), model, machine_of("1xRTX-4090", 64_GiB));
  CHECK(p.run.does_not_fit());
  REQUIRE(p.nearest);
  CHECK_FALSE(p.nearest->result);
  CHECK(p.nearest->changes.empty());
  const Json json = Json::parse(nearest_json(p));
  CHECK_FALSE(json.at("found").get<bool>());
  CHECK_FALSE(json.contains("result"));
}

TEST_CASE("Drives are used when the host is too small") {
  const ModelSpec model = find_model("70B");
  MachineSpec machine = machine_of("4xA100-80G", 1024_GiB);
  machine.nvme = {};
  const std::string text = config_text(R"("stage": 3, "offload_optimizer": {"device": "cpu"})", 1, 1);
  const CheckPrediction without = predicted(text, model, machine, of_tokens(2048, true));
  REQUIRE(without.nearest);
  CHECK_FALSE(without.nearest->result);
  set_nvme(machine, "4x2TB@6.5GB/s");
  const CheckPrediction with = predicted(text, model, machine, of_tokens(2048, true));
  REQUIRE(with.nearest);
  REQUIRE(with.nearest->result);
  CHECK(std::ranges::any_of(with.nearest->changes, [](const KeyChange& c) { return c.to == "\"nvme\""; }));
  REQUIRE(with.nearest->result->time);  // by mechanism, and it says so
  CHECK(std::ranges::any_of(with.nearest->result->time->assumptions,
                            [](const Assumption& a) { return a.source.starts_with("by mechanism, not measured"); }));
  CHECK_FALSE(with.nearest->result->memory->caveat.empty());
}

TEST_CASE("A draft without changes reads as its file, one with changes differs in them alone") {
  for (const char* name : {"03_zero2", "06_zero3_offload", "10_trainer_zero3", "16_commented"}) {
    INFO(name);
    const ConfigText file = ConfigText::parse(read(kTests + "/data/lint/good/" + name + ".json"), name);
    const auto words = [](const ConfigText& text) {
      const DeepSpeedConfig c = read_deepspeed_config(text, 4096);
      return fmt::format("{} {} {} {} {} {} {} {} {} {}", c.reduce_bucket, c.sub_group, c.prefetch_bucket, c.max_live,
                         c.overlap_comm, static_cast<int>(c.offload_optimizer.device), c.offload_param.pin_memory,
                         to_string(c.precision), c.micro_batch.value_or(-1), fmt::join(c.automatic, ","));
    };
    ConfigDraft draft(file);
    CHECK(words(draft.text()) == words(file));
    CHECK(draft.changes().empty());
    const int stage = read_deepspeed_config(file).stage;
    REQUIRE(draft.set("zero_optimization.stage", 1));
    CHECK(read_deepspeed_config(draft.text()).stage == 1);
    REQUIRE(draft.changes().size() == 1);
    CHECK(draft.changes().front().from == std::to_string(stage));
    CHECK_FALSE(draft.set("zero_optimization.stage.deeper", 1));
  }
}

TEST_CASE("Users' runs: called as they went") {
  std::ifstream cases(kTests + "/data/user_cases/cases.jsonl");
  REQUIRE(cases);
  int tested = 0;
  for (std::string line; std::getline(cases, line);) {
    const Json c = Json::parse(line);
    const std::string id = c.at("id").get<std::string>();
    INFO(id);
    const ModelSpec model = c.contains("model_config") ? read_model(c["model_config"].dump(), id)
                                                       : find_model(c["model"].get<std::string>());
    std::optional<Bytes> host;
    if (c.contains("host_memory")) host = parse_bytes(c["host_memory"].get<std::string>(), id);
    CheckWorkload flags = of_tokens(c["seq_len"].get<std::int64_t>(), c["recompute"].get<std::string>() == "full");
    flags.lora_rank = c.value("lora_rank", std::int64_t{0});
    flags.margin = 0.03;
    const CheckPrediction p =
        predicted(c["deepspeed"].dump(), model, machine_of(c["gpus"].get<std::string>(), host), flags);
    const Json& observed = c["observed"];
    if (c.contains("not_compared")) continue;  // the reason stands there
    if (c.contains("attention")) continue;     // check runs SDPA; recorded_oom_test.cpp
    ++tested;
    REQUIRE(p.run.memory);
    CHECK(p.run.memory->fits() == observed["fits"].get<bool>());
    if (observed.contains("gpu_gib")) {
      CHECK(p.run.memory->device() / Bytes(kGiB) == Approx(observed["gpu_gib"].get<double>()).epsilon(0.06));
    }
  }
  CHECK(tested >= 8);
}
