#pragma once
// What each piece of work asks of the machine.

#include <array>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "models/assumption.h"
#include "models/machine_spec.h"
#include "models/plan.h"
#include "models/schedule.h"

namespace zeroplan {

/// What a work can keep busy, seen from one rank. The simulator maps roles to the resources of a Topology.
enum class ResourceRole : std::uint8_t {
  sm,       // the GPU's arithmetic
  hbm,      // its memory
  links,    // NVLink or PCIe between the GPUs of a node, as collectives use them
  network,  // the node's NICs
  h2d,      // the rank's PCIe, towards the GPU
  d2h,
  dram,  // host memory
  cpu,   // the host's cores
  nvme_read,
  nvme_write,
};
inline constexpr int kNumRoles = 10;
std::string_view to_string(ResourceRole kind);
/// "GPU arithmetic", "NVLink", ... for people; `links` is named by what the machine has.
std::string role_name(ResourceRole kind, const MachineSpec& machine);

/// A work's demand. `busy[r]` is how long resource r would need for it if nothing else ran on this rank, with every
/// rank of the node at the same op (all ranks run the same schedule: what they share is divided evenly). Alone it takes
/// latency + the longest of them: the roofline of a kernel and the slowest link of a transfer.
struct Demand {
  Seconds latency;
  std::array<Seconds, kNumRoles> busy{};

  Seconds& operator[](ResourceRole kind) { return busy[static_cast<std::size_t>(kind)]; }
  Seconds operator[](ResourceRole kind) const { return busy[static_cast<std::size_t>(kind)]; }
  Seconds alone() const;
  /// The resource that sets alone().
  ResourceRole limit() const;
};

class CostModel {
 public:
  virtual ~CostModel() = default;
  virtual Demand demand(const Work& work) const = 0;
};

/// Costs on a machine of the catalog under our runtime. `slowdown` scales the time of one resource ("what if PCIe were
/// twice as fast": 0.5); all 1 by default.
class MachineCostModel : public CostModel {
 public:
  /// `shard_ranks` tells the size of Group::shard. `model` tells a probed host which kernel an op is
  /// (host_device_model.h); it may be null for GPUs. Throws InputError when the GPU cannot compute in `type`.
  MachineCostModel(const MachineSpec& machine, int shard_ranks, DType type, const ModelSpec* model = nullptr);
  ~MachineCostModel() override;
  MachineCostModel(MachineCostModel&&) noexcept;

  Demand demand(const Work& work) const override;
  /// Part of the latency during which the op itself does not run (HostDeviceModel::handoff); 0 on GPUs.
  Seconds handoff(const Work& work) const;
  /// HostDeviceModel::undisturbed(); nothing for GPUs, whose kernels truly share.
  std::optional<Seconds> undisturbed(const Work& work) const;
  /// Scales all later demands on one resource.
  void scale(ResourceRole kind, double factor);
  std::vector<Assumption> assumptions() const;
  /// GPU memory of the communicators a plan needs.
  Bytes communicator_memory() const;

  struct Parts;  // the models of the parts of the machine

 private:
  std::unique_ptr<Parts> parts_;
};

/// Throws InputError unless shard groups of neighbouring ranks divide a node or are whole nodes, and divide all ranks.
void require_even_groups(int ranks, int gpus_per_node, int shard_ranks);

}  // namespace zeroplan
