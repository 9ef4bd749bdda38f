#include "runtime/kernels/gemm.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "models/gemm_tasks.h"
#include "runtime/cpu_features.h"
#include "runtime/kernels/gemm_kernels.h"
#include "runtime/kernels/scratch.h"

namespace zeroplan {
namespace {

// Block sizes (Goto & van de Geijn, "Anatomy of high-performance matrix multiplication", 2008): packed a and b blocks
// stay in a 1 MiB second-level cache, the accumulators of a task in the third.
constexpr std::int64_t kDepth = 256;  // k
constexpr std::int64_t kRows = 96;    // packed rows of a

constexpr std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

template <class W>
void portable_kernel(std::int64_t depth, const W* a, const W* b, W* c, std::int64_t stride) {
  constexpr int kSide = 4;
  for (int i = 0; i < kSide; ++i) {
    for (int j = 0; j < kSide; ++j) {
      W sum = c[i * stride + j];
      for (std::int64_t k = 0; k < depth; ++k) sum = std::fma(a[k * kSide + i], b[k * kSide + j], sum);
      c[i * stride + j] = sum;
    }
  }
}

template <class W>
GemmKernel<W> choose_kernel() {
#ifdef ZEROPLAN_X86_KERNELS
  if constexpr (std::is_same_v<W, float>) {
    if (cpu_has_avx512()) return {12, 32, gemm_kernel_avx512};
    if (cpu_has_avx2()) return {6, 16, gemm_kernel_avx2};
  }
#endif
  return {4, 4, portable_kernel<W>};
}

/// Rows 0 to 3 of x [4, depth] (`across` apart) as columns: to[k * width + row]. Turned in registers four by four, as
/// one store an element would be: 2 to 4 times as fast.
template <class T, class W>
void turn_four(const T* x, std::int64_t across, std::int64_t depth, int width, W* to) {
  constexpr std::int64_t kSide = 4, kPiece = 32;
  using Four [[gnu::vector_size(kSide * sizeof(W))]] = W;
  alignas(Four) W rows[kSide][kPiece];
  for (std::int64_t first = 0; first < depth; first += kPiece) {
    const std::int64_t here = std::min(kPiece, depth - first);
    for (std::int64_t r = 0; r < kSide; ++r) {
      for (std::int64_t k = 0; k < here; ++k) rows[r][k] = widen(x[r * across + first + k]);
    }
    std::int64_t k = 0;
    for (; k + kSide <= here; k += kSide) {
      Four v[kSide];
      for (std::int64_t r = 0; r < kSide; ++r) std::memcpy(&v[r], &rows[r][k], sizeof(Four));
      const Four low01 = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5);
      const Four low23 = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5);
      const Four high01 = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7);
      const Four high23 = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
      const Four turned[kSide] = {
          __builtin_shufflevector(low01, low23, 0, 1, 4, 5), __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
          __builtin_shufflevector(high01, high23, 0, 1, 4, 5), __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
      for (std::int64_t i = 0; i < kSide; ++i) std::memcpy(to + (first + k + i) * width, &turned[i], sizeof(Four));
    }
    for (; k < here; ++k) {
      for (std::int64_t r = 0; r < kSide; ++r) to[(first + k) * width + r] = rows[r][k];
    }
  }
}

/// Panels of `width` rows of x [count, depth]: to[panel][k][row], missing rows zero. `along` and `across` are the
/// strides of k and of the rows.
template <class T, class W>
void pack(const T* x, std::int64_t across, std::int64_t along, std::int64_t count, std::int64_t depth, int width,
          W* to) {
  for (std::int64_t first = 0; first < count; first += width, to += width * depth) {
    const std::int64_t here = std::min<std::int64_t>(width, count - first);
    const T* from = x + first * across;
    if (here < width) std::fill(to, to + width * depth, W{0});
    if (across == 1) {
      for (std::int64_t k = 0; k < depth; ++k) {
        for (std::int64_t r = 0; r < here; ++r) to[k * width + r] = widen(from[k * along + r]);
      }
    } else {
      std::int64_t r = 0;
      if (along == 1) {
        for (; r + 4 <= here; r += 4) turn_four(from + r * across, across, depth, width, to + r);
      }
      for (; r < here; ++r) {
        for (std::int64_t k = 0; k < depth; ++k) to[k * width + r] = widen(from[r * across + k * along]);
      }
    }
  }
}

