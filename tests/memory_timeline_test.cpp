// Peaks by tier and owner: hand-made cases, and folded against flat against a count of the test's own.

#include "sim/memory_timeline.h"

#include <map>

#include "models/lower.h"
#include "tests/catch.h"
#include "tests/random_plan.h"
#include "tests/unfold.h"

namespace zeroplan::tests {
namespace {

void require(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

/// Plays allocations of GPU memory op by op.
MemoryPeak naive_peak(const Schedule& s) {
  MemoryPeak peak;
  OwnerBytes now{};
  Bytes total;
  const auto change = [&](const Buffer& b, double sign) {
    total += sign * b.size;
    now[static_cast<std::size_t>(b.owner)] += sign * b.size;
  };
  for (const Buffer& b : s.buffers()) {
    if (b.lifetime == Lifetime::resident && b.memory == Memory::hbm) change(b, 1);
  }
  peak.bytes = peak.resident = total;
  peak.owners = now;
  for (const UnfoldedOp& u : unfold(s)) {
    const Op& op = s.ops()[u.op];
    const bool alloc = std::holds_alternative<Alloc>(s.work(op)), free = std::holds_alternative<Free>(s.work(op));
    if (!alloc && !free) continue;
    for (const Operand& o : s.operands(op)) change(s.buffer(o.buffer), alloc ? 1 : -1);
    if (total > peak.bytes) {
      peak.bytes = total;
      peak.at_op = u.op;
      peak.owners = now;
    }
  }
  require(total == peak.resident, "step buffers are left at the end");
  return peak;
}

void check_same(const MemoryPeak& a, const MemoryPeak& b) {
  require(a.bytes == b.bytes, "peaks differ");
  require(a.resident == b.resident, "resident bytes differ");
  require(a.owners == b.owners, "owners at the peak differ");
  Bytes sum;
  for (const Bytes owner : a.owners) sum += owner;
  require(sum == a.bytes, "owners do not sum to the peak");
}

void check_scenario(const Scenario& scenario) {
  Lowering lowering(scenario.model);
  const Schedule flat = lowering.zeroplan(scenario.plan, Folding::none);
  const Schedule folded = lowering.zeroplan(scenario.plan, Folding::layers);
  const Schedule layers = lowering.zeroplan(scenario.plan, Folding::micro_steps);
  const MemoryTimeline a(flat), b(folded), c(layers);
  for (int m = 0; m < kNumMemories; ++m) {
    check_same(a.peak(static_cast<Memory>(m)), b.peak(static_cast<Memory>(m)));
    check_same(a.peak(static_cast<Memory>(m)), c.peak(static_cast<Memory>(m)));
  }
  const MemoryPeak& hbm = a.peak(Memory::hbm);
  const MemoryPeak naive = naive_peak(flat);
  check_same(hbm, naive);
  require(naive.at_op == hbm.at_op, "the peak stands at another op");
  Bytes live;
  for (const BufferId id : live_after(flat, hbm.at_op, Memory::hbm)) live += flat.buffer(id).size;
  require(live == hbm.bytes, "the buffers alive at the peak do not sum to it");
}

void check_many(std::uint64_t seed, std::int64_t cases) {
  Random random(seed);
  std::map<std::string, std::pair<int, std::string>> failures;
  for (std::int64_t i = 0; i < cases; ++i) {
    const Scenario scenario = random_scenario(random);
    try {
      check_scenario(scenario);
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

class Allocations {
 public:
  BufferId buffer(std::int64_t units, Owner owner = Owner::activations, Lifetime lifetime = Lifetime::step,
                  Memory memory = Memory::hbm) {
    return builder.declare(
        {BufferRole::value, memory, owner, lifetime, -1, -1, Bytes(static_cast<double>(units * kBufferAlignment))});
  }
  void alloc(BufferId id) { add(alloc_, id); }
  void free(BufferId id) { add(free_, id); }
  static Bytes units(std::int64_t n) { return Bytes(static_cast<double>(n * kBufferAlignment)); }

  ScheduleBuilder builder;

 private:
  void add(WorkId work, BufferId id) {
    const Operand operand{id, Access::write};
    builder.add(Stream::compute, Phase::forward, -1, work, {}, {&operand, 1});
  }
  WorkId alloc_ = builder.work(Alloc{}), free_ = builder.work(Free{});
};

/// Allocations and frees in nested repeats; each body gains, keeps or loses memory, and what is gained is lost later.
class RandomMemory {
 public:
  explicit RandomMemory(Random& random) : random_(random) {}

  Schedule make() {
    for (int k = 0; k < 6; ++k) {
      buffers_.push_back(a_.buffer(random_.between(1, 50), static_cast<Owner>(random_.between(0, kNumOwners - 1))));
    }
    if (random_.chance(50)) a_.buffer(7, Owner::parameters, Lifetime::resident);
    range(0, 1);
    // Every buffer back to none alive, as a validated schedule would be.
    for (std::size_t k = 0; k < buffers_.size(); ++k) {
      const bool more = alive_[k] > 0;
      for (std::int64_t i = 0; i < std::abs(alive_[k]); ++i) more ? a_.free(buffers_[k]) : a_.alloc(buffers_[k]);
    }
    return a_.builder.finish();
  }

 private:
  void range(int depth, std::int64_t times) {
    const auto parts = random_.between(1, 6);
    for (int p = 0; p < parts; ++p) {
      const auto k = static_cast<std::size_t>(random_.between(0, static_cast<std::int64_t>(buffers_.size()) - 1));
      const bool alloc = random_.chance(55);
      alloc ? a_.alloc(buffers_[k]) : a_.free(buffers_[k]);
      alive_[k] += alloc ? times : -times;
      if (depth < 3 && random_.chance(35)) {
        const std::int64_t count = random_.between(1, 6);
        a_.builder.begin_repeat(count);
        range(depth + 1, times * count);
        a_.builder.end_repeat();
      }
    }
  }

  Random& random_;
  Allocations a_;
  std::vector<BufferId> buffers_;
  std::map<std::size_t, std::int64_t> alive_;
};

}  // namespace

TEST_CASE("The peak counts what is alive together and names its owners") {
  Allocations a;
  const BufferId weights = a.buffer(10, Owner::parameters, Lifetime::resident);
  const BufferId host = a.buffer(99, Owner::optimizer, Lifetime::resident, Memory::dram);
  const BufferId x = a.buffer(4), y = a.buffer(5, Owner::logits), z = a.buffer(6);
  a.alloc(x);
  a.alloc(y);
  a.free(x);
  a.alloc(z);
  a.free(y);
  a.free(z);
  const Schedule s = a.builder.finish();
  const MemoryTimeline timeline(s);
  const MemoryPeak& peak = timeline.peak(Memory::hbm);
  CHECK(peak.bytes == Allocations::units(21));
  CHECK(peak.resident == Allocations::units(10));
  CHECK(peak.at_op == 3);
  CHECK(peak.owners[static_cast<std::size_t>(Owner::logits)] == Allocations::units(5));
  CHECK(peak.owners[static_cast<std::size_t>(Owner::activations)] == Allocations::units(6));
  CHECK(timeline.peak(Memory::dram).bytes == Allocations::units(99));
  CHECK(timeline.peak(Memory::nvme).bytes == Bytes());
  CHECK(live_after(s, 3, Memory::hbm) == std::vector<BufferId>{weights, z, y});
  CHECK(live_after(s, 3, Memory::dram) == std::vector<BufferId>{host});
}

TEST_CASE("A repeated block that gains memory peaks in its last iteration and one that loses in its first") {
  Allocations a;
  const BufferId kept = a.buffer(3), scratch = a.buffer(100);
  a.builder.begin_repeat(10);  // forward: keeps 3 an iteration
  a.alloc(kept);
  a.alloc(scratch);
  a.free(scratch);
  a.builder.end_repeat();
  a.builder.begin_repeat(10);  // backward: gives them back
  a.alloc(scratch);
  a.free(scratch);
  a.free(kept);
  a.builder.end_repeat();
  const Schedule s = a.builder.finish();
  CHECK(MemoryTimeline(s).peak(Memory::hbm).bytes == Allocations::units(130));
  CHECK(MemoryTimeline(s).peak(Memory::hbm).at_op == 1);
}

TEST_CASE("3000 random allocations in nested repeats peak where a naive count says") {
  Random random(31);
  int wrong = 0;
  for (int i = 0; i < 3000; ++i) {
    const Schedule s = RandomMemory(random).make();
    const MemoryPeak naive = naive_peak(s), peak = MemoryTimeline(s).peak(Memory::hbm);
    wrong += naive.bytes == peak.bytes && naive.owners == peak.owners && naive.at_op == peak.at_op ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE("2000 random plans take the same bytes folded and flat") { check_many(32, 2000); }
TEST_CASE("100000 random plans take the same bytes folded and flat", "[.slow]") { check_many(33, slow_cases(100'000)); }

}  // namespace zeroplan::tests
