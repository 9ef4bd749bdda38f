// Laws of the search under DeepSpeed and FSDP2.

#include "planner/engine_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "models/error.h"
#include "planner/engine_plans.h"
#include "planner/export_parts.h"
#include "planner/report_json.h"
#include "tests/catch.h"

using namespace zeroplan;

namespace {

Request request_of(const std::string& model, const std::string& gpus, Engine engine, int nodes = 1) {
  Request request;
  request.model = find_model(model);
  request.machine = machine_for(parse_gpu_request(gpus), nodes);
  request.engine = engine;
  return request;
}

/// Small and large models, cards that are too small, several nodes.
std::vector<Request> requests() {
  std::vector<Request> all;
  for (const Engine engine : {Engine::deepspeed, Engine::fsdp2}) {
    all.push_back(request_of("smollm2-135m", "2x3090-24G", engine));
    all.push_back(request_of("gpt2-xl", "1xRTX-4090", engine));
    all.push_back(request_of("7B", "8xA100-80G", engine));
    all.push_back(request_of("8B", "8xH100", engine, 2));
    all.push_back(request_of("13B", "4xA100-40G", engine));
    all.push_back(request_of("70B", "8xH100", engine));
    all.push_back(request_of("405B", "1xRTX-4090", engine));
  }
  return all;
}

EngineFit fit_of(const Request& request, const Plan& plan) {
  EngineFitter fitter(request.model, request.machine, request.margin);
  const EngineWorkload w{plan.micro_step(), plan.accumulation, plan.ranks, plan.recompute != Recompute::none,
                         plan.precision.weights};
  if (plan.engine == Engine::deepspeed) {
    const Prediction none;
    return fitter.deepspeed_text(export_deepspeed({plan, request.model, request.machine, none, request.margin}).json,
                                 w);
  }
  Fsdp2Options options;
  options.ranks = plan.ranks;
  options.shard_ranks = plan.shard_ranks == plan.ranks ? 0 : plan.shard_ranks;
  options.reshard_after_forward = options.reshard_root = plan.zero_stage == 3;
  options.compute = plan.precision.weights;
  options.offload = plan.parameters.hbm < plan.parameters.total();
  return fitter.fsdp2(options, w);
}

void check_sum(const TierMemory& tier) {
  Bytes sum;
  for (const auto& [owner, bytes] : tier.breakdown) {
    INFO(owner);
    CHECK(bytes > Bytes());
    sum += bytes;
  }
  CHECK(sum.base() == Approx(tier.peak.base()).epsilon(1e-12));
}

void check_prediction(const Answer& answer, const Candidate& c) {
  const Prediction& p = c.prediction;
  check_sum(p.gpu);
  REQUIRE(p.host.has_value());
  check_sum(*p.host);
  const auto tokens = static_cast<double>(*answer.request.seq_len * *answer.request.global_batch);
  CHECK(p.tokens_per_second * p.step.base() == Approx(tokens).epsilon(1e-12));
  CHECK(p.tokens_per_second_per_gpu * c.plan.ranks == Approx(p.tokens_per_second).epsilon(1e-12));
  const TimeBreakdown& t = p.time;
  const Seconds parts = t.compute + t.exposed_communication + t.exposed_offload + t.optimizer + t.idle;
  CHECK(parts.base() == Approx(p.step.base()).epsilon(1e-9));
  REQUIRE(p.mfu.has_value());
  CHECK(*p.mfu > 0);
  CHECK(*p.hfu >= *p.mfu);
  CHECK(*p.hfu < 1);
  CHECK(c.plan.engine == answer.request.engine);
  CHECK(c.plan.micro_batch * c.plan.accumulation * c.plan.ranks == *answer.request.global_batch);
}

void check_shortfall(const Answer& answer) {
  REQUIRE(answer.shortfall.has_value());
  CHECK(answer.plans.empty());
  CHECK_FALSE(answer.shortfall->nearest.fits);
  REQUIRE_FALSE(answer.shortfall->lacks.empty());
  for (const Shortfall::Lack& lack : answer.shortfall->lacks) {
    INFO(lack.tier);
    CHECK(lack.missing() > Bytes());
    CHECK((lack.tier == "gpu" || lack.tier == "host"));
  }
  check_prediction(answer, answer.shortfall->nearest);
}

}  // namespace

