#pragma once
// Costs on a machine whose host is the device, from what `zeroplan probe` measured. Ranks are groups of threads that
// share the node's cores and DRAM: docs/cost-model.md section 7.

#include <memory>
#include <vector>

#include "models/assumption.h"
#include "models/machine_spec.h"
#include "models/model_spec.h"
#include "models/schedule.h"
#include "sim/cost_model.h"

namespace zeroplan {

/// Roles of a Demand on such a machine: `sm` is the thread pool of a rank's compute stream, `hbm` the threads of its
/// other streams that compute (sums, Adam on the host), `h2d` and `d2h` the threads that copy, `links` those of a
/// collective; these belong to the rank. `cpu`, `dram` and the disk are shared by all.
class HostDeviceModel {
 public:
  /// `model` tells which kernel an op is; without it only works that say so themselves have a cost. Throws InputError
  /// when the probe did not measure `type`.
  HostDeviceModel(const MachineSpec& machine, int shard_ranks, DType type, const ModelSpec* model);
  ~HostDeviceModel();
  HostDeviceModel(HostDeviceModel&&) noexcept;

  /// Throws std::logic_error for a graph op when there is no model; InputError for a kernel that was not measured.
  Demand demand(const Work& work) const;
  /// Part of demand(work).latency during which the op itself does not run: its thread is woken before, the thread that
  /// waits for it after.
  Seconds handoff(const Work& work) const;
  /// How long the op runs while nobody takes its cores. Threads get their cores in turns that are longer than most ops,
  /// and one that was asleep gets its turn at once: this is what an op takes in most steps, whatever the step takes.
  Seconds undisturbed(const Work& work) const;
  std::vector<Assumption> assumptions() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace zeroplan
