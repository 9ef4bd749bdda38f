#include "models/block_lifetimes.h"

#include <cstddef>
#include <vector>

namespace zeroplan {
namespace {

bool used_in(const std::vector<ProgramStep>& steps, int slot) {
  for (const ProgramStep& s : steps) {
    for (const ProgramOperand& o : s.operands) {
      if (o.slot == slot) return true;
    }
  }
  return false;
}

/// `alive`: slots that exist at the first step; `stays`: slots that are not freed.
void place(std::vector<ProgramStep>& steps, std::vector<bool>& alive, const std::vector<bool>& stays) {
  std::vector<std::size_t> last(alive.size(), steps.size());
  for (std::size_t i = 0; i < steps.size(); ++i) {
    for (const ProgramOperand& o : steps[i].operands) last[static_cast<std::size_t>(o.slot)] = i;
  }
  for (std::size_t i = 0; i < steps.size(); ++i) {
    for (const ProgramOperand& o : steps[i].operands) {
      const auto s = static_cast<std::size_t>(o.slot);
      if (!alive[s]) {
        alive[s] = true;
        steps[i].alloc_before.push_back(o.slot);
      }
    }
    for (const ProgramOperand& o : steps[i].operands) {
      const auto s = static_cast<std::size_t>(o.slot);
      if (alive[s] && last[s] == i && !stays[s]) {
        alive[s] = false;
        steps[i].free_after.push_back(o.slot);
      }
    }
  }
}

}  // namespace

void births_and_deaths(BlockProgram& program) {
  std::vector<bool> alive(program.slots.size(), false);
  const auto external = [&](int slot) {
    if (slot >= 0) alive[static_cast<std::size_t>(slot)] = true;
  };
  external(program.input);
  external(program.memory);
  std::vector<bool> stays(program.slots.size(), false);
  for (int s : program.saved) stays[static_cast<std::size_t>(s)] = true;
  if (program.memory >= 0) stays[static_cast<std::size_t>(program.memory)] = true;
  if (program.output >= 0) stays[static_cast<std::size_t>(program.output)] = true;
  place(program.forward, alive, stays);

  alive.assign(program.slots.size(), false);
  for (int s : program.saved) external(s);
  external(program.memory);
  external(program.output_gradient);
  external(program.memory_gradient);
  stays.assign(program.slots.size(), false);
  for (int s : {program.memory, program.memory_gradient, program.input_gradient}) {
    if (s >= 0) stays[static_cast<std::size_t>(s)] = true;
  }
  place(program.backward, alive, stays);
  // Saved but read by no backward step (a checkpointed input whose recompute is empty): dies with the last step.
  if (!program.backward.empty()) {
    for (int s : program.saved) {
      if (!used_in(program.backward, s)) program.backward.back().free_after.push_back(s);
    }
    if (program.output_gradient >= 0 && !used_in(program.backward, program.output_gradient) &&
        program.output_gradient != program.input_gradient) {
      program.backward.back().free_after.push_back(program.output_gradient);
    }
  }
}

}  // namespace zeroplan
