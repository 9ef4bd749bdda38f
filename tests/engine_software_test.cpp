// What of PyTorch's own choices a prediction depends on, and that the run makes the same ones: the form of AdamW under
// FSDP2, PYTORCH_CUDA_ALLOC_CONF, pinned buffers; and what a step's messages are on the links.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "models/error.h"
#include "planner/check_prediction.h"
#include "planner/check_prediction_report.h"
#include "planner/engine_plans.h"
#include "planner/exports.h"
#include "planner/search.h"
#include "tests/catch.h"

using namespace zeroplan;
using zeroplan::tests::HasText;

namespace {

Request request_of(const std::string& model, const std::string& gpus, Engine engine) {
  Request r;
  r.model = find_model(model);
  r.machine = machine_for(parse_gpu_request(gpus), 1);
  r.engine = engine;
  return r;
}

bool assumes(const Answer& answer, const std::string& what, const std::string& value) {
  return std::ranges::any_of(answer.assumptions,
                             [&](const Assumption& a) { return a.what == what && a.value == value; });
}

EagerStep small_step(const ModelSpec& model) {
  EagerOptions options;
  options.tokens = {1, 128};
  options.checkpointing = true;
  return eager_step(model, options);
}

/// Bytes that the optimizer's temporaries hold at most at one moment of the last step.
std::int64_t temporaries(const EngineTape& tape) {
  std::int64_t now = 0, most = 0;
  for (const TapeOp& op : tape.ops()) {
    if (op.kind != TapeKind::alloc && op.kind != TapeKind::free) continue;
    const TapeBuffer& buffer = tape.buffer(static_cast<TapeId>(op.id));
    if (buffer.role != BufferRole::workspace || buffer.owner != Owner::optimizer) continue;
    now += op.kind == TapeKind::alloc ? buffer.bytes : -buffer.bytes;
    most = std::max(most, now);
  }
  CHECK(now == 0);
  return most;
}

EngineRecording recorded(const EagerStep& step, AdamForm form, int ranks) {
  Fsdp2Options options;
  options.ranks = ranks;
  options.adam = form;
  return record_fsdp2(step, {1, 128}, 1, options, {});
}

CheckPrediction checked(const std::string& text, const ModelSpec& model, const MachineSpec& machine,
                        const CheckWorkload& workload) {
  const ConfigText file = ConfigText::parse(text, "ds.json");
  const CheckInput input{file, &model, &machine};
  return predict_check(input, check_deepspeed(input), workload);
}

std::string config_of(const std::string& zero) {
  return R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "bf16": {"enabled": true},
    "optimizer": {"type": "AdamW"}, "zero_optimization": {)" +
         zero + "}}";
}

}  // namespace

TEST_CASE("AdamW's forms hold nothing, the share's square roots, or three buffers of single parameters") {
  const ModelSpec model = find_model("smollm2-135m");
  const EagerStep step = small_step(model);
  for (const int ranks : {1, 3, 8}) {
    // Of each parameter, dimension 0 cut and padded; the loop keeps the last one's denominator while it makes two more.
    std::int64_t all = 0, last = 0, most = 0;
    for (const EagerParameter& p : step.parameters) {
      const std::int64_t bytes = (p.shape[0] + ranks - 1) / ranks * (p.elements / p.shape[0]) * 4;
      all += bytes;
      most = std::max(most, last + 2 * bytes);
      last = bytes;
    }
    CAPTURE(ranks);
    CHECK(temporaries(recorded(step, AdamForm::fused, ranks).tape) == 0);
    CHECK(temporaries(recorded(step, AdamForm::foreach, ranks).tape) == all);
    CHECK(temporaries(recorded(step, AdamForm::loop, ranks).tape) == most);
  }
}

TEST_CASE("Only the fused AdamW counts its steps on the GPU") {
  const EagerStep step = small_step(find_model("smollm2-135m"));
  const auto after = [&](AdamForm form) {
    return predict(recorded(step, form, 4), {}).memory.steps.back().after.base();
  };
  const double counts = 512.0 * static_cast<double>(step.parameters.size());  // 4 bytes in a block each
  CHECK(after(AdamForm::fused) - after(AdamForm::foreach) == counts);
  CHECK(after(AdamForm::loop) == after(AdamForm::foreach));
}

