#include "runtime/kernels/gemm.h"

#include <algorithm>
#include <cmath>

#include "runtime/cpu_features.h"
#include "runtime/kernels/gemm_kernels.h"
#include "runtime/kernels/scratch.h"

namespace zeroplan {
namespace {

// Block sizes (Goto & van de Geijn, "Anatomy of high-performance matrix multiplication", 2008): packed a and b blocks
// stay in a 1 MiB second-level cache, the accumulators of a task in the third.
constexpr std::int64_t kDepth = 256;     // k
constexpr std::int64_t kRows = 96;       // packed rows of a
constexpr std::int64_t kTaskRows = 960;  // rows of one task: how often a packed b is used
constexpr std::int64_t kTaskColumns = 512;

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
      for (std::int64_t r = 0; r < here; ++r) {
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

/// Columns of a task: as many as fit, fewer when threads would have nothing to do.
std::int64_t task_columns(std::int64_t row_tasks, std::int64_t columns, int threads) {
  constexpr std::int64_t kUnit = 32;
  const std::int64_t wanted = (2 * threads + row_tasks - 1) / row_tasks;
  const std::int64_t even = threads == 1 ? columns : round_up((columns + wanted - 1) / wanted, kUnit);
  return std::clamp(even, kUnit, kTaskColumns);
}

}  // namespace

template <class TA, class TB, class C>
void gemm(std::int64_t rows, std::int64_t columns, std::span<const GemmTerm<TA, TB>> terms, const GemmOutput<C>& output,
          ThreadPool& pool) {
  static_assert(std::is_same_v<Wide<TA>, Wide<TB>> && std::is_same_v<Wide<TA>, Wide<C>>);
  if (rows == 0 || columns == 0) return;
  const std::int64_t row_tasks = (rows + kTaskRows - 1) / kTaskRows;
  const std::int64_t width = task_columns(row_tasks, columns, pool.size());
  const std::int64_t column_tasks = (columns + width - 1) / width;
  pool.for_ranges(row_tasks * column_tasks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t row = task / column_tasks * kTaskRows;
      const std::int64_t column = task % column_tasks * width;
      block(row, column, std::min(kTaskRows, rows - row), std::min(width, columns - column), terms, output);
    }
  });
}

std::int64_t gemm_scratch_bytes() {
  return static_cast<std::int64_t>(sizeof(float)) * (kTaskRows * kTaskColumns + kRows * kDepth + kTaskColumns * kDepth);
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
