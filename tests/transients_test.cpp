// Loading and saving as schedules: laws on random plans.

#include <algorithm>
#include <cmath>
#include <vector>

#include "models/error.h"
#include "models/lower.h"
#include "sim/memory_timeline.h"
#include "sim/simulate.h"
#include "tests/catch.h"
#include "tests/random_plan.h"

namespace zeroplan::tests {
namespace {

constexpr int kRanksPerNode = 8;

bool is_state(const Buffer& buffer) {
  return buffer.lifetime == Lifetime::resident &&
         (buffer.role == BufferRole::weights || buffer.role == BufferRole::weight_shard ||
          buffer.role == BufferRole::master || buffer.role == BufferRole::moments);
}

/// How often each buffer is written and read by what is no Alloc or Free.
struct Touches {
  std::vector<int> writes, reads;
};
Touches touches(const Schedule& schedule) {
  Touches t{std::vector<int>(schedule.buffers().size()), std::vector<int>(schedule.buffers().size())};
  for (const Op& op : schedule.ops()) {
    const Work& work = schedule.work(op);
    if (std::holds_alternative<Alloc>(work) || std::holds_alternative<Free>(work)) continue;
    for (const Operand& operand : schedule.operands(op)) {
      if (operand.access != Access::read) ++t.writes[operand.buffer.index];
      if (operand.access != Access::write) ++t.reads[operand.buffer.index];
    }
  }
  return t;
}

Bytes host_peak(const MemoryTimeline& memory) {
  return memory.peak(Memory::dram).bytes + memory.peak(Memory::pinned).bytes;
}
Bytes host_residents(const MemoryTimeline& memory) {
  return memory.peak(Memory::dram).resident + memory.peak(Memory::pinned).resident;
}

void check_states(const Schedule& schedule, Transient what) {
  const Touches t = touches(schedule);
  for (std::size_t k = 0; k < t.writes.size(); ++k) {
    const Buffer& buffer = schedule.buffers()[k];
    const bool loads = what == Transient::initialise || what == Transient::resume;
    if (!is_state(buffer)) {
      if (buffer.lifetime == Lifetime::resident) CHECK(t.writes[k] + t.reads[k] == 0);
      continue;
    }
    CHECK(t.writes[k] == (loads ? 1 : 0));  // put into place once, and only by loading
    if (what == Transient::checkpoint && buffer.role == BufferRole::moments) CHECK(t.reads[k] == 1);
  }
}

/// Bytes of a checkpoint's files that one rank writes or reads.
Bytes file_bytes(const Schedule& schedule) {
  Bytes bytes;
  for (const Op& op : schedule.ops()) {
    const auto* copy = std::get_if<Copy>(&schedule.work(op));
    if (copy == nullptr || schedule.operands(op).size() != 1) continue;
    bytes += copy->bytes;
  }
  return bytes;
}

void check_scenario(const Scenario& s) {
  const Schedule step = lower(s.model, s.plan, Folding::layers);
  const MemoryTimeline in_step(step);
  const Bytes staging = transient_staging(s.model, s.plan, step);
  Bytes most;
  for (const Transient what : kTransients) {
    INFO(to_string(what));
    const Schedule schedule = lower_transient(s.model, s.plan, what, kRanksPerNode);
    validate(schedule, s.model);
    check_states(schedule, what);
    const MemoryTimeline memory(schedule);
    for (const Memory m : {Memory::hbm, Memory::dram, Memory::pinned, Memory::nvme})
      CHECK(memory.peak(m).resident == in_step.peak(m).resident);
    CHECK(memory.peak(Memory::hbm).bytes.base() <= in_step.peak(Memory::hbm).bytes.base());
    CHECK(memory.peak(Memory::nvme).bytes == in_step.peak(Memory::nvme).bytes);
    CHECK(host_peak(memory) <= host_residents(memory) + staging);
    most = std::max(most, host_peak(memory) - host_residents(memory));
  }
  CHECK(most.base() == staging.base());
  // All ranks together store every element once: fp32 master and two moments, padding and rounding apart.
  const double stored = s.plan.ranks * file_bytes(lower_transient(s.model, s.plan, Transient::checkpoint, 1)).base();
  const double each = 4 + 2 * size_of(s.plan.precision.states);
  CHECK(stored >= each * static_cast<double>(s.model.parameters()));
}

}  // namespace

TEST_CASE("Loading and saving: laws on 300 random plans") {
  Random random(91);
  for (int i = 0; i < 300; ++i) {
    const Scenario s = random_scenario(random);
    INFO(name_of(s));
    check_scenario(s);
  }
}
TEST_CASE("Loading and saving: laws on 10000 random plans", "[.slow]") {
  Random random(92);
  for (std::int64_t i = 0; i < slow_cases(10'000); ++i) {
    const Scenario s = random_scenario(random);
    INFO(name_of(s));
    check_scenario(s);
  }
}

TEST_CASE("Loading and saving: no faster than the links") {
  Random random(93);
  for (int i = 0; i < 60; ++i) {
    const MachineSpec machine = random_machine(random);
    const ModelSpec model = random_model(random);
    const Plan plan = random_plan(random, model, machine.ranks(), machine.gpus_per_node);
    INFO(machine.name << " " << describe(plan));
    try {
      const MachineCostModel cost(machine, plan.shard_ranks, plan.precision.weights);
      for (const Transient what : kTransients) {
        const bool drives = machine.nvme.read.base() > 0 && machine.nvme.write.base() > 0;
        if (what != Transient::initialise && !drives) continue;
        const Schedule schedule = lower_transient(model, plan, what, machine.gpus_per_node);
        const Simulation played = simulate(schedule, demands(schedule, cost), machine, plan.shard_ranks);
        double bytes = 0;
        for (const Op& op : schedule.ops()) {
          const auto* copy = std::get_if<Copy>(&schedule.work(op));
          if (copy != nullptr && copy->to == Memory::hbm) bytes += copy->bytes.base();
        }
        INFO(to_string(what));
        CHECK(played.step.base() >= bytes / machine.gpu.pcie.base());
        CHECK(std::isfinite(played.step.base()));
      }
    } catch (const InputError&) {
      // A GPU without this precision.
    }
  }
}

TEST_CASE("Loading and saving: a checkpoint holds 12 bytes a parameter, stored once") {
  Random random(94);
  Scenario s = random_scenario(random);
  s.plan = Plan{};
  const int blocks = static_cast<int>(s.model.sequence.size());
  s.plan.ranks = s.plan.shard_ranks = 4;
  s.plan.zero_stage = 3;
  s.plan.optimizer = s.plan.parameters = Placement::all(Tier::hbm, blocks);
  const double sharded = file_bytes(lower_transient(s.model, s.plan, Transient::checkpoint, 4)).base();
  CHECK_THAT(4 * sharded / static_cast<double>(s.model.parameters()), WithinRel(12.0, 0.05));
  s.plan.shard_ranks = 2;
  CHECK_THAT(file_bytes(lower_transient(s.model, s.plan, Transient::checkpoint, 4)).base(), WithinRel(sharded, 0.05));
}

}  // namespace zeroplan::tests
