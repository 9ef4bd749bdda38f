#pragma once
// `zeroplan probe`: this machine as a machine.json.

#include <string>
#include <vector>

#include "models/machine_spec.h"

namespace zeroplan {

struct ProbeOptions {
  std::string disk_directory;  // where the disk is measured; empty: no disk
  int rounds = 5;              // of the kernels; each figure is the median of them
};

struct ProbeResult {
  MachineSpec machine;
  std::vector<std::string> notes;  // what could not be measured, and why
};

/// Measures the host part: kernels in one thread, what several threads gain, memory, collectives, disk. Takes about 20
/// seconds and up to 700 MB of memory, 64 MiB of disk space for a moment. The machine has one device; set_host_ranks()
/// makes more of it. Throws DeviceError.
ProbeResult probe_host(const ProbeOptions& options);

/// Cores that this process may use, model name, memory that it may use (a container's limit counts).
struct HostFacts {
  int cores = 1;
  std::string cpu;
  Bytes memory;
};
HostFacts host_facts();

}  // namespace zeroplan
