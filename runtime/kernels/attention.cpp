#include <algorithm>

#include "runtime/kernels/exponential.h"
#include "runtime/kernels/gemm.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/loops.h"
#include "runtime/kernels/scratch.h"

// Equations: Dao, "FlashAttention-2", arXiv 2307.08691, sections 2.2 and 3.1: forward saves the log-sum-exp L of each
// row, backward forms P = exp(S - L) again. A block of rows sees all its keys at once, so there is no running maximum.

namespace zeroplan {
namespace {

constexpr std::int64_t kRowBlock = 128;

/// Sizes and the place of each head in a packed row.
struct Layout {
  std::int64_t heads, kv_heads, d, seq_len, width, window;
  bool causal;
  double scale;

  std::int64_t q(std::int64_t head) const { return head * d; }
  std::int64_t k(std::int64_t kv_head) const { return (heads + kv_head) * d; }
  std::int64_t v(std::int64_t kv_head) const { return (heads + kv_heads + kv_head) * d; }
  std::int64_t group() const { return heads / kv_heads; }
  std::int64_t blocks() const { return (seq_len + kRowBlock - 1) / kRowBlock; }

  /// Keys that query i sees: [first, last).
  std::int64_t first_key(std::int64_t i) const { return window > 0 ? std::max<std::int64_t>(0, i - window + 1) : 0; }
  std::int64_t last_key(std::int64_t i) const { return causal ? i + 1 : seq_len; }
};

Layout layout_of(const AttentionShape& shape, std::int64_t seq_len) {
  if (shape.chunked || shape.cross || shape.qk_dim != shape.v_dim || shape.kv_heads <= 0 ||
      shape.heads % shape.kv_heads != 0 || (shape.window > 0 && !shape.causal)) {
    throw std::logic_error("attention: no host kernel for this shape");
  }
  const std::int64_t d = shape.qk_dim;
  return {shape.heads,
          shape.kv_heads,
          d,
          seq_len,
          (shape.heads + 2 * shape.kv_heads) * d,
          shape.window,
          shape.causal,
          1.0 / std::sqrt(static_cast<double>(d))};
}

/// Queries [row, row + rows) of one sequence and the keys [key, key + keys) that any of them sees.
struct Window {
  std::int64_t row, rows, key, keys;
};
Window window_of(const Layout& at, std::int64_t block) {
  const std::int64_t row = block * kRowBlock, rows = std::min(kRowBlock, at.seq_len - row);
  const std::int64_t key = at.first_key(row);
  return {row, rows, key, at.last_key(row + rows - 1) - key};
}

/// One sequence's packed q, k, v with what products need.
template <class T>
struct Sequence {
  const Layout& at;
  const T* qkv;  // first token

  Matrix<T> rows(std::int64_t row, std::int64_t offset) const { return {qkv + row * at.width + offset, at.width, 1}; }
};

/// to = a b, or to += a b.
template <class TA, class TB, class W>
void product(std::int64_t rows, std::int64_t columns, std::int64_t depth, Matrix<TA> a, Matrix<TB> b, W* to,
             std::int64_t stride, bool add, ThreadPool& alone) {
  const GemmTerm<TA, TB> term{a, b, depth};
  gemm<TA, TB, W>(rows, columns, {&term, 1}, {to, stride, add ? to : nullptr, stride, nullptr}, alone);
}

/// Raw scores q k^T of a window into s [rows, keys].
template <class T>
void scores(const Sequence<T>& x, const Window& w, std::int64_t head, Wide<T>* s, ThreadPool& alone) {
  product(w.rows, w.keys, x.at.d, x.rows(w.row, x.at.q(head)), x.rows(w.key, x.at.k(head / x.at.group())).transposed(),
          s, w.keys, false, alone);
}

/// Sets s outside the keys that query i sees to zero and calls use(first, last) for those inside, as columns.
template <class W, class Use>
void masked_row(const Layout& at, const Window& w, std::int64_t i, W* s, Use&& use) {
  const std::int64_t first = std::max(at.first_key(i), w.key) - w.key, last = at.last_key(i) - w.key;
  std::fill(s, s + first, W{0});
  std::fill(s + last, s + w.keys, W{0});
  use(first, last);
}

template <class T>
void forward_block(const Sequence<T>& x, std::int64_t head, std::int64_t block, T* out, Wide<T>* log_sum_exp,
                   ThreadPool& alone) {
  using W = Wide<T>;
  const Layout& at = x.at;
  const Window w = window_of(at, block);
  const auto s = scratch<W>(ScratchSlot::scores, w.rows * w.keys);
  const auto o = scratch<W>(ScratchSlot::rows, kRowBlock * (at.d + 1));
  W* sums = o.data() + kRowBlock * at.d;
  scores(x, w, head, s.data(), alone);
  for (std::int64_t i = 0; i < w.rows; ++i) {
    W* row = s.data() + i * w.keys;
    masked_row(at, w, w.row + i, row, [&](std::int64_t first, std::int64_t last) {
      const W scale = static_cast<W>(at.scale);
      const W largest = lane_max<W>(last - first, [&](std::int64_t j) { return row[first + j]; });
      exponentials(row + first, last - first, scale, largest * scale);
      sums[i] = lane_sum<W>(last - first, [&](std::int64_t j) { return row[first + j]; });
      log_sum_exp[(w.row + i) * at.heads + head] = largest * scale + std::log(sums[i]);
    });
  }
  product(w.rows, at.d, w.keys, Matrix<W>{s.data(), w.keys, 1}, x.rows(w.key, at.v(head / at.group())), o.data(), at.d,
          false, alone);
  for (std::int64_t i = 0; i < w.rows; ++i) {
    T* to = out + ((w.row + i) * at.heads + head) * at.d;
    for (std::int64_t j = 0; j < at.d; ++j) to[j] = narrow<T>(o[static_cast<std::size_t>(i * at.d + j)] / sums[i]);
  }
}

/// What backward reads of one sequence, and where its gradients go.
template <class T>
struct BackwardSequence {
  Sequence<T> x;
  const T* dout;
  const T* out;
  const Wide<T>* log_sum_exp;
  T* gradient;
  const T* base;  // may be null

