#pragma once
// Matrix products with fixed bits: every element is one chain of fused multiply-adds over k in order, in Wide<T>,
// rounded to the output type once. Neither tiles nor threads nor the instruction set change the result.

#include <cstdint>
#include <span>

#include "runtime/numeric.h"
#include "runtime/thread_pool.h"

namespace zeroplan {

/// A matrix in memory; strides in elements. Transposing swaps the strides.
template <class T>
struct Matrix {
  const T* data = nullptr;
  std::int64_t row_stride = 0, column_stride = 1;
  Matrix transposed() const { return {data, column_stride, row_stride}; }
  const T* at(std::int64_t row, std::int64_t column) const { return data + row * row_stride + column * column_stride; }
};

/// One product of the sum a1 b1 + a2 b2 + ...: a [m, depth], b [depth, n].
template <class TA, class TB>
struct GemmTerm {
  Matrix<TA> a;
  Matrix<TB> b;
  std::int64_t depth = 0;
};

/// out[i, j] = base[i, j] + (sum of the terms)[i, j] + bias[j]; base and bias may be null; base may be out. Row-major.
template <class C>
struct GemmOutput {
  C* out = nullptr;
  std::int64_t stride = 0;
  const C* base = nullptr;
  std::int64_t base_stride = 0;
  const C* bias = nullptr;
};

template <class TA, class TB, class C>
void gemm(std::int64_t rows, std::int64_t columns, std::span<const GemmTerm<TA, TB>> terms, const GemmOutput<C>& output,
          ThreadPool& pool);

/// Most bytes of scratch that gemm() holds in one thread.
std::int64_t gemm_scratch_bytes();

}  // namespace zeroplan
