// The longest-path reader: hand-made cases, and random schedules against an unfolder and longest path of the test's
// own.

#include "sim/estimate.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "models/error.h"
#include "models/lower.h"
#include "tests/catch.h"
#include "tests/random_plan.h"
#include "tests/unfold.h"

namespace zeroplan::tests {
namespace {

constexpr double kAgreement = 1e-12;     // relative
constexpr double kRounding = 0x1.0p-53;  // of one addition

Demand demand_of(double seconds) {
  Demand d;
  d[ResourceRole::sm] = Seconds(seconds);
  return d;
}

/// A schedule whose works take the seconds given, one work an op.
class Timed {
 public:
  OpRef op(Stream stream, double seconds, std::initializer_list<OpRef> after = {}, Phase phase = Phase::forward) {
    demands_.push_back(demand_of(seconds));
    return builder.add(stream, phase, -1, builder.work(Join{}), std::span<const OpRef>(after.begin(), after.size()),
                       {});
  }
  Estimate estimate() {
    const Schedule schedule = builder.finish();
    return Estimator().run(schedule, demands_);
  }

  ScheduleBuilder builder;

 private:
  std::vector<Demand> demands_;
};

bool close(double a, double b, double scale, std::size_t additions = 0) {
  return std::abs(a - b) <= (kAgreement + kRounding * static_cast<double>(additions)) * scale;
}

std::array<double, 5> parts(const TimeBreakdown& b) {
  return {b.compute.base(), b.exposed_communication.base(), b.exposed_offload.base(), b.optimizer.base(),
          b.idle.base()};
}

// --- laws of one schedule ----------------------------------------------------------------------------

void require(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

void check_laws(const Estimate& e, std::size_t ops) {
  const double step = e.step.base();
  require(close(e.breakdown.total().base(), step, step, ops), "the breakdown does not sum to the step");
  for (const double part : parts(e.breakdown))
    require(part >= -kAgreement * step, "a part of the breakdown is negative");
  for (const Seconds busy : e.stream_busy)
    require(busy.base() <= step * (1 + kAgreement), "a stream is busy longer than the step");
}

void check_same(const Estimate& a, const Estimate& b, std::size_t ops) {
  const double step = a.step.base();
  require(close(b.step.base(), step, step, ops), "the folded step differs");
  for (std::size_t k = 0; k < parts(a.breakdown).size(); ++k) {
    require(close(parts(a.breakdown)[k], parts(b.breakdown)[k], step, ops),
            "the folded breakdown differs in part " + std::to_string(k));
  }
  for (std::size_t s = 0; s < kNumStreams; ++s) {
    require(close(a.stream_busy[s].base(), b.stream_busy[s].base(), a.stream_busy[s].base(), ops),
            "a stream's busy time differs");
  }
  for (std::size_t r = 0; r < kNumRoles; ++r) {
    require(close(a.role_busy[r].base(), b.role_busy[r].base(), a.role_busy[r].base(), ops),
            "a resource's busy time differs");
  }
}

double naive_step(const Schedule& schedule, std::span<const Demand> demands) {
  std::vector<double> seconds;
  for (const Demand& d : demands) seconds.push_back(d.alone().base());
  double step = 0;
  for (const double end : longest_path(schedule, unfold(schedule), seconds)) step = std::max(step, end);
  return step;
}

// --- random (model, machine, plan) -------------------------------------------------------------------

/// Prices the works of one kind of schedule with random times: every winner and every drift can happen.
std::vector<Demand> random_demands(const Schedule& schedule, const std::vector<double>& seconds_of_stream,
                                   Random& random) {
  std::vector<Demand> demands(schedule.works().size());
  for (const Op& op : schedule.ops()) {
    const bool free = std::holds_alternative<Alloc>(schedule.work(op)) ||
                      std::holds_alternative<Free>(schedule.work(op)) ||
                      std::holds_alternative<Join>(schedule.work(op));
    Demand& d = demands[op.work.index];
    if (free || d.alone().base() > 0) continue;
    d = demand_of(seconds_of_stream[static_cast<std::size_t>(op.stream)] * (0.5 + random.unit()));
  }
  return demands;
}

void check_folding(const Schedule& flat, std::span<const Demand> flat_demands, const Schedule& folded,
                   std::span<const Demand> folded_demands) {
  Estimator estimator;
  const Estimate a = estimator.run(flat, flat_demands);
  const Estimate b = estimator.run(folded, folded_demands);
  check_laws(a, flat.ops().size());
  check_laws(b, flat.ops().size());
  check_same(a, b, flat.ops().size());
  const double step = a.step.base();
  require(close(naive_step(flat, flat_demands), step, step), "the step is not the longest path");
}

std::vector<MachineSpec> sample_machines(Random& random, int count) {
  std::vector<MachineSpec> machines;
  while (static_cast<int>(machines.size()) < count) machines.push_back(random_machine(random));
  return machines;
}

void check_random(Random& random, const std::vector<MachineSpec>& machines, Scenario& scenario) {
  const MachineSpec& machine = random.pick(machines);
  scenario.model = random_model(random);
  scenario.plan = random_plan(random, scenario.model, machine.ranks(), machine.gpus_per_node);
  Lowering lowering(scenario.model);
  const Schedule flat = lowering.zeroplan(scenario.plan, Folding::none);
  const Schedule folded = lowering.zeroplan(scenario.plan, Folding::layers);
  if (random.chance(50)) {
    std::vector<double> seconds;
    for (int s = 0; s < kNumStreams; ++s) seconds.push_back(std::pow(10.0, -3 + 2 * random.unit()));
    // Both declare their works in the order of first use.
    require(flat.works().size() == folded.works().size(), "flat and folded schedules have other works");
    const auto demands = random_demands(flat, seconds, random);
    check_folding(flat, demands, folded, demands);
    return;
  }
  try {
    const MachineCostModel cost(machine, scenario.plan.shard_ranks, scenario.plan.precision.weights);
    check_folding(flat, demands(flat, cost), folded, demands(folded, cost));
  } catch (const InputError&) {
    // A GPU without this precision.
  }
}

void check_many(std::uint64_t seed, std::int64_t cases) {
  Random random(seed);
  const std::vector<MachineSpec> machines = sample_machines(random, 60);
  std::map<std::string, std::pair<int, std::string>> failures;
  for (std::int64_t i = 0; i < cases; ++i) {
    Scenario scenario;
    try {
      check_random(random, machines, scenario);
    } catch (const std::exception& e) {
      auto& [count, first] = failures[e.what()];
      if (count++ == 0) first = name_of(scenario);
    }
  }
  for (const auto& [what, failure] : failures) {
    INFO(what << ": " << failure.first << " of " << cases << " cases, the first: " << failure.second);
    CHECK(what.empty());
  }
  CHECK(failures.empty());
}

// --- random schedules of no model --------------------------------------------------------------------

/// Ops on random streams with random edges, nested repeats and carried values of every kind.
class RandomSchedule {
 public:
  explicit RandomSchedule(Random& random) : random_(random) {}

  Schedule make() {
    const int works = static_cast<int>(random_.between(1, 12));
    for (int w = 0; w < works; ++w) {
      works_.push_back(builder_.work(Join{}));
      demands.push_back(demand_of(random_.chance(10) ? 0.0 : std::pow(10.0, 3 * random_.unit())));
    }
    body(0);
    return builder_.finish();
  }

  std::vector<Demand> demands;

 private:
  void body(int depth) {
    const int parts = static_cast<int>(random_.between(1, depth == 0 ? 5 : 4));
    op();
    for (int p = 0; p < parts; ++p) {
      const auto ops = random_.between(0, 6);
      for (int k = 0; k < ops; ++k) op();
      if (depth < 3 && random_.chance(40)) repeat(depth + 1);
    }
  }

  OpRef some() { return known_.empty() || random_.chance(10) ? OpRef{} : random_.pick(known_); }

  void op() {
    std::vector<OpRef> after;
    const auto edges = random_.between(0, 3);
    for (int e = 0; e < edges; ++e) after.push_back(some());
    const auto stream = static_cast<Stream>(random_.between(0, kNumStreams - 1));
    const auto phase = static_cast<Phase>(random_.between(0, 2));
    known_.push_back(builder_.add(stream, phase, -1, random_.pick(works_), after, {}));
  }

  void repeat(int depth) {
    const std::int64_t count = depth == 1 ? random_.between(1, 60) : random_.between(1, 12);
    builder_.begin_repeat(count);
    std::vector<OpRef> carried;
    const auto values = random_.between(0, 4);
    for (int k = 0; k < values; ++k) carried.push_back(builder_.carry(some()));
    known_.insert(known_.end(), carried.begin(), carried.end());
    body(depth);
    for (const OpRef value : carried) builder_.set_next(value, some());
    builder_.end_repeat();
  }

  Random& random_;
  ScheduleBuilder builder_;
  std::vector<WorkId> works_;
  std::vector<OpRef> known_;
};

/// The same ops without repeats.
Schedule flattened(const Schedule& folded) {
  ScheduleBuilder builder;
  for (const Work& work : folded.works()) builder.work(work);
  for (const UnfoldedOp& u : unfold(folded)) {
    const Op& op = folded.ops()[u.op];
    std::vector<OpRef> after;
    for (const std::uint32_t from : u.after) after.push_back({from});
    builder.add(op.stream, op.phase, op.block, op.work, after, {});
  }
  return builder.finish();
}

}  // namespace

TEST_CASE("One op alone takes alone()") {
  for (const double seconds : {0.0, 1e-9, 0.5, 3600.0}) {
    Timed t;
    t.op(Stream::compute, seconds);
    CHECK(t.estimate().step == Seconds(seconds));
  }
  Demand d;
  d.latency = 5.0_us;
  d[ResourceRole::sm] = 2.0_us;
  d[ResourceRole::hbm] = 7.0_us;
  CHECK_THAT(d.alone().base(), WithinRel(12e-6, 1e-15));
  CHECK(d.limit() == ResourceRole::hbm);
}

// compute: A(3) -------- C(2) ---- E(1)
// gather:      B(10) after A;  E after B        A 0-3, B 3-13, C 3-5, E 13-14
TEST_CASE("Two streams meet at the later of their ends and the wait is the transfer's") {
  Timed t;
  const OpRef a = t.op(Stream::compute, 3);
  const OpRef b = t.op(Stream::gather, 10, {a});
  t.op(Stream::compute, 2);
  t.op(Stream::compute, 1, {b});
  const Estimate e = t.estimate();
  CHECK(e.step == Seconds(14));
  CHECK(e.breakdown.compute == Seconds(6));
  CHECK(e.breakdown.exposed_communication == Seconds(8));
  CHECK(e.breakdown.total() == e.step);
  CHECK(e.stream_busy[static_cast<std::size_t>(Stream::gather)] == Seconds(10));
}

// nvme: R(9) -> h2d: U(1) -> compute waits: the disk is to blame, not the copy. Adam on the host counts as optimizer.
TEST_CASE("A wait belongs to the slowest transfer upstream") {
  Timed t;
  const OpRef r = t.op(Stream::nvme_read, 9, {}, Phase::optimizer);
  const OpRef u = t.op(Stream::host, 20, {r}, Phase::optimizer);
  const OpRef c = t.op(Stream::h2d, 1, {u}, Phase::optimizer);
  t.op(Stream::compute, 1, {c}, Phase::forward);
  const Estimate e = t.estimate();
  CHECK(e.step == Seconds(31));
  CHECK(e.breakdown.optimizer == Seconds(30));
  CHECK(e.breakdown.exposed_offload == Seconds(0));
}

// Each of 1,000 iterations: compute 1 s, gather 3 s after it; the next compute does not wait: gather falls behind by 2
// s an iteration, and the step ends with it: 1 + 3,000 s.
TEST_CASE("A repeated block whose streams drift apart ends with the slower one") {
  Timed t;
  t.builder.begin_repeat(1000);
  const OpRef c = t.op(Stream::compute, 1);
  t.op(Stream::gather, 3, {c});
  t.builder.end_repeat();
  const Estimate e = t.estimate();
  CHECK_THAT(e.step.base(), WithinRel(3001.0, kAgreement));
}

// The same, but iteration i waits for the gather of iteration i - 1: period 4 after the first compute.
TEST_CASE("A carried value couples the iterations") {
  Timed t;
  t.builder.begin_repeat(1000);
  const OpRef last = t.builder.carry({});
  const OpRef c = t.op(Stream::compute, 1, {last});
  const OpRef g = t.op(Stream::gather, 3, {c});
  t.builder.set_next(last, g);
  t.builder.end_repeat();
  const Estimate e = t.estimate();
  CHECK_THAT(e.step.base(), WithinRel(4000.0, kAgreement));
  CHECK_THAT(e.breakdown.compute.base(), WithinRel(1000.0, kAgreement));
}

// The slow stream is overtaken late: gather is 900 s ahead of compute at the start and loses 1 s an iteration.
TEST_CASE("A winner that changes after hundreds of iterations is not missed") {
  Timed t;
  const OpRef late = t.op(Stream::reduce, 900);
  t.builder.begin_repeat(2000);
  const OpRef g = t.op(Stream::gather, 1);
  t.op(Stream::compute, 0.5, {g, late});
  t.builder.end_repeat();
  CHECK_THAT(t.estimate().step.base(), WithinRel(2000.5, kAgreement));
}

TEST_CASE("Repeats nest") {
  Timed t;
  t.builder.begin_repeat(32);
  t.op(Stream::compute, 2);
  t.builder.begin_repeat(80);
  const OpRef c = t.op(Stream::compute, 1);
  t.op(Stream::gather, 0.5, {c});
  t.builder.end_repeat();
  t.builder.end_repeat();
  const Estimate e = t.estimate();
  CHECK_THAT(e.step.base(), WithinRel(32 * 82.0 + 0.5, kAgreement));
  CHECK_THAT(e.stream_busy[static_cast<std::size_t>(Stream::gather)].base(), WithinRel(32 * 40.0, kAgreement));
}

TEST_CASE("A trace holds the start and end of every op") {
  ScheduleBuilder builder;
  const WorkId one = builder.work(Join{}), two = builder.work(Join{});
  const OpRef a = builder.add(Stream::compute, Phase::forward, -1, one, {}, {});
  builder.add(Stream::gather, Phase::forward, -1, two, std::span<const OpRef>(&a, 1), {});
  const Schedule schedule = builder.finish();
  const std::vector<Demand> demands{demand_of(1), demand_of(2)};
  const Estimate e = Estimator().run(schedule, demands, true);
  REQUIRE(e.trace.ops.size() == 2);
  CHECK(e.trace.ops[1].start == Seconds(1));
  CHECK(e.trace.ops[1].end == Seconds(3));
}

namespace {

void check_repeats(std::uint64_t seed, std::int64_t cases) {
  Random random(seed);
  Estimator estimator;
  std::map<std::string, int> failures;
  for (std::int64_t i = 0; i < cases; ++i) {
    RandomSchedule source(random);
    const Schedule folded = source.make();
    std::int64_t ops = 0;
    for (const std::int64_t times : folded.multiplicities()) ops += times;
    if (ops > 20'000) continue;
    const Schedule flat = flattened(folded);
    const Estimate a = estimator.run(flat, source.demands), b = estimator.run(folded, source.demands);
    try {
      const double naive = naive_step(folded, source.demands);
      require(close(a.step.base(), naive, naive), "the flat step is not the longest path");
      check_same(a, b, flat.ops().size());
    } catch (const std::exception& e) {
      ++failures[e.what()];
    }
  }
  for (const auto& [what, count] : failures) {
    INFO(what << ": " << count);
    CHECK(what.empty());
  }
  CHECK(failures.empty());
}

}  // namespace

TEST_CASE("3000 random repeats take as long as a naive unfolder says") { check_repeats(21, 3000); }
TEST_CASE("100000 random repeats take as long as a naive unfolder says", "[.slow]") {
  check_repeats(24, slow_cases(100'000));
}

TEST_CASE("2000 random plans cost the same folded and flat") { check_many(22, 2000); }
TEST_CASE("100000 random plans cost the same folded and flat", "[.slow]") { check_many(23, slow_cases(100'000)); }

}  // namespace zeroplan::tests
