// What is known of a configuration of DeepSpeed or FSDP2 without a replay, against replays and by hand.

#include "planner/engine_counts.h"

#include <variant>

#include "models/error.h"
#include "models/op_label.h"
#include "planner/engine_fit.h"
#include "planner/engine_plans.h"
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

namespace {

/// FLOPs of a rank's step of Llama-2 7B: 2 x 64 tokens a micro-step.
double flops_of(Engine engine, int stage, Recompute recompute, std::int64_t lora_rank, std::int64_t micro_steps) {
  Request request = request_for("llama-2-7b", engine, DType::bf16);
  request.lora_rank = lora_rank;
  Choice choice;
  choice.stage = stage;
  choice.shard_ranks = 4;
  choice.micro_batch = 2;
  choice.recompute = recompute;
  const Plan plan = plan_of(request, {64, 8 * micro_steps}, choice);
  REQUIRE(plan.accumulation == micro_steps);
  EnginePlans plans(request);
  return plans.fit(plan, FitDetail::whole).prediction.flops.base();
}

}  // namespace

TEST_CASE("FLOPs of a step under an engine, by hand") {
  // Llama-2 7B: 32 layers, hidden 4096, ffn 11008, vocabulary 32000, heads of 128.
  const double h = 4096, f = 11008, layers = 32, tokens = 2 * 64;
  const double linears = 2 * tokens * (4 * h * h + 3 * h * f), down = 2 * tokens * h * f;
  const double attention = 4 * tokens * h * (64 + 1) / 2.0;  // mean keys of the causal half
  const double head = 2 * tokens * h * 32000;
  // Angles of rotary embeddings are a matrix product too: positions by frequencies.
  constexpr double kRotary = 1e-6;
  const double step = layers * (3 * linears + 3.5 * attention) + 3 * head;
  const auto near = [&](double value) { return Approx(value).epsilon(kRotary); };
  CHECK(flops_of(Engine::fsdp2, 3, Recompute::none, 0, 1) == near(step));
  CHECK(flops_of(Engine::deepspeed, 2, Recompute::none, 0, 1) == near(step));
  // Recomputing ends once what backward needs is there, before the down projection. Stage 3's own linear runs it.
  const double again = layers * (linears + attention);
  CHECK(flops_of(Engine::fsdp2, 3, Recompute::full, 0, 1) == near(step + again - layers * down));
  CHECK(flops_of(Engine::deepspeed, 2, Recompute::full, 0, 1) == near(step + again - layers * down));
  CHECK(flops_of(Engine::deepspeed, 3, Recompute::full, 0, 1) == near(step + again));
  // Three micro-steps recorded stand for five.
  CHECK(flops_of(Engine::fsdp2, 3, Recompute::none, 0, 5) == near(5 * step));

  // Adapters of rank r on each linear [out, in]: A and B forward, and in backward their two gradients each. Frozen
  // matrices have the gradient of their input alone, the first layer's q, k and v not even that, nor their A's.
  const double r = 16;
  const double adapters = 2 * tokens * r * (4 * (h + h) + 3 * (h + f));
  const double first = 3 * 2 * tokens * (h * h + h * r);
  const double lora = layers * (2 * linears + 3 * adapters + 3.5 * attention) - first + 2 * head;
  CHECK(flops_of(Engine::fsdp2, 3, Recompute::none, 16, 1) == near(lora));
  CHECK(flops_of(Engine::deepspeed, 2, Recompute::none, 16, 1) == near(lora));
}

TEST_CASE("Model FLOPs are those of PyTorch's step without what its kernels do twice, adapters or not") {
  constexpr double kFusedBackward = 2.5, kModelBackward = 2;  // of attention, in forwards
  for (const char* name : {"llama-2-7b", "qwen3-0.6b", "gpt2", "opt-1.3b", "mistral-7b-v0.1"}) {
    for (const std::int64_t rank : {0, 8}) {
      EagerOptions options;
      options.tokens = {1, 128};
      options.lora_rank = rank;
      const ModelSpec model = find_model(name);
      double sum = 0;
      const EagerStep step = eager_step(model, options);
      for (const EagerEvent& event : step.events) {
        if (event.kind != EagerEventKind::kernel) continue;
        const Compute& work = step.works[static_cast<std::size_t>(event.id)];
        const auto* attention = std::get_if<AttentionWork>(&work.kernel);
        const bool twice = attention != nullptr && attention->backward;
        sum += work_flops(work).base() * (twice ? kModelBackward / kFusedBackward : 1);
      }
      const double flops = model_flops(adapted_model(model, rank), options.tokens, AttentionCount::causal).base();
      INFO(name << " rank " << rank << ": " << flops << " " << sum);
      CHECK(flops == Approx(sum).epsilon(1e-5));  // the angles of rotary embeddings are products too
    }
  }
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
