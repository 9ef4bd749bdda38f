// Cases of docs/user-cases.md: memory of GPU and host, and the loss.

#include <fmt/format.h>

#include <algorithm>

#include "models/error.h"
#include "planner/check_prediction_report.h"
#include "planner/deepspeed_releases.h"
#include "planner/engine_prediction.h"
#include "planner/loss_memory.h"
#include "sim/caching_allocator.h"
#include "tests/catch.h"
#include "tests/user_case.h"

using namespace zeroplan;
using namespace zeroplan::tests;

// --- buckets -----------------------------------------------------------------------------------------

TEST_CASE("ds-1302: the sweep of ZeRO-2's buckets, row by row") {
  const Json& rows = fact("ds-1302").at("rows");
  const auto buffers = [](const Json& row) {
    const DeepSpeedConfig c = config_of(
        fmt::format(R"("stage": 2, "contiguous_gradients": {}, "overlap_comm": {}, "reduce_bucket_size": {})",
                    row["contiguous_gradients"].dump(), row["overlap_comm"].dump(), row["reduce_bucket_size"].dump()),
        "fp16");
    return reduction_buffers(c, {2023, 1});
  };
  const Json& last = rows.back();
  for (const Json& row : rows) {
    INFO(row.dump());
    const double observed = row["mib"].get<double>() - last["mib"].get<double>();
    CHECK((buffers(row) - buffers(last)).base() / kMiB == Approx(observed).margin(5));
  }
}

TEST_CASE("ds-1302: the replayed step of rank 0 differs as the sweep does") {
  // No eager graph of ViT: a decoder of its width and depth, with a vocabulary as small as its classes.
  const ModelSpec model = read_model(
      R"({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 1664, "n_layer": 48, "n_inner": 8192,
          "n_head": 16, "vocab_size": 1000, "n_positions": 257, "tie_word_embeddings": true})",
      "gpt-g.json");
  const EagerStep step = eager(model, {8, 257}, false, DType::fp16);
  const Json& rows = fact("ds-1302").at("rows");
  std::vector<double> peaks;
  for (const Json& row : rows) {
    DeepSpeedJob job;
    job.config = config_of(
        fmt::format(
            R"("stage": 2, "contiguous_gradients": {}, "overlap_comm": {}, "reduce_scatter": {}, "reduce_bucket_size": {})",
            row["contiguous_gradients"].dump(), row["overlap_comm"].dump(), row["reduce_scatter"].dump(),
            row["reduce_bucket_size"].dump()),
        "fp16");
    job.ranks = 8;
    peaks.push_back(predict_deepspeed(step, {8, 257}, job, {}).memory.steps.back().backward.base() / kMiB);
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    INFO(rows[i].dump());
    const double observed = rows[i]["mib"].get<double>() - rows.back()["mib"].get<double>();
    CHECK(peaks[i] - peaks.back() == Approx(observed).margin(30));
  }
}

TEST_CASE("ds-pr374: 4.5 times the bucket is a matter of 2020 and 2021") {
  const DeepSpeedConfig c = config_of(R"("stage": 2, "overlap_comm": true, "reduce_bucket_size": 5e8)", "fp16");
  CHECK(reduction_buffers(c, {2020, 10}).base() == number("ds-pr374", "then"));
  CHECK(reduction_buffers(c, {2021, 5}).base() == number("ds-pr374", "now"));
  CHECK(reduction_buffers(c, {2026, 1}).base() == number("ds-pr374", "now"));
  const Case of(R"({"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": true},
                    "zero_optimization": {"stage": 2, "overlap_comm": true}})",
                find_model("gpt2-xl"), machine_of("8xA100-80G"));
  CHECK(release_differences(c, of.model, of.machine).empty());  // not said of today's
  const auto then = release_differences(c, of.model, of.machine, {2020, 12});
  REQUIRE(then.size() == 1);
  CHECK(then[0].gpu.base() == number("ds-pr374", "then") - number("ds-pr374", "now"));
  CHECK_THROWS_AS(parse_release_month("0.3", "--release"), InputError);
  CHECK_THROWS_AS(parse_release_month("2021-13", "--release"), InputError);
  CHECK(parse_release_month("2021-03", "--release") == ReleaseMonth{2021, 3});
}

