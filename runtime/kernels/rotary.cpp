#include <numbers>

#include "runtime/kernels/kernels.h"
#include "runtime/kernels/loops.h"

namespace zeroplan {
namespace {

std::vector<double> frequencies(std::int64_t head_dim, double theta) {
  if (head_dim <= 0 || head_dim % 2 != 0) throw std::logic_error("rotary: head dimension must be even");
  std::vector<double> result;
  for (std::int64_t i = 0; i < head_dim; i += 2) {
    result.push_back(std::pow(theta, -static_cast<double>(i) / static_cast<double>(head_dim)));
  }
  return result;
}

RotaryTable table_of(std::int64_t positions, const std::vector<double>& frequency) {
  RotaryTable table;
  table.positions = positions;
  table.half = static_cast<std::int64_t>(frequency.size());
  for (std::int64_t position = 0; position < positions; ++position) {
    for (const double f : frequency) {
      table.cos.push_back(std::cos(static_cast<double>(position) * f));
      table.sin.push_back(std::sin(static_cast<double>(position) * f));
    }
  }
  return table;
}

struct Packed {
  std::int64_t d = 0, turned_heads = 0, width = 0;
};
Packed packed_of(const AttentionShape& shape, std::int64_t seq_len, const RotaryTable& table) {
  const Packed packed{shape.qk_dim, shape.heads + shape.kv_heads, (shape.heads + 2 * shape.kv_heads) * shape.qk_dim};
  if (2 * table.half != packed.d || table.positions < seq_len || seq_len <= 0) {
    throw std::logic_error("rotary: table of another shape");
  }
  return packed;
}

/// Turns the q and k heads of one token; direction -1 turns back. out = base + turned; `in` may be `out`.
template <class T>
void turn(const Packed& packed, const double* cos, const double* sin, double direction, const T* in, T* out,
          const T* base) {
  using W = Wide<T>;
  const std::int64_t half = packed.d / 2;
  const auto put = [&](std::int64_t i, W value) {
    out[i] = narrow<T>(base == nullptr ? value : widen(base[i]) + value);
  };
  for (std::int64_t head = 0; head < packed.turned_heads; ++head) {
    for (std::int64_t i = 0; i < half; ++i) {
      const std::int64_t low = head * packed.d + i, high = low + half;
      const W c = static_cast<W>(cos[i]), s = static_cast<W>(direction * sin[i]);
      const W a = widen(in[low]), b = widen(in[high]);
      put(low, a * c - b * s);
      put(high, b * c + a * s);
    }
  }
  if (in == out && base == nullptr) return;
  for (std::int64_t i = packed.turned_heads * packed.d; i < packed.width; ++i) put(i, widen(in[i]));
}

}  // namespace

RotaryTable make_rotary_table(std::int64_t positions, std::int64_t head_dim, double theta) {
  return table_of(positions, frequencies(head_dim, theta));
}

// Wavelengths above original / low_freq_factor are stretched by `factor`, below original / high_freq_factor kept,
// between these interpolated (Hugging Face transformers, modeling_rope_utils, rope type "llama3").
RotaryTable make_rotary_table(std::int64_t positions, std::int64_t head_dim, double theta,
                              const Llama3Scaling& scaling) {
  std::vector<double> frequency = frequencies(head_dim, theta);
  for (double& f : frequency) {
    const double turns = static_cast<double>(scaling.original_positions) * f / (2 * std::numbers::pi);
    const double keep =
        std::clamp((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0);
    f *= keep + (1 - keep) / scaling.factor;
  }
  return table_of(positions, frequency);
}

template <class T>
void rotary_forward(const AttentionShape& shape, std::int64_t seq_len, const RotaryTable& table, std::span<T> qkv,
                    ThreadPool& pool) {
  const Packed packed = packed_of(shape, seq_len, table);
  for_rows(rows_of(qkv.size(), packed.width, "rotary input"), packed.width, pool, [&](std::int64_t token) {
    const std::int64_t row = token % seq_len * table.half;
    T* x = qkv.data() + token * packed.width;
    turn<T>(packed, table.cos.data() + row, table.sin.data() + row, 1.0, x, x, nullptr);
  });
}

template <class T>
void rotary_backward(const AttentionShape& shape, std::int64_t seq_len, const RotaryTable& table,
                     std::span<const T> dqkv, ValueGradient<T> dx, ThreadPool& pool) {
  const Packed packed = packed_of(shape, seq_len, table);
  expect_gradient(dx, static_cast<std::int64_t>(dqkv.size()), "rotary input gradient");
  for_rows(rows_of(dqkv.size(), packed.width, "rotary gradient"), packed.width, pool, [&](std::int64_t token) {
    const std::int64_t row = token % seq_len * table.half, at = token * packed.width;
    turn<T>(packed, table.cos.data() + row, table.sin.data() + row, -1.0, dqkv.data() + at, dx.out.data() + at,
            dx.base.empty() ? nullptr : dx.base.data() + at);
  });
}

#define ZEROPLAN_ROTARY(T)                                                                                          \
  template void rotary_forward(const AttentionShape&, std::int64_t, const RotaryTable&, std::span<T>, ThreadPool&); \
  template void rotary_backward(const AttentionShape&, std::int64_t, const RotaryTable&, std::span<const T>,        \
                                ValueGradient<T>, ThreadPool&)
ZEROPLAN_ROTARY(Bf16);
ZEROPLAN_ROTARY(Fp16);
ZEROPLAN_ROTARY(float);
ZEROPLAN_ROTARY(double);

}  // namespace zeroplan
