#include "runtime/collective_sums.h"

#include <algorithm>
#include <bit>

#include "runtime/collective_sums_paths.h"
#include "runtime/cpu_features.h"
#include "runtime/numeric.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kBlock = 2048;  // 8 KiB of sums stay in the first cache while the sources pass through

/// Which payload a sum of two NaNs keeps is up to the compiler: one NaN for all.
template <class T>
T rounded(float sum) {
  if constexpr (std::is_same_v<T, float>) {
    return sum == sum ? sum : std::bit_cast<float>(0x7fc00000u);
  } else {
    return narrow<T>(sum);
  }
}

template <class T>
void sum_block(std::span<const void* const> sources, std::span<void* const> targets, std::int64_t begin,
               std::int64_t count) {
  float sums[kBlock];
  const T* first = static_cast<const T*>(sources[0]) + begin;
  for (std::int64_t i = 0; i < count; ++i) sums[i] = widen(first[i]);
  for (const void* source : sources.subspan(1)) {
    const T* values = static_cast<const T*>(source) + begin;
    for (std::int64_t i = 0; i < count; ++i) sums[i] += widen(values[i]);
  }
  for (void* target : targets) {
    T* values = static_cast<T*>(target) + begin;
    for (std::int64_t i = 0; i < count; ++i) values[i] = rounded<T>(sums[i]);
  }
}

/// How many elements were summed with special instructions.
std::int64_t sum_fast(std::span<const void* const> sources, std::span<void* const> targets, std::int64_t count,
                      DType type) {
#ifdef ZEROPLAN_X86_KERNELS
  static const bool has_avx2 = cpu_has_avx2();
  if (!has_avx2) return 0;
  const SumArrays arrays{sources.data(), std::ssize(sources), targets.data(), std::ssize(targets)};
  if (type == DType::bf16) return sum_bf16_avx2(arrays, count);
  if (type == DType::fp16) return sum_fp16_avx2(arrays, count);
  if (type == DType::fp32) return sum_fp32_avx2(arrays, count);
#else
  (void)sources, (void)targets, (void)count, (void)type;
#endif
  return 0;
}

}  // namespace

void sum_in_order(std::span<const void* const> sources, std::span<void* const> targets, std::int64_t count, DType type,
                  SumPath path) {
  const std::int64_t done = path == SumPath::best ? sum_fast(sources, targets, count, type) : 0;
  with_storage(type, [&](auto storage) {
    using T = typename decltype(storage)::Type;
    for (std::int64_t begin = done; begin < count; begin += kBlock) {
      sum_block<T>(sources, targets, begin, std::min(kBlock, count - begin));
    }
  });
}

}  // namespace zeroplan
