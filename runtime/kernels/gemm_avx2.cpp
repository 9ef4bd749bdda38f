#include <immintrin.h>

#include "runtime/kernels/gemm_kernels.h"

namespace zeroplan {

void gemm_kernel_avx2(std::int64_t depth, const float* a, const float* b, float* c, std::int64_t stride) {
  constexpr int kRows = 6, kLanes = 8;
  __m256 sum[kRows][2];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    sum[i][0] = _mm256_loadu_ps(c + i * stride);
    sum[i][1] = _mm256_loadu_ps(c + i * stride + kLanes);
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    const __m256 b0 = _mm256_loadu_ps(b);
    const __m256 b1 = _mm256_loadu_ps(b + kLanes);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const __m256 ai = _mm256_set1_ps(a[i]);
      sum[i][0] = _mm256_fmadd_ps(ai, b0, sum[i][0]);
      sum[i][1] = _mm256_fmadd_ps(ai, b1, sum[i][1]);
    }
    a += kRows;
    b += 2 * kLanes;
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    _mm256_storeu_ps(c + i * stride, sum[i][0]);
    _mm256_storeu_ps(c + i * stride + kLanes, sum[i][1]);
  }
}

}  // namespace zeroplan
