#include "planner/transients.h"

#include <fmt/format.h>

#include "planner/report_layout.h"
#include "sim/simulate.h"

namespace zeroplan {
namespace {

/// Context, libraries, NCCL: not in any schedule.
Bytes beside_the_arena(const Prediction& prediction) {
  Bytes bytes;
  for (const auto& [owner, part] : prediction.gpu.breakdown)
    if (owner == "context" || owner == "libraries" || owner == "nccl") bytes += part;
  return bytes;
}

bool uses_files(Transient what) { return what != Transient::initialise; }

}  // namespace

std::vector<TransientUse> transient_uses(const PlanFile& file, const Prediction& prediction) {
  const double node = file.machine.gpus_per_node;
  const bool drives = file.machine.nvme.read.base() > 0 && file.machine.nvme.write.base() > 0;
  const MachineCostModel cost(file.machine, file.plan.shard_ranks, file.plan.precision.weights, &file.model);
  Simulator simulator(file.machine);
  std::vector<TransientUse> uses;
  for (const Transient what : kTransients) {
    const Schedule schedule = lower_transient(file.model, file.plan, what, file.machine.gpus_per_node);
    const MemoryTimeline memory(schedule);
    TransientUse use;
    use.what = what;
    use.gpu = memory.peak(Memory::hbm).bytes + beside_the_arena(prediction);
    use.host = node * (memory.peak(Memory::dram).bytes + memory.peak(Memory::pinned).bytes);
    use.nvme = node * memory.peak(Memory::nvme).bytes;
    if (drives || !uses_files(what))
      use.time = simulator.run(schedule, demands(schedule, cost), file.plan.shard_ranks).step;
    uses.push_back(use);
  }
  return uses;
}

std::string report_transients(const std::vector<TransientUse>& uses, const ReportStyle& style) {
  TextTable rows({{"loading and saving", Align::left}, {"GPU"}, {"host a node"}, {"NVMe a node"}, {"takes"}});
  for (const TransientUse& use : uses) {
    rows.add({std::string(to_string(use.what)), format_gib(use.gpu), format_gib(use.host),
              use.nvme.base() > 0 ? format_gib(use.nvme) : "-",
              use.time ? format_seconds(*use.time) : "no drives stated"});
  }
  return inked("Before and after steps", Ink::bold, style) +
         " (peaks, states included; checkpoints and weights are files on the node's drives)\n" + rows.text();
}

}  // namespace zeroplan
