// Cases of docs/user-cases.md: what check says of a file.

#include <fmt/format.h>

#include <algorithm>

#include "planner/check_prediction_report.h"
#include "planner/deepspeed_estimator.h"
#include "planner/search.h"
#include "tests/catch.h"
#include "tests/processor_time.h"
#include "tests/user_case.h"

using namespace zeroplan;
using namespace zeroplan::tests;

// --- "auto" and the estimators -----------------------------------------------------------------------

TEST_CASE("hf-25322, hf-16495, hf-21342, ray-62486: what auto is") {
  const std::string zero = R"("reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                              "stage3_param_persistence_threshold": "auto")";
  const auto config = [&](int stage) {
    return fmt::format(
        R"({{"train_batch_size": 8, "bf16": {{"enabled": true}}, "zero_optimization": {{"stage": {}, {}}}}})", stage,
        zero);
  };
  const Case of(config(3), find_model("7B"), machine_of("8xA100-80G"));
  REQUIRE(of.model.hidden == fact("hf-25322").at("hidden").get<std::int64_t>());
  const CheckAnswer answer = of.lint();
  CHECK(answer.config.reduce_bucket == fact("hf-25322").at("reduce_bucket_size").get<std::int64_t>());
  CHECK(answer.config.prefetch_bucket == fact("hf-25322").at("stage3_prefetch_bucket_size").get<std::int64_t>());
  CHECK(answer.config.param_persistence ==
        fact("hf-25322").at("stage3_param_persistence_threshold").get<std::int64_t>());
  const Finding* values = find(answer, "auto-values");
  REQUIRE(values != nullptr);
  CHECK_THAT(values->message, HasText("16,777,216"));
  CHECK_THAT(values->message, HasText("ValueError"));  // hf-21342
  CHECK(
      values->fix ==
      R"("reduce_bucket_size": 16777216, "stage3_prefetch_bucket_size": 15099494, "stage3_param_persistence_threshold": 40960)");
  CHECK(find(answer, "auto-bucket-below-3") == nullptr);

  const Case two(config(2), find_model("7B"), machine_of("8xA100-80G"));
  const CheckAnswer below = two.lint();
  CHECK(find(below, "auto-bucket-below-3") != nullptr);
  CHECK(find(below, "auto-values")->fix == "\"reduce_bucket_size\": 16777216");

  const Case bare(R"({"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}})",
                  find_model("gpt-j-6b"), machine_of("8xA100-80G"));
  const CheckAnswer defaults = bare.lint();
  CHECK(bytes_of(defaults.config.reduce_bucket, DType::bf16).base() / kGb == number("ray-62486", "default_gb"));
  CHECK_THAT(find(defaults, "default-bucket")->message, HasText("16,777,216 here, 33.6 MB"));
}

TEST_CASE("ds-965, axo-1129: DeepSpeed's estimators, to what they print") {
  for (const char* id : {"ds-965", "axo-1129"}) {
    const Json& j = fact(id);
    EstimatorQuestion q;
    q.parameters = j["parameters"].get<std::int64_t>();
    q.largest_module = j["largest"].get<std::int64_t>();
    q.gpus_per_node = j["gpus"].get<int>();
    const auto ask = [&](const Json& row) {
      q.offload_optimizer = row["offload"] != "none";
      q.offload_parameters = row["offload"] == "both";
      q.zero_init = row.value("zero_init", true);
    };
    for (const Json& row : j["zero3"]) {
      INFO(id << row.dump());
      ask(row);
      const EstimatorBytes bytes = deepspeed_zero3_estimate(q);
      CHECK(bytes.host.base() / kGiB == Approx(row["host"].get<double>()).margin(0.1));
      CHECK(bytes.gpu.base() / kGiB == Approx(row["gpu"].get<double>()).margin(0.01));
    }
    for (const Json& row : j.value("zero2", Json::array())) {
      INFO(id << row.dump());
      ask(row);
      const EstimatorBytes bytes = deepspeed_zero2_estimate(q, EstimatorForm::before_2024);
      CHECK(bytes.host.base() / kGiB == Approx(row["host"].get<double>()).margin(0.1));
      CHECK(bytes.gpu.base() / kGiB == Approx(row["gpu"].get<double>()).margin(0.01));
    }
  }
  // The present form, by hand: 2 P + 18 P / 8.
  EstimatorQuestion q;
  q.parameters = 8000;
  q.gpus_per_node = 8;
  CHECK(deepspeed_zero2_estimate(q, EstimatorForm::since_2024).gpu == Bytes(2 * 8000 + 18 * 1000));
}

