#pragma once
// Machines by hand for the cost-model tests: what the catalog would say, without the catalog.

#include <stdexcept>
#include <string>

#include "models/machine_spec.h"

namespace zeroplan::tests {

inline GpuSpec test_gpu(const std::string& name) {
  GpuSpec gpu;
  gpu.name = name;
  gpu.vendor = "NVIDIA";
  gpu.p2p_over_pcie = true;
  gpu.pcie_generation = 4;
  gpu.pcie = 31.5_GBps;
  const auto set = [&gpu](const char* arch, const char* capability, double tflops, double matmul, double bandwidth,
                          int sms, double nvlink) {
    gpu.arch = arch;
    gpu.compute_capability = capability;
    if (tflops > 0) gpu.peak_bf16 = gpu.peak_fp16 = FlopsPerSecond(tflops * 1e12);
    if (matmul > 0) gpu.measured_matmul = FlopsPerSecond(matmul * 1e12);
    gpu.memory_bandwidth = BytesPerSecond(bandwidth * 1e9);
    gpu.num_sms = sms;
    gpu.nvlink = BytesPerSecond(nvlink * 1e9);
  };
  if (name == "A100-SXM4-80GB") set("Ampere", "8.0", 312, 271.2, 2039, 108, 300);
  if (name == "A100-PCIe-80GB") set("Ampere", "8.0", 312, 252.9, 1935, 108, 300);
  if (name == "H100-SXM5-80GB") set("Hopper", "9.0", 989, 794.5, 3350, 132, 450);
  if (name == "H100-PCIe-80GB") set("Hopper", "9.0", 756, 0, 2000, 114, 300);
  if (name == "H200-SXM-141GB") set("Hopper", "9.0", 989, 794.5, 4800, 132, 450);
  if (name == "H800-SXM5-80GB") set("Hopper", "9.0", 989, 0, 3350, 132, 200);
  if (name == "B200-SXM-180GB") set("Blackwell", "10.0", 2250, 1745, 8000, 148, 900);
  if (name == "V100-SXM2-32GB") {
    set("Volta", "7.0", 125, 0, 900, 80, 150);
    gpu.peak_bf16.reset();
  }
  if (name == "RTX-3090") set("Ampere", "8.6", 71, 0, 936, 82, 56.25);
  if (name == "RTX-5090") set("Blackwell", "12.0", 209.5, 0, 1792, 170, 0);
  if (name == "RTX-PRO-6000") set("Blackwell", "12.0", 503.8, 0, 1792, 188, 0);
  if (name == "MI300X") {
    set("CDNA3", "gfx942", 1307, 668.4, 5300, 304, 448);
    gpu.vendor = "AMD";
  }
  if (name.starts_with("RTX-3") || name.starts_with("RTX-5")) gpu.p2p_over_pcie = false;
  if (gpu.arch == "Hopper" || gpu.arch == "Blackwell") {
    gpu.pcie_generation = 5;
    gpu.pcie = 63.0_GBps;
  }
  if (gpu.arch.empty()) throw std::logic_error("no test GPU " + name);
  return gpu;
}

inline MachineSpec node_of(const std::string& gpu, int count, Interconnect interconnect) {
  MachineSpec machine;
  machine.name = std::to_string(count) + "x" + gpu;
  machine.gpu = test_gpu(gpu);
  machine.gpus_per_node = count;
  machine.interconnect = interconnect;
  const bool linked = interconnect == Interconnect::nvswitch || interconnect == Interconnect::nvlink_mesh ||
                      interconnect == Interconnect::nvlink_pairs;
  if (linked) machine.nvlink = machine.gpu.nvlink;
  machine.sockets = count >= 8 ? 2 : 1;
  machine.gpus_per_pcie_switch = interconnect == Interconnect::pcie_switch ? 4 : 2;
  machine.gpus_per_root_complex = count >= 8 ? 4 : count;
  machine.dram_bandwidth = BytesPerSecond(machine.sockets * 176e9);
  return machine;
}

inline MachineSpec nodes_of(MachineSpec node, int nodes, const std::string& network, double gigabytes_per_second) {
  node.nodes = nodes;
  node.network.nics = 8;
  node.network.kind = network;
  node.network.bandwidth = BytesPerSecond(gigabytes_per_second * 1e9);
  return node;
}

/// The machines of tests/data/collectives.csv and collectives_held_out.csv.
inline MachineSpec measured_machine(const std::string& key) {
  const MachineSpec a100 = node_of("A100-SXM4-80GB", 8, Interconnect::nvswitch);
  const MachineSpec h100 = node_of("H100-SXM5-80GB", 8, Interconnect::nvswitch);
  const MachineSpec h200 = node_of("H200-SXM-141GB", 8, Interconnect::nvswitch);
  const MachineSpec b200 = node_of("B200-SXM-180GB", 8, Interconnect::nvswitch);
  if (key == "a100-sxm-8") return a100;
  if (key == "h100-8") return h100;
  if (key == "h100-4") return node_of("H100-SXM5-80GB", 4, Interconnect::nvswitch);
  if (key == "h200-8") return h200;
  if (key == "b200-8") return b200;
  if (key == "h800-8") return node_of("H800-SXM5-80GB", 8, Interconnect::nvswitch);
  if (key == "mi300x-8") return node_of("MI300X", 8, Interconnect::nvlink_mesh);
  if (key == "a100-pcie-8") return node_of("A100-PCIe-80GB", 8, Interconnect::root_complex);
  if (key == "a100-pcie-bridged") return node_of("A100-PCIe-80GB", 4, Interconnect::nvlink_pairs);
  if (key == "h100-pcie-2") return node_of("H100-PCIe-80GB", 2, Interconnect::nvlink_pairs);
  if (key == "rtx5090-8" || key == "rtx5090-4") {
    MachineSpec machine = node_of("RTX-5090", key == "rtx5090-8" ? 8 : 4, Interconnect::root_complex);
    // 8 cards: two Xeon 8480+, 8 channels DDR5-4800, 0.8 of 307 GB/s each. The 4-card host is not stated: no limit.
    machine.dram_bandwidth = BytesPerSecond(key == "rtx5090-8" ? 490e9 : 0);
    return machine;
  }
  if (key == "h200-host-2") {  // peer access off: through host memory
    MachineSpec machine = node_of("H200-SXM-141GB", 2, Interconnect::root_complex);
    machine.gpu.p2p_over_pcie = false;
    return machine;
  }
  if (key == "pro6000-8") return node_of("RTX-PRO-6000", 8, Interconnect::pcie_switch);
  if (key == "p4de-2") return nodes_of(a100, 2, "EFA v1", 50);
  if (key == "p5-2") return nodes_of(h100, 2, "EFA v2", 400);
  if (key == "p5en-4") return nodes_of(h200, 4, "EFA v3", 400);
  if (key == "p6-b200-4") return nodes_of(b200, 4, "EFA v4", 400);
  if (key == "a100-hdr-2") return nodes_of(a100, 2, "InfiniBand HDR", 100);
  if (key == "h100-ib-2") return nodes_of(h100, 2, "InfiniBand NDR", 400);
  if (key == "h200-roce-2") return nodes_of(h200, 2, "RoCE v2 BlueField-3 (8x400)", 400);
  if (key == "a100-roce-2") return nodes_of(a100, 2, "RoCE v2 (16x100)", 200);
  if (key == "a100-hdr-3") return nodes_of(a100, 3, "InfiniBand HDR", 100);
  if (key == "a3mega-2") return nodes_of(h100, 2, "GPUDirect-TCPXO (8x200)", 200);
  if (key == "a3ultra-2") return nodes_of(h200, 2, "RoCE v2 CX-7 (8x400)", 400);
  if (key == "v100-tcp-4")
    return nodes_of(node_of("V100-SXM2-32GB", 8, Interconnect::nvlink_mesh), 4, "100GbE TCP", 12.5);
  throw std::logic_error("no measured machine " + key);
}

}  // namespace zeroplan::tests
