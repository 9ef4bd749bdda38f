#pragma once
// Shared by the allocator model's source files.

#include <cstdint>

namespace zeroplan {

inline constexpr std::int64_t kMebibyte = 1 << 20;

constexpr std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

}  // namespace zeroplan