TEST_CASE("Plans under FSDP2 carry the form of AdamW: asked for on the GPU, the loop on the host, and say so") {
  Request r = request_of("llama-2-7b", "8xA100-80G", Engine::fsdp2);
  r.constraints.recompute = Recompute::full;
  const Answer usual = search(r);
  REQUIRE(usual.feasible);
  CHECK(assumes(usual, "AdamW", "fused"));
  r.adam = AdamForm::foreach;
  const Answer foreach = search(r);
  REQUIRE(foreach.feasible);
  CHECK(!assumes(foreach, "AdamW", "fused"));
  for (const Candidate& c : foreach.plans) {
    const bool host = c.plan.optimizer.hbm < c.plan.optimizer.total();
    CHECK(c.plan.adam == (host ? AdamForm::loop : AdamForm::foreach));
    check_plan(c.plan, r.model, "test");
  }
  CHECK_THAT(describe(foreach.plans.front().plan), HasText("foreach AdamW"));
  CHECK(foreach.plans.front().prediction.time.optimizer > usual.plans.front().prediction.time.optimizer);
  r.constraints.offload = Offload{OffloadWhat::all, Tier::host};
  CHECK_THROWS_AS(search(r), InputError);
  r.adam = AdamForm::loop;
  const Answer loop = search(r);
  REQUIRE(loop.feasible);
  CHECK(assumes(loop, "AdamW", "loop, on the host"));
}

TEST_CASE("The allocator's settings change what is reserved, and plan, export and simulation have the same ones") {
  Request r = request_of("llama-2-7b", "8xA100-80G", Engine::deepspeed);
  r.constraints.stages = {2};
  r.constraints.micro_batch = 1;
  const Answer usual = search(r);
  REQUIRE(usual.feasible);
  CHECK(assumes(usual, "PYTORCH_CUDA_ALLOC_CONF", "not set"));
  r.allocator_conf = "expandable_segments:True";
  const Answer expandable = search(r);
  REQUIRE(expandable.feasible);
  CHECK(!assumes(expandable, "PYTORCH_CUDA_ALLOC_CONF", "not set"));
  const Plan& plan = expandable.plans.front().plan;
  CHECK(plan.allocator_conf == r.allocator_conf);
  EnginePlans plans(r);
  Plan without = plan;
  without.allocator_conf.clear();
  const EngineFit fit = plans.fit(plan);
  CHECK(fit.reserved < plans.fit(without).reserved);
  CHECK(fit.allocated <= plans.fit(without).allocated);  // no block keeps a tail
  for (const Answer* answer : {&usual, &expandable}) {
    const ExportSet set = export_fitted(answer->plans.front(), *answer);
    for (const ExportFile& file : set.files) {
      if (file.name == "plan.json")
        CHECK(read_plan(file.text, "plan.json").plan.allocator_conf == answer->plans.front().plan.allocator_conf);
      if (file.name == "launch.sh")
        CHECK_THAT(file.text,
                   HasText(answer == &usual ? "planned_conf=''" : "planned_conf='expandable_segments:True'"));
    }
  }
  r.allocator_conf = "expandable_segment:True";
  CHECK_THROWS_AS(search(r), InputError);
}

TEST_CASE("What fits only after flushes is exported with growing segments when those keep it in step") {
  // A zeroplan plan on cards of many sizes: some are just too small for PyTorch's fragments.
  Request r = request_of("llama-3.2-1b", "8xA100-80G", Engine::zeroplan);
  r.constraints.stages = {2};
  r.constraints.micro_batch = 2;
  r.constraints.recompute = Recompute::none;
  r.seq_len = 2048;
  const Answer answer = search(r);
  REQUIRE(answer.feasible);
  int helped = 0;
  for (double gib = 12; gib <= 40; gib += 1) {
    Answer small = answer;
    small.request.machine.gpu.memory = Bytes(gib * kGiB);
    const ExportSet set = export_fitted(answer.plans.front(), small);
    const bool noted = std::ranges::any_of(set.notes, [](const std::string& note) {
      return note.find("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (launch.sh sets it)") != std::string::npos;
    });
    for (const ExportFile& file : set.files) {
      if (file.name != "launch.sh") continue;
      CHECK((file.text.find("planned_conf='expandable_segments:True'") != std::string::npos) == noted);
    }
    helped += noted ? 1 : 0;
  }
  CHECK(helped > 0);
  CHECK(helped < 29);
}

