// The static arena: layouts are legal, meet the live peak, and the bound is the memory timeline's peak.

#include <algorithm>
#include <ctime>

#include <fmt/format.h>

#include "models/arena.h"
#include "models/lower.h"
#include "sim/memory_timeline.h"
#include "tests/catch.h"
#include "tests/random_plan.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

struct Case {
  std::string name;
  Plan plan;
};

Plan base_plan(const ModelSpec& model, int stage, Recompute recompute, int prefetch) {
  Plan plan;
  plan.ranks = 64;
  plan.zero_stage = stage;
  plan.shard_ranks = stage == 0 ? 1 : 64;
  plan.accumulation = 4;
  const int blocks = static_cast<int>(model.sequence.size());
  plan.optimizer = plan.parameters = Placement::all(Tier::hbm, blocks);
  plan.recompute = recompute;
  plan.recompute_layers = recompute == Recompute::none ? 0 : static_cast<int>(model.num_layers);
  plan.prefetch_layers = prefetch;
  if (model.max_positions > 0) plan.seq_len = std::min<std::int64_t>(4096, model.max_positions);
  return plan;
}

std::vector<Case> typical_plans(const ModelSpec& model) {
  std::vector<Case> cases;
  const auto add = [&](std::string name, int stage, Recompute recompute, int prefetch) -> Plan& {
    return cases.emplace_back(Case{std::move(name), base_plan(model, stage, recompute, prefetch)}).plan;
  };
  const int blocks = static_cast<int>(model.sequence.size());
  add("zero0 none", 0, Recompute::none, 1);
  add("zero1 selective", 1, Recompute::selective, 1);
  add("zero2 none", 2, Recompute::none, 1);
  add("zero2 full", 2, Recompute::full, 1);
  add("zero3 none p0", 3, Recompute::none, 0);
  add("zero3 none p1", 3, Recompute::none, 1);
  add("zero3 none p2", 3, Recompute::none, 2);
  add("zero3 selective p1", 3, Recompute::selective, 1);
  add("zero3 full p0", 3, Recompute::full, 0);
  add("zero3 full p1", 3, Recompute::full, 1);
  add("zero3 full p2", 3, Recompute::full, 2);
  Plan& half = add("zero3 half full p1", 3, Recompute::full, 1);
  half.recompute_layers = static_cast<int>(model.num_layers) / 2;
  if (half.recompute_layers == 0) half.recompute = Recompute::none;
  Plan& offload = add("zero3 full p1 offload", 3, Recompute::full, 1);
  offload.optimizer = offload.parameters = Placement::all(Tier::host, blocks);
  offload.gradients = Tier::host;
  Plan& two = add("zero2 full offload", 2, Recompute::full, 1);
  two.optimizer = Placement::all(Tier::host, blocks);
  two.gradients = Tier::host;
  return cases;
}

