// What is known of a configuration of DeepSpeed or FSDP2 without a replay, against replays and by hand.

#include "planner/engine_counts.h"

#include "models/error.h"
#include "planner/engine_fit.h"
#include "planner/export_fit.h"
#include "planner/search.h"
#include "planner/search_space.h"
#include "tests/catch.h"

using namespace zeroplan;

namespace {

Request request_for(const std::string& model, Engine engine, DType precision) {
  Request request;
  request.model = find_model(model);
  request.machine = machine_for(parse_gpu_request("4xA100-80G"), 1);
  set_host_memory(request.machine, 1024_GiB);
  request.engine = engine;
  request.precision = precision;
  request.seq_len = 64;  // states, not activations, decide
  request.global_batch = 8;
  return request;
}

DeepSpeedJob job_of(const std::string& zero, int accumulation) {
  const std::string text = R"({"bf16": {"enabled": true}, "zero_optimization": {)" + zero + "}}";
  DeepSpeedJob job;
  job.config = read_deepspeed_config(ConfigText::parse(text, "deepspeed.json"));
  job.ranks = 4;
  job.accumulation = accumulation;
  return job;
}

EagerStep small_step() {
  EagerOptions options;
  options.tokens = {1, 64};
  return eager_step(find_model("smollm2-135m"), options);
}

/// Every micro-step recorded.
Traffic recorded(const EagerStep& step, const DeepSpeedJob& job) {
  EngineTape tape;
  record_run(*make_deepspeed_engine(step, job, tape), step, {4, job.accumulation, 32 << 20, {1, 64}}, tape);
  return steady_traffic(tape, job.accumulation);
}

void check_equal(const Traffic& a, const Traffic& b) {
  CHECK(a.all_gather == b.all_gather);
  CHECK(a.reduce_scatter == b.reduce_scatter);
  CHECK(a.all_reduce == b.all_reduce);
  CHECK(a.h2d == b.h2d);
  CHECK(a.d2h == b.d2h);
  CHECK(a.nvme_read == b.nvme_read);
  CHECK(a.nvme_write == b.nvme_write);
}

}  // namespace

TEST_CASE("States that stay on a GPU are never more than the peak of a replay") {
  int compared = 0;
  for (const char* model : {"smollm2-135m", "gpt2"}) {
    for (const Engine engine : {Engine::deepspeed, Engine::fsdp2}) {
      for (const DType precision : {DType::bf16, DType::fp16, DType::fp32}) {
        for (const OffloadWhat what : {OffloadWhat::none, OffloadWhat::optimizer, OffloadWhat::parameters}) {
          for (const int stage : {0, 1, 2, 3}) {
            Request request = request_for(model, engine, precision);
            if (engine == Engine::fsdp2 && stage < 2) continue;
            if (what == OffloadWhat::optimizer && (stage == 0 || engine == Engine::fsdp2)) continue;
            if (what == OffloadWhat::parameters && stage < 3) continue;
            request.constraints.stages = {stage};
            request.constraints.offload = Offload{what, Tier::host};
            for (const Candidate& c : search(request).plans) {
              INFO(model << " " << to_string(engine) << " " << to_string(precision) << " stage " << stage << " offload "
                         << static_cast<int>(what) << " group " << c.plan.shard_ranks);
              CHECK(engine_states_on_gpu(request.model, c.plan) <= c.prediction.lower_bound);
              ++compared;
            }
          }
        }
      }
    }
  }
  CHECK(compared >= 60);
}

TEST_CASE("BLAS workspaces by GPU") {
  const auto mebibytes = [](const char* gpu) { return static_cast<double>(blas_workspace(find_gpu(gpu))) / 1048576; };
  CHECK(mebibytes("A100-SXM4-80GB") == 8.125);
  CHECK(mebibytes("RTX-4090") == 8.125);
  CHECK(mebibytes("H100-SXM5-80GB") == 32);
  CHECK(mebibytes("RTX-5090") == 32);
  CHECK(mebibytes("MI210") == 32);
  CHECK(mebibytes("MI300X") == 128);
}

