#pragma once
// Latencies and limits of NCCL's own cost model (2.30.7, nccl.md section 3, after src/graph/tuning.cc), and the
// measured fractions that correct its link rates (nccl.md sections 5, 6, 9). Only sim/collective_*.cpp and
// sim/ring_law.cpp include this.

#include <array>
#include <cstddef>

#include "models/units.h"

namespace zeroplan::nccl {

/// Protocols in the order of the tables below.
inline constexpr std::size_t kLL = 0, kLL128 = 1, kSimple = 2;
inline constexpr std::array<const char*, 3> kProtocolNames = {"LL", "LL128", "Simple"};

using Latencies = std::array<double, 3>;  // microseconds, by protocol
inline constexpr Latencies kRingBase = {6.6, 14.0, 8.4};
inline constexpr Latencies kTreeBase = {6.8, 14.0, 8.4};
inline constexpr Latencies kRingNvlink = {0.6, 1.9, 3.4};
inline constexpr Latencies kRingPcie = {1.0, 2.5, 5.7};
inline constexpr Latencies kRingNetwork = {2.7, 4.0, 14.0};
inline constexpr Latencies kTreeNvlink = {0.6, 1.25, 4.0};
inline constexpr Latencies kTreePcie = {1.0, 1.9, 4.0};
inline constexpr Latencies kTreeNetwork = {5.0, 8.5, 14.0};
inline constexpr double kNvlsUs = 25, kNvlsTreeNetworkUs = 20.9;
inline constexpr double kPatBaseUs = 8, kPatNetworkUs = 14;

/// A benchmark's host issues no more than one call in that time: 4 KiB on 2 x H200 (docs/measurements/h200x2, 13.2 to
/// 13.5), 8 B on 8 x H100 (awsome-distributed-training, 12.9). Steps have launches of their own.
inline constexpr double kCallUs = 13;

/// Multi-node all-reduce ring with Simple pays more per step: Ampere and later, before.
inline constexpr double kRingPlateau = 1.4, kRingPlateauOld = 1.9;
/// Useful part of what a protocol moves.
inline constexpr double kLLFraction = 0.5, kLL128Fraction = 0.92;
inline constexpr double kTreeFraction = 0.92, kTreePattern = 0.85, kTreeLLDivisor = 3.8;
inline constexpr double kTreeLL128OneNode = 7.0 / 9, kTreeLL128 = 120.0 / 128;
inline constexpr double kPatFraction = 0.75;
/// LL's cap on bus bandwidth in one node, GB/s: Volta, Ampere, Hopper, Blackwell.
inline constexpr double kLLMaxVolta = 39, kLLMaxAmpere = 87.7, kLLMaxHopper = 141, kLLMaxBlackwell = 282;
/// Simple tree's correction from 64 B (index 0) by powers of two; beyond the table the last value.
inline constexpr std::array<double, 24> kTreeSimpleCorrection = {0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8,
                                                                 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6,
                                                                 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9};

/// Latency of a ring inside a step, before the factor: microseconds a rank inside nodes, a node boundary, and once
/// (step-time.md section 2, Collective).
inline constexpr double kStepRankUs = 3.4, kStepNodeUs = 20, kStepBaseUs = 9;
inline constexpr double kStepLatencyFactor = 2.3;

/// Ranks of the one-node all-reduces that asymptotes were measured with.
inline constexpr int kTableRanks = 8;
/// Ring on x16 PCIe, fraction of the lane rate, one socket and 8 cards over two: SimuMax fit on A100 PCIe (20.8, 20.7,
/// 20.5 and 12.5, 13.5, 11.1 of 31.5 GB/s for all-reduce, all-gather, reduce-scatter).
inline constexpr double kPcieReduce = 0.660, kPcieGather = 0.657, kPcieScatter = 0.651;
inline constexpr double kPcieReduceTwoSockets = 0.397, kPcieGatherTwoSockets = 0.428, kPcieScatterTwoSockets = 0.352;
/// A switch tree with peer access: 8 RTX PRO 6000 reach 37.6 to 41 of 63 GB/s (rtx6kpro).
inline constexpr double kPcieSwitch = 0.62;
/// Without peer access, through host memory, all-reduce. 8 ranks over two sockets: 28 of 63 GB/s (8 RTX 5090, nccl
/// issue 1639; reporter: the 4090 is alike). 4 ranks of one socket: geometric mean of 35 (4 RTX 5090, same issue) and
/// 30.2, which 2 H200 with peer access off mean for 4 (docs/measurements/h200x2: 28.0 all-reduce, 25.0 gather).
inline constexpr double kHostMemory = 0.516, kHostMemoryTwoSockets = 0.444;
/// What the channels of that path copy, of x16: from the same two figures (docs/cost-model.md section 4).
inline constexpr double kHostMemoryCopies = 1.30;
/// Each byte is written to and read from host memory once.
inline constexpr double kHostMemoryPasses = 2;

/// NVLink bridges between two cards: A100 PCIe 208 of 300 GB/s (nccl-tests issue 178); H100 PCIe 116 of 300 (nccl issue
/// 1161, one report); GA102 (3090, A6000): NCCL's 48 of 56.25 times A100's measured 208 over its 240.
inline constexpr double kBridge = 0.693, kBridgeHopper = 0.387, kBridgeGa102 = 0.74;
/// Mesh of links between every pair: MI300X 313 of 448 with 8 GPUs, 47.7 of 64 with two.
inline constexpr double kXgmi = 0.72;
/// NVLink neighbours of a GPU in NVIDIA's meshes (DGX-1: 4; 4 x A100: 3).
inline constexpr int kMeshNeighbours = 4;

/// SMs: one thread block a channel (nccl.md section 8).
inline constexpr int kRingChannels = 24;   // A100 node; not confirmed from a log for later ones
inline constexpr int kVoltaChannels = 12;  // 6 links, doubled
inline constexpr int kNvlsHopper = 16, kNvlsBlackwell = 24, kNvlsBlackwellNodes = 32;
inline constexpr int kPcieChannels = 2;  // two to four

}  // namespace zeroplan::nccl
