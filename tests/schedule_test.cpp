// The builder's rules and the names of things.

#include "models/schedule.h"

#include <algorithm>

#include "models/lower.h"
#include "tests/catch.h"
#include "tests/random_plan.h"

namespace zeroplan::tests {
namespace {

class Small {
 public:
  OpRef op(std::initializer_list<OpRef> after = {}, std::initializer_list<Operand> operands = {}) {
    return builder.add(Stream::compute, Phase::forward, -1, work_, std::span<const OpRef>(after.begin(), after.size()),
                       std::span<const Operand>(operands.begin(), operands.size()));
  }
  ScheduleBuilder builder;

 private:
  WorkId work_ = builder.work(Join{});
};

}  // namespace

TEST_CASE("An edge from a later op is refused and none is dropped") {
  Small s;
  const OpRef a = s.op();
  CHECK_THROWS_AS(s.op({OpRef{7}}), std::logic_error);
  const OpRef b = s.op({OpRef{}, a});
  const Schedule schedule = s.builder.finish();
  CHECK(schedule.after(schedule.ops()[b.index()]).size() == 1);
}

TEST_CASE("A buffer that was not declared is refused") {
  Small s;
  CHECK_THROWS_AS(s.op({}, {{BufferId{}, Access::read}}), std::logic_error);
  CHECK_THROWS_AS(s.op({}, {{BufferId{3}, Access::read}}), std::logic_error);
}

TEST_CASE("A repeated block must have ops and be closed and carry before its ops") {
  {
    Small s;
    s.builder.begin_repeat(2);
    CHECK_THROWS_AS(s.builder.end_repeat(), std::logic_error);
  }
  {
    Small s;
    s.builder.begin_repeat(2);
    s.op();
    CHECK_THROWS_AS(s.builder.carry({}), std::logic_error);
    CHECK_THROWS_AS(s.builder.finish(), std::logic_error);
  }
}

TEST_CASE("Sizes are rounded up to the alignment of the arena") {
  ScheduleBuilder builder;
  const auto size = [&](double bytes) { return builder.buffer(builder.declare({.size = Bytes(bytes)})).size.base(); };
  CHECK(size(0) == 0);
  CHECK(size(1) == 256);
  CHECK(size(256) == 256);
  CHECK(size(257) == 512);
}

TEST_CASE("Multiplicities are products of the repeats around an op") {
  Small s;
  s.op();
  s.builder.begin_repeat(3);
  s.op();
  s.builder.begin_repeat(5);
  s.op();
  s.builder.end_repeat();
  s.builder.end_repeat();
  s.op();
  CHECK(s.builder.finish().multiplicities() == std::vector<std::int64_t>{1, 3, 15, 1});
}

TEST_CASE("Labels say layer and phase and what is done") {
  const ModelSpec model = find_model("llama-3.2-1b");
  Plan plan;
  plan.ranks = plan.shard_ranks = 2;
  plan.zero_stage = 3;
  plan.seq_len = 128;
  plan.optimizer = plan.parameters = Placement::all(Tier::hbm, static_cast<int>(model.sequence.size()));
  const Schedule s = lower(model, plan, Folding::none);
  std::vector<std::string> labels;
  for (const Op& op : s.ops()) labels.push_back(label(s, op, model));
  const auto has = [&](const char* text) { return std::count(labels.begin(), labels.end(), text); };
  CHECK(has("layer 3 forward: all-gather") >= 1);
  CHECK(has("layer 3 backward: reduce-scatter") == 1);
  CHECK(has("layer 3 optimizer: Adam") == 1);
  CHECK(has("head backward: loss") >= 1);
  CHECK(has("step optimizer: wait") >= 1);
  CHECK(block_label(model, 0) == "embedding");
  CHECK(block_label(model, -1) == "step");
  CHECK(block_label(model, 4) == "layer 3");
}

TEST_CASE("Every op and buffer of random plans has a name") {
  Random random(51);
  for (int i = 0; i < 200; ++i) {
    const Scenario scenario = random_scenario(random);
    const Schedule s = lower(scenario.model, scenario.plan, Folding::layers);
    for (const Op& op : s.ops()) REQUIRE_FALSE(label(s, op, scenario.model).ends_with(": "));
    for (const Buffer& b : s.buffers()) REQUIRE_FALSE(label(b, scenario.model).empty());
  }
}

TEST_CASE("Equal models and plans give equal schedules") {
  Random random(52);
  for (int i = 0; i < 100; ++i) {
    const Scenario scenario = random_scenario(random);
    Lowering used(scenario.model);
    (void)used.zeroplan(random_plan(random, scenario.model, 4, 4),
                        Folding::layers);  // what it remembers must not matter
    const Schedule a = lower(scenario.model, scenario.plan, Folding::none);
    const Schedule b = used.zeroplan(scenario.plan, Folding::none);
    REQUIRE(a.ops().size() == b.ops().size());
    REQUIRE(a.works().size() == b.works().size());
    REQUIRE(a.buffers().size() == b.buffers().size());
    for (std::size_t k = 0; k < a.ops().size(); ++k) {
      const auto x = a.after(a.ops()[k]), y = b.after(b.ops()[k]);
      REQUIRE(a.ops()[k].work.index == b.ops()[k].work.index);
      REQUIRE(std::equal(x.begin(), x.end(), y.begin(), y.end()));
    }
  }
}

TEST_CASE("An engine without a lowering is refused") {
  const ModelSpec model = find_model("gpt2-xl");
  Plan plan;
  plan.engine = Engine::fsdp2;
  CHECK_THROWS_WITH(lower(model, plan, Folding::none), HasText("fsdp2"));
}

}  // namespace zeroplan::tests