template <class C, class W>
void store(const GemmOutput<C>& output, std::int64_t row, std::int64_t column, std::int64_t rows, std::int64_t columns,
           const W* sums, std::int64_t stride) {
  for (std::int64_t i = 0; i < rows; ++i) {
    const W* sum = sums + i * stride;
    C* out = output.out + (row + i) * output.stride + column;
    const C* base = output.base == nullptr ? nullptr : output.base + (row + i) * output.base_stride + column;
    const C* bias = output.bias == nullptr ? nullptr : output.bias + column;
    if (base == nullptr && bias == nullptr) {
      for (std::int64_t j = 0; j < columns; ++j) out[j] = narrow<C>(sum[j]);
    } else if (base == nullptr) {
      for (std::int64_t j = 0; j < columns; ++j) out[j] = narrow<C>(sum[j] + widen(bias[j]));
    } else if (bias == nullptr) {
      for (std::int64_t j = 0; j < columns; ++j) out[j] = narrow<C>(widen(base[j]) + sum[j]);
    } else {
      for (std::int64_t j = 0; j < columns; ++j) out[j] = narrow<C>(widen(base[j]) + sum[j] + widen(bias[j]));
    }
  }
}

/// The product for output rows [row, row + rows) and columns [column, column + columns).
template <class TA, class TB, class C>
void block(std::int64_t row, std::int64_t column, std::int64_t rows, std::int64_t columns,
           std::span<const GemmTerm<TA, TB>> terms, const GemmOutput<C>& output) {
  using W = Wide<TA>;
  static const GemmKernel<W> kernel = choose_kernel<W>();
  const std::int64_t stride = round_up(columns, kernel.columns);
  const auto sums = scratch<W>(ScratchSlot::gemm_c, round_up(rows, kernel.rows) * stride);
  const auto a = scratch<W>(ScratchSlot::gemm_a, kRows * kDepth);
  const auto b = scratch<W>(ScratchSlot::gemm_b, stride * kDepth);
  std::fill(sums.begin(), sums.end(), W{0});
  for (const auto& term : terms) {
    for (std::int64_t k = 0; k < term.depth; k += kDepth) {
      const std::int64_t depth = std::min(kDepth, term.depth - k);
      pack(term.b.at(k, column), term.b.column_stride, term.b.row_stride, columns, depth, kernel.columns, b.data());
      for (std::int64_t i = 0; i < rows; i += kRows) {
        const std::int64_t here = std::min(kRows, rows - i);
        pack(term.a.at(row + i, k), term.a.row_stride, term.a.column_stride, here, depth, kernel.rows, a.data());
        for (std::int64_t jr = 0; jr < columns; jr += kernel.columns) {
          for (std::int64_t ir = 0; ir < here; ir += kernel.rows) {
            kernel.run(depth, a.data() + ir * depth, b.data() + jr * depth, sums.data() + (i + ir) * stride + jr,
                       stride);
          }
        }
      }
    }
  }
  store(output, row, column, rows, columns, sums.data(), stride);
}

}  // namespace

template <class TA, class TB, class C>
void gemm(std::int64_t rows, std::int64_t columns, std::span<const GemmTerm<TA, TB>> terms, const GemmOutput<C>& output,
          ThreadPool& pool) {
  static_assert(std::is_same_v<Wide<TA>, Wide<TB>> && std::is_same_v<Wide<TA>, Wide<C>>);
  if (rows == 0 || columns == 0) return;
  const GemmTasks cut = gemm_tasks(rows, columns, pool.size());
  pool.for_ranges(cut.row_tasks * cut.column_tasks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t row = task / cut.column_tasks * cut.rows, column = task % cut.column_tasks * cut.columns;
      block(row, column, std::min(cut.rows, rows - row), std::min(cut.columns, columns - column), terms, output);
    }
  });
}

std::int64_t gemm_scratch_bytes() {
  return static_cast<std::int64_t>(sizeof(float)) *
         (kMostTaskRows * kMostTaskColumns + kRows * kDepth + kMostTaskColumns * kDepth);
}

#define ZEROPLAN_GEMM(TA, TB, C) \
  template void gemm(std::int64_t, std::int64_t, std::span<const GemmTerm<TA, TB>>, const GemmOutput<C>&, ThreadPool&)
ZEROPLAN_GEMM(double, double, double);
ZEROPLAN_GEMM(float, float, float);
ZEROPLAN_GEMM(Bf16, Bf16, Bf16);
ZEROPLAN_GEMM(Fp16, Fp16, Fp16);
ZEROPLAN_GEMM(Bf16, Bf16, float);
ZEROPLAN_GEMM(Fp16, Fp16, float);
ZEROPLAN_GEMM(float, Bf16, float);  // scores x values
ZEROPLAN_GEMM(float, Fp16, float);

}  // namespace zeroplan
