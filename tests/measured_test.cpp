// measured.json: exact round trips, strictness, medians; plan_identity.

#include "models/measured.h"

#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "models/error.h"
#include "models/lower.h"
#include "tests/catch.h"
#include "tests/random_plan.h"

namespace zeroplan::tests {
namespace {

using Json = nlohmann::ordered_json;

Measured random_measured(Random& random) {
  Measured m;
  m.engine = "zeroplan";
  m.backend = "host";
  m.plan = "0123456789abcdef";
  m.ranks = static_cast<int>(random.between(1, 9));
  if (random.chance(50)) m.cpu = "AMD EPYC";
  m.cores = static_cast<int>(random.between(1, 99));
  m.threads_per_rank = static_cast<int>(random.between(1, 9));
  if (random.chance(70)) m.paths = {{"adam", "avx512"}, {"disk", "io_uring"}};
  m.steps = random.between(1, 9);
  m.warmup_steps = random.between(0, m.steps - 1);
  m.median_step = random.between(m.warmup_steps, m.steps - 1);
  for (int i = 0; i < m.steps; ++i) {
    m.losses.push_back(random.chance(20) ? INFINITY : random.unit() * 10 - 5);
    m.step_seconds.emplace_back(random.unit());
  }
  for (const Tier tier : {Tier::hbm, Tier::host, Tier::nvme}) {
    if (random.chance(60)) m.memory.push_back({tier, random.between(0, 1 << 30), random.between(0, 1 << 30)});
  }
  m.traffic.all_gather = random.between(0, 1 << 30);
  m.traffic.received = random.between(0, 1 << 30);
  for (std::int64_t i = random.between(0, 30); i > 0; --i) {
    MeasuredOp op;
    op.span.start = Seconds(random.unit());
    op.span.end = op.span.start + Seconds(random.unit());
    if (random.chance(30)) op.transfer_start = 0.5 * (op.span.start + op.span.end);
    op.seconds = Seconds(random.unit() * 1e-3);
    m.ops.push_back(op);
  }
  return m;
}

std::string sample_text() {
  Random random(7);
  Measured m = random_measured(random);
  m.steps = 3, m.warmup_steps = 1, m.median_step = 2;
  m.losses = {6, 5, 4};
  m.step_seconds = {Seconds(3), Seconds(1), Seconds(2)};
  m.memory = {{Tier::hbm, 1024, 1024}, {Tier::host, 512, 512}};
  m.ops = {{{Seconds(0), Seconds(1)}, Seconds(0.5), Seconds(0.5)}};
  return write_measured(m);
}

std::string refusal(const std::string& pointer, const Json& value) {
  Json j = Json::parse(sample_text());
  j[Json::json_pointer(pointer)] = value;
  try {
    (void)read_measured(j.dump(2), "m.json");
    return "";
  } catch (const InputError& e) {
    return e.what();
  }
}

TEST_CASE("What is written as measured.json is read back equal, and writes the same bytes") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    const Measured m = random_measured(random);
    const std::string text = write_measured(m);
    const Measured back = read_measured(text, "m.json");
    REQUIRE(back == m);
    REQUIRE(write_measured(back) == text);
  }
}

TEST_CASE("The example is read, and written as it is") {
  const std::string path = std::string(ZEROPLAN_SOURCE_DIR) + "/examples/host/measured.json";
  std::ifstream file(path);
  REQUIRE(file);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const Measured m = read_measured(text, path);
  CHECK(write_measured(m) == text);
  CHECK(m.losses.size() == static_cast<std::size_t>(m.steps));
  CHECK(m.ops.size() > 100);
}

TEST_CASE("Losses that are no number are kept") {
  Random random(3);
  Measured m = random_measured(random);
  m.losses.assign(m.losses.size(), NAN);
  CHECK(std::isnan(read_measured(write_measured(m), "m.json").losses[0]));
}

TEST_CASE("A measurement that cannot be is refused with its place") {
  CHECK(refusal("/steps", 3).empty());
  CHECK_THAT(refusal("/extra", 1), HasText("m.json:"));
  CHECK_THAT(refusal("/schema", 2), HasText("schema 1"));
  CHECK_THAT(refusal("/plan", "xyz"), HasText("16 hexadecimal digits"));
  CHECK_THAT(refusal("/steps", 4), HasText("/losses: expected one for each of the 4 steps, got 3"));
  CHECK_THAT(refusal("/warmup_steps", 3), HasText("/warmup_steps"));
  CHECK_THAT(refusal("/median_step", 0), HasText("/median_step"));
  CHECK_THAT(refusal("/losses/0", "five"), HasText("/losses/0: expected a number"));
  CHECK_THAT(refusal("/memory/1/tier", "gpu"), HasText("each tier once"));
  CHECK_THAT(refusal("/memory/0/tier", "hbm"), HasText("\"gpu\""));
  CHECK_THAT(refusal("/memory/0/used_bytes", -1), HasText("/memory/0/used_bytes"));
  CHECK_THAT(refusal("/traffic/bytes", 1), HasText("unknown key \"bytes\""));
  CHECK_THAT(refusal("/ops/0/start", 2), HasText("no time before \"start\""));
  CHECK_THAT(refusal("/ops/0/transfer_start", 2), HasText("between"));
  CHECK_THAT(refusal("/ops/0/seconds", "1s"), HasText("/ops/0/seconds"));
  CHECK_THAT(refusal("/machine/cores", 0), HasText("/machine/cores"));
}

