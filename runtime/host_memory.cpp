#include "runtime/host_memory.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace zeroplan {

std::optional<Bytes> host_memory(std::string_view key) {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  double amount = 0;
  while (file >> name >> amount) {
    if (name.ends_with(':') && name.substr(0, name.size() - 1) == key) return Bytes(amount * kKiB);  // "kB" there
    std::getline(file, unit);
  }
  return std::nullopt;
}

std::optional<Bytes> container_memory() {
  std::ifstream file("/sys/fs/cgroup/memory.max");
  double limit = 0;
  if (!(file >> limit)) return std::nullopt;  // "max", or no such file
  return Bytes(limit);
}

std::optional<Bytes> available_memory() {
  const auto system = host_memory("MemAvailable"), container = container_memory();
  if (system && container) return std::min(*system, *container);
  return system ? system : container;
}

}  // namespace zeroplan