  void put(std::int64_t row, std::int64_t offset, const Wide<T>* values) const {
    const std::int64_t start = row * x.at.width + offset;
    for (std::int64_t j = 0; j < x.at.d; ++j) {
      gradient[start + j] = narrow<T>(base == nullptr ? values[j] : widen(base[start + j]) + values[j]);
    }
  }
};

/// From scores s and dP: P into s and dS = P (dP - D) scale into ds, D = sum of dO O.
template <class T>
void score_gradients(const BackwardSequence<T>& b, const Window& w, std::int64_t head, Wide<T>* s, Wide<T>* ds) {
  using W = Wide<T>;
  const Layout& at = b.x.at;
  const W scale = static_cast<W>(at.scale);
  for (std::int64_t i = 0; i < w.rows; ++i) {
    const std::int64_t row = (w.row + i) * at.heads + head;
    const T* g = b.dout + row * at.d;
    const T* o = b.out + row * at.d;
    const W delta = lane_sum<W>(at.d, [&](std::int64_t j) { return widen(g[j]) * widen(o[j]); });
    const W log_sum = b.log_sum_exp[row];
    W* p = s + i * w.keys;
    W* dp = ds + i * w.keys;
    masked_row(at, w, w.row + i, dp, [](std::int64_t, std::int64_t) {});
    masked_row(at, w, w.row + i, p, [&](std::int64_t first, std::int64_t last) {
      exponentials(p + first, last - first, scale, log_sum);
      for (std::int64_t j = first; j < last; ++j) dp[j] = p[j] * (dp[j] - delta) * scale;
    });
  }
}

template <class T>
void backward_block(const BackwardSequence<T>& b, std::int64_t head, std::int64_t block, Wide<T>* dk, Wide<T>* dv,
                    ThreadPool& alone) {
  using W = Wide<T>;
  const Layout& at = b.x.at;
  const std::int64_t kv_head = head / at.group();
  const Window w = window_of(at, block);
  const auto s = scratch<W>(ScratchSlot::scores, w.rows * w.keys);
  const auto ds = scratch<W>(ScratchSlot::score_gradients, w.rows * w.keys);
  const auto dq = scratch<W>(ScratchSlot::rows, kRowBlock * (at.d + 1));
  const Matrix<T> dout{b.dout + (w.row * at.heads + head) * at.d, at.heads * at.d, 1};
  scores(b.x, w, head, s.data(), alone);
  product(w.rows, w.keys, at.d, dout, b.x.rows(w.key, at.v(kv_head)).transposed(), ds.data(), w.keys, false, alone);
  score_gradients(b, w, head, s.data(), ds.data());
  const Matrix<W> p{s.data(), w.keys, 1}, score{ds.data(), w.keys, 1};
  product(w.keys, at.d, w.rows, p.transposed(), dout, dv + w.key * at.d, at.d, true, alone);
  product(w.keys, at.d, w.rows, score.transposed(), b.x.rows(w.row, at.q(head)), dk + w.key * at.d, at.d, true, alone);
  product(w.rows, at.d, w.keys, score, b.x.rows(w.key, at.k(kv_head)), dq.data(), at.d, false, alone);
  for (std::int64_t i = 0; i < w.rows; ++i) b.put(w.row + i, at.q(head), dq.data() + i * at.d);
}

/// All gradients of one key-value head and its query heads: one thread, so sums over queries have one order.
template <class T>
void backward_group(const BackwardSequence<T>& b, std::int64_t kv_head, ThreadPool& alone) {
  using W = Wide<T>;
  const Layout& at = b.x.at;
  const auto dk = scratch<W>(ScratchSlot::key_gradient, at.seq_len * at.d);
  const auto dv = scratch<W>(ScratchSlot::value_gradient, at.seq_len * at.d);
  std::fill(dk.begin(), dk.end(), W{0});
  std::fill(dv.begin(), dv.end(), W{0});
  for (std::int64_t head = kv_head * at.group(); head < (kv_head + 1) * at.group(); ++head) {
    for (std::int64_t block = 0; block < at.blocks(); ++block) {
      backward_block(b, head, block, dk.data(), dv.data(), alone);
    }
  }
  for (std::int64_t row = 0; row < at.seq_len; ++row) {
    b.put(row, at.k(kv_head), dk.data() + row * at.d);
    b.put(row, at.v(kv_head), dv.data() + row * at.d);
  }
}

std::int64_t sequences_of(const Layout& at, std::size_t elements) {
  return rows_of(elements, at.width * at.seq_len, "attention input");
}

}  // namespace

template <class T>
void attention_forward(const AttentionShape& shape, std::int64_t seq_len, std::span<const T> qkv, std::span<T> out,
                       std::span<Wide<T>> log_sum_exp, ThreadPool& pool) {
  const Layout at = layout_of(shape, seq_len);
  const std::int64_t batch = sequences_of(at, qkv.size()), per_head = at.blocks();
  expect_count(out.size(), batch * seq_len * at.heads * at.d, "attention output");
  expect_count(log_sum_exp.size(), batch * seq_len * at.heads, "attention log-sum-exp");
  pool.for_ranges(batch * at.heads * per_head, 1, [&](std::int64_t begin, std::int64_t end) {
    ThreadPool alone(1);
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t sequence = task / (at.heads * per_head), head = task / per_head % at.heads;
      const std::int64_t token = sequence * seq_len;
      forward_block(Sequence<T>{at, qkv.data() + token * at.width}, head, task % per_head,
                    out.data() + token * at.heads * at.d, log_sum_exp.data() + token * at.heads, alone);
    }
  });
}

