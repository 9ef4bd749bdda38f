#pragma once
// What host work and host transfers ask of a node: bytes on its memory, its PCIe links and its disks, and core time.
// The simulator shares the capacities between all ranks of the node; alone_* give the time of one piece of work by
// itself.

#include <cstdint>
#include <vector>

#include "models/assumption.h"
#include "models/machine_spec.h"
#include "models/units.h"

namespace zeroplan {

/// Element types of one optimizer update on the host.
struct AdamTypes {
  DType gradient = DType::bf16;  // read
  DType master = DType::fp32;    // read and written
  DType moments = DType::fp32;   // both read and written
  bool writes_copy = true;       // writes the 2-byte weights that go back to the GPU
};

/// Bytes read and written per parameter by one fused pass: 28 with the defaults, 26 without the copy, 20 with 2-byte
/// moments, 18 without either.
Bytes adam_traffic(const AdamTypes& types);

/// One pass that adds a 2-byte gradient into an fp32 sum: 2 read, 4 read, 4 written a parameter.
inline constexpr Bytes kAccumulateTraffic(10);
/// fp32 master, momentum and variance streamed to the GPU, and the same back: bytes a parameter each way.
inline constexpr Bytes kStreamedStates(12);

/// Work of the host's cores.
struct HostWork {
  Bytes dram;         // read plus written
  Seconds core_time;  // summed over cores
};

/// A copy between pinned host memory and one GPU.
struct HostCopy {
  Seconds latency;
  Bytes link;  // on its direction of the PCIe link, and on the link's total
  Bytes dram;  // each byte is read from or written to host memory once
};

/// A transfer between host memory and the node's disks, in bytes of reading on `nvme_capacity`.
struct DiskTransfer {
  Bytes read_equivalent;
  Bytes dram;
};

class HostModel {
 public:
  /// Throws nothing; a machine without disks has a capacity of 0 for them.
  explicit HostModel(const MachineSpec& machine);

  HostWork adam(std::int64_t parameters, const AdamTypes& types) const;
  HostWork accumulate(std::int64_t parameters) const;
  HostWork stream(Bytes traffic) const;
  HostCopy copy(Bytes bytes) const;
  /// Reads and writes at the same time share a drive: a written byte takes as long as read rate / write rate read ones.
  DiskTransfer disk_read(Bytes bytes) const;
  DiskTransfer disk_write(Bytes bytes) const;

  BytesPerSecond dram_capacity() const { return dram_; }              // a node, read-modify-write
  double cores() const { return cores_; }                             // a node
  BytesPerSecond pcie_capacity() const { return pcie_; }              // a GPU, one direction alone
  BytesPerSecond pcie_total_capacity() const { return pcie_total_; }  // a GPU, both directions together
  BytesPerSecond nvme_capacity() const { return nvme_read_; }         // a node, reading

  /// All cores of the node on it: the slower of memory and cores.
  Seconds alone(const HostWork& work) const;
  Seconds alone(const HostCopy& copy) const;
  Seconds alone(const DiskTransfer& transfer) const;

  std::vector<Assumption> assumptions() const;

 private:
  BytesPerSecond dram_, pcie_, pcie_total_, nvme_read_, nvme_write_;
  double cores_ = 1;
  bool cores_assumed_ = false;
  int pcie_generation_ = 4;
};

}  // namespace zeroplan
