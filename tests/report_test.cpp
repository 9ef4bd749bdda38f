#include "planner/report.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "models/lower.h"
#include "planner/report_json.h"
#include "planner/report_layout.h"
#include "tests/catch.h"

namespace zeroplan {
namespace {

using Json = nlohmann::json;
using tests::HasText;
using tests::WithinAbs;
using tests::WithinRel;

Request request_of(const std::string& model, const std::string& gpus) {
  Request request;
  request.model = find_model(model);
  request.machine = machine_for(parse_gpu_request(gpus), 1);
  return request;
}

const Answer& offloaded() {
  static const Answer answer = search(request_of("13B", "4xA100-40G"));
  return answer;
}

const Answer& too_small() {
  static const Answer answer = [] {
    Request request = request_of("13B", "2x3090-24G");
    set_host_memory(request.machine, 64_GiB);
    return search(request);
  }();
  return answer;
}

bool has_null(const Json& json) {
  if (json.is_null()) return true;
  if (!json.is_structured()) return false;
  for (const Json& item : json) {
    if (has_null(item)) return true;
  }
  return false;
}

TEST_CASE("plan as JSON: the keys of the specification, and none is null") {
  const Json json = Json::parse(plan_json(offloaded(), std::nullopt));
  for (const char* key : {"model", "machine", "workload", "feasible", "plans", "assumptions", "search"}) {
    CHECK(json.contains(key));
  }
  CHECK(json["model"]["parameters"] == 13015864320);
  CHECK(json["model"]["trainable"] == 13015864320);
  CHECK(json["machine"]["gpus"] == 4);
  CHECK(json["workload"]["seq_len"] == 4096);
  REQUIRE(!json["plans"].empty());
  const Json& plan = json["plans"][0];
  CHECK(plan["engine"] == "zeroplan");
  CHECK(plan["plan"].contains("state_bytes_per_parameter"));
  for (const char* key :
       {"step_seconds", "tokens_per_second", "tokens_per_second_per_gpu", "memory", "time", "traffic", "limited_by"}) {
    CHECK(plan["prediction"].contains(key));
  }
  CHECK(!has_null(json));
}

TEST_CASE("plan as JSON: the breakdown of each tier sums to its peak, exactly") {
  const Json json = Json::parse(plan_json(offloaded(), std::nullopt));
  for (const Json& plan : json["plans"]) {
    for (const auto& [tier, memory] : plan["prediction"]["memory"].items()) {
      std::int64_t sum = 0;
      for (const Json& bytes : memory["breakdown"]) sum += bytes.get<std::int64_t>();
      INFO(tier);
      CHECK(sum == memory["peak_bytes"].get<std::int64_t>());
      CHECK(memory["peak_bytes"] <= memory["capacity_bytes"]);
    }
  }
}

TEST_CASE("plan as JSON: rounding the parts moves the peak by at most a byte a part") {
  const Json json = Json::parse(plan_json(offloaded(), std::nullopt));
  const Prediction& prediction = offloaded().plans.front().prediction;
  const auto parts = static_cast<double>(prediction.gpu.breakdown.size());
  CHECK_THAT(json["plans"][0]["prediction"]["memory"]["gpu"]["peak_bytes"].get<double>(),
             WithinAbs(prediction.gpu.peak.base(), parts));
}

TEST_CASE("plan as JSON: a tier that is not used is left out") {
  const Json json = Json::parse(plan_json(search(request_of("gpt2", "8xA100-80G")), std::nullopt));
  CHECK(json["plans"][0]["prediction"]["memory"].size() == 1);
}

TEST_CASE("plan as JSON: the parts of the time sum to the step") {
  const Json json = Json::parse(plan_json(offloaded(), std::nullopt));
  for (const Json& plan : json["plans"]) {
    double sum = 0;
    for (const Json& part : plan["prediction"]["time"]) sum += part.get<double>();
    CHECK_THAT(sum, WithinRel(plan["prediction"]["step_seconds"].get<double>(), 1e-9));
  }
}

TEST_CASE("plan as JSON: hours need tokens, dollars a price too") {
  Answer answer = offloaded();
  answer.request.machine.price.reset();
  Json cost = Json::parse(plan_json(answer, 1e9))["plans"][0]["cost"];
  CHECK_THAT(cost["hours"].get<double>(), WithinRel(1e9 / answer.plans[0].prediction.tokens_per_second / 3600, 1e-12));
  CHECK(!cost.contains("usd"));
  CHECK(!Json::parse(plan_json(answer, std::nullopt))["plans"][0].contains("cost"));

  answer.request.machine.price = PriceSpec{10, "", "", "test"};
  answer.request.machine.nodes = 3;
  cost = Json::parse(plan_json(answer, 1e9))["plans"][0]["cost"];
  CHECK_THAT(cost["usd"].get<double>(), WithinRel(30 * cost["hours"].get<double>(), 1e-12));
  CHECK_THAT(cost["usd_per_million_tokens"].get<double>(), WithinRel(cost["usd"].get<double>() / 1000, 1e-12));
}

TEST_CASE("plan as JSON: what does not fit says what is missing") {
  REQUIRE(!too_small().feasible);
  const Json json = Json::parse(plan_json(too_small(), std::nullopt));
  CHECK(json["feasible"] == false);
  CHECK(json["plans"].empty());
  const Json& lacks = json["shortfall"]["lacks"];
  REQUIRE(!lacks.empty());
  for (const Json& lack : lacks) {
    CHECK(lack["missing_bytes"] ==
          lack["needed_bytes"].get<std::int64_t>() - lack["available_bytes"].get<std::int64_t>());
    CHECK(lack["missing_bytes"] > 0);
  }
  // 12 bytes a parameter: an fp32 master and two fp32 moments.
  CHECK(json["shortfall"]["optimizer_state_bytes"] == 12 * 13015864320);
  for (const Json& change : json["shortfall"]["changes"]) CHECK(change["step_seconds"] > 0);
}

TEST_CASE("the text of a plan that fits says so, why and what is next") {
  PlanReport extra;
  extra.command = "zeroplan plan --model 13B";
  const std::string text = report_plan(offloaded(), extra, {});
  for (const char* part : {"Fits", "to spare", "Memory at the peak", "Time of a step", "limited by", "What would help",
                           "Assumed", "zeroplan plan --model 13B --out"}) {
    CHECK_THAT(text, HasText(part));
  }
  for (const Assumption& a : offloaded().assumptions) CHECK_THAT(text, HasText(a.source));
  CHECK(text.find('\x1b') == std::string::npos);
  for (const char c : text) CHECK(static_cast<unsigned char>(c) < 0x80);
}

TEST_CASE("the text of a plan that does not fit names the missing GiB and the states") {
  const std::string text = report_plan(too_small(), {}, {});
  CHECK_THAT(text, HasText("Does not fit"));
  CHECK_THAT(text, HasText(format_gib(too_small().shortfall->lacks.front().missing()) + " missing"));
  CHECK_THAT(text, HasText("master and Adam states alone: 145.5 GiB"));
}

TEST_CASE("a memory bar is as wide as asked, filled in proportion, colour or not") {
  TierMemory memory;
  memory.capacity = 40_GiB;
  memory.breakdown = {{"parameters", 10_GiB}, {"pinned", 5_GiB}, {"optimizer", 5_GiB}};
  memory.peak = 20_GiB;
  CHECK(memory_bar(memory, 8, {}) == "[PPIO....]");
  memory.capacity = 10_GiB;  // more than there is: the bar is the peak
  CHECK(memory_bar(memory, 8, {}) == "[PPPPIIOO]");
  const std::string coloured = memory_bar(memory, 8, {true, true});
  CHECK_THAT(coloured, HasText("\x1b[0m"));
}

TEST_CASE("time by phase and stream counts every op of the folded and the flat schedule alike") {
  const ModelSpec model = find_model("gpt2");
  Request request = request_of("gpt2", "2x3090-24G");
  request.global_batch = 16;
  const Answer answer = search(request);
  const Plan& plan = answer.plans.front().plan;
  const MachineCostModel cost(request.machine, plan.shard_ranks, plan.precision.weights);
  const StepTable folded = step_table(lower(model, plan, Folding::layers), cost, model);
  const StepTable flat = step_table(lower(model, plan, Folding::none), cost, model);
  CHECK(folded.ops == flat.ops);
  REQUIRE(folded.rows.size() == flat.rows.size());
  for (std::size_t i = 0; i < flat.rows.size(); ++i) {
    CHECK(folded.rows[i].ops == flat.rows[i].ops);
    CHECK_THAT(folded.rows[i].busy.base(), WithinRel(flat.rows[i].busy.base(), 1e-12));
    CHECK(folded.rows[i].busy <= answer.plans.front().prediction.step * (1 + 1e-9));
  }
}

TEST_CASE("alternatives share one global batch, and one of each is cheapest and fastest") {
  Request workload;
  workload.model = find_model("gpt2");
  std::vector<Alternative> alternatives;
  for (const char* gpus : {"8xA100-80G", "2x3090-24G"}) {
    alternatives.push_back({gpus, machine_for(parse_gpu_request(gpus), 1)});
  }
  alternatives.push_back({"3 nodes", machine_for(parse_gpu_request("8xA100-80G"), 3)});
  WhatifLimits limits;
  limits.tokens = 1e9;
  const WhatifAnswer answer = plan_alternatives(workload, alternatives, limits);
  REQUIRE(answer.rows.size() == 3);
  int cheapest = 0, fastest = 0;
  for (const WhatifRow& row : answer.rows) {
    REQUIRE(row.answer);
    CHECK(row.answer->request.global_batch == answer.workload.global_batch);
    CHECK(*row.answer->request.global_batch % row.alternative.machine.ranks() == 0);
    CHECK(row.cost().has_value() == row.alternative.machine.price.has_value());
    cheapest += row.cheapest;
    fastest += row.fastest;
  }
  CHECK(cheapest == 1);
  CHECK(fastest == 1);
  CHECK(!has_null(Json::parse(whatif_json({{"", answer, {}}}))));
}

TEST_CASE("a machine that cannot run the workload is a row, and an error only when it is all there is") {
  Request workload;
  workload.model = find_model("gpt2");
  const Alternative old{"V100", machine_for(parse_gpu_request("1xV100-32G"), 1)};  // no bf16
  CHECK_THROWS_WITH(plan_alternatives(workload, {old}), HasText("bf16"));
  const WhatifAnswer answer =
      plan_alternatives(workload, {old, {"A100", machine_for(parse_gpu_request("1xA100-40G"), 1)}});
  CHECK(answer.rows[0].best() == nullptr);
  CHECK_THAT(answer.rows[0].refusal, HasText("bf16"));
  CHECK(answer.rows[1].fastest);
}

}  // namespace
}  // namespace zeroplan