TEST_CASE("Broken text is refused, never misread") {
  const std::string text = sample_text();
  Random random(11);
  for (int i = 0; i < 500; ++i) {
    std::string broken = text;
    for (std::int64_t k = random.between(1, 3); k > 0; --k) {
      const auto at = static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(broken.size()) - 1));
      if (random.chance(50)) {
        broken[at] = static_cast<char>(random.between(32, 126));
      } else {
        broken.erase(at, 1);
      }
    }
    try {
      const Measured m = read_measured(broken, "m.json");
      CHECK(m.losses.size() == static_cast<std::size_t>(m.steps));
    } catch (const InputError&) {
    }
  }
}

PlanFile small_file() {
  Random random(5);
  PlanFile file;
  file.model = random_readable_model(random);
  file.machine = machine_for(parse_gpu_request("4xA100-80G"), 1);
  file.plan = random_plan(random, file.model, 4, 4);
  return file;
}

TEST_CASE("A plan's identity depends on plan and configuration, and survives the file") {
  const PlanFile file = small_file();
  const std::string identity = plan_identity(file);
  CHECK(plan_identity(read_plan(write_plan(file), "plan.json")) == identity);
  std::set<std::string> all{identity};
  PlanFile other = file;
  other.plan.loss_chunk_tokens += 1;
  CHECK(all.insert(plan_identity(other)).second);
  other = file;
  other.plan.clip_norm += 0.5;
  CHECK(all.insert(plan_identity(other)).second);
  other = file;
  Json config = Json::parse(file.model.config);
  config["vocab_size"] = config.value("vocab_size", 0) + 1;
  other.model.config = config.dump();
  CHECK(all.insert(plan_identity(other)).second);
  other = file;
  other.machine.name = "elsewhere";
  CHECK(plan_identity(other) == identity);
}

/// Steps in which op i of step s takes `seconds[s]` x (i + 1); collectives wait the first half.
std::vector<StepTimes> steps_of(const Schedule& schedule, const std::vector<double>& seconds) {
  std::vector<StepTimes> steps;
  for (const double unit : seconds) {
    StepTimes& step = steps.emplace_back();
    for (std::size_t i = 0; i < schedule.ops().size(); ++i) {
      const double length = unit * static_cast<double>(i + 1);
      step.trace.ops.push_back({Seconds(1), Seconds(1 + length)});
      step.transfer_starts.emplace_back(1 + length / 2);
    }
  }
  return steps;
}

TEST_CASE("Op times are medians without the warm-up; waits of collectives are apart") {
  const PlanFile file = small_file();
  const Schedule schedule = lower(file.model, file.plan, Folding::none);
  Measured m;
  m.steps = 5;
  m.step_seconds = {Seconds(9), Seconds(4), Seconds(2), Seconds(3), Seconds(8)};
  const auto all = steps_of(schedule, {9, 4, 2, 3, 8});
  SECTION("every step traced") { set_op_times(m, schedule, all, 1); }
  SECTION("only the last four traced") { set_op_times(m, schedule, std::span(all).subspan(1), 1); }
  CHECK(m.warmup_steps == 1);
  CHECK(m.median_step == 3);  // the lower median of 2 3 4 8
  CHECK(m.step() == Seconds(3));
  REQUIRE(m.ops.size() == schedule.ops().size());
  for (std::size_t i = 0; i < m.ops.size(); ++i) {
    const bool collective = std::holds_alternative<Collective>(schedule.work(schedule.ops()[i]));
    const double length = 3 * static_cast<double>(i + 1);
    REQUIRE(m.ops[i].span.end == Seconds(1 + length));
    REQUIRE(m.ops[i].transfer_start.has_value() == collective);
    REQUIRE_THAT(m.ops[i].seconds.base(), WithinRel(collective ? length / 2 : length, 1e-12));
  }
}

TEST_CASE("One step is its own median; a trace of another schedule is our bug") {
  const PlanFile file = small_file();
  const Schedule schedule = lower(file.model, file.plan, Folding::none);
  Measured m;
  m.steps = 1;
  m.step_seconds = {Seconds(2)};
  auto steps = steps_of(schedule, {2});
  set_op_times(m, schedule, steps, 2);
  CHECK(m.warmup_steps == 0);
  CHECK(m.median_step == 0);
  steps[0].trace.ops.pop_back();
  CHECK_THROWS_AS(set_op_times(m, schedule, steps, 2), std::logic_error);
  CHECK_THROWS_AS(set_op_times(m, schedule, {}, 2), std::logic_error);
}

}  // namespace
}  // namespace zeroplan::tests
