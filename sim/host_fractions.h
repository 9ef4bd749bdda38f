#pragma once
// What a node's links and disks reach of their nominal rates: one place for the graph, the cost model and the
// assumptions.

namespace zeroplan {

inline constexpr int kFirstGen5 = 5;

/// Pinned copies over PCIe, one direction, of the lane rate. Gen5: 55.4 of 63 GB/s both ways on an H200
/// (docs/measurements/h200); Gen4: 26 of 31.5 on an A100 (links.json).
constexpr double pcie_fraction(int generation) { return generation >= kFirstGen5 ? 0.88 : 0.825; }

/// Each direction when both are busy: 50.8 of 63 GB/s on an H200 (docs/measurements/h200); 18.5 to 19.6 of 31.5 on an
/// A100 (nccl.md section 9).
constexpr double pcie_duplex_fraction(int generation) { return generation >= kFirstGen5 ? 0.806 : 0.605; }

/// Bytes a second of a copy between the GPU and memory that is not pinned, one GPU: the driver stages it. 1.6 s more
/// for 1.68 G gradients of 4 B (data/groundtruth, DeepSpeed row 22 against row 17).
inline constexpr double kPageableCopyRate = 4.2e9;
/// It reads the memory, writes the driver's pinned buffer and reads that.
inline constexpr double kPageablePasses = 3;

/// Disk rate of the engine over the given rate: goal R12 of perf-anchors.md, 0.90 of fio at the same mix; not measured.
inline constexpr double kDiskFraction = 0.90;

}  // namespace zeroplan