TEST_CASE("ds-pr7307, ds-pr7689: offload at stages 1 and 2 before 2025") {
  const auto parameters = fact("ds-pr7307").at("parameters").get<std::int64_t>();
  const DeepSpeedConfig c = config_of(R"("stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": false})");
  const Bytes weights = bytes_of(parameters, DType::bf16);
  CHECK((weights + offload_step_copy(c, parameters, 1, {2025, 4})).base() / kGb == number("ds-pr7307", "then_gb"));
  CHECK(offload_step_copy(c, parameters, 1, {2025, 5}) == Bytes());
  CHECK(offload_step_copy(config_of(R"("stage": 3, "offload_optimizer": {"device": "cpu"})"), parameters, 1,
                          {2025, 4}) == Bytes());

  // 0.19, a decoder of 10 G parameters: the whole of the step's memory.
  const Case ten(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization":
                     {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": false}}})",
                 decoder(4096, 48, 11008, 32, 32000), machine_of("1xA100-80G"));
  REQUIRE(ten.model.parameters() == Approx(10e9).epsilon(0.02));
  const CheckPrediction p = ten.predicted(tokens(512));
  REQUIRE(p.run.memory);
  const double gb = p.run.memory->prediction.memory.steps.back().step.base() / kGb;
  CHECK(gb > fact("ds-pr7307").at("now_gb")[0].get<double>());
  CHECK(gb < fact("ds-pr7307").at("now_gb")[1].get<double>());
  // Both differences are said, with the months.
  REQUIRE(p.releases.size() == 2);
  CHECK(p.releases[0].gpu.base() == 4.0 * static_cast<double>(ten.model.parameters()));
  CHECK(p.releases[1].to == ReleaseMonth{2025, 11});
  CHECK(p.releases[1].pinned.base() > 10.0 * static_cast<double>(ten.model.parameters()));
}

// --- host memory -------------------------------------------------------------------------------------

TEST_CASE("pin-pow2: pinned blocks are rounded up to powers of two") {
  for (const Json& row : fact("pin-pow2").at("rows")) {
    INFO(row.dump());
    const auto asked = static_cast<std::int64_t>(row[0].get<double>() * kGiB);
    CHECK(static_cast<double>(PinnedHostAllocator::rounded(asked)) == row[1].get<double>() * kGiB);
  }
  // Offloaded states: the factor is said, with a sub-group that rounds to nothing.
  const Case of(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization":
                    {"stage": 3, "sub_group_size": 600000000, "offload_optimizer": {"device": "cpu", "pin_memory": true}}})",
                find_model("7B"), machine_of("1xA100-80G"));
  const CheckAnswer answer = of.lint();
  const Finding* finding = find(answer, "host-pinned-factor");
  REQUIRE(finding != nullptr);
  CHECK_THAT(finding->fix, HasText("\"sub_group_size\": 536870912"));
  DeepSpeedConfig even = answer.config;
  even.sub_group = 536870912;
  CHECK(offloaded_host_bytes(even, of.model, of.machine).rounded <
        offloaded_host_bytes(answer.config, of.model, of.machine).rounded);
}

TEST_CASE("ds-4380, ds-3823, ds-4239: exit code -9 is the host, and what gives it room") {
  Case of(R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "bf16": {"enabled": true},
              "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}})",
          find_model("7B"), machine_of("1xA100-80G"));
  set_host_memory(of.machine, Bytes(160e9));
  of.machine.nvme = {};
  const CheckPrediction p = of.predicted(tokens(2048));
  REQUIRE(p.run.memory);
  CHECK_FALSE(p.run.memory->host_fits());
  CHECK(p.run.memory->gpu == GpuVerdict::fits);
  CHECK(remarks(p, "exit code -9 (SIGKILL)"));
  CHECK(remarks(p, "torch.OutOfMemoryError is the GPU's"));
  // The GPU has room: parameters go back to it, the optimizer stays.
  REQUIRE(p.nearest);
  REQUIRE(p.nearest->result);
  REQUIRE(p.nearest->changes.size() == 1);
  CHECK(p.nearest->changes[0].key == "zero_optimization.offload_param.device");
  CHECK(p.nearest->changes[0].to == "\"none\"");
  // What gives most host memory back stands first.
  REQUIRE_FALSE(p.gains.empty());
  CHECK(p.gains.front().changes.front().key == "zero_optimization.offload_optimizer.device");
  CHECK(std::ranges::is_sorted(p.gains, std::ranges::greater(), [](const Gain& g) { return g.host; }));
  CHECK_THAT(report_prediction(p, of.machine, {}), HasText("What each change takes"));
}

