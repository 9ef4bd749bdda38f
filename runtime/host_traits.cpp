#include "runtime/host_traits.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "runtime/cpu_features.h"

namespace zeroplan {
namespace {

/// As Linux tells it ("32768K"); `otherwise` where it does not.
Bytes cache_size(int level, Bytes otherwise) {
  std::ifstream file(fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/size", level));
  double kib = 0;
  char unit = 0;
  return file >> kib >> unit && unit == 'K' && kib > 0 ? Bytes(kib * kKiB) : otherwise;
}

}  // namespace

HostKernels host_traits() {
  HostKernels host;
  host.instructions = "portable";
  if (cpu_has_avx2()) host.instructions = "avx2", host.tile_rows = 6, host.tile_columns = 16;
  if (cpu_has_avx512()) host.instructions = "avx512", host.tile_rows = 12, host.tile_columns = 32;
  host.near_memory = cache_size(2, 1_MiB);
  // Other cores and other guests use the last cache too: a quarter of it counts.
  host.shared_memory = std::max(host.near_memory, 0.25 * cache_size(3, 16_MiB));
  return host;
}

}  // namespace zeroplan