TEST_CASE("Under other engines every reported plan fits when it is replayed again, the fastest first") {
  for (const Request& request : requests()) {
    INFO(request.model.name << " on " << request.machine.name << " under " << to_string(request.engine));
    const Answer answer = search(request);
    if (!answer.feasible) {
      check_shortfall(answer);
      continue;
    }
    CHECK(static_cast<int>(answer.plans.size()) <= request.top_k);
    double last = answer.plans.front().prediction.tokens_per_second;
    for (const Candidate& c : answer.plans) {
      INFO(describe(c.plan));
      CHECK(c.fits);
      const EngineFit fit = fit_of(request, c.plan);
      CHECK(fit.fits_in_step());
      CHECK(c.prediction.gpu.peak <= (request.machine.gpu.memory * (1 - request.margin)) * (1 + 1e-12));
      CHECK(c.prediction.host->peak == fit.host);
      CHECK(c.prediction.tokens_per_second <= 1.003 * last);  // less is no difference: without offload first
      last = c.prediction.tokens_per_second;
      check_prediction(answer, c);
    }
  }
}

TEST_CASE("Under other engines nothing fits only where what takes least does not fit") {
  int infeasible = 0;
  for (Request request : requests()) {
    INFO(request.model.name << " on " << request.machine.name << " under " << to_string(request.engine));
    if (search(request).feasible) continue;
    ++infeasible;
    request.constraints = {{3}, Offload{OffloadWhat::all, Tier::host}, Recompute::full, 1};
    const Answer least = search(request);
    CHECK_FALSE(least.feasible);
    CHECK_FALSE(fit_of(request, least.shortfall->nearest.plan).fits_in_step());
  }
  CHECK(infeasible >= 2);
}

TEST_CASE("Under other engines several stages give one row each, those that do not fit too") {
  Request request = request_of("70B", "8xH100", Engine::deepspeed);
  request.constraints.stages = {0, 1, 2, 3};
  request.per_stage = true;
  const Answer answer = search(request);
  REQUIRE(answer.plans.size() == 4);
  CHECK(answer.feasible);
  for (int stage = 0; stage < 4; ++stage) {
    const Candidate& row = answer.plans[static_cast<std::size_t>(stage)];
    CHECK(row.plan.zero_stage == stage);
    CHECK(row.fits == (stage == 3));
    check_prediction(answer, row);
    if (!row.fits) {
      const bool gpu = row.prediction.gpu.peak > request.machine.gpu.memory * (1 - request.margin);
      CHECK((gpu || row.prediction.host->peak > row.prediction.host->capacity * (1 - request.margin)));
    }
  }
}

TEST_CASE("Under other engines states that alone exceed the card are a shortfall, not bad input") {
  Request request = request_of("70B", "8xH100", Engine::deepspeed);
  request.constraints.stages = {0};
  const Answer answer = search(request);
  CHECK_FALSE(answer.feasible);
  check_shortfall(answer);
  CHECK(answer.shortfall->lacks.front().needed > Bytes(14.0 * static_cast<double>(request.model.parameters())));
}

TEST_CASE("A change that leaves no plan is not proposed for a shortfall, and does not refuse the request") {
  // Disks serve DeepSpeed's stage 3 only.
  Request request = request_of("yi-34b", "2x3090-24G", Engine::deepspeed);
  request.seq_len = 64;
  request.constraints.stages = {1};
  request.constraints.offload = Offload{OffloadWhat::optimizer, Tier::host};
  const Answer answer = search(request);
  REQUIRE(answer.shortfall.has_value());
  for (const Shortfall::Change& c : answer.shortfall->changes) CHECK(c.flag.find("--nvme") == std::string::npos);
  request.constraints.offload->to = Tier::nvme;
  request.machine.nvme = parse_nvme("1x1TB");
  CHECK_THROWS_AS(search(request), InputError);
}

TEST_CASE("Under other engines fixed choices are kept") {
  Request request = request_of("7B", "8xA100-80G", Engine::deepspeed);
  request.constraints = {{3}, Offload{OffloadWhat::optimizer, Tier::host}, Recompute::full, 2};
  const auto plans = search(request).plans;
  CHECK_FALSE(plans.empty());
  for (const Candidate& c : plans) {
    CHECK(c.plan.zero_stage == 3);
    CHECK(c.plan.optimizer.host == c.plan.optimizer.total());
    CHECK(c.plan.parameters.hbm == c.plan.parameters.total());
    CHECK(c.plan.recompute == Recompute::full);
    CHECK(c.plan.micro_batch == 2);
  }
  request.engine = Engine::fsdp2;
  request.constraints.offload->what = OffloadWhat::parameters;
  const auto sharded = search(request).plans;
  CHECK_FALSE(sharded.empty());
  for (const Candidate& c : sharded) {
    CHECK(c.plan.zero_stage == 3);
    CHECK(c.plan.parameters.host == c.plan.parameters.total());
    CHECK(c.plan.optimizer.host == c.plan.optimizer.total());
  }
}

