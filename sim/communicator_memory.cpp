#include <fmt/format.h>

#include "sim/collective_model.h"

namespace zeroplan {

namespace {

/// nccl.md section 9, "Reserve for NCCL": a ring on one node, NVLS or the network, and AWS from p5 on, whose plugin
/// raises NCCL's buffers to 8 MiB and its NVLS chunks to 512 KiB (section 7).
constexpr Bytes kRing(0.3e9), kSwitchOrNetwork(1e9), kAwsHopper(2e9);
/// NCCL uses the switch for reductions from this many ranks on (measured on 8 x H200).
constexpr int kNvlsRanks = 5;

bool hopper_or_later(const GpuSpec& gpu) {
  const std::string& capability = gpu.compute_capability;
  return gpu.vendor == "NVIDIA" && (capability.starts_with("9.") || capability.starts_with("10."));
}

}  // namespace

CommunicatorMemory communicator_memory(const MachineSpec& machine, RankGroup group) {
  const auto answer = [](Bytes bytes, const char* reason) {
    return CommunicatorMemory{bytes,
                              {"NCCL buffers of one communicator", fmt::format("{:.1f} GB", bytes.base() / kGB),
                               std::string(reason) + " (docs/cost-model.md)"}};
  };
  if (group.ranks <= 1) return {Bytes(), {"NCCL buffers of one communicator", "0 GB", "one rank: no connections"}};
  const bool network = group.nodes > 1;
  const bool in_switch = hopper_or_later(machine.gpu) && machine.interconnect == Interconnect::nvswitch &&
                         group.ranks_per_node >= kNvlsRanks;
  if (machine.provider == "AWS" && hopper_or_later(machine.gpu) && (network || in_switch))
    return answer(kAwsHopper, "AWS's plugin enlarges buffers from p5 on");
  if (network) return answer(kSwitchOrNetwork, "several nodes: network buffers");
  if (in_switch) return answer(kSwitchOrNetwork, "in-switch reduction (NVLS) buffers");
  return answer(kRing, "one node, ring");
}

}  // namespace zeroplan