TEST_CASE("hfblog-fsdp70, ds-2899, lmflow-160: what loading takes beside the steady step") {
  const StorageNeeds llama = storage_needs(find_model("llama-2-70b"), machine_of("8xA100-80G", 2), config_of(""));
  const Json& range = fact("hfblog-fsdp70").at("naive_tb");
  CHECK(llama.load_each_fp32.base() / 1e12 > range[0].get<double>());
  CHECK(llama.load_each_fp32.base() / 1e12 < range[1].get<double>());
  CHECK(llama.load_one_fp32.base() / kGb == Approx(number("hfblog-fsdp70", "one_gb")).epsilon(0.002));

  const DeepSpeedConfig both =
      config_of(R"("stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"})", "fp16");
  const ModelSpec galactica = find_model("opt-30b");
  const MachineSpec two = machine_of("4xA100-80G", 2);
  CHECK(storage_needs(galactica, two, both).load_gpu.base() / kGiB ==
        Approx(number("ds-2899", "load_gib")).epsilon(0.001));
  // 16-bit weights of a rank as one pinned block, rounded.
  DeepSpeedConfig weights = both, none = both;
  weights.offload_optimizer.device = OffloadDevice::none;
  weights.offload_param.pin_memory = false;
  none.offload_param.device = none.offload_optimizer.device = OffloadDevice::none;
  const double added =
      offloaded_host_bytes(weights, galactica, two).rounded.base() - 4 * 1.6 * kGiB;  // the processes themselves
  CHECK(added / kGiB == Approx(number("ds-2899", "host_gib")).epsilon(0.1));
  // Eight fp32 copies of a 7B model.
  CHECK(storage_needs(find_model("llama-7b"), machine_of("8xV100-16G"), both).load_each_fp32.base() / kGb ==
        Approx(216).epsilon(0.01));
}

TEST_CASE("fc-1457, ds-3820, ds-1111: saving and going on") {
  ModelSpec base = decoder(6656, 60, 17920, 52, 32000);
  REQUIRE(base.parameters() == Approx(32.5e9).epsilon(0.01));
  const DeepSpeedConfig stage3 = config_of(R"("stage": 3)");
  ModelSpec thirty = decoder(6656, 55, 17920, 52, 32000);
  ModelSpec adapted = thirty;
  apply_lora(adapted, 16);
  const StorageNeeds lora = storage_needs(adapted, machine_of("2xA100-40G"), stage3);
  CHECK(lora.gather.base() / kGb == Approx(number("fc-1457", "gather_gb")).epsilon(0.02));
  CHECK(lora.weights.base() == 2.0 * static_cast<double>(adapted.trainable_parameters()));  // adapters alone
  CHECK(lora.weights < lora.gather * 0.01);

  MachineSpec drives = machine_of("8xA100-80G");
  set_nvme(drives, "4x2TB@6GB/s");
  const StorageNeeds seventy = storage_needs(find_model("70B"), drives, stage3);
  CHECK(seventy.weights.base() / kGb == Approx(number("ds-3820", "weights_gb")).epsilon(0.001));
  CHECK(seventy.states.base() / kGb == Approx(number("ds-3820", "states_gb")).epsilon(0.001));
  REQUIRE(seventy.write);
  CHECK(seventy.write->base() == Approx((seventy.weights + seventy.states).base() / drives.nvme.write.base()));

  const ModelSpec five = decoder(4096, 24, 11008, 32, 32000);
  const StorageNeeds resumed = storage_needs(five, machine_of("8xV100-16G", 4), config_of(R"("stage": 2)"));
  const double scale = static_cast<double>(five.parameters()) / number("ds-1111", "parameters");
  CHECK(resumed.resume.base() / kGb == Approx(number("ds-1111", "resume_gb") * scale).epsilon(1e-9));
  CHECK(storage_needs(five, machine_of("8xV100-16G", 4), stage3).resume == Bytes());
}

// --- the loss ----------------------------------------------------------------------------------------