TEST_CASE("Under other engines flags that leave no plan are refused, none is dropped") {
  const auto message = [](Engine engine, const Constraints& constraints) -> std::string {
    Request request = request_of("7B", "8xA100-80G", engine);
    request.constraints = constraints;
    request.per_stage = constraints.stages.size() > 1;
    try {
      search(request);
    } catch (const InputError& e) {
      return e.what();
    }
    return "";
  };
  using Catch::Matchers::Contains;
  const Offload optimizer{OffloadWhat::optimizer, Tier::host}, parameters{OffloadWhat::parameters, Tier::host};
  CHECK_THAT(message(Engine::fsdp2, {{0, 1, 2, 3}, {}, {}, {}}), Contains("--zero 0"));
  CHECK_THAT(message(Engine::fsdp2, {{1}, {}, {}, {}}), Contains("--zero 1"));
  CHECK_THAT(message(Engine::fsdp2, {{}, optimizer, {}, {}}), Contains("--offload optimizer"));
  CHECK_THAT(message(Engine::deepspeed, {{2}, parameters, {}, {}}), Contains("--offload"));
  CHECK_THAT(message(Engine::deepspeed, {{0}, optimizer, {}, {}}), Contains("--offload"));
  CHECK_THAT(message(Engine::deepspeed, {{}, {}, Recompute::selective, {}}), Contains("--recompute"));
}

TEST_CASE("Under other engines the objective memory gives what takes least on the GPU") {
  for (const Engine engine : {Engine::deepspeed, Engine::fsdp2}) {
    for (const char* model : {"smollm2-135m", "7B"}) {
      INFO(model << " under " << to_string(engine));
      Request request = request_of(model, "8xA100-80G", engine);
      const Answer fast = search(request);
      request.objective = Objective::memory;
      const Answer small = search(request);
      REQUIRE(small.feasible);
      CHECK(static_cast<int>(small.plans.size()) <= request.top_k);
      for (std::size_t i = 1; i < small.plans.size(); ++i)
        CHECK(small.plans[i - 1].prediction.gpu.peak <= small.plans[i].prediction.gpu.peak);
      for (const Candidate& c : fast.plans) CHECK(small.plans.front().prediction.gpu.peak <= c.prediction.gpu.peak);
    }
  }
}

TEST_CASE("Under other engines the same request gives the same answer") {
  const Request request = request_of("7B", "8xH100", Engine::deepspeed);
  const auto text = [&] {
    Answer answer = search(request);
    answer.search.seconds = 0;
    return plan_json(answer, 1e12);
  };
  const std::string first = text();
  CHECK(first == text());
  const Traffic traffic = search(request).plans.front().prediction.traffic;  // of the replayed tape
  CHECK(traffic.all_gather + traffic.reduce_scatter + traffic.all_reduce > Bytes());
}

TEST_CASE("Offload that gains what makes no difference is not the answer") {
  // Adapters are a few MB of states: on the host they cost no time and gain 0.1 %.
  for (const int top : {1, 3}) {
    Request request = request_of("8B", "8xH200", Engine::deepspeed);
    request.lora_rank = 16;
    request.top_k = top;
    const Answer answer = search(request);
    REQUIRE(answer.feasible);
    const Plan& plan = answer.plans.front().plan;
    CHECK(plan.optimizer.hbm == plan.optimizer.total());
    CHECK(plan.parameters.hbm == plan.parameters.total());
  }
}

