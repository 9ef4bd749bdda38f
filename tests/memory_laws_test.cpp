// What more memory and the search's lower bounds may never do, on random (model, machine, plan).

#include "models/error.h"
#include "models/lower.h"
#include "planner/prediction.h"
#include "tests/catch.h"
#include "tests/random_plan.h"

namespace zeroplan::tests {
namespace {

constexpr double kMargin = 0.05;

MachineSpec with_gpu_memory(const MachineSpec& machine, double factor) {
  MachineSpec larger = machine;
  larger.gpu.memory = factor * machine.gpu.memory;
  return larger;
}

void check_more_memory(const ModelSpec& model, const MachineSpec& machine, const Plan& plan, Random& random) {
  const Prediction now = Predictor(model, machine).predict(plan, Detail::live);
  const Prediction more = Predictor(model, with_gpu_memory(machine, 1 + 3 * random.unit())).predict(plan, Detail::live);
  CHECK(now.gpu.peak == more.gpu.peak);
  CHECK(now.step == more.step);
  if (fits(now, kMargin)) CHECK(fits(more, kMargin));
  MachineSpec host = machine;
  host.dram = 2.0 * machine.dram;
  if (fits(now, kMargin)) CHECK(fits(Predictor(model, host).predict(plan, Detail::live), kMargin));
}

void check_bounds(const ModelSpec& model, const MachineSpec& machine, const Plan& plan) {
  const auto bound = Predictor(model, machine).resident_states(plan);
  const MemoryTimeline memory(lower(model, plan, Folding::layers));
  const auto at = [&](Memory m) { return bound[static_cast<std::size_t>(m)]; };
  CHECK(at(Memory::hbm) <= memory.peak(Memory::hbm).bytes);
  CHECK(at(Memory::dram) + at(Memory::pinned) <= memory.peak(Memory::dram).bytes + memory.peak(Memory::pinned).bytes);
  CHECK(at(Memory::nvme) <= memory.peak(Memory::nvme).bytes);
}

/// A plan that fits can be loaded and saved: no transient needs more than the prediction says, on any tier.
void check_load_and_save(const ModelSpec& model, const MachineSpec& machine, const Plan& plan) {
  const Prediction step = Predictor(model, machine).predict(plan, Detail::live);
  const double node = machine.gpus_per_node;
  for (const Transient what : kTransients) {
    INFO(to_string(what));
    const MemoryTimeline memory(lower_transient(model, plan, what, machine.gpus_per_node));
    const Bytes host = node * (memory.peak(Memory::dram).bytes + memory.peak(Memory::pinned).bytes);
    CHECK(memory.peak(Memory::hbm).bytes <= step.lower_bound);
    CHECK(host <= (step.host ? step.host->peak : machine.usable_dram()));
    CHECK(node * memory.peak(Memory::nvme).bytes <= (step.nvme ? step.nvme->peak : Bytes()));
  }
}

void check_many(std::uint64_t seed, std::int64_t cases) {
  Random random(seed);
  std::vector<MachineSpec> machines;
  for (int k = 0; k < 40; ++k) machines.push_back(random_machine(random));
  for (std::int64_t i = 0; i < cases; ++i) {
    const MachineSpec& machine = random.pick(machines);
    Scenario s;
    s.model = random_model(random);
    s.plan = random_plan(random, s.model, machine.ranks(), machine.gpus_per_node);
    INFO(machine.name << " " << name_of(s));
    try {
      check_bounds(s.model, machine, s.plan);
      if (i % 10 == 0) check_load_and_save(s.model, machine, s.plan);
      check_more_memory(s.model, machine, s.plan, random);
    } catch (const InputError&) {
      // A GPU without this precision.
    }
  }
}

}  // namespace

TEST_CASE("More memory never turns fits into does not and bounds stay below peaks: 1000 random plans") {
  check_many(81, 1000);
}
TEST_CASE("More memory never turns fits into does not and bounds stay below peaks: 100000 random plans", "[.slow]") {
  check_many(82, slow_cases(100'000));
}

}  // namespace zeroplan::tests
