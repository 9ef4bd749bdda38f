// Whether configurations fit under DeepSpeed and FSDP2, and a deepspeed.json that does.

#include "planner/engine_fit.h"

#include <fmt/format.h>

#include "models/error.h"
#include "planner/export_fit.h"
#include "planner/search.h"
#include "tests/catch.h"

using namespace zeroplan;

namespace {

DeepSpeedConfig config_of(const std::string& zero) {
  const std::string text = R"({"bf16": {"enabled": true}, "zero_optimization": {)" + zero + "}}";
  return read_deepspeed_config(ConfigText::parse(text, "deepspeed.json"));
}

/// Every micro-step of every step, without the short cut of predict_deepspeed().
RunMemory replay_all(const EagerStep& step, TokenShape tokens, const DeepSpeedJob& job) {
  EngineTape tape;
  record_run(*make_deepspeed_engine(step, job, tape), step, {4, job.accumulation, 32 << 20, tokens}, tape);
  return replay(tape, {}, PeakCounting::each_phase);
}

Answer planned(const std::string& model, const std::string& gpus, Constraints constraints = {}, Bytes host = 1024_GiB) {
  Request request;
  request.model = find_model(model);
  request.machine = machine_for(parse_gpu_request(gpus), 1);
  set_host_memory(request.machine, host);
  request.constraints = std::move(constraints);
  return search(request);
}

}  // namespace

TEST_CASE("Three micro-steps and two steps stand for many, to the byte") {
  const ModelSpec model = find_model("smollm2-135m");
  const TokenShape tokens{2, 512};
  for (const bool checkpointing : {false, true}) {
    EagerOptions options;
    options.tokens = tokens;
    options.checkpointing = checkpointing;
    const EagerStep step = eager_step(model, options);
    for (const char* zero :
         {R"("stage": 0)", R"("stage": 1)", R"("stage": 2, "overlap_comm": true, "reduce_bucket_size": 5000000)",
          R"("stage": 2, "offload_optimizer": {"device": "cpu"})", R"("stage": 3, "overlap_comm": true)",
          R"("stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"})"}) {
      INFO(zero << " checkpointing " << checkpointing);
      DeepSpeedJob job;
      job.config = config_of(zero);
      job.ranks = 4;
      job.accumulation = 5;
      const RunMemory all = replay_all(step, tokens, job);
      const RunMemory few = predict_deepspeed(step, tokens, job, {}).memory;
      CHECK(few.steps.back().forward == all.steps.back().forward);
      CHECK(few.steps.back().backward == all.steps.back().backward);
      CHECK(few.steps.back().step == all.steps.back().step);
      CHECK(few.steps.back().after == all.steps.back().after);
      CHECK(few.peak_reserved == all.peak_reserved);
    }
  }
}

TEST_CASE("A smaller card: fits, fits after flushes, does not fit, in this order") {
  const ModelSpec model = find_model("tinyllama-1.1b");
  MachineSpec machine = machine_for(parse_gpu_request("8xA100-80G"), 1);
  const EngineWorkload workload{{2, 2048}, 1, 8, true, DType::bf16};
  int last = 0;
  std::vector<int> seen;
  for (double gib = 40; gib > 2; gib *= 0.93) {
    machine.gpu.memory = Bytes(gib * kGiB);
    EngineFitter fitter(model, machine, 0);
    const EngineFit fit = fitter.deepspeed(config_of(R"("stage": 2)"), workload);
    const int verdict = static_cast<int>(fit.gpu);
    INFO(gib << " GiB: " << describe(fit));
    CHECK(verdict >= last);
    last = verdict;
    seen.push_back(verdict);
    CHECK((fit.gpu == GpuVerdict::does_not_fit) == !fit.failure.empty());
    CHECK(fit.allocated <= fit.reserved);
  }
  for (const int verdict : {0, 1, 2}) CHECK(std::find(seen.begin(), seen.end(), verdict) != seen.end());
}

TEST_CASE("deepspeed.json fits under DeepSpeed even where the plan itself would not") {
  Constraints constraints;
  constraints.recompute = Recompute::none;
  const Answer answer = planned("llama-2-7b", "4xA100-80G", constraints);
  REQUIRE(answer.feasible);
  const Candidate& best = answer.plans.front();
  const ExportSubject subject{best.plan, answer.request.model, answer.request.machine, best.prediction,
                              answer.request.margin};
  EngineFitter fitter(answer.request.model, answer.request.machine, answer.request.margin);
  const DeepspeedFit planned_fit = deepspeed_as_planned(subject, fitter);
  const DeepspeedFit found = deepspeed_that_fits(subject, fitter);
  REQUIRE(found.fit);
  CHECK(found.fit->fits());
  CHECK(found.plan.global_batch() == best.plan.global_batch());
  if (!planned_fit.fit->fits()) {
    CHECK_FALSE(found.plan == best.plan);
    CHECK(found.exported.notes.front().find("as the plan has it") != std::string::npos);
  }
  // The file says what was found.
  const EngineWorkload workload{found.plan.micro_step(), found.plan.accumulation, found.plan.ranks,
                                found.plan.recompute != Recompute::none, DType::bf16};
  CHECK(fitter.deepspeed_text(found.exported.json, workload).allocated == found.fit->allocated);
}

