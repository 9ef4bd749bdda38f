#pragma once

#include <string>
#include <vector>

#include "models/machine_spec.h"

namespace zeroplan {

struct DiskProbe {
  std::vector<HostDiskRate> rates;
  NvmeSpec drive;  // what the directory's disk has: free space, its best rates
  std::vector<std::string> notes;
};

/// Reads and writes a file of 64 MiB in `directory` with the runtime's own disk engine, by block size and depth. Throws
/// InputError for a directory that is none, DeviceError when the disk fails.
DiskProbe probe_disk(const std::string& directory);

}  // namespace zeroplan