TEST_CASE("mlm-132: logits of 8192 tokens, whole and in chunks") {
  const auto vocabulary = fact("mlm-132").at("vocabulary").get<std::int64_t>();
  const auto all = fact("mlm-132").at("tokens").get<std::int64_t>(),
             chunk = fact("mlm-132").at("chunk").get<std::int64_t>();
  CHECK(logits_bytes(all, vocabulary, DType::fp32).base() / kGiB ==
        Approx(number("mlm-132", "full_gib")).margin(0.001));
  CHECK(logits_bytes(chunk, vocabulary, DType::fp32).base() / kGiB ==
        Approx(number("mlm-132", "chunk_gib")).margin(0.001));
  // The same block in the eager step of a model with that vocabulary.
  const ModelSpec model = decoder(512, 2, 1408, 8, vocabulary);
  const LossBlocks blocks = loss_blocks(eager(model, {1, all}, true), {1, all}, vocabulary);
  CHECK(blocks.block == logits_bytes(all, vocabulary, DType::fp32));
  CHECK(blocks.fp32 >= 2);
  CHECK(eager_peaks(eager(model, {1, all}, true)).backward >= blocks.held);
}

TEST_CASE("nemorl-4222: two blocks of the logits' size as backward begins") {
  const auto vocabulary = fact("nemorl-4222").at("vocabulary").get<std::int64_t>();
  const auto all = fact("nemorl-4222").at("tokens").get<std::int64_t>();
  const ModelSpec model = decoder(512, 2, 1408, 8, vocabulary);
  const LossBlocks blocks = loss_blocks(eager(model, {1, all}, true), {1, all}, vocabulary);
  CHECK(blocks.block.base() / kGiB == Approx(number("nemorl-4222", "block_gib")).margin(0.005));
  CHECK(blocks.in_backward);
  CHECK(blocks.fp32 >= 2);
  CHECK(loss_blocks(eager(model, {1, 64}, true), {1, 64}, 0).held == Bytes());
}

// --- FSDP --------------------------------------------------------------------------------------------

TEST_CASE("pt-82001: what more GPUs save under FSDP is the states' share, no more") {
  const ModelSpec model = find_model("t5-3b");
  const EagerStep step = eager(model, {1, 256}, true);
  std::map<int, double> allocated, resident;
  for (const int ranks : {8, 32}) {
    Fsdp2Options options;
    options.ranks = ranks;
    const RunMemory memory = predict_fsdp2(step, {1, 256}, 1, options, {}).memory;
    resident[ranks] = memory.steps.back().after.base() / kGb;
    allocated[ranks] = memory.steps.back().backward.base() / kGb;
  }
  // After the step weights, master and states: 12 bytes; gradients too while backward ends: 16.
  const double states = number("pt-82001", "difference_gb");
  CHECK(resident[8] - resident[32] == Approx(states * 12 / 16).epsilon(0.02));
  CHECK(allocated[8] - allocated[32] < states * 1.02);
  const Json& seen = fact("pt-82001").at("reserved_gb");
  CHECK(states == Approx(seen[0].get<double>() - seen[3].get<double>()).margin(0.5));
}

TEST_CASE("litllama-389, awsome-220: grouped AdamW holds one more copy of the share in the step") {
  const ModelSpec model = find_model("llama-7b");
  const EagerStep step = eager(model, {1, 256}, true);
  Fsdp2Options options;
  options.ranks = 4;
  const StepMemory fused = predict_fsdp2(step, {1, 256}, 1, options, {}).memory.steps.back();
  options.adam = AdamForm::foreach;
  const StepMemory grouped = predict_fsdp2(step, {1, 256}, 1, options, {}).memory.steps.back();
  const double own = static_cast<double>(model.parameters()) / 4;
  // Above what stays after the step: fp32 gradients, and the term.
  const double extra = (grouped.step - grouped.after).base() / own - size_of(DType::fp32);
  const Json& range = fact("litllama-389").at("extra_bytes");
  CHECK(extra > range[0].get<double>() * 0.99);
  CHECK(extra < range[1].get<double>());
  CHECK(grouped.step > fused.step);
  CHECK(grouped.after < fused.after);  // step counts are on the host
  CHECK(grouped.after.base() == Approx(fused.after.base()).epsilon(1e-4));
  CHECK(grouped.backward.base() ==
        Approx(fused.backward.base()).epsilon(1e-4));  // it is the optimizer's peak, not backward's
  CHECK(grouped.step > grouped.backward);
  options.offload = true;
  CHECK_THROWS_AS(check(options), InputError);
}