TEST_CASE("llf-6755, ds-3606: the estimator's safe figure is said beside ours") {
  Case of(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3,
              "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "cpu", "pin_memory": true}}})",
          find_model("qwen2.5-32b"), machine_of("1xH100-NVL-94G"));
  const CheckPrediction p = of.predicted(tokens(2048));
  REQUIRE(p.estimator);
  CHECK(p.estimator->bytes.host.base() / kGiB == Approx(824).epsilon(0.001));
  CHECK_THAT(report_prediction(p, of.machine, {}), HasText("823.9 GiB of host a node"));

  // By hand: Mixtral's largest module holds a layer's stacks of experts, gate and up in one and down in the other.
  const Case moe(
      R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}})",
      find_model("mixtral-8x7b"), machine_of("8xA100-80G"));
  const CheckPrediction experts = moe.predicted(tokens(512));
  const double stacks = 3.0 * 8 * 14336 * 4096, all = static_cast<double>(moe.model.parameters());
  REQUIRE(experts.estimator);
  CHECK(experts.estimator->bytes.gpu.base() == Approx(4 * stacks + 18 * all / 8));
  CHECK(experts.estimator->bytes.host.base() == Approx(4 * stacks * 8 * 1.5));
}

TEST_CASE("check says what of the machine is a default") {
  const auto network = [](int nodes) {
    const Case of(
        R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}})",
        find_model("gpt2"), machine_of("8xA100-80G", nodes));
    const CheckPrediction p = of.predicted(tokens(512));
    return std::ranges::count(p.assumptions, "network of a node", &Assumption::what);
  };
  CHECK(network(4) == 1);
  CHECK(network(1) == 0);
}

// --- verdicts and what moves them --------------------------------------------------------------------

TEST_CASE("llf-2518: Mixtral at stage 2 fits no card of 80 GB, at stage 3 with the optimizer on the host it does") {
  const Case of(R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "bf16": {"enabled": true},
                    "zero_optimization": {"stage": 2, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8,
                    "overlap_comm": false, "contiguous_gradients": true}})",
                find_model("mixtral-8x7b"), machine_of("8xA100-80G"));
  const CheckPrediction p = of.predicted(tokens(2048));
  CHECK(find(of.lint(), "states-exceed-gpu") != nullptr);
  CHECK(p.run.does_not_fit());
  REQUIRE(p.stages.size() == 4);
  for (const StageRow& row : p.stages) CHECK(row.run.does_not_fit());  // 93 GB of states at stage 3 too
  REQUIRE(p.nearest);
  REQUIRE(p.nearest->result);
  CHECK(p.nearest->changes[0].to == "3");
}

TEST_CASE("hf-10929, ds-1302: sharding a small model costs more than it saves, and from which size on it pays") {
  const auto on_two = [](const std::string& model) {
    return Case(
        R"({"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": true}, "zero_optimization": {"stage": 3}})",
        find_model(model), machine_of("2xRTX-3090"));
  };
  const Case small = on_two("t5-small");
  const CheckPrediction p = small.predicted(tokens(512, false));
  REQUIRE(p.stages.size() == 4);
  CHECK(p.stages[3].run.memory->allocated > p.stages[0].run.memory->allocated);
  CHECK(remarks(p, "than stage 0"));
  CHECK(remarks(p, "Below about"));
  // Without contiguous_gradients stage 3 has no bucket that could outweigh anything.
  const Case unbucketed(
      R"({"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": true}, "zero_optimization": {"stage": 3,
          "contiguous_gradients": false}})",
      find_model("t5-small"), machine_of("2xRTX-3090"));
  CHECK_FALSE(remarks(unbucketed.predicted(tokens(512, false)), "Below about"));
  const Case large = on_two("opt-1.3b");
  CHECK_FALSE(remarks(large.predicted(tokens(512, false)), "Below about"));
}

