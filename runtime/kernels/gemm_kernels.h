#pragma once
// The innermost product of gemm(), one for each instruction set. No inline functions here: see runtime/CMakeLists.txt.

#include <cstdint>

namespace zeroplan {

/// c[i, j] = fused multiply-adds of a[k, i] b[k, j] onto c[i, j] for k = 0, 1, ... in this order: the same bits from
/// every kernel. a [depth, rows] and b [depth, columns] packed; c has row stride `stride`.
template <class W>
struct GemmKernel {
  int rows = 0, columns = 0;
  void (*run)(std::int64_t depth, const W* a, const W* b, W* c, std::int64_t stride) = nullptr;
};

void gemm_kernel_avx2(std::int64_t depth, const float* a, const float* b, float* c, std::int64_t stride);    // 6 x 16
void gemm_kernel_avx512(std::int64_t depth, const float* a, const float* b, float* c, std::int64_t stride);  // 12 x 32

}  // namespace zeroplan
