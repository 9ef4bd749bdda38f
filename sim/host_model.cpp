#include "sim/host_model.h"

#include "sim/host_fractions.h"

#include <fmt/format.h>

#include <algorithm>

namespace zeroplan {

namespace {

/// One core's read-modify-write rate in a fused Adam, 28 B a parameter. Two H200 hosts with 16 cores: 24.4 GB/s alone
/// and 22.4 each of two (perf-anchors.md section 10); 20.4 alone, 16.8 each of two, 14.6 each of four
/// (docs/measurements/h200, 2026-11-30). Bounds only few cores: sixteen are bounded by memory.
constexpr BytesPerSecond kCoreBandwidth = 20.0_GBps;
/// Start of one copy: 2.6 to 2.7 us to the GPU, 1.4 to 1.9 us from it, 64 KiB to 4 MiB (docs/measurements/h200).
constexpr Seconds kCopyLatency = 2.5_us;
/// Cores where the machine does not say: what two sockets of a cloud GPU node have (p4d: 48).
constexpr double kAssumedCoresPerGpu = 6;

}  // namespace

Bytes adam_traffic(const AdamTypes& types) {
  const int bytes = size_of(types.gradient) + 2 * size_of(types.master) + 4 * size_of(types.moments) +
                    (types.writes_copy ? size_of(DType::bf16) : 0);
  return Bytes(bytes);
}

HostModel::HostModel(const MachineSpec& machine)
    : dram_(machine.dram_bandwidth),
      pcie_(machine.gpu.pcie * pcie_fraction(machine.gpu.pcie_generation)),
      nvme_read_(machine.nvme.read * kDiskFraction),
      nvme_write_(machine.nvme.write * kDiskFraction),
      pcie_generation_(machine.gpu.pcie_generation) {
  pcie_total_ = machine.gpu.pcie * (2 * pcie_duplex_fraction(pcie_generation_));
  cores_assumed_ = machine.physical_cores <= 0;
  cores_ = cores_assumed_ ? kAssumedCoresPerGpu * machine.gpus_per_node : machine.physical_cores;
}

HostWork HostModel::stream(Bytes traffic) const { return {traffic, traffic / kCoreBandwidth}; }

HostWork HostModel::adam(std::int64_t parameters, const AdamTypes& types) const {
  return stream(adam_traffic(types) * static_cast<double>(parameters));
}

HostWork HostModel::accumulate(std::int64_t parameters) const {
  return stream(kAccumulateTraffic * static_cast<double>(parameters));
}

HostCopy HostModel::copy(Bytes bytes) const {
  if (!(bytes > Bytes())) return {};
  return {kCopyLatency, bytes, bytes};
}

DiskTransfer HostModel::disk_read(Bytes bytes) const { return {bytes, bytes}; }

DiskTransfer HostModel::disk_write(Bytes bytes) const {
  const double cost = nvme_write_ > BytesPerSecond() ? nvme_read_ / nvme_write_ : 1;
  return {bytes * cost, bytes};
}

Seconds HostModel::alone(const HostWork& work) const { return std::max(work.dram / dram_, work.core_time / cores_); }

Seconds HostModel::alone(const HostCopy& copy) const {
  return copy.latency + std::max(copy.link / pcie_, copy.dram / dram_);
}

Seconds HostModel::alone(const DiskTransfer& transfer) const {
  return std::max(transfer.read_equivalent / nvme_read_, transfer.dram / dram_);
}

std::vector<Assumption> HostModel::assumptions() const {
  std::vector<Assumption> list;
  list.push_back({"host memory traffic", fmt::format("{:.4g} GB/s a node", dram_.base() / 1e9), "machine"});
  list.push_back({"host core", fmt::format("{:.0f} GB/s read-modify-write", kCoreBandwidth.base() / 1e9),
                  "measured in a fused Adam on two H200 hosts (docs/cost-model.md section 5)"});
  list.push_back({"pinned copies",
                  fmt::format("{:.4g} GB/s one way, {:.4g} GB/s each with both busy", pcie_.base() / 1e9,
                              pcie_total_.base() / 2e9),
                  pcie_generation_ >= kFirstGen5 ? "0.88 and 0.81 of x16, measured on an H200"
                                                 : "0.825 and 0.605 of x16, measured on an A100"});
  if (nvme_read_ > BytesPerSecond())
    list.push_back({"disks", fmt::format("{:.2f} of the given rates; mixed reads and writes share them", kDiskFraction),
                    "what the runtime aims at; not measured"});
  if (cores_assumed_)
    list.push_back({"host cores", fmt::format("{:.0f}", cores_), "6 a GPU, as p4d; the machine does not say"});
  return list;
}

}  // namespace zeroplan