TEST_CASE("A higher stage that needs more is said, and only then") {
  // dsx-336, ds-5305: long sequences make activations, not states, decide.
  const ModelSpec model = decoder(1024, 8, 2816, 16, 1000);
  int said = 0;
  for (const int stage : {1, 2, 3}) {
    for (const std::int64_t length : {64, 2048}) {
      const Case of(fmt::format(R"({{"train_micro_batch_size_per_gpu": 4, "fp16": {{"enabled": true}},
                                    "zero_optimization": {{"stage": {}}}}})",
                                stage),
                    model, machine_of("2xRTX-3090"));
      const CheckPrediction p = of.predicted(tokens(length, false));
      REQUIRE(p.stages.size() == 4);
      const Bytes own = p.stages[static_cast<std::size_t>(stage)].run.memory->allocated;
      bool lower_is_less = false;
      for (int i = 0; i < stage; ++i)
        lower_is_less |= p.stages[static_cast<std::size_t>(i)].run.memory->allocated < own;
      INFO(stage << " " << length);
      CHECK(remarks(p, fmt::format("Stage {} allocates", stage)) == lower_is_less);
      said += lower_is_less ? 1 : 0;
    }
  }
  CHECK(said > 0);
}

TEST_CASE("dsx-172, nemorl-2871: a card that is nearly full, and what each change gives back") {
  Case of(R"({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3,
              "overlap_comm": true}})",
          find_model("opt-1.3b"), machine_of("4xA100-40G"));
  const CheckPrediction roomy = of.predicted(tokens(1024, false));
  CHECK(roomy.gains.empty());
  // A card with 2 % more than the step reserves: fits without a margin, called tight.
  const EngineFit& fit = *roomy.run.memory;
  of.machine.gpu.memory = (fit.reserved_high + fit.overhead) * 1.02;
  CheckWorkload flags = tokens(1024, false);
  flags.margin = 0;
  const CheckPrediction p = of.predicted(flags);
  REQUIRE(p.run.memory->fits());
  CHECK(is_tight(*p.run.memory));
  CHECK(remarks(p, "cache flushes"));
  REQUIRE(p.gains.size() >= 4);
  for (const Gain& gain : p.gains) {
    // Each figure is that of the file with the change made.
    Json json = Json::parse(of.file.text());
    EngineWorkload w = p.run.workload;
    for (const KeyChange& change : gain.changes) {
      if (change.in_script) {
        w.checkpointing = change.to == "true";
        continue;
      }
      std::string pointer = "/" + change.key;
      std::ranges::replace(pointer, '.', '/');
      json[Json::json_pointer(pointer)] = Json::parse(change.to);
    }
    const DeepSpeedConfig config = read_deepspeed_config(text_of(json.dump()), of.model.hidden);
    w.tokens.batch = config.micro_batch.value_or(1);
    w.accumulation = config.accumulation.value_or(1);
    EngineFitter fitter(of.model, of.machine, 0);
    INFO(gain.changes.front().key);
    CHECK(fitter.deepspeed(config, w).allocated == fit.allocated - gain.allocated);
  }
  // The 5 % margin refuses what fits by 2 %.
  CHECK_FALSE(of.predicted(tokens(1024, false)).run.fits_well());
}

TEST_CASE("ds-5109, axo-1129, eullm-408: a frozen base under stage 3") {
  const Case of(
      R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}})",
      find_model("llama-30b"), machine_of("8xA100-80G"));
  const CheckPrediction p = of.predicted(tokens(2048, true, 16));
  CHECK(number("ds-5109", "sharded_gb") == Approx(8.1));
  CHECK(remarks(p, fmt::format("{:.1f} GB a GPU when stage 3 shards it", number("ds-5109", "sharded_gb"))));
  CHECK(remarks(p, fmt::format("{:.1f} GB when deepspeed.zero.Init", 65.1)));
  CHECK(remarks(p, "ds_numel"));
  CHECK(remarks(p, "quantized weights are never sharded (32.5 GB in 8 bits, 16.3 GB in 4)"));
  CHECK(remarks(p, "modules_to_save"));  // qwen-1104

  const ModelSpec moe = find_model("qwen3-30b-a3b");
  CHECK(bytes_of(largest_gather(eager(moe, {1, 64}, true)), DType::bf16).base() / kMiB == number("eullm-408", "mib"));
  const Case experts(
      R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}})", moe,
      machine_of("4xA100-80G"));
  CHECK(remarks(experts.predicted(tokens(2048, false)), "402,653,184 elements, 768 MiB"));
  CHECK(remarks(experts.predicted(tokens(2048, false, 16)), "402,653,184 elements, 768 MiB"));  // as it was run
}