/// Random births and deaths, some inside a repeated block; sizes from a few values, as in a model, or odd.
Schedule random_schedule(Random& random) {
  ScheduleBuilder builder;
  const WorkId alloc = builder.work(Alloc{}), free = builder.work(Free{});
  const auto op = [&](WorkId work, BufferId buffer) {
    const Operand operand{buffer, Access::write};
    builder.add(Stream::compute, Phase::forward, -1, work, {}, {&operand, 1});
  };
  const auto size = [&] {
    return Bytes(static_cast<double>(random.chance(50) ? 1024 << random.between(0, 6) : random.between(1, 90'000)));
  };
  const auto churn = [&](std::int64_t steps) {
    std::vector<BufferId> live;
    for (std::int64_t k = 0; k < steps || !live.empty(); ++k) {
      if (k < steps && (live.empty() || random.chance(55))) {
        const Lifetime lifetime = Lifetime::step;
        live.push_back(builder.declare({BufferRole::value, Memory::hbm, Owner::activations, lifetime, -1, -1, size()}));
        op(alloc, live.back());
      } else {
        const auto last = static_cast<std::int64_t>(live.size()) - 1;
        const auto at = live.begin() + (random.chance(60) ? last : random.between(0, last));
        op(free, *at);
        live.erase(at);
      }
    }
  };
  for (std::int64_t k = random.between(0, 3); k > 0; --k) {
    builder.declare({BufferRole::moments, Memory::hbm, Owner::optimizer, Lifetime::resident, -1, -1, size()});
  }
  const BufferId around =
      builder.declare({BufferRole::value, Memory::hbm, Owner::activations, Lifetime::step, -1, -1, size()});
  op(alloc, around);
  churn(random.between(0, 60));
  builder.begin_repeat(random.between(1, 5));
  churn(random.between(1, 120));
  builder.end_repeat();
  op(free, around);
  churn(random.between(0, 60));
  return builder.finish();
}

struct Result {
  double ratio = 1;
  double milliseconds = 0;  // of processor time
};

/// Lays out, checks the layout and its bound, and measures.
Result laid_out(const Schedule& schedule, LayoutEffort effort = LayoutEffort::normal) {
  const std::clock_t start = std::clock();
  const ArenaLayout layout = lay_out(schedule, Memory::hbm, effort);
  const double milliseconds = 1e3 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  CHECK_NOTHROW(check_layout(schedule, Memory::hbm, layout));
  CHECK(layout.lower_bound == MemoryTimeline(schedule).peak(Memory::hbm).bytes);
  CHECK(layout.size >= layout.lower_bound);
  return {layout.ratio(), milliseconds};
}

bool dense(const ModelSpec& model) { return model.active_parameters() == model.parameters(); }

Result laid_out(const ModelSpec& model, const Plan& plan, LayoutEffort effort = LayoutEffort::normal) {
  check_plan(plan, model, "test");
  return laid_out(lower(model, plan, Folding::micro_steps), effort);
}

}  // namespace

TEST_CASE("Layouts of random schedules share no byte between live buffers") {
  Random random(1);
  double sum = 0;
  for (int k = 0; k < 400; ++k) {
    CAPTURE(k);
    sum += laid_out(random_schedule(random)).ratio;
  }
  CHECK(sum / 400 < 1.02);
}

TEST_CASE("Layouts of random plans share no byte between live buffers and stay near the live peak") {
  Random random(2);
  std::vector<double> ratios;
  for (int k = 0; k < 300; ++k) {
    const Scenario scenario = random_scenario(random);
    CAPTURE(name_of(scenario));
    const Schedule schedule = lower(scenario.model, scenario.plan, Folding::micro_steps);
    ratios.push_back(laid_out(schedule).ratio);
    for (Memory memory : {Memory::pinned, Memory::dram, Memory::nvme}) {
      const ArenaLayout layout = lay_out(schedule, memory);
      CHECK_NOTHROW(check_layout(schedule, memory, layout));
      CHECK(layout.size == MemoryTimeline(schedule).peak(memory).bytes);
    }
  }
  std::sort(ratios.begin(), ratios.end());
  CHECK(ratios[ratios.size() * 9 / 10] == 1.0);
  CHECK(ratios[ratios.size() * 98 / 100] <= 1.01);
  CHECK(ratios.back() < 1.10);  // small models with odd mixes of few large buffers
}

TEST_CASE("A flat and a micro-step-folded schedule need the same arena") {
  const ModelSpec model = find_model("llama-2-7b");
  Plan plan = base_plan(model, 3, Recompute::full, 1);
  plan.accumulation = 5;
  const Schedule flat = lower(model, plan, Folding::none), folded = lower(model, plan, Folding::micro_steps);
  const ArenaLayout a = lay_out(flat, Memory::hbm), b = lay_out(folded, Memory::hbm);
  check_layout(flat, Memory::hbm, a);
  CHECK(a.size == b.size);
  CHECK(a.lower_bound == b.lower_bound);
  CHECK(lay_out(folded, Memory::hbm).offset == b.offset);
  CHECK_THROWS_AS(lay_out(lower(model, plan, Folding::layers), Memory::hbm), std::logic_error);
}

TEST_CASE("check_layout finds shared bytes, overruns and missing alignment") {
  Random random(3);
  const Schedule schedule = random_schedule(random);
  const ArenaLayout good = lay_out(schedule, Memory::hbm);
  ArenaLayout bad = good;
  bad.size = good.size - Bytes(256.0);
  CHECK_THROWS_AS(check_layout(schedule, Memory::hbm, bad), std::logic_error);
  bad = good;
  for (std::int64_t& offset : bad.offset) offset = 0;
  CHECK_THROWS_AS(check_layout(schedule, Memory::hbm, bad), std::logic_error);
  bad = good;
  bad.size = good.size + Bytes(512.0);
  for (std::int64_t& offset : bad.offset) offset += 128;
  CHECK_THROWS_AS(check_layout(schedule, Memory::hbm, bad), std::logic_error);
}

TEST_CASE("Llama-2 arenas are at most 1 % above the live peak") {
  for (const char* name : {"llama-2-7b", "llama-2-70b"}) {
    const ModelSpec model = find_model(name);
    for (const Case& c : typical_plans(model)) {
      CAPTURE(name, c.name);
      CHECK(laid_out(model, c.plan).ratio <= 1.01);
    }
  }
}

TEST_CASE("Arenas of every dense catalog model are at most 1 % above the live peak", "[.slow]") {
  for (const std::string& name : model_names()) {
    const ModelSpec model = find_model(name);
    if (!dense(model)) continue;
    for (std::int64_t micro_batch : {1, 3}) {
      for (Case& c : typical_plans(model)) {
        CAPTURE(name, c.name, micro_batch);
        c.plan.micro_batch = micro_batch;
        CHECK(laid_out(model, c.plan).ratio <= 1.01);
      }
    }
  }
}

// The tables of docs/memory-layout.md.
TEST_CASE("Arena over live peak, by model and plan", "[.arena-table]") {
  constexpr const char* kModels[] = {"gpt2-xl",     "llama-2-7b",          "llama-3-8b", "qwen2.5-14b",
                                     "llama-2-70b", "command-r-plus-104b", "bloom-176b", "llama-3.1-405b",
                                     "t5-11b",      "mixtral-8x7b"};
  fmt::print("| plan |");
  for (const char* name : kModels) fmt::print(" {} |", name);
  const auto plans = typical_plans(find_model(kModels[0]));
  for (std::size_t p = 0; p < plans.size(); ++p) {
    fmt::print("\n| {} |", plans[p].name);
    for (const char* name : kModels) {
      const ModelSpec model = find_model(name);
      fmt::print(" {:.4f} |", laid_out(model, typical_plans(model)[p].plan).ratio);
    }
  }
  std::int64_t cases = 0, exact = 0;
  std::vector<double> times;
  Result worst;
  for (const std::string& name : model_names()) {
    const ModelSpec model = find_model(name);
    if (!dense(model)) continue;
    for (std::int64_t micro_batch : {1, 3}) {
      for (Case& c : typical_plans(model)) {
        c.plan.micro_batch = micro_batch;
        const Result result = laid_out(model, c.plan);
        ++cases;
        exact += result.ratio == 1.0;
        times.push_back(result.milliseconds);
        if (result.ratio > worst.ratio) worst = result;
      }
    }
  }
  std::sort(times.begin(), times.end());
  fmt::print(
      "\n\nLlama-2-70B, zero3 full p1: {:.2f} ms",
      laid_out(find_model("llama-2-70b"), base_plan(find_model("llama-2-70b"), 3, Recompute::full, 1)).milliseconds);
  fmt::print("\n\n{} cases, {} exact, worst {:.4f}; processor ms: median {:.2f}, 95 % {:.2f}, most {:.2f}\n", cases,
             exact, worst.ratio, times[times.size() / 2], times[times.size() * 95 / 100], times.back());
}