TEST_CASE("Under other engines adapters are planned: less memory than training everything, the rank in every plan") {
  for (const Engine engine : {Engine::deepspeed, Engine::fsdp2}) {
    INFO(to_string(engine));
    Request request = request_of("7B", "2x3090-24G", engine);
    request.seq_len = 512;
    request.global_batch = 16;
    const Answer all = search(request);
    request.lora_rank = 16;
    const Answer adapters = search(request);
    REQUIRE(adapters.feasible);
    for (const Candidate& c : adapters.plans) {
      CHECK(c.plan.lora_rank == 16);
      CHECK(c.prediction.mfu.value() < c.prediction.hfu.value());
      CHECK(c.prediction.hfu.value() < 1);
      // Not of the weights that stay frozen: two forwards of every three.
      CHECK(c.prediction.mfu.value() * c.prediction.step <
            0.75 * (all.plans.front().prediction.mfu.value() * all.plans.front().prediction.step));
      CHECK_FALSE(c.prediction.gpu.at_op.empty());
      EnginePlans plans(request);
      const EngineFit fit = plans.fit(c.plan);
      CHECK(fit.fits_in_step());
      CHECK(c.prediction.host->peak == fit.host);
      const PlanFile file{c.plan, request.model, request.machine};
      CHECK(read_plan(write_plan(file), "plan.json").plan == c.plan);
    }
    if (all.feasible) CHECK(adapters.plans.front().prediction.step < all.plans.front().prediction.step);
    request.engine = Engine::zeroplan;
    CHECK_THROWS_AS(search(request), InputError);
  }
}

TEST_CASE("Under DeepSpeed states go to NVMe where the host is too small, and no further than the drives hold") {
  Request request = request_of("13B", "2x3090-24G", Engine::deepspeed);
  set_host_memory(request.machine, 96_GiB);
  request.seq_len = 1024;
  request.global_batch = 16;
  const Answer without = search(request);
  CHECK_FALSE(without.feasible);
  set_nvme(request.machine, "1x2TB@3GB/s");
  const Answer with = search(request);
  REQUIRE(with.feasible);
  const Candidate& best = with.plans.front();
  REQUIRE(best.plan.optimizer.nvme == best.plan.optimizer.total());
  REQUIRE(best.prediction.nvme.has_value());
  CHECK(best.prediction.nvme->peak.base() >= 16.0 * static_cast<double>(request.model.parameters()) * (1 - 1e-9));
  CHECK(best.prediction.traffic.nvme_write > Bytes());
  CHECK(EnginePlans(request).fit(best.plan).fits_in_step());
  set_nvme(request.machine, "1x100GB@3GB/s");
  const Answer small = search(request);
  CHECK_FALSE(small.feasible);
}

TEST_CASE("Under other engines every change that is said to make it fit does, when it is planned") {
  for (const Engine engine : {Engine::deepspeed, Engine::fsdp2}) {
    Request request = request_of("13B", "2x3090-24G", engine);
    set_host_memory(request.machine, 64_GiB);
    request.seq_len = 2048;
    request.global_batch = 16;
    const Answer answer = search(request);
    REQUIRE_FALSE(answer.feasible);
    CHECK_FALSE(answer.shortfall->changes.empty());
    for (const Shortfall::Change& change : answer.shortfall->changes) {
      INFO(to_string(engine) << ": " << change.flag);
      Request changed = request;
      if (change.flag.starts_with("--host-memory ")) {
        set_host_memory(changed.machine, parse_bytes(change.flag.substr(14), "--host-memory"));
      } else if (change.flag.starts_with("--nvme ")) {
        set_nvme(changed.machine, change.flag.substr(7));
      } else if (change.flag.starts_with("--nodes ")) {
        set_nodes(changed.machine, std::stoi(change.flag.substr(8)));
      } else if (change.flag.starts_with("--seq-len ")) {
        changed.seq_len = std::stoll(change.flag.substr(10));
      }
      CHECK(change.result.fits);
      CHECK(EnginePlans(changed).fit(change.result.plan).fits_in_step());
      CHECK(search(changed).feasible);
    }
  }
}

TEST_CASE("Under other engines advice names what is waited for, and a step is no longer with it") {
  Request request = request_of("13B", "8xA100-80G", Engine::deepspeed);
  request.constraints = {{3}, Offload{OffloadWhat::optimizer, Tier::host}, Recompute::full, 1};
  const Answer answer = search(request);
  REQUIRE(answer.feasible);
  const std::vector<Advice> advice = advise(answer, answer.plans.front());
  REQUIRE_FALSE(advice.empty());
  for (std::size_t i = 0; i < advice.size(); ++i) {
    CHECK(advice[i].speedup >= 1.02);
    CHECK(advice[i].speedup <= 2);
    if (i > 0) CHECK(advice[i].speedup <= advice[i - 1].speedup);
  }
  CHECK(std::ranges::any_of(advice, [](const Advice& a) { return a.what.find("host's memory") != std::string::npos; }));
}