TEST_CASE("page-moltq, ds-4100: 70B on 4 x A100-80G, in seconds") {
  Request request;
  request.model = find_model("llama-3.1-70b");
  request.machine = machine_of("4xA100-80G");
  request.seq_len = 2048;
  request.machine.nvme = {};
  set_host_memory(request.machine, Bytes(1200e9));
  const double begin = processor_seconds();
  const Answer fits = search(request);
  CHECK(processor_seconds() - begin < 10);
  CHECK(fits.feasible);
  CHECK(fits.plans.front().plan.zero_stage == 3);
  set_host_memory(request.machine, Bytes(512e9));
  const Answer refused = search(request);
  CHECK_FALSE(refused.feasible);
  REQUIRE(refused.shortfall);
  CHECK(refused.shortfall->lacks.front().tier == "host");
  CHECK_FALSE(refused.shortfall->changes.empty());
  // Stage 2 keeps 141.1 GB of weights on each GPU.
  request.constraints.stages = {2};
  const Answer second = search(request);
  CHECK_FALSE(second.feasible);
  CHECK(second.shortfall->nearest.prediction.gpu.peak.base() > 141.1e9);
}

TEST_CASE("ds-7474: offload is started with cores bound, and its step is within twice the report's") {
  const Case of(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization":
                    {"stage": 2, "offload_optimizer": {"device": "cpu"}}})",
                find_model("qwen2.5-3b"), machine_of("2xA100-40G"));
  const CheckPrediction p = of.predicted(tokens(1024));
  REQUIRE(p.run.time);
  CHECK(p.run.time->step.base() < 2 * 2.383);
  CHECK(p.run.time->step.base() > 2.383 / 2);
  CHECK(remarks(p, "--bind_cores_to_rank"));
}

// --- files -------------------------------------------------------------------------------------------

TEST_CASE("ds-6914, llf-2574: ranks that no launcher joined") {
  const std::pair<const char*, int> files[] = {
      {R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1})", 4},
      {R"({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1})", 16}};
  for (const auto& [text, ranks] : files) {
    INFO(text);
    const CheckAnswer one = linted(text, "1xA100-80G");
    REQUIRE(find(one, "batch-identity") != nullptr);
    CHECK_THAT(find(one, "batch-identity")->message, HasText(fmt::format("holds on {} ranks", ranks)));
    CHECK_THAT(find(one, "batch-identity")->message, HasText("without torchrun or deepspeed"));
    if (ranks > 8) continue;
    const CheckAnswer all = linted(text, fmt::format("{}xA100-80G", ranks));
    CHECK(find(all, "batch-identity") == nullptr);
    CHECK_FALSE(all.has_errors());
  }
}

