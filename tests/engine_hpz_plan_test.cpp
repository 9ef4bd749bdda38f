// Plans of DeepSpeed with hpZ: searched, written, played; what their memory and step gain and cost.

#include <fmt/format.h>

#include <algorithm>

#include "models/error.h"
#include "planner/engine_plans.h"
#include "planner/engine_search.h"
#include "planner/engine_simulation.h"
#include "planner/export_parts.h"
#include "tests/catch.h"

using namespace zeroplan;

namespace {

Request request_on(const std::string& gpus, int nodes, BytesPerSecond network) {
  Request request;
  request.model = find_model("llama-2-7b");
  request.machine = machine_for(parse_gpu_request(gpus), nodes);
  request.machine.network.bandwidth = network;
  request.engine = Engine::deepspeed;
  request.seq_len = 2048;
  request.global_batch = 2 * 8 * nodes;
  request.constraints.stages = {3};
  request.constraints.micro_batch = 1;
  request.constraints.recompute = Recompute::full;
  return request;
}

Plan with_group(Plan plan, int ranks) {
  plan.shard_ranks = ranks;
  return plan;
}

}  // namespace

TEST_CASE("Between nodes of a slow network the search takes hpZ, on one node it has none to take") {
  const Request request = request_on("8xA100-80G", 4, 10.0_GBps);
  const Answer answer = search(request);
  REQUIRE(answer.feasible);
  const Plan best = answer.plans.front().plan;
  CHECK(best.shard_ranks == 8);
  CHECK(describe(best).find("ZeRO-3 with hpZ in groups of 8") != std::string::npos);
  // Its file says so, and is read back as the same.
  const Prediction none;
  const DeepspeedExport file = export_deepspeed({best, request.model, request.machine, none, request.margin});
  CHECK(file.json.find("\"zero_hpz_partition_size\": 8") != std::string::npos);
  const PlanFile written{best, request.model, request.machine};
  CHECK(read_plan(write_plan(written), "plan.json").plan == best);
  const Answer alone = search(request_on("8xA100-80G", 1, 0.0_GBps));
  REQUIRE(alone.feasible);
  for (const Candidate& c : alone.plans) CHECK(c.plan.shard_ranks == c.plan.ranks);
}

TEST_CASE("hpZ: a second copy of the weights in memory, fewer gathers between nodes; the played step agrees") {
  const Request request = request_on("8xA100-80G", 4, 10.0_GBps);
  EnginePlans plans(request);
  const Answer answer = search(request);
  REQUIRE(answer.feasible);
  const Plan with = with_group(answer.plans.front().plan, 8), without = with_group(with, 32);
  const double weights = 2.0 * static_cast<double>(request.model.parameters());
  const double more = (plans.fit(with).allocated - plans.fit(without).allocated).base();
  CHECK(more > 0.5 * weights / 8);
  CHECK(more < 1.5 * weights / 8);
  CHECK(plans.time(with).step < 0.7 * plans.time(without).step);
  CHECK(simulate_engine({with, request.model, request.machine}, {}).played_step <
        0.8 * simulate_engine({without, request.model, request.machine}, {}).played_step);
}

TEST_CASE("hpZ is refused below stage 3, in groups of one and with weights off the GPU") {
  const Request request = request_on("8xA100-80G", 4, 10.0_GBps);
  Answer answer = search(request);
  REQUIRE(answer.feasible);
  const Plan good = with_group(answer.plans.front().plan, 8);
  CHECK_NOTHROW(check_plan(good, request.model, "plan"));
  const auto refused = [&](const std::string& why, auto change) {
    Plan plan = good;
    change(plan);
    try {
      check_plan(plan, request.model, "plan");
      FAIL("expected: " << why);
    } catch (const InputError& error) {
      CHECK_THAT(error.what(), tests::HasText(why));
    }
  };
  refused("all 32 ranks under deepspeed", [](Plan& p) { p.zero_stage = 2; });
  refused("several ranks", [](Plan& p) { p.shard_ranks = 1; });
  refused("weights off the GPU", [](Plan& p) {
    p.parameters = Placement::all(Tier::host, p.parameters.total());
    p.optimizer = Placement::all(Tier::host, p.optimizer.total());
    p.update = UpdateOn::host;
  });
}
