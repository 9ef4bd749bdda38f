#include <algorithm>

#include "models/error.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/loops.h"
#include "runtime/kernels/scratch.h"

namespace zeroplan {
namespace {

void check_ids(std::span<const std::int32_t> ids, std::int64_t vocab) {
  for (const std::int32_t id : ids) {
    if (id < 0 || id >= vocab) {
      throw InputError("token id " + std::to_string(id) + " is outside the vocabulary of " + std::to_string(vocab));
    }
  }
}

/// Tokens sorted by id, equal ids in token order.
std::span<const std::int64_t> tokens_by_id(std::span<const std::int32_t> ids) {
  const auto order = scratch<std::int64_t>(ScratchSlot::order, static_cast<std::int64_t>(ids.size()));
  for (std::size_t t = 0; t < ids.size(); ++t) order[t] = static_cast<std::int64_t>(t);
  const auto id = [&](std::int64_t t) { return ids[static_cast<std::size_t>(t)]; };
  std::sort(order.begin(), order.end(),
            [&](std::int64_t a, std::int64_t b) { return id(a) < id(b) || (id(a) == id(b) && a < b); });
  return order;
}

constexpr std::int64_t kColumns = 64;

/// out[0, count) (+)= the sum of the rows' columns, in their order.
template <class T, class G, class Rows>
void add_rows(const Rows& rows, std::int64_t hidden, const T* dy, std::int64_t column, std::int64_t count, G* out) {
  Wide<T> sums[kColumns] = {};
  for (const std::int64_t row : rows) {
    const T* from = dy + row * hidden + column;
    for (std::int64_t j = 0; j < count; ++j) sums[j] += widen(from[j]);
  }
  for (std::int64_t j = 0; j < count; ++j) out[j] = narrow<G>(widen(out[j]) + sums[j]);
}

template <class G>
void clear(WeightGradient<G> gradient) {
  if (!gradient.accumulate) std::fill(gradient.out.begin(), gradient.out.end(), G{});
}

/// Calls body(column, count) for blocks of columns.
template <class Body>
void for_columns(std::int64_t hidden, ThreadPool& pool, Body&& body) {
  pool.for_ranges(hidden, kColumns, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t column = begin; column < end; column += kColumns) body(column, std::min(kColumns, end - column));
  });
}

template <class T, class G>
void table_backward(std::span<const std::int32_t> ids, std::int64_t hidden, const T* dy, WeightGradient<G> table,
                    ThreadPool& pool) {
  const auto order = tokens_by_id(ids);
  for_columns(hidden, pool, [&](std::int64_t column, std::int64_t count) {
    for (std::size_t begin = 0, end = 0; begin < order.size(); begin = end) {
      const std::int32_t id = ids[static_cast<std::size_t>(order[begin])];
      while (end < order.size() && ids[static_cast<std::size_t>(order[end])] == id) ++end;
      add_rows(order.subspan(begin, end - begin), hidden, dy, column, count, table.out.data() + id * hidden + column);
    }
  });
}

/// The tokens at one position: position, position + seq_len, ...
struct Strided {
  std::int64_t first, step, last;
  struct Iterator {
    std::int64_t at, step;
    std::int64_t operator*() const { return at; }
    void operator++() { at += step; }
    bool operator!=(const Iterator& other) const { return at < other.at; }
  };
  Iterator begin() const { return {first, step}; }
  Iterator end() const { return {last, step}; }
};

}  // namespace

template <class T>
void embedding_forward(std::span<const std::int32_t> ids, std::int64_t seq_len, std::int64_t hidden,
                       std::span<const T> table, std::span<const T> positions, std::span<T> y, ThreadPool& pool) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  check_ids(ids, rows_of(table.size(), hidden, "embedding table"));
  expect_count(y.size(), tokens * hidden, "embedding output");
  if (!positions.empty() && rows_of(positions.size(), hidden, "position table") < seq_len) {
    throw std::logic_error("embedding: fewer position rows than tokens of a sequence");
  }
  for_rows(tokens, hidden, pool, [&](std::int64_t token) {
    const T* row = table.data() + ids[static_cast<std::size_t>(token)] * hidden;
    T* to = y.data() + token * hidden;
    if (positions.empty()) {
      std::copy(row, row + hidden, to);
      return;
    }
    const T* position = positions.data() + token % seq_len * hidden;
    for (std::int64_t i = 0; i < hidden; ++i) to[i] = narrow<T>(widen(row[i]) + widen(position[i]));
  });
}

template <class T, class G>
void embedding_backward(std::span<const std::int32_t> ids, std::int64_t seq_len, std::int64_t hidden,
                        std::span<const T> dy, WeightGradient<G> table, WeightGradient<G> positions, ThreadPool& pool) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  check_ids(ids, rows_of(table.out.size(), hidden, "embedding gradient"));
  expect_count(dy.size(), tokens * hidden, "embedding output gradient");
  clear(table);
  table_backward(ids, hidden, dy.data(), table, pool);
  if (positions.out.empty()) return;
  if (rows_of(positions.out.size(), hidden, "position gradient") < seq_len) {
    throw std::logic_error("embedding: fewer position rows than tokens of a sequence");
  }
  clear(positions);
  for_columns(hidden, pool, [&](std::int64_t column, std::int64_t count) {
    for (std::int64_t position = 0; position < seq_len; ++position) {
      add_rows(Strided{position, seq_len, tokens}, hidden, dy.data(), column, count,
               positions.out.data() + position * hidden + column);
    }
  });
}

#define ZEROPLAN_EMBEDDING(T)                                                                                    \
  template void embedding_forward(std::span<const std::int32_t>, std::int64_t, std::int64_t, std::span<const T>, \
                                  std::span<const T>, std::span<T>, ThreadPool&)
ZEROPLAN_EMBEDDING(Bf16);
ZEROPLAN_EMBEDDING(Fp16);
ZEROPLAN_EMBEDDING(float);
ZEROPLAN_EMBEDDING(double);

#define ZEROPLAN_EMBEDDING_BACKWARD(T, G)                                                                         \
  template void embedding_backward(std::span<const std::int32_t>, std::int64_t, std::int64_t, std::span<const T>, \
                                   WeightGradient<G>, WeightGradient<G>, ThreadPool&)
ZEROPLAN_EMBEDDING_BACKWARD(Bf16, Bf16);
ZEROPLAN_EMBEDDING_BACKWARD(Bf16, float);
ZEROPLAN_EMBEDDING_BACKWARD(Fp16, Fp16);
ZEROPLAN_EMBEDDING_BACKWARD(Fp16, float);
ZEROPLAN_EMBEDDING_BACKWARD(float, float);
ZEROPLAN_EMBEDDING_BACKWARD(double, double);

}  // namespace zeroplan
