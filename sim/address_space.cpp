#include "sim/address_space.h"

#include <algorithm>
#include <stdexcept>

namespace zeroplan {

std::int64_t AddressSpace::take(std::int64_t bytes) {
  const auto gap =
      std::find_if(gaps_.rbegin(), gaps_.rend(), [&](const auto& each) { return each.second - each.first >= bytes; });
  if (gap == gaps_.rend()) throw std::logic_error("AddressSpace: no gap is wide enough");
  const std::int64_t address = gap->second - bytes;
  if (address == gap->first) {
    gaps_.erase(gap->first);
  } else {
    gap->second = address;
  }
  return address;
}

void AddressSpace::give_back(std::int64_t address, std::int64_t bytes) {
  std::int64_t end = address + bytes;
  auto above = gaps_.lower_bound(address);
  if (above != gaps_.end() && above->first == end) {
    end = above->second;
    above = gaps_.erase(above);
  }
  if (above != gaps_.begin() && std::prev(above)->second == address) {
    std::prev(above)->second = end;
  } else {
    gaps_.emplace_hint(above, address, end);
  }
}

}  // namespace zeroplan
