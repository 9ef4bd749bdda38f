// Cases of docs/user-cases.md: rates, counts and plans.

#include <fmt/format.h>

#include <algorithm>

#include "models/state_regimes.h"
#include "planner/lint_parts.h"
#include "planner/required_rates.h"
#include "planner/search.h"
#include "sim/engine_time.h"
#include "tests/catch.h"
#include "tests/user_case.h"

using namespace zeroplan;
using namespace zeroplan::tests;

// --- rates and counts --------------------------------------------------------------------------------

TEST_CASE("ds-2252: what a step reduces and gathers, by stage and accumulation") {
  const ModelSpec model = decoder(512, 8, 1408, 8, 1000);
  const double p = static_cast<double>(model.parameters()) * 2;  // bytes of bf16
  for (const int accumulation : {1, 4}) {
    const auto traffic = [&](int stage) {
      const Case of(fmt::format(R"({{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": {},
                                    "bf16": {{"enabled": true}}, "zero_optimization": {{"stage": {},
                                    "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
                                    "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}}}})",
                                accumulation, stage),
                    model, machine_of("4xA100-80G"));
      return of.predicted(tokens(256, false)).run.memory->prediction.traffic;
    };
    INFO(accumulation);
    CHECK(traffic(1).all_reduce.base() == Approx(p).epsilon(0.01));
    CHECK(traffic(2).all_reduce.base() == Approx(accumulation * p).epsilon(0.01));
    CHECK(traffic(3).reduce_scatter.base() == Approx(accumulation * p).epsilon(0.01));
    CHECK(traffic(3).all_gather.base() == Approx(2 * accumulation * p).epsilon(0.05));
    CHECK(traffic(1).all_gather.base() == Approx(p).epsilon(0.01));
  }
}

TEST_CASE("ds-2928: the network that stage 3 of 70B needs on 64 GPUs") {
  Request request;
  request.model = find_model("70B");
  request.machine = machine_of("8xA100-80G", 8);
  request.machine.network.bandwidth = BytesPerSecond(100e9 / 8);
  request.constraints.stages = {3};
  const Answer answer = search(request);
  REQUIRE(answer.feasible);
  const std::vector<RequiredRate> rates = required_rates(answer, answer.plans.front());
  const auto network = std::ranges::find(rates, ResourceRole::network, &RequiredRate::role);
  REQUIRE(network != rates.end());
  // 100 Gb/s is not enough, 200 to 400 are.
  const double gbits = 8 * network->needed.base() / 1e9;
  CHECK(gbits > 200);
  CHECK(gbits < 400);
  // With that network the plan no longer waits.
  request.machine.network.bandwidth = network->needed;
  Predictor faster(request.model, request.machine);
  CHECK(faster.step_with(answer.plans.front().plan, ResourceRole::sm, 1) <= network->unlimited * 1.06);
}

TEST_CASE("ds-998: faster drives never slow a plan, and from some batch on they are fast enough") {
  Request request;
  request.model = find_model("13B");
  request.machine = machine_of("1xA100-80G");
  request.seq_len = 2048;
  request.global_batch = 8;
  request.constraints.offload = Offload{OffloadWhat::optimizer, Tier::nvme};
  set_host_memory(request.machine, Bytes(128e9));
  set_nvme(request.machine, "1x4TB@3GB/s");
  const Answer answer = search(request);
  REQUIRE(answer.feasible);
  const Plan& plan = answer.plans.front().plan;
  Seconds last(1e9);
  for (const double gbps : {1.5, 3.0, 6.0, 12.0, 48.0}) {
    MachineSpec machine = request.machine;
    machine.nvme.read = BytesPerSecond(gbps * 1e9);
    machine.nvme.write = BytesPerSecond(gbps * 0.5e9);
    const Seconds step = Predictor(request.model, machine).step_with(plan, ResourceRole::sm, 1);
    CHECK(step <= last);
    last = step;
  }
  const std::vector<RequiredRate> rates = required_rates(answer, answer.plans.front());
  const auto drives = std::ranges::find_if(rates, [](const RequiredRate& r) {
    return r.role == ResourceRole::nvme_read || r.role == ResourceRole::nvme_write;
  });
  REQUIRE(drives != rates.end());
  CHECK(drives->needed > drives->now);
  REQUIRE(drives->batch);
  CHECK(*drives->batch > 8);
  Plan larger = plan;
  larger.accumulation *= *drives->batch / plan.global_batch();
  Predictor now(request.model, request.machine);
  CHECK(now.step_with(larger, drives->role, 1) <= now.step_with(larger, drives->role, 1e-6) * 1.05);
}

TEST_CASE("pages-gpu-guides, swift-95, mle-23: the figures that guides quote are regimes of one model") {
  const ModelSpec model = find_model("llama-3.1-70b");
  const auto regimes = state_regimes();
  CHECK(std::ranges::is_sorted(regimes, {}, &StateRegime::bytes));
  const Json& range = fact("page-gpu-guides").at("gb");
  // The least and the most that guides quote for training in full lie between the regimes' ends.
  CHECK(state_bytes(model, regimes.front()).base() / kGb == Approx(range[0].get<double>()).epsilon(0.01));
  CHECK(state_bytes(model, regimes.back()).base() / kGb > range[1].get<double>());
  // swift-95: 95 GB for Qwen-7B is 12 bytes a parameter.
  CHECK(
      std::ranges::any_of(regimes, [](const StateRegime& r) { return r.bytes == Approx(95.0 / 7.72).epsilon(0.03); }));
  // Frozen weights stay at two bytes.
  ModelSpec adapted = model;
  apply_lora(adapted, 16);
  CHECK(state_bytes(adapted, regimes.front()).base() ==
        2.0 * static_cast<double>(model.parameters()) + 8.0 * static_cast<double>(adapted.trainable_parameters()));
  // A GPU alone shards nothing: what check counts for DeepSpeed in a step is one of them, the highest.
  for (const int stage : {2, 3}) {
    DeepSpeedConfig config;
    config.stage = stage, config.precision = DType::bf16, config.reduce_bucket = 0;
    CHECK(gpu_states(config, 1'000'000, 1).bytes.base() == regimes.back().bytes * 1'000'000);
  }
  // check says which one a configuration is (mle-23).
  const Case of(
      R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}})",
      find_model("gpt2-xl"), machine_of("8xA100-80G"));
  CHECK(remarks(of.predicted(tokens(512)), "2 bytes of each parameter, 20 of the share of 8 ranks"));
}