TEST_CASE("A plan that DeepSpeed can only run with what no rule covers is exported as one that is known to fit") {
  // Two blocks of the optimizer stay on the GPU: offload_optimizer.ratio, whose memory is not modelled.
  const Answer answer = planned("llama-2-13b", "4xA10G", {}, 192_GiB);
  REQUIRE(answer.feasible);
  const Candidate& best = answer.plans.front();
  REQUIRE(best.plan.optimizer.hbm > 0);
  REQUIRE(best.plan.optimizer.host > 0);
  const ExportSubject subject{best.plan, answer.request.model, answer.request.machine, best.prediction,
                              answer.request.margin};
  EngineFitter fitter(answer.request.model, answer.request.machine, answer.request.margin);
  CHECK_THAT(deepspeed_as_planned(subject, fitter).unknown, tests::HasText("ratio"));
  const DeepspeedFit found = deepspeed_that_fits(subject, fitter);
  REQUIRE(found.fit);
  CHECK(found.fit->fits());
  CHECK(found.plan.optimizer.hbm == 0);
  CHECK(found.plan.global_batch() == best.plan.global_batch());
  CHECK(found.exported.json.find("\"ratio\"") == std::string::npos);
  CHECK_THAT(found.exported.notes.front(), tests::HasText("cannot be predicted (deepspeed: offload_optimizer.ratio"));
}

TEST_CASE("Where the host is too small and there are drives, states go to NVMe") {
  Constraints constraints;
  constraints.stages = {3};
  constraints.offload = Offload{OffloadWhat::optimizer, Tier::host};
  const Answer answer = planned("llama-2-7b", "4xA100-40G", constraints);
  REQUIRE(answer.feasible);
  const Candidate& best = answer.plans.front();
  MachineSpec machine = answer.request.machine;
  set_host_memory(machine, Bytes(112 * kGiB));
  const auto with_drives = [&](Bytes capacity) {
    machine.nvme = {4, capacity, BytesPerSecond(8e9), BytesPerSecond(4e9)};
    const ExportSubject subject{best.plan, answer.request.model, machine, best.prediction, answer.request.margin};
    EngineFitter fitter(answer.request.model, machine, answer.request.margin);
    return deepspeed_that_fits(subject, fitter);
  };
  const DeepspeedFit found = with_drives(Bytes(8e12));
  REQUIRE(found.fit);
  INFO(describe(*found.fit) << found.exported.json << found.exported.notes.front());
  CHECK(found.fit->fits());
  CHECK_THAT(found.exported.json, tests::HasText("nvme"));
  const DeepspeedFit crowded = with_drives(Bytes(1e9));
  INFO(crowded.exported.notes.front());
  CHECK_FALSE((crowded.fit && crowded.fit->fits()));
}

TEST_CASE("What no rule covers is not predicted") {
  const ModelSpec model = find_model("tinyllama-1.1b");
  const MachineSpec machine = machine_for(parse_gpu_request("8xA100-80G"), 1);
  EngineFitter fitter(model, machine, 0.05);
  CHECK_THROWS_AS(
      fitter.deepspeed(config_of(R"("stage": 3, "mics_shard_size": 3)"), {{1, 512}, 1, 8, true, DType::bf16}),
      InputError);
}

TEST_CASE("A trial fits exactly where the whole fit does, and never says more than that needs") {
  const ModelSpec model = find_model("smollm2-360m");
  int fitting = 0, over = 0;
  for (const double gib : {6.0, 8.0, 12.0, 24.0}) {
    MachineSpec machine = machine_for(parse_gpu_request("4xA100-80G"), 1);
    machine.gpu.memory = Bytes(gib * kGiB);
    set_host_memory(machine, Bytes((gib < 8 ? 24 : 256) * kGiB));
    for (const char* zero :
         {R"("stage": 1)", R"("stage": 2)", R"("stage": 3)", R"("stage": 3, "offload_optimizer": {"device": "cpu"})"}) {
      for (const std::int64_t batch : {1, 4, 8}) {
        INFO(gib << " GiB " << zero << " batch " << batch);
        const std::string text = fmt::format(R"({{"bf16": {{"enabled": true}}, "zero_optimization": {{{}}}}})", zero);
        const DeepSpeedConfig config = read_deepspeed_config(ConfigText::parse(text, "ds.json"), model.hidden);
        const EngineWorkload w{{batch, 1024}, 2, 4};
        const EngineFit whole = EngineFitter(model, machine, 0.05).deepspeed(config, w);
        const EngineTrial trial = EngineFitter(model, machine, 0.05).try_deepspeed(config, w, Bytes());
        CHECK(trial.fit.has_value() == whole.fits_in_step());
        if (trial.fit) {
          ++fitting;
          CHECK(trial.fit->device() == whole.device());
          CHECK(trial.fit->host == whole.host);
          CHECK(trial.fit->allocated == whole.allocated);
        } else {
          ++over;
          CHECK(trial.device_at_least <= whole.device());
          CHECK(trial.host <= whole.host);
        }
      }
    }
  }
  CHECK(fitting >= 8);
  CHECK(over >= 8);
}
