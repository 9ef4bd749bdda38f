// Prediction beside measurement: made-up measurements whose answer is known.

#include "planner/compare_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/error.h"
#include "models/lower.h"
#include "tests/catch.h"
#include "tests/random_plan.h"

namespace zeroplan::tests {
namespace {

using Json = nlohmann::ordered_json;

PlanFile random_file(Random& random) {
  PlanFile file;
  file.model = random_readable_model(random);
  file.machine = machine_for(parse_gpu_request("4xA100-80G"), 1);
  file.plan = random_plan(random, file.model, 4, 4);
  return file;
}

/// What would be measured if the prediction were exact and every time `factor` times as long.
Measured measured_as_predicted(const PlanFile& file, double factor) {
  const Schedule flat = lower(file.model, file.plan, Folding::none);
  Predictor predictor(file.model, file.machine);
  const PredictedStep predicted = predicted_step(predictor, file, flat);
  Measured m;
  m.engine = "zeroplan";
  m.backend = "host";
  m.plan = plan_identity(file);
  m.ranks = file.plan.ranks;
  m.steps = 3;
  m.losses = {3, 2, 1};
  m.step_seconds.assign(3, factor * predicted.step);
  m.memory = predicted.memory;
  for (MeasuredTier& tier : m.memory) tier.used = tier.planned;
  StepTimes step;
  for (const Span& span : predicted.trace.ops) step.trace.ops.push_back({factor * span.start, factor * span.end});
  for (const Seconds time : predicted.transfer_starts) step.transfer_starts.push_back(factor * time);
  set_op_times(m, flat, std::vector(2, step), 1);
  return m;
}

TEST_CASE("A measurement that is what was predicted has no errors") {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    Random random(seed);
    const PlanFile file = random_file(random);
    const Measured measured = measured_as_predicted(file, 1);
    const Comparison c = compare_plan(file, measured, "m.json").comparison;
    INFO("seed " << seed);
    CHECK(c.memory_equal());
    CHECK_FALSE(c.memory.empty());
    CHECK(c.predicted_step == c.measured_step);
    CHECK(c.predicted_wait == c.measured_wait);
    CHECK(c.median_kind_error == 0.0);
    std::int64_t timed = 0;
    for (const ComparedRow& row : c.rows) {
      CHECK_THAT((row.predicted - row.measured).base(), WithinAbs(0, 1e-12));
      if (row.kind != OpKind::bookkeeping) timed += row.count;
    }
    CHECK(timed == static_cast<std::int64_t>(c.ops.size()));
    CHECK(c.ops.size() >= 20);
    CHECK_THAT((c.measured_coverage.covered + c.measured_coverage.unattributed).base(),
               WithinRel(c.measured_step.base(), 1e-9));
    CHECK_THAT(c.measured_coverage.unattributed.base(), WithinAbs(0, 1e-9 * c.measured_step.base()));
  }
}

TEST_CASE("Twice as slow is an error of minus 50 %, in every row") {
  Random random(4);
  const PlanFile file = random_file(random);
  const Comparison c = compare_plan(file, measured_as_predicted(file, 2), "m.json").comparison;
  CHECK_THAT(*relative_error(c.predicted_step, c.measured_step), WithinAbs(-0.5, 1e-12));
  CHECK_THAT(*c.median_kind_error, WithinAbs(0.5, 1e-9));
  for (const ComparedRow& row : c.rows) {
    if (const auto error = relative_error(row.predicted, row.measured)) CHECK_THAT(*error, WithinAbs(-0.5, 1e-9));
  }
}

std::string refusal(const PlanFile& file, const Measured& measured) {
  try {
    (void)compare_plan(file, measured, "m.json");
    return "";
  } catch (const InputError& e) {
    return e.what();
  }
}

TEST_CASE("The measurement of another plan, of other ranks or other ops is refused") {
  Random random(4);
  const PlanFile file = random_file(random);
  const Measured good = measured_as_predicted(file, 1);
  REQUIRE(refusal(file, good).empty());
  PlanFile other = file;
  other.plan.clip_norm += 1;
  CHECK_THAT(refusal(other, good), HasText("m.json: /plan: measured on another plan"));
  Measured bad = good;
  bad.ranks = 8;
  CHECK_THAT(refusal(file, bad), HasText("/ranks: expected the plan's 4, got 8"));
  bad = good;
  bad.ops.pop_back();
  CHECK_THAT(refusal(file, bad), HasText("/ops: expected the"));
  bad = good;
  bad.ops[0].transfer_start = bad.ops[0].span.start;
  CHECK_THAT(refusal(file, bad), HasText("/ops/0/transfer_start"));
  bad = good;
  bad.engine = "deepspeed";
  CHECK_THAT(refusal(file, bad), HasText("/engine: expected the plan's \"zeroplan\""));
}

TEST_CASE("Memory that differs by a byte, or a tier that only one side has, is shown") {
  Random random(4);
  const PlanFile file = random_file(random);
  Measured measured = measured_as_predicted(file, 1);
  measured.memory = {{Tier::hbm, measured.memory[0].planned, measured.memory[0].planned + 1}, {Tier::nvme, 0, 512}};
  const PlanComparison result = compare_plan(file, measured, "m.json");
  CHECK_FALSE(result.comparison.memory_equal());
  CHECK_THAT(report_comparison(file, measured, result, {}), HasText("-1 B"));
  const Json json = Json::parse(comparison_json(file, measured, result));
  CHECK(json["memory"][0]["measured_bytes"] == measured.memory[0].used);
  CHECK(json["memory"].back() == Json{{"tier", "nvme"}, {"predicted_bytes", 0}, {"measured_bytes", 512}});
}

TEST_CASE("The report names phases, kinds, the step and what is unattributed; JSON has the keys of the specification") {
  Random random(4);
  const PlanFile file = random_file(random);
  const Measured measured = measured_as_predicted(file, 1);
  const PlanComparison result = compare_plan(file, measured, "m.json");
  const std::string text = report_comparison(file, measured, result, {});
  for (const char* part : {"backward", "matmul", "attention", "Adam", "waits for peers", "unattributed", "equal"}) {
    CHECK_THAT(text, HasText(part));
  }
  const Json json = Json::parse(comparison_json(file, measured, result));
  CHECK(json.contains("unattributed_seconds"));
  REQUIRE(json["ops"].size() == result.comparison.ops.size());
  for (const char* key : {"op", "kind", "phase", "predicted_seconds", "measured_seconds"}) {
    CHECK(json["ops"][0].contains(key));
  }
}

TEST_CASE("Time in which no op runs is unattributed, on whatever streams the others are") {
  Trace trace;
  trace.ops = {
      {Seconds(3), Seconds(4)}, {Seconds(0), Seconds(2)}, {Seconds(1), Seconds(1.5)}, {Seconds(1.5), Seconds(2.5)}};
  const Coverage c = coverage(trace, Seconds(7));
  CHECK(c.covered == Seconds(3.5));
  CHECK(c.unattributed == Seconds(3.5));  // 2.5 to 3, 4 to 7
  CHECK(coverage({}, Seconds(2)).unattributed == Seconds(2));
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Random random(seed);
    Trace drawn;
    std::vector<bool> busy(1000);
    for (int i = 0; i < 12; ++i) {
      const std::int64_t from = random.between(0, 900), to = from + random.between(0, 99);
      drawn.ops.push_back({Seconds(static_cast<double>(from)), Seconds(static_cast<double>(to))});
      std::fill(busy.begin() + from, busy.begin() + to, true);
    }
    const auto count = static_cast<double>(std::count(busy.begin(), busy.end(), true));
    CHECK(coverage(drawn, Seconds(1000)).covered == Seconds(count));
  }
}

TEST_CASE("Every op of every plan has a kind") {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const Scenario scenario = random_scenario(random);
    const Schedule schedule = lower(scenario.model, scenario.plan, Folding::layers);
    for (const Op& op : schedule.ops()) {
      const Work& work = schedule.work(op);
      const bool timed = !std::holds_alternative<Alloc>(work) && !std::holds_alternative<Free>(work) &&
                         !std::holds_alternative<Join>(work);
      REQUIRE((op_kind(work, scenario.model) != OpKind::bookkeeping) == timed);
    }
  }
}

}  // namespace
}  // namespace zeroplan::tests