TEST_CASE("check: settings of the allocator, messages and what a rank sends of them") {
  const ModelSpec model = find_model("llama-3.2-1b");
  CheckWorkload workload;
  workload.seq_len = 1024;
  workload.checkpointing = false;
  for (const int gpus : {1, 2, 8}) {
    const MachineSpec machine = machine_for(parse_gpu_request(fmt::format("{}xA100-80G", gpus)), 1);
    for (const char* zero : {R"("stage": 1)", R"("stage": 2)", R"("stage": 3)"}) {
      CAPTURE(gpus, zero);
      const CheckPrediction p = checked(config_of(zero), model, machine, workload);
      REQUIRE(p.run.memory);
      const EnginePrediction& e = p.run.memory->prediction;
      // All collectives are among all ranks.
      const Bytes messages = e.traffic.all_gather + e.traffic.reduce_scatter + 2 * e.traffic.all_reduce;
      CHECK(e.sent.base() == Approx(messages.base() * (gpus - 1) / gpus));
      const std::string text = report_prediction(p, machine, {});
      CHECK((text.find("each rank sends") != std::string::npos) == (gpus > 1));
      CHECK(text.find(" 1 ranks") == std::string::npos);
      CHECK(text.find("-0.0 GiB") == std::string::npos);
      CHECK_THAT(text, HasText("PYTORCH_CUDA_ALLOC_CONF: not set"));
    }
  }
  const MachineSpec machine = machine_for(parse_gpu_request("8xA100-80G"), 1);
  CheckWorkload expandable = workload;
  expandable.allocator_conf = "expandable_segments:True";
  const std::string text = config_of(R"("stage": 2)");
  const CheckPrediction p = checked(text, model, machine, expandable);
  CHECK(p.run.memory->reserved < checked(text, model, machine, workload).run.memory->reserved);
  CHECK_THAT(report_prediction(p, machine, {}), HasText("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"));
}

TEST_CASE("How often stage 3 gathers its weights is counted: once to three times") {
  const ModelSpec model = find_model("llama-3.2-1b");
  const MachineSpec machine = machine_for(parse_gpu_request("8xA100-80G"), 1);
  CheckWorkload workload;
  workload.seq_len = 1024;
  const auto gathers = [&](const char* zero, bool checkpointing) {
    workload.checkpointing = checkpointing;
    const CheckPrediction p = checked(config_of(zero), model, machine, workload);
    const double times = p.run.memory->prediction.traffic.all_gather /
                         (bytes_of(model.parameters(), DType::bf16) * static_cast<double>(p.run.workload.accumulation));
    const std::string said = fmt::format("gathers {:.1f} x the weights in each", times);
    CHECK(std::ranges::any_of(p.remarks, [&](const std::string& r) { return r.find(said) != std::string::npos; }));
    return times;
  };
  const double roomy = gathers(R"("stage": 3)", false);
  const double tight = gathers(R"("stage": 3, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
                               "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0)",
                               true);
  CHECK(roomy >= 1);
  CHECK(tight > roomy);
  CHECK(tight <= 3.2);
}

TEST_CASE(
    "Trained parameters on the host are copied from pinned memory whatever pin_memory says, frozen ones are not") {
  const ModelSpec model = find_model("llama-2-7b");
  const MachineSpec machine = machine_for(parse_gpu_request("2xA100-80G"), 1);
  CheckWorkload workload;
  workload.seq_len = 512;
  workload.checkpointing = true;
  const auto step = [&](bool optimizer, bool parameters) {
    const std::string text = config_of(fmt::format(
        R"("stage": 3, "offload_optimizer": {{"device": "cpu", "pin_memory": {}}},
           "offload_param": {{"device": "cpu", "pin_memory": {}}})",
        optimizer, parameters));
    return checked(text, model, machine, workload).run;
  };
  CHECK(step(true, true).time->step == step(true, false).time->step);
  CHECK(step(false, true).time->step > step(true, true).time->step);
  workload.lora_rank = 8;
  const RunPrediction pinned = step(true, true), pageable = step(true, false);
  CHECK(pageable.time->step > pinned.time->step);
  // The frozen shards are on the host either way: rounded to powers of two when they are pinned.
  CHECK(pageable.memory->prediction.host_use.pinned < pinned.memory->prediction.host_use.pinned);
  const double weights = 2.0 * static_cast<double>(model.parameters()) / 2;
  CHECK(pageable.memory->prediction.host_use.total().base() > weights);
}

TEST_CASE("Gradients written to drives hide behind the last micro-step, be it of another size") {
  const ModelSpec model = find_model("llama-2-7b");
  MachineSpec machine = machine_for(parse_gpu_request("8xA100-80G"), 1);
  set_nvme(machine, "1x4TB@1GB/s");
  EngineTimeRun run;
  run.tokens = {4, 4096};
  run.ranks = 8;
  run.offload_optimizer = OffloadedOptimizer::nvme;
  run.accumulation = 2;
  const EngineTime twice = predict_engine_time(model, machine, run);
  run.accumulation = 1;
  run.remainder_batch = 4;
  const EngineTime with_rest = predict_engine_time(model, machine, run);
  CHECK(with_rest.offload.base() == Approx(twice.offload.base()).epsilon(1e-12));
  CHECK(with_rest.step.base() == Approx(twice.step.base()).epsilon(1e-12));
  // A smaller rest hides less of the same writes.
  run.remainder_batch = 1;
  CHECK(predict_engine_time(model, machine, run).offload > with_rest.offload);
}