template <class T>
void attention_backward(const AttentionShape& shape, std::int64_t seq_len, std::span<const T> dout,
                        std::span<const T> qkv, std::span<const T> out, std::span<const Wide<T>> log_sum_exp,
                        ValueGradient<T> dqkv, ThreadPool& pool) {
  const Layout at = layout_of(shape, seq_len);
  const std::int64_t batch = sequences_of(at, qkv.size());
  expect_count(out.size(), batch * seq_len * at.heads * at.d, "attention output");
  expect_count(dout.size(), batch * seq_len * at.heads * at.d, "attention output gradient");
  expect_count(log_sum_exp.size(), batch * seq_len * at.heads, "attention log-sum-exp");
  expect_gradient(dqkv, batch * seq_len * at.width, "attention input gradient");
  pool.for_ranges(batch * at.kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    ThreadPool alone(1);
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t token = task / at.kv_heads * seq_len, packed = token * at.width;
      const std::int64_t rows = token * at.heads;
      backward_group(BackwardSequence<T>{{at, qkv.data() + packed},
                                         dout.data() + rows * at.d,
                                         out.data() + rows * at.d,
                                         log_sum_exp.data() + rows,
                                         dqkv.out.data() + packed,
                                         dqkv.base.empty() ? nullptr : dqkv.base.data() + packed},
                     task % at.kv_heads, alone);
    }
  });
}

std::int64_t kernel_scratch_bytes(TokenShape tokens, std::int64_t head_dim) {
  const std::int64_t word = sizeof(float);
  const std::int64_t attention =
      word * (2 * kRowBlock * tokens.seq_len + kRowBlock * (head_dim + 1) + 2 * tokens.seq_len * head_dim);
  const std::int64_t order = static_cast<std::int64_t>(sizeof(std::int64_t)) * tokens.tokens();
  return gemm_scratch_bytes() + attention + order;
}

#define ZEROPLAN_ATTENTION(T)                                                                                   \
  template void attention_forward(const AttentionShape&, std::int64_t, std::span<const T>, std::span<T>,        \
                                  std::span<Wide<T>>, ThreadPool&);                                             \
  template void attention_backward(const AttentionShape&, std::int64_t, std::span<const T>, std::span<const T>, \
                                   std::span<const T>, std::span<const Wide<T>>, ValueGradient<T>, ThreadPool&)
ZEROPLAN_ATTENTION(Bf16);
ZEROPLAN_ATTENTION(Fp16);
ZEROPLAN_ATTENTION(float);
ZEROPLAN_ATTENTION(double);

}  // namespace zeroplan