TEST_CASE("FLOPs of a step under an engine, by hand") {
  // Llama-2 7B: 32 layers, hidden 4096, ffn 11008, vocabulary 32000.
  const Request request = request_for("llama-2-7b", Engine::deepspeed, DType::bf16);
  const double h = 4096, f = 11008, layers = 32, tokens = 2 * 64, micro_steps = 1;
  const double linears = 2 * tokens * (4 * h * h + 3 * h * f);
  const double attention = 4 * tokens * h * (64 + 1) / 2.0;  // mean keys of the causal half
  const double head = 2 * tokens * h * 32000;
  Choice choice;
  choice.stage = 2;
  choice.shard_ranks = 4;
  choice.micro_batch = 2;
  const Workload workload{64, 8};
  Plan plan = plan_of(request, workload, choice);
  REQUIRE(plan.accumulation == 1);
  CHECK(engine_flops(request.model, plan).base() ==
        Approx(micro_steps * (layers * (3 * linears + 3.5 * attention) + 3 * head)).epsilon(1e-12));
  choice.recompute = Recompute::full;
  plan = plan_of(request, workload, choice);
  const double again = linears - 2 * tokens * h * f + attention;  // the down projection does not run again
  CHECK(engine_flops(request.model, plan).base() ==
        Approx(layers * (3 * linears + 3.5 * attention + again) + 3 * head).epsilon(1e-12));
}

TEST_CASE("Traffic under DeepSpeed: three recorded micro-steps stand for many") {
  const EagerStep step = small_step();
  for (const char* zero :
       {R"("stage": 0)", R"("stage": 1)", R"("stage": 2)", R"("stage": 2, "offload_optimizer": {"device": "cpu"})",
        R"("stage": 3)", R"("stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"})"}) {
    for (const int accumulation : {1, 2, 3, 6}) {
      INFO(zero << " " << accumulation << " micro-steps");
      const DeepSpeedJob job = job_of(zero, accumulation);
      check_equal(predict_deepspeed(step, {1, 64}, job, {}).traffic, recorded(step, job));
    }
  }
}

TEST_CASE("Traffic by hand: weights gathered once a step at stage 2, FSDP2's gradients in fp32 each micro-step") {
  const EagerStep step = small_step();
  double parameters = 0;
  for (const EagerParameter& p : step.parameters) parameters += static_cast<double>(p.elements);
  const auto near = [&](Bytes bytes, double per_parameter) {
    return bytes.base() == Approx(per_parameter * parameters).epsilon(1e-3);  // padding, scalars of the norm
  };
  const Traffic two = predict_deepspeed(step, {1, 64}, job_of(R"("stage": 2)", 5), {}).traffic;
  CHECK(near(two.all_gather, 2));
  CHECK(near(two.reduce_scatter + two.all_reduce, 5 * 2));
  CHECK(two.h2d == Bytes());
  const Traffic one = predict_deepspeed(step, {1, 64}, job_of(R"("stage": 1)", 5), {}).traffic;
  CHECK(near(one.reduce_scatter + one.all_reduce, 2));
  Fsdp2Options options;
  options.ranks = 4;
  const Traffic fsdp = predict_fsdp2(step, {1, 64}, 5, options, {}).traffic;
  CHECK(near(fsdp.reduce_scatter, 5 * 4));
  CHECK(near(fsdp.all_gather, 5 * 2 * 2));  // forward and backward, 2 B
  // One rank has nobody to send to.
  for (const char* zero : {R"("stage": 1)", R"("stage": 2)", R"("stage": 3)"}) {
    DeepSpeedJob alone = job_of(zero, 2);
    alone.ranks = 1;
    const Traffic none = predict_deepspeed(step, {1, 64}, alone, {}).traffic;
    CHECK(none.all_gather + none.reduce_scatter + none.all_reduce == Bytes());
  }
}

TEST_CASE("A tape of another number of micro-steps is our mistake") {
  EngineTape tape;
  const EagerStep step = small_step();
  const DeepSpeedJob job = job_of(R"("stage": 1)", 2);
  record_run(*make_deepspeed_engine(step, job, tape), step, {2, 2, 0, {1, 64}}, tape);
  CHECK_THROWS_AS(steady_traffic(tape, 5), std::logic_error);
}

TEST_CASE("Activations that surely stay are never more than eager PyTorch saves") {
  int compared = 0;
  for (const std::string& name : model_names()) {
    const ModelSpec model = find_model(name);
    for (const bool checkpointing : {false, true}) {
      for (const std::int64_t rank : {0, 4}) {
        EagerOptions options;
        options.tokens = {2, 64};
        options.checkpointing = checkpointing;
        options.attention = usual_attention(model);
        options.lora_rank = rank;
        EagerPeaks peaks;
        try {
          peaks = eager_peaks(eager_step(model, options));
        } catch (const InputError&) {
          continue;  // no eager graph
        }
        INFO(name << " checkpointing " << checkpointing << " rank " << rank);
        Plan plan;
        plan.micro_batch = 2;
        plan.seq_len = 64;
        plan.recompute = checkpointing ? Recompute::full : Recompute::none;
        const Bytes known = engine_saved_activations(adapted_model(model, rank), plan);
        CHECK(known > Bytes());
        CHECK(known <= peaks.saved);
        ++compared;
      }
    }
  }
  CHECK(compared > 200);
}
