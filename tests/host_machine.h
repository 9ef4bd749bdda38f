#pragma once
// A host that computes, by hand: round figures in place of a probe's.

#include <string>

#include "models/host_kernels.h"
#include "models/machine_spec.h"

namespace zeroplan::tests {

/// Every kernel: 1 us a call, 0.01 ns a multiply-add, 1 ns of anything else, nothing more for far memory, 0.1 ns more
/// for an element that comes from DRAM.
inline HostKernels host_kernels_by_hand(int cores) {
  HostKernels host;
  host.instructions = "avx2";
  host.tile_rows = 6, host.tile_columns = 16;
  host.near_memory = 1_MiB;
  host.shared_memory = 8_MiB;
  host.pool_wake = 10.0_us;
  host.stream_wake = 2.0_us;
  host.speedups = {{1, 1.0}};
  host.memory = {{1, 20_GBps}};
  if (cores > 1) host.speedups.push_back({cores, 0.9 * cores});
  if (cores > 1) host.memory.push_back({cores, 40_GBps});
  for (const HostKernelForm& form : host_kernel_forms()) {
    const bool on_bytes = form.name == "copy" || form.name == "clear";
    for (const DType type : {DType::bf16, DType::fp16, DType::fp32, DType::u8}) {
      if (on_bytes != (type == DType::u8)) continue;
      HostKernelTime& time = host.kernels.emplace_back();
      time.kernel = form.name;
      time.type = type;
      for (const std::string_view term : terms_of(form.form)) {
        time.terms.push_back(term == "call"              ? 1.0_us
                             : term == "mac"             ? Seconds(1e-11)
                             : term == "far_element"     ? Seconds()
                             : term == "distant_element" ? Seconds(1e-10)
                                                         : Seconds(1e-9));
      }
    }
  }
  for (const int ranks : {2, 4}) {
    for (const char* name : {"all-gather", "reduce-scatter", "all-reduce"}) {
      for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
        host.collectives.push_back({name, ranks, type, {1_KiB, 1_MiB}, {ranks * 5.0_us, ranks * 100.0_us}});
      }
    }
  }
  host.disk = {{"read", 64_KiB, 1, 1_GBps}, {"write", 64_KiB, 1, 1_GBps}};
  return host;
}

/// 64 GiB, as `ranks` devices.
inline MachineSpec host_machine(int cores, int ranks) {
  MachineSpec machine;
  machine.name = "host by hand";
  machine.kind = "probed";
  machine.gpu.name = machine.gpu.vendor = "host";
  machine.gpu.memory = 32_GiB;
  machine.gpu.memory_bandwidth = 40_GBps;
  machine.gpu.peak_bf16 = machine.gpu.peak_fp16 = machine.gpu.peak_fp32 = FlopsPerSecond(1e12);
  machine.physical_cores = cores;
  machine.dram = 64_GiB;
  machine.dram_bandwidth = 40_GBps;
  machine.nvme = {1, 100_GiB, 2_GBps, 1_GBps};
  machine.host_device = true;
  machine.host_kernels = host_kernels_by_hand(cores);
  set_host_ranks(machine, ranks);
  return machine;
}

}  // namespace zeroplan::tests