TEST_CASE("fmsfsdp: Llama 2 on 128 A100, against runs that nothing here was fitted to") {
  // Their stack: FSDP1 with compiled blocks; the network is not stated: p4de's 400 Gb/s.
  MachineSpec machine = find_machine("p4de.24xlarge");
  machine.nodes = 16;
  struct Row {
    const char* model;
    std::int64_t batch;
    bool recompute, hybrid;
    double tokens_per_second;
  };
  for (const Row& row : {Row{"llama-2-7b", 2, false, true, 3760}, Row{"llama-2-13b", 1, false, true, 1700},
                         Row{"34b", 8, true, false, 772}, Row{"llama-2-70b", 6, true, false, 380}}) {
    EngineTimeRun run;
    run.engine = TimedEngine::fsdp1;
    run.tokens = {row.batch, 4096};
    run.ranks = 128;
    run.shard_ranks = row.hybrid ? 8 : 0;
    run.recompute = row.recompute ? TimedRecompute::full : TimedRecompute::none;
    run.stack = KernelStack::compiled_blocks;
    run.optimizer = OptimizerSoftware::torch_fused;
    // Code Llama's shape stands for the 34B that Meta kept.
    const ModelSpec model =
        row.model == std::string("34b")
            ? read_model(
                  R"({"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 48, "intermediate_size": 22016,
                             "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000})",
                  "34b.json")
            : find_model(row.model);
    const EngineTime time = predict_engine_time(model, machine, run);
    INFO(row.model);
    const double predicted = static_cast<double>(row.batch * 4096) / time.step.base();
    CHECK(predicted == Approx(row.tokens_per_second).epsilon(0.2));
  }
}

TEST_CASE("tt-h200: fp8 Llama 3.1 8B from 32 to 64 H200") {
  const auto tokens_per_second = [](int nodes) {
    MachineSpec machine = machine_of("8xH200", nodes);
    machine.network = {8, BytesPerSecond(8 * 50e9), "InfiniBand NDR", true};  // 400 Gb/s a GPU
    EngineTimeRun run;
    run.engine = TimedEngine::fsdp2;
    run.tokens = {2, 8192};
    run.ranks = 8 * nodes;
    run.fp8 = true;
    run.recompute = TimedRecompute::selective;
    run.stack = KernelStack::compiled_blocks;
    run.optimizer = OptimizerSoftware::torch_fused;
    const EngineTime time = predict_engine_time(find_model("llama-3.1-8b"), machine, run);
    return 2 * 8192 / time.step.base();
  };
  const double on_32 = tokens_per_second(4), on_64 = tokens_per_second(8);
  CHECK(on_32 == Approx(10938).epsilon(0.1));
  CHECK(on_64 == Approx(10753).epsilon(0.1));
  CHECK(on_64 / on_32 == Approx(0.983).margin(0.01));
}

TEST_CASE("cb-36, llma-19, acc-3383: parameters are counted from the configuration, whatever its dtype") {
  CHECK(static_cast<double>(find_model("qwen1.5-72b").parameters()) ==
        Approx(number("cb-36", "parameters")).epsilon(0.001));
  const auto counted = [](const std::string& type) {
    return read_model(R"({"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "intermediate_size": 2816,
                          "num_attention_heads": 16, "vocab_size": 32000, "torch_dtype": ")" +
                          type + "\"}",
                      "config.json")
        .parameters();
  };
  CHECK(counted("float32") == counted("bfloat16"));
}
