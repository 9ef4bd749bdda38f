#include "cli/available_memory.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>

namespace zeroplan {
namespace {

std::optional<Bytes> from_meminfo() {
  constexpr double kUnit = 1024;  // "kB" there
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  double amount = 0;
  while (file >> key >> amount) {
    if (key == "MemAvailable:") return Bytes(amount * kUnit);
    std::getline(file, unit);
  }
  return std::nullopt;
}

std::optional<Bytes> from_container() {
  std::ifstream file("/sys/fs/cgroup/memory.max");
  double limit = 0;
  if (!(file >> limit)) return std::nullopt;  // "max", or no such file
  return Bytes(limit);
}

}  // namespace

std::optional<Bytes> available_memory() {
  const auto system = from_meminfo(), container = from_container();
  if (system && container) return std::min(*system, *container);
  return system ? system : container;
}

}  // namespace zeroplan
