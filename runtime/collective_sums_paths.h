#pragma once
// Sums with special instructions, chosen at run time by collective_sums.cpp. No inline functions: see
// runtime/CMakeLists.txt.

#include <cstdint>

namespace zeroplan {

struct SumArrays {
  const void* const* sources;
  std::int64_t source_count;
  void* const* targets;
  std::int64_t target_count;
};

/// As sum_in_order() for the first elements, and how many those are: all but a few.
std::int64_t sum_fp32_avx2(const SumArrays& arrays, std::int64_t count);
std::int64_t sum_bf16_avx2(const SumArrays& arrays, std::int64_t count);
std::int64_t sum_fp16_avx2(const SumArrays& arrays, std::int64_t count);

}  // namespace zeroplan
