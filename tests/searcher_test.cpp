// What one pass over the space must not miss.

#include "planner/searcher.h"

#include <algorithm>

#include "tests/catch.h"

namespace zeroplan {
namespace {

Request request_of(const std::string& model, const std::string& gpus) {
  Request request;
  request.model = find_model(model);
  request.machine = machine_for(parse_gpu_request(gpus), 1);
  request.seq_len = 4096;
  request.global_batch = 128;
  request.top_k = 10;
  return request;
}

TEST_CASE("States that go back to the GPU make room for their gradients too") {
  // 13B on 4 x 40 GB with full recompute: weights stay on the GPU, which has room for half of the states. A block whose
  // states return brings its fp32 gradient along.
  Request request = request_of("13B", "4xA100-40G");
  request.constraints.stages = {3};
  request.constraints.recompute = Recompute::full;
  request.constraints.micro_batch = 1;
  const auto plans = Searcher(request, {*request.seq_len, *request.global_batch}).run();
  const int blocks = static_cast<int>(request.model.sequence.size());
  const auto found = std::find_if(plans.begin(), plans.end(), [&](const Candidate& c) {
    return c.plan.gradients == Tier::host && c.plan.parameters.hbm == blocks;
  });
  REQUIRE(found != plans.end());
  CHECK(found->plan.optimizer.hbm > blocks / 3);
  CHECK(fits(found->prediction, request.margin));
}

TEST_CASE("No flag finds a plan that is much faster than the answer without it") {
  // Estimates rank offload badly: three of these answers were 14 to 22 % slower than the flag's.
  struct Case {
    const char *model, *gpus;
    Bytes dram;
  };
  for (const Case& c : {Case{"llama-65b", "8xA100-40G", 2048_GiB}, Case{"llama-30b", "4xA100-40G", 1024_GiB},
                        Case{"70B", "8xA100-80G", 2048_GiB}, Case{"mixtral-8x7b", "4xA100-80G", 1024_GiB}}) {
    Request request = request_of(c.model, c.gpus);
    set_host_memory(request.machine, c.dram);
    set_nvme(request.machine, "none");
    request.top_k = 3;
    const Answer free = search(request);
    REQUIRE(free.feasible);
    request.top_k = 1;
    request.constraints.offload = Offload{OffloadWhat::all, Tier::host};
    const Answer fixed = search(request);
    INFO(c.model << " on " << c.gpus);
    REQUIRE(fixed.feasible);
    CHECK(fixed.plans.front().plan.precision.accumulation == free.plans.front().plan.precision.accumulation);
    CHECK(free.plans.front().prediction.step <= 1.02 * fixed.plans.front().prediction.step);
  }
}

TEST_CASE("How many plans are shown does not change which is best") {
  Request request = request_of("yi-34b", "1xH100");
  request.top_k = 1;
  const Answer one = search(request);
  request.top_k = 3;
  const Answer three = search(request);
  REQUIRE((one.feasible && three.feasible));
  CHECK(three.plans.front().prediction.step <= 1.01 * one.plans.front().prediction.step);
}

TEST_CASE("A queue that grows over many micro-steps is in the step that is reported") {
  // Gradients reach the host faster than it adds them up. The first micro-steps hide that behind the update, which
  // reads states from disk; 256 cannot.
  Request request = request_of("yi-34b", "1xH100");
  request.seq_len = 2048;
  request.global_batch = 256;
  request.top_k = 1;
  request.constraints.recompute = Recompute::full;
  request.constraints.micro_batch = 1;
  const Answer answer = search(request);
  REQUIRE(answer.feasible);
  const Candidate& best = answer.plans.front();
  REQUIRE(best.plan.accumulation == 256);
  Predictor predictor(request.model, request.machine);
  const Seconds whole = predictor.simulate(best.plan, {}).step;
  CHECK(best.prediction.step.base() == Approx(whole.base()).epsilon(0.01));
  CHECK(predictor.play_shortly(best.plan).step >= predictor.step_with(best.plan, ResourceRole::sm, 1));
}

TEST_CASE("a disk that would help is named with the offload that uses it") {
  Request request = request_of("13B", "8xA100-80G");
  set_host_memory(request.machine, 96_GiB);
  request.constraints.stages = {3};
  request.constraints.offload = Offload{OffloadWhat::optimizer, Tier::host};
  request.constraints.recompute = Recompute::full;
  request.constraints.micro_batch = 1;
  const Answer answer = search(request);
  REQUIRE(answer.shortfall.has_value());
  const auto& changes = answer.shortfall->changes;
  const auto disk = std::find_if(changes.begin(), changes.end(),
                                 [](const Shortfall::Change& c) { return c.flag.find("--nvme") != std::string::npos; });
  REQUIRE(disk != changes.end());
  CHECK(disk->flag == "--nvme 1x1TB --offload optimizer:nvme");
  // Followed, it fits.
  set_nvme(request.machine, "1x1TB");
  request.constraints.offload->to = Tier::nvme;
  CHECK(search(request).feasible);
}

TEST_CASE("What fits with a margin fits with a smaller one") {
  // The host holds weights and gradients and a part of the states; how many blocks go to the disk depends on slots
  // that are only there when some do.
  Request request = request_of("llama-65b", "1xRTX-4090");
  request.precision = DType::fp32;
  request.seq_len = 512;
  request.global_batch = 1024;
  set_host_memory(request.machine, 1024_GiB);
  set_nvme(request.machine, "1x2TB@3GB/s");
  for (const double margin : {0.01, 0.03, 0.05, 0.08, 0.1}) {
    request.margin = margin;
    const auto plans = Searcher(request, {*request.seq_len, *request.global_batch}).run();
    INFO(margin);
    REQUIRE_FALSE(plans.empty());
    CHECK(fits(plans.front().prediction, margin));
    const Placement& states = plans.front().plan.optimizer;
    CHECK(states.host > states.nvme);  // the disk is the slowest tier: no more goes there than has to
  }
}

TEST_CASE("The nearest plan of an answer that does not fit lacks something") {
  for (const int gib : {16, 64, 160, 200}) {
    Request request = request_of("13B", "1xRTX-4090");
    set_host_memory(request.machine, Bytes(gib * kGiB));
    const Answer answer = search(request);
    INFO(gib);
    CHECK(answer.feasible != answer.shortfall.has_value());
    if (answer.shortfall) CHECK_FALSE(answer.shortfall->lacks.empty());
    for (const Candidate& c : answer.plans) CHECK(fits(c.prediction, request.margin) == answer.feasible);
  }
}

TEST_CASE("A default batch that leaves two micro-batches has a warning with the nearest that leaves more") {
  const auto warned = [](const std::string& gpus, std::optional<std::int64_t> batch,
                         std::optional<std::int64_t> micro) {
    Request request = request_of("13B", gpus);
    request.global_batch = batch;
    request.constraints.micro_batch = micro;
    std::vector<Assumption> assumptions;
    std::vector<std::string> warnings;
    workload_of(request, assumptions, warnings);
    return warnings.empty() ? std::string() : warnings.front();
  };
  CHECK(warned("3xA100-80G", {}, {}) ==
        "the default batch, 129 sequences on 3 ranks, leaves micro-batches of 1 and 43 alone: 43 is a prime; "
        "--global-batch 132 has 1, 2, 4, 11, 22, 44");
  CHECK(warned("3xA100-80G", 129, {}).empty());  // somebody's choice
  CHECK(warned("3xA100-80G", {}, 2).empty());
  for (const char* gpus : {"1xA100-80G", "2xA100-80G", "4xA100-80G", "5xA100-80G", "6xA100-80G", "8xA100-80G"}) {
    CHECK(warned(gpus, {}, {}).empty());  // 128, 64, 32, 26, 22, 16 a rank
  }
  CHECK(warned("7xA100-80G", {}, {}).find("micro-batches of 1 and 19") != std::string::npos);
}

}  // namespace
}  // namespace zeroplan
