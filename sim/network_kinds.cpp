#include "sim/network_kinds.h"

namespace zeroplan {
namespace {

constexpr Seconds us(double value) { return Seconds(value * 1e-6); }

/// Fractions: nccl.md sections 5 and 9. Steps: what small all-reduces (two nodes: two steps) take beyond NCCL's table,
/// 92 us with a tree, 67 us with NVLSTree. The first name found counts.
constexpr NetworkKind kKinds[] = {
    {"EFA v1", 0.83, us(71), true, "78.3 GB/s on 2 x p4de: 0.83 of what a tree may reach over 50; 235 us for 256 KiB"},
    {"EFA v2", 0.91, us(26), true, "as EFA v3; 2 x p5: 118 us for 512 KiB"},
    {"EFA v3", 0.91, us(26), true, "365 of 400 GB/s, ring on 4 x p5en; steps as EFA v2"},
    {"EFA v4", 0.95, us(0), true, "382 of 400 GB/s on 4 x p6-b200; dstack pull request 3961: 57 us for 512 B on two"},
    {"TCPXO", 0.94, us(52), true, "189 of 200 GB/s, 2 x A3 Mega; 170 us for 512 KiB (docs/cost-model.md)"},
    {"TCPX", 0.83, us(52), true, "as the lowest measured with GPUDirect; steps as TCPXO"},
    // 2 nodes of 8 A100 reach 86 (nccl-tests 175) and 91 GB/s (nccl-tests 100) of 100: the ring's limit.
    {"HDR", 0.87, us(0), false, "docs/cost-model.md; measured 0.85 to 0.96"},
    {"InfiniBand", 0.87, us(0), true, "docs/cost-model.md; measured 0.85 to 0.96"},
    {"IB ", 0.87, us(0), true, "docs/cost-model.md; measured 0.85 to 0.96"},
    {"RoCE", 0.83, us(0), true, "329 to 336 of 400 GB/s on 2 x A3 Ultra"},
    {"EFA", 0.83, us(71), true, "as EFA v1"},
};
constexpr NetworkKind kTcp = {"", 0.5, us(0), false, "TCP sockets: 0.4 to 0.6 (docs/cost-model.md)"};

}  // namespace

const NetworkKind& network_kind(std::string_view kind) {
  for (const NetworkKind& entry : kKinds)
    if (kind.find(entry.name) != std::string_view::npos) return entry;
  return kTcp;
}

}  // namespace zeroplan