TEST_CASE("Keys that people misspelt, misplaced or relied on, with what is said of them") {
  struct Said {
    const char* id;
    const char* text;
    const char* rule;
    const char* words;
  };
  const Said cases[] = {
      {"ds-653", R"({"train_batch_size": 8, "gradient_clipp1ng": 1})", "misspelt-key-ignored", "gradient_clipping"},
      {"ds-774", R"({"train_batch_size": 8, "zero_optimisation": {"stage": 2}})", "misspelt-key-ignored",
       "zero_optimization"},
      {"ds-1809", R"({"train_batch_size": 8, "no_such_field": 1})", "unknown-key-ignored", "is no key"},
      {"dsx-200",
       R"({"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage3_param_persitence_threshold": 1e5}})",
       "misspelt-key-refused", "stage3_param_persistence_threshold"},
      {"axo-2964", R"({"train_batch_size": 8, "zero_optimization": {"stage": 3, "prefetch_bucket_size": "auto"}})",
       "auto-alias", "not found in kwargs"},
      {"axo-2964",
       R"({"train_batch_size": 8, "zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": true}})",
       "alias-name", "look for the long name"},
      {"acc-2814",
       R"({"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 15099494.4}})",
       "fractional-integer", "ValidationError"},
      {"acc-941", R"({"train_batch_size": 8, "zero3_init_flag": true})", "accelerate-key-ignored", "accelerate config"},
      {"mds-452", R"({"train_batch_size": 8, "activation_checkpointing": {"partition_activations": true}})",
       "activation-section", "gradient_checkpointing"},
      {"oi-1498", R"({"train_batch_size": 8, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}})",
       "accumulation-by-hand", "loses all gradients but the last"},
      {"ds-2252",
       R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "zero_optimization": {"stage": 2}})",
       "reduces-each-micro-step", "8 micro-steps"},
      {"hf-34524",
       R"({"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": false}})",
       "save-gather-off", "without an error"},
      {"ds-3721", R"({"train_batch_size": 8, "zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}})",
       "stage3-key-below-3", "no effect at stage 2"},
      {"ds-6420, ds-5047",
       R"({"train_batch_size": 8, "zero_optimization": {"stage": 3, "allgather_bucket_size": 2e8}})",
       "unread-key-default", "no effect at stage 3"}};
  for (const Said& c : cases) {
    INFO(c.id);
    const CheckAnswer answer = linted(c.text);
    const Finding* finding = find(answer, c.rule);
    REQUIRE(finding != nullptr);
    CHECK_THAT(finding->message, HasText(c.words));
  }
  CHECK(
      find(
          linted(
              R"({"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": false}})"),
          "save-gather-off")
          ->rule->severity == Severity::warning);
  // acc-2814: 5e8 is an integer. ds-653: notes to oneself are left alone.
  const CheckAnswer fine = linted(
      R"({"train_batch_size": 8, "_comment": "mine", "x-team": 3, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}})");
  CHECK(find(fine, "fractional-integer") == nullptr);
  CHECK_FALSE(std::ranges::any_of(fine.findings, [](const Finding& f) { return f.rule->severity != Severity::note; }));
  // oi-1498 at stage 3, ds-2252 at stage 1: nothing to say.
  CHECK(find(linted(R"({"train_batch_size": 8, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 3}})"),
             "accumulation-by-hand") == nullptr);
  CHECK(find(linted(R"({"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}})"),
             "reduces-each-micro-step") == nullptr);
}

TEST_CASE("ds-6420: stage-3 sizes are told in bytes of the model") {
  const Case of(R"({"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3,
                    "stage3_prefetch_bucket_size": 5e7, "stage3_param_persistence_threshold": 1e5}})",
                find_model("13B"), machine_of("8xA100-80G"));
  const CheckAnswer answer = of.lint();
  const Finding* finding = find(answer, "stage3-knobs");
  REQUIRE(finding != nullptr);
  CHECK_THAT(finding->message, HasText("prefetch 95 MiB"));
  CHECK_THAT(finding->message, HasText("persistence 100,000 elements: 1 MiB never sharded"));
  CHECK(finding->message.find("live") == std::string::npos);  // not in the file
}

TEST_CASE("ds-3506: a tensor that the swap buffer does not hold") {
  const ModelSpec nllb = read_model(
      R"({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 2048, "d_ff": 8192, "d_kv": 64,
          "num_heads": 32, "num_layers": 24, "vocab_size": 256206})",
      "nllb.json");
  REQUIRE(largest_parameter(nllb) == fact("ds-3506").at("largest").get<std::int64_t>());
  const Case of(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3,
                    "offload_param": {"device": "nvme", "nvme_path": "/local", "buffer_size": 1e8}}})",
                nllb, machine_of("1xA100-80G"));
  const CheckAnswer answer = of.lint();
  const Finding* finding = find(answer, "param-buffer-small");
  REQUIRE(finding != nullptr);
  CHECK_THAT(finding->message, HasText("524,709,888"));
  const Case fixed(fix_deepspeed(of.input()).text, nllb, of.machine);
  CHECK(fixed.lint().config.offload_param.buffer_size >= largest_parameter(nllb));
}
