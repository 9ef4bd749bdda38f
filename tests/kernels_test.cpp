// Gradients of every kernel by finite differences in fp64; 16-bit and fp32 kernels against fp64; base and accumulate;
// same bits for any number of threads.

#include "runtime/kernels/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "models/error.h"
#include "models/gemm_tasks.h"
#include "models/lower.h"
#include "runtime/cpu_features.h"
#include "runtime/kernels/exponential.h"
#include "runtime/kernels/exponential_loop.h"
#include "runtime/kernels/gemm_kernels.h"
#include "tests/catch.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

template <class T>
using Arrays = std::vector<std::vector<T>>;

/// Multiples of 1/64 in [-2, 2]: exact in bf16, fp16, fp32 and fp64.
std::vector<double> values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<double> result(count);
  for (double& x : result) x = (static_cast<int>(random() % 257) - 128) / 64.0;
  return result;
}

template <class To, class From>
std::vector<To> as(const std::vector<From>& from) {
  std::vector<To> to(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) to[i] = narrow<To>(static_cast<Wide<To>>(widen(from[i])));
  return to;
}
template <class To, class From>
Arrays<To> all_as(const Arrays<From>& from) {
  Arrays<To> to;
  for (const auto& array : from) to.push_back(as<To>(array));
  return to;
}

enum class Mode { overwrite, add_in_place, add_elsewhere };

/// Gradients of one call of backward, in the order of the kernel's inputs; `base` is what was there before.
template <class T, class G>
struct Sink {
  Mode mode;
  Arrays<double> base;
  std::vector<std::vector<T>> values, bases;
  std::vector<std::vector<G>> weights;

  explicit Sink(Mode m, const Arrays<double>& b)
      : mode(m), base(b), values(b.size()), bases(b.size()), weights(b.size()) {}

  ValueGradient<T> value(std::size_t i) {
    values[i] = as<T>(base[i]);
    bases[i] = as<T>(base[i]);
    switch (mode) {
      case Mode::overwrite:
        return {values[i], {}};
      case Mode::add_in_place:
        return {values[i], values[i]};
      case Mode::add_elsewhere:
        std::fill(values[i].begin(), values[i].end(), narrow<T>(777));
        return {values[i], bases[i]};
    }
    return {};
  }
  WeightGradient<G> weight(std::size_t i) {
    weights[i] = as<G>(base[i]);
    return {weights[i], mode != Mode::overwrite};
  }
  Arrays<double> result() const {
    Arrays<double> all;
    for (std::size_t i = 0; i < base.size(); ++i) {
      all.push_back(values[i].empty() ? as<double>(weights[i]) : as<double>(values[i]));
    }
    return all;
  }
};

// --- the kernels, each with inputs, forward and backward -------------------------------------------

struct LinearKernel {
  std::int64_t tokens = 7, in = 5, out1 = 6, out2 = 3;
  bool bias = true;
  Arrays<double> inputs() const {
    const auto n = [](std::int64_t count) { return static_cast<std::size_t>(count); };
    return {values(n(tokens * in), 1), values(n(out1 * in), 2), values(n(out2 * in), 3), values(bias ? n(out1) : 0, 4),
            values(bias ? n(out2) : 0, 5)};
  }
  template <class T>
  Arrays<T> forward(const Arrays<T>& x, ThreadPool& pool) const {
    std::vector<T> y(static_cast<std::size_t>(tokens * (out1 + out2)));
    const std::vector<LinearPart<T>> parts = {{x[1], x[3]}, {x[2], x[4]}};
    linear_forward<T>(x[0], parts, in, y, pool);
    return {y};
  }
  template <class T, class G>
  Arrays<double> backward(const Arrays<T>& x, const std::vector<T>& dy, Sink<T, G> sink, ThreadPool& pool) const {
    const std::vector<LinearPart<T>> parts = {{x[1], x[3]}, {x[2], x[4]}};
    linear_backward_data<T>(dy, parts, in, sink.value(0), pool);
    std::vector<LinearPartGradient<G>> to = {{sink.weight(1), {}}, {sink.weight(2), {}}};
    if (bias) to[0].bias = sink.weight(3);
    if (bias) to[1].bias = sink.weight(4);
    linear_backward_weight<T, G>(dy, x[0], to, in, pool);
    return sink.result();
  }
};

struct NormKernel {
  NormFunction function = NormFunction::rms;
  bool bias = false;
  std::int64_t tokens = 9, width = 37;
  NormShape shape() const { return {function, width, 1e-5}; }
  Arrays<double> inputs() const {
    const auto n = static_cast<std::size_t>(width);
    return {values(static_cast<std::size_t>(tokens) * n, 1), values(n, 2), values(bias ? n : 0, 3)};
  }
  template <class T>
  std::vector<Wide<T>> run(const Arrays<T>& x, std::vector<T>& y, ThreadPool& pool) const {
    y.resize(x[0].size());
    std::vector<Wide<T>> statistics(static_cast<std::size_t>(tokens * (function == NormFunction::rms ? 1 : 2)));
    norm_forward<T>(shape(), x[0], x[1], x[2], y, statistics, pool);
    return statistics;
  }
  template <class T>
  Arrays<T> forward(const Arrays<T>& x, ThreadPool& pool) const {
    std::vector<T> y;
    run(x, y, pool);
    return {y};
  }
  template <class T, class G>
  Arrays<double> backward(const Arrays<T>& x, const std::vector<T>& dy, Sink<T, G> sink, ThreadPool& pool) const {
    std::vector<T> y;
    const auto statistics = run(x, y, pool);
    norm_backward<T, G>(shape(), dy, x[0], x[1], statistics, sink.value(0), sink.weight(1),
                        bias ? sink.weight(2) : WeightGradient<G>{}, pool);
    return sink.result();
  }
};

struct RotaryKernel {
  AttentionShape shape;
  std::int64_t seq_len = 5, batch = 2;
  std::size_t count() const {
    return static_cast<std::size_t>(batch * seq_len * (shape.heads + 2 * shape.kv_heads) * shape.qk_dim);
  }
  RotaryTable table() const { return make_rotary_table(seq_len + 3, shape.qk_dim, 10000.0); }
  Arrays<double> inputs() const { return {values(count(), 1)}; }
  template <class T>
  Arrays<T> forward(const Arrays<T>& x, ThreadPool& pool) const {
    std::vector<T> y = x[0];
    rotary_forward<T>(shape, seq_len, table(), y, pool);
    return {y};
  }
  template <class T, class G>
  Arrays<double> backward(const Arrays<T>&, const std::vector<T>& dy, Sink<T, G> sink, ThreadPool& pool) const {
    rotary_backward<T>(shape, seq_len, table(), dy, sink.value(0), pool);
    return sink.result();
  }
};

struct AttentionKernel {
  AttentionShape shape;
  std::int64_t seq_len = 5, batch = 2;
  std::size_t rows() const { return static_cast<std::size_t>(batch * seq_len); }
  std::size_t out_width() const { return static_cast<std::size_t>(shape.heads * shape.qk_dim); }
  Arrays<double> inputs() const {
    return {values(rows() * static_cast<std::size_t>((shape.heads + 2 * shape.kv_heads) * shape.qk_dim), 1)};
  }
  template <class T>
  std::vector<Wide<T>> run(const Arrays<T>& x, std::vector<T>& out, ThreadPool& pool) const {
    out.resize(rows() * out_width());
    std::vector<Wide<T>> log_sum(rows() * static_cast<std::size_t>(shape.heads));
    attention_forward<T>(shape, seq_len, x[0], out, log_sum, pool);
    return log_sum;
  }
  template <class T>
  Arrays<T> forward(const Arrays<T>& x, ThreadPool& pool) const {
    std::vector<T> out;
    run(x, out, pool);
    return {out};
  }
  template <class T, class G>
  Arrays<double> backward(const Arrays<T>& x, const std::vector<T>& dy, Sink<T, G> sink, ThreadPool& pool) const {
    std::vector<T> out;
    const auto log_sum = run(x, out, pool);
    attention_backward<T>(shape, seq_len, dy, x[0], out, log_sum, sink.value(0), pool);
    return sink.result();
  }
};

struct ActivationKernel {
  ActivationShape shape;
  std::int64_t tokens = 5;
  Arrays<double> inputs() const {
    auto x = values(static_cast<std::size_t>(tokens * shape.width * (shape.gated ? 2 : 1)), 1);
    for (double& v : x) v = v * 3 + 1.0 / 64;  // wider, and away from the corner of ReLU
    return {x};
  }
  template <class T>
  Arrays<T> forward(const Arrays<T>& x, ThreadPool& pool) const {
    std::vector<T> y(static_cast<std::size_t>(tokens * shape.width));
    activation_forward<T>(shape, x[0], y, pool);
    return {y};
  }
  template <class T, class G>
  Arrays<double> backward(const Arrays<T>& x, const std::vector<T>& dy, Sink<T, G> sink, ThreadPool& pool) const {
    activation_backward<T>(shape, dy, x[0], sink.value(0), pool);
    return sink.result();
  }
};

struct EmbeddingKernel {
  bool positions = true;
  std::int64_t seq_len = 6, hidden = 5, vocab = 7;
  std::vector<std::int32_t> ids = {3, 1, 3, 6, 0, 3, 1, 1, 2, 6, 6, 3};  // two sequences; 4 and 5 do not occur
  Arrays<double> inputs() const {
    return {values(static_cast<std::size_t>(vocab * hidden), 1),
            values(positions ? static_cast<std::size_t>((seq_len + 2) * hidden) : 0, 2)};
  }
  template <class T>
  Arrays<T> forward(const Arrays<T>& x, ThreadPool& pool) const {
    std::vector<T> y(ids.size() * static_cast<std::size_t>(hidden));
    embedding_forward<T>(ids, seq_len, hidden, x[0], x[1], y, pool);
    return {y};
  }
  template <class T, class G>
  Arrays<double> backward(const Arrays<T>&, const std::vector<T>& dy, Sink<T, G> sink, ThreadPool& pool) const {
    embedding_backward<T, G>(ids, seq_len, hidden, dy, sink.weight(0), positions ? sink.weight(1) : WeightGradient<G>{},
                             pool);
    return sink.result();
  }
};

AttentionShape shape_of(std::int64_t heads, std::int64_t kv_heads, std::int64_t d, std::int64_t window = 0,
                        bool causal = true) {
  AttentionShape shape;
  shape.heads = heads;
  shape.kv_heads = kv_heads;
  shape.qk_dim = shape.v_dim = d;
  shape.window = window;
  shape.causal = causal;
  return shape;
}

/// Calls check(kernel, name) for every kernel above in every variant.
template <class Check>
void for_each_kernel(Check&& check) {
  check(LinearKernel{}, "linear");
  check(LinearKernel{.tokens = 67, .in = 33, .out1 = 17, .out2 = 35, .bias = false}, "linear without bias");
  check(LinearKernel{.tokens = 1, .in = 1, .out1 = 1, .out2 = 2}, "linear of one token and one column");
  check(NormKernel{}, "RMSNorm");
  check(NormKernel{NormFunction::layer, true, 67, 21}, "LayerNorm");
  check(NormKernel{NormFunction::layer, false, 3, 16}, "LayerNorm without bias");
  check(RotaryKernel{shape_of(3, 1, 6)}, "rotary");
  check(RotaryKernel{shape_of(1, 1, 2), 1, 3}, "rotary of one position and one pair");
  check(RotaryKernel{shape_of(6, 2, 10), 9}, "rotary of groups");
  check(AttentionKernel{shape_of(2, 2, 4)}, "attention");
  check(AttentionKernel{shape_of(4, 2, 3), 7}, "grouped-query attention");
  check(AttentionKernel{shape_of(3, 1, 5), 131, 1}, "attention over two row blocks");
  check(AttentionKernel{shape_of(2, 1, 4, 9), 140, 1}, "sliding window");
  check(AttentionKernel{shape_of(2, 2, 4, 0, false), 6}, "attention without mask");
  check(AttentionKernel{shape_of(4, 2, 6), 1, 3}, "attention of one position");
  check(AttentionKernel{shape_of(2, 2, 4, 1), 7}, "sliding window of one position");
  check(AttentionKernel{shape_of(6, 2, 2, 3), 11}, "sliding window of groups");
  check(AttentionKernel{shape_of(2, 1, 2, 130), 261, 1}, "sliding window over three row blocks");
  for (const auto function : {ActivationFunction::gelu_tanh, ActivationFunction::gelu_erf, ActivationFunction::silu,
                              ActivationFunction::relu}) {
    check(ActivationKernel{{function, false, 9}}, "activation");
    check(ActivationKernel{{function, true, 9}}, "gated activation");
  }
  check(EmbeddingKernel{}, "embedding");
  check(EmbeddingKernel{false}, "embedding without positions");
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
double largest(const std::vector<double>& x) {
  double most = 0;
  for (const double v : x) most = std::max(most, std::abs(v));
  return most;
}
/// Greatest difference relative to the greatest magnitude of `right`.
double relative_error(const std::vector<double>& found, const std::vector<double>& right) {
  double most = 0;
  for (std::size_t i = 0; i < right.size(); ++i) most = std::max(most, std::abs(found[i] - right[i]));
  return right.empty() ? 0 : most / std::max(largest(right), 1e-30);
}

template <class T>
Arrays<double> forward_and_backward(const auto& kernel, ThreadPool& pool) {
  const Arrays<T> x = all_as<T>(kernel.inputs());
  Arrays<double> all = all_as<double>(kernel.forward(x, pool));
  const auto dy = as<T>(values(all[0].size(), 99));
  for (auto& gradient : kernel.backward(x, dy, Sink<T, T>(Mode::overwrite, kernel.inputs()), pool)) {
    all.push_back(std::move(gradient));
  }
  return all;
}

template <class T>
void check_precision(double tolerance) {
  ThreadPool pool(1);
  for_each_kernel([&](const auto& kernel, const char* name) {
    INFO(name);
    const auto right = forward_and_backward<double>(kernel, pool), found = forward_and_backward<T>(kernel, pool);
    for (std::size_t i = 0; i < right.size(); ++i) {
      INFO("array " << i);
      CHECK(relative_error(found[i], right[i]) < tolerance);
    }
  });
}

}  // namespace

TEST_CASE("Gradients of every kernel are finite differences of its forward") {
  ThreadPool pool(1);
  for_each_kernel([&](const auto& kernel, const char* name) {
    INFO(name);
    Arrays<double> x = kernel.inputs();
    const auto dy = values(kernel.forward(x, pool)[0].size(), 99);
    const auto gradients = kernel.backward(x, dy, Sink<double, double>(Mode::overwrite, x), pool);
    for (std::size_t a = 0; a < x.size(); ++a) {
      std::vector<double> numeric(x[a].size());
      // At most 300 elements of each input: an odd stride meets all rows and columns.
      const std::size_t stride = x[a].size() / 300 * 2 + 1;
      std::vector<double> found, right;
      for (std::size_t i = 0; i < x[a].size(); i += stride) {
        constexpr double kStep = 1e-5;
        const double at = x[a][i];
        x[a][i] = at + kStep;
        const double above = dot(kernel.forward(x, pool)[0], dy);
        x[a][i] = at - kStep;
        const double below = dot(kernel.forward(x, pool)[0], dy);
        x[a][i] = at;
        right.push_back((above - below) / (2 * kStep));
        found.push_back(gradients[a][i]);
      }
      INFO("input " << a);
      CHECK(relative_error(found, right) < 1e-6);
    }
  });
}

TEST_CASE("Kernels in 16 bits and fp32 agree with fp64 to a few roundings of their type") {
  // Greatest error over the greatest element. One rounding is 2^-9 (bf16) and 2^-12 (fp16); gradients of attention read
  // the rounded output, which the fp64 kernel has exactly.
  check_precision<Bf16>(0x1p-7);
  check_precision<Fp16>(0x1p-10);
  check_precision<float>(3e-6);
}

TEST_CASE("Kernels give the same bits with any number of threads") {
  ThreadPool one(1), three(3);
  for_each_kernel([&](const auto& kernel, const char* name) {
    INFO(name);
    CHECK(forward_and_backward<float>(kernel, one) == forward_and_backward<float>(kernel, three));
    CHECK(forward_and_backward<Bf16>(kernel, one) == forward_and_backward<Bf16>(kernel, three));
  });
}

TEST_CASE("A gradient is added to its base in place or from elsewhere, with one rounding") {
  ThreadPool pool(1);
  for_each_kernel([&](const auto& kernel, const char* name) {
    INFO(name);
    const Arrays<double> x = kernel.inputs();
    Arrays<double> base;
    for (std::size_t i = 0; i < x.size(); ++i) base.push_back(values(x[i].size(), static_cast<unsigned>(50 + i)));
    const auto dy = values(kernel.forward(x, pool)[0].size(), 99);
    const auto run = [&](Mode mode) { return kernel.backward(x, dy, Sink<double, double>(mode, base), pool); };
    Arrays<double> sum = run(Mode::overwrite);
    for (std::size_t a = 0; a < sum.size(); ++a) {
      for (std::size_t i = 0; i < sum[a].size(); ++i) sum[a][i] = base[a][i] + sum[a][i];
    }
    CHECK(run(Mode::add_in_place) == sum);
    CHECK(run(Mode::add_elsewhere) == sum);
    // fp32 weight gradients of 16-bit values.
    const auto narrow_x = all_as<Bf16>(x);
    const auto wide = kernel.backward(narrow_x, as<Bf16>(dy), Sink<Bf16, float>(Mode::add_in_place, base), pool);
    for (std::size_t a = 0; a < sum.size(); ++a) CHECK(relative_error(wide[a], sum[a]) < 0x1p-7);
  });
}

TEST_CASE("Attention is the softmax that the textbook has, masks and groups included") {
  ThreadPool pool(2);
  const AttentionKernel cases[] = {{shape_of(2, 2, 8), 33, 2},        {shape_of(6, 2, 5), 65, 1},
                                   {shape_of(4, 1, 3), 130, 1},       {shape_of(2, 1, 4, 7), 90, 2},
                                   {shape_of(2, 2, 4, 0, false), 67}, {shape_of(1, 1, 2), 1, 3}};
  for (const AttentionKernel& kernel : cases) {
    const auto x = kernel.inputs();
    std::vector<double> out;
    const auto log_sum = kernel.run(x, out, pool);
    const AttentionShape& shape = kernel.shape;
    const std::int64_t d = shape.qk_dim, width = (shape.heads + 2 * shape.kv_heads) * d;
    const auto at = [&](std::int64_t token, std::int64_t head, std::int64_t i) {
      return x[0][static_cast<std::size_t>(token * width + head * d + i)];
    };
    double worst = 0;
    for (std::int64_t t = 0; t < kernel.batch * kernel.seq_len; ++t) {
      const std::int64_t start = t / kernel.seq_len * kernel.seq_len, i = t - start;
      for (std::int64_t h = 0; h < shape.heads; ++h) {
        const std::int64_t kv = h / (shape.heads / shape.kv_heads);
        double sum = 0;
        std::vector<double> right(static_cast<std::size_t>(d));
        for (std::int64_t j = 0; j < kernel.seq_len; ++j) {
          if (shape.causal && j > i) continue;
          if (shape.window > 0 && j <= i - shape.window) continue;
          double score = 0;
          for (std::int64_t e = 0; e < d; ++e) score += at(t, h, e) * at(start + j, shape.heads + kv, e);
          const double p = std::exp(score / std::sqrt(static_cast<double>(d)));
          sum += p;
          for (std::int64_t e = 0; e < d; ++e) {
            right[static_cast<std::size_t>(e)] += p * at(start + j, shape.heads + shape.kv_heads + kv, e);
          }
        }
        worst = std::max(worst, std::abs(log_sum[static_cast<std::size_t>(t * shape.heads + h)] - std::log(sum)));
        for (std::int64_t e = 0; e < d; ++e) {
          const double found = out[static_cast<std::size_t>((t * shape.heads + h) * d + e)];
          worst = std::max(worst, std::abs(found - right[static_cast<std::size_t>(e)] / sum));
        }
      }
    }
    CHECK(worst < 1e-12);
  }
  const auto qkv = values(12, 1);
  std::vector<double> out(4), log_sum(1);
  CHECK_THROWS_AS(attention_forward<double>(shape_of(1, 1, 4), 1, std::span(qkv).first(11), out, log_sum, pool),
                  std::logic_error);
}

TEST_CASE("Attention of large scores neither overflows nor loses the mask") {
  ThreadPool pool(1);
  const AttentionKernel kernel{shape_of(1, 1, 4), 3, 1};
  std::vector<float> x(36, 0.0f);
  for (std::size_t t = 0; t < 3; ++t) {
    for (std::size_t i = 0; i < 4; ++i)
      x[t * 12 + i] = 1e4f, x[t * 12 + 4 + i] = t == 1 ? 1e4f : -1e4f, x[t * 12 + 8 + i] = float(t);
  }
  std::vector<float> out;
  kernel.run<float>({x}, out, pool);
  CHECK(out == std::vector<float>{0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1});
}

TEST_CASE("Every element of a linear is one chain of fused multiply-adds, whatever the shape and the processor") {
  for (const int threads : {1, 2, 16}) {
    ThreadPool pool(threads);
    for (const auto& [tokens, in, out] :
         {std::array<std::int64_t, 3>{1, 1, 1}, {13, 300, 33}, {97, 70, 65}, {5, 513, 7}, {970, 9, 530}}) {
      const LinearKernel kernel{tokens, in, out, 1, false};
      Arrays<float> x = all_as<float>(kernel.inputs());
      std::mt19937 random(5);
      for (auto& array : x) {
        for (float& v : array) v = std::ldexp(static_cast<float>(random() % 100000) - 5e4f, -15);
      }
      const auto y = kernel.forward(x, pool)[0];
      std::size_t wrong = 0;
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t o = 0; o < out; ++o) {
          float sum = 0;
          for (std::int64_t k = 0; k < in; ++k) {
            sum = std::fma(x[0][static_cast<std::size_t>(t * in + k)], x[1][static_cast<std::size_t>(o * in + k)], sum);
          }
          wrong += y[static_cast<std::size_t>(t * (out + 1) + o)] != sum;
        }
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("A product is cut into tasks that cover it once and give every thread two") {
  std::mt19937 random(11);
  for (int i = 0; i < 3000; ++i) {
    const auto side = [&] { return 1 + static_cast<std::int64_t>(random() % (1u << (1 + random() % 13))); };
    const std::int64_t rows = side(), columns = side();
    const int threads = 1 + static_cast<int>(random() % 32);
    const GemmTasks cut = gemm_tasks(rows, columns, threads);
    INFO(rows << " x " << columns << " for " << threads << ": tasks of " << cut.rows << " x " << cut.columns);
    REQUIRE((cut.rows <= kMostTaskRows && cut.columns <= kMostTaskColumns));
    REQUIRE((cut.rows % kTaskRowUnit == 0 && (threads == 1 || cut.columns % kTaskColumnUnit == 0)));
    REQUIRE((cut.row_tasks - 1) * cut.rows < rows);
    REQUIRE(cut.row_tasks * cut.rows >= rows);
    REQUIRE((cut.column_tasks - 1) * cut.columns < columns);
    REQUIRE(cut.column_tasks * cut.columns >= columns);
    if (threads == 1) continue;
    const auto units = [](std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit; };
    const std::int64_t finest = units(rows, kTaskRowUnit) * units(columns, kTaskColumnUnit);
    const std::int64_t fewest = units(rows, kMostTaskRows) * units(columns, kMostTaskColumns);
    REQUIRE(cut.row_tasks * cut.column_tasks >= std::min<std::int64_t>(finest, 2 * threads));
    REQUIRE(cut.row_tasks * cut.column_tasks <= std::max<std::int64_t>(fewest, 4 * threads));
  }
}

#if defined(__x86_64__)
TEST_CASE("The inner products of AVX2 and AVX-512 are the same chains") {
  constexpr int kDepth = 37;
  std::mt19937 random(8);
  const auto check = [&](int rows, int columns, auto* run) {
    std::vector<float> a(static_cast<std::size_t>(kDepth * rows)), b(static_cast<std::size_t>(kDepth * columns)),
        c(static_cast<std::size_t>(rows * columns));
    for (auto* array : {&a, &b, &c}) {
      for (float& v : *array) v = std::ldexp(static_cast<float>(random() % 100000) - 5e4f, -15);
    }
    std::vector<float> right = c;
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) {
        float& sum = right[static_cast<std::size_t>(i * columns + j)];
        for (int k = 0; k < kDepth; ++k) {
          sum = std::fma(a[static_cast<std::size_t>(k * rows + i)], b[static_cast<std::size_t>(k * columns + j)], sum);
        }
      }
    }
    run(kDepth, a.data(), b.data(), c.data(), columns);
    CHECK(c == right);
  };
  if (cpu_has_avx2()) check(6, 16, gemm_kernel_avx2);
  if (cpu_has_avx512()) check(12, 32, gemm_kernel_avx512);
}
#endif

TEST_CASE("Exponentials are right to 3 units in the last place and have the same bits in every instruction set") {
  std::vector<float> x;
  for (int i = -95000; i <= 89000; i += 7) x.push_back(static_cast<float>(i) * 1e-3f);
  for (const float special : {0.0f, -0.0f, 1e-30f, -1e30f, 88.29f, -87.29f, -std::numeric_limits<float>::infinity()})
    x.push_back(special);
  auto found = x;
  exponentials(found.data(), static_cast<std::int64_t>(x.size()), 1.0f, 0.0f);
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] < -87.3f) CHECK(found[i] == 0.0f);
    if (x[i] < -87.3f || x[i] > 88.3f) continue;
    const double right = std::exp(static_cast<double>(x[i]));
    worst = std::max(worst, std::abs(found[i] - right) / (right * 0x1p-23));
  }
  CHECK(worst < 3);
  const auto same = [&](ExponentialLoop* loop) {
    for (std::size_t count = 0; count < 40; ++count) {  // tails
      std::vector<float> some(x.end() - static_cast<std::ptrdiff_t>(count), x.end());
      loop(some.data(), static_cast<std::int64_t>(count), 1.0f, 0.0f);
      CHECK(std::equal(some.begin(), some.end(), found.end() - static_cast<std::ptrdiff_t>(count)));
    }
    auto all = x;
    loop(all.data(), static_cast<std::int64_t>(all.size()), 1.0f, 0.0f);
    CHECK(all == found);
  };
  same(exponentials_portable);
#if defined(__x86_64__)
  if (cpu_has_avx2()) same(exponentials_avx2);
  if (cpu_has_avx512()) same(exponentials_avx512);
#endif
}

TEST_CASE("Cross-entropy gives the loss, its gradient in place, and the same bits for any chunks") {
  ThreadPool pool(2);
  constexpr std::int64_t kVocab = 37;
  constexpr std::size_t kRows = 9;
  const auto logits = values(kRows * kVocab, 1);
  const std::vector<std::int32_t> targets = {0, 36, 5, kIgnoredTarget, 7, 7, 1, 2, 3};
  const auto loss = [&](std::vector<double> x) { return cross_entropy<double>(x, kVocab, targets, 1.0, 0.0, pool); };
  std::vector<double> gradient = logits;
  const double total = cross_entropy<double>(gradient, kVocab, targets, 0.25, 0.0, pool);
  double naive = 0;
  for (std::size_t r = 0; r < kRows; ++r) {
    if (targets[r] == kIgnoredTarget) continue;
    double sum = 0;
    for (std::int64_t j = 0; j < kVocab; ++j) sum += std::exp(logits[r * kVocab + static_cast<std::size_t>(j)]);
    naive += std::log(sum) - logits[r * kVocab + static_cast<std::size_t>(targets[r])];
  }
  CHECK_THAT(total, WithinRel(naive, 1e-12));
  std::vector<double> numeric(gradient.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    auto x = logits;
    x[i] += 1e-5;
    const double above = loss(x);
    x[i] -= 2e-5;
    numeric[i] = 0.25 * (above - loss(x)) / 2e-5;
  }
  CHECK(relative_error(gradient, numeric) < 1e-6);

  auto whole = as<Bf16>(logits);
  const double at_once = cross_entropy<Bf16>(whole, kVocab, targets, 1.0, 0.0, pool);
  CHECK_THAT(at_once, WithinRel(total, 1e-6));
  auto parts = as<Bf16>(logits);
  double in_chunks = 0;
  for (std::size_t r = 0; r < kRows; r += 2) {
    const std::size_t rows = std::min<std::size_t>(2, kRows - r);
    in_chunks = cross_entropy<Bf16>(std::span(parts).subspan(r * kVocab, rows * kVocab), kVocab,
                                    std::span(targets).subspan(r, rows), 1.0, in_chunks, pool);
  }
  CHECK(in_chunks == at_once);
  CHECK(as<double>(parts) == as<double>(whole));
  const std::vector<std::int32_t> bad = {37};
  std::vector<double> row(kVocab);
  CHECK_THROWS_WITH(cross_entropy<double>(row, kVocab, bad, 1.0, 0.0, pool), HasText("target 37"));
}

TEST_CASE("Rotary keeps lengths and turns scores by distance only; Llama 3 scaling slows low frequencies") {
  const RotaryTable plain = make_rotary_table(16, 8, 500000.0), scaled = make_rotary_table(16, 8, 500000.0, {});
  for (std::size_t i = 0; i < plain.cos.size(); ++i)
    CHECK_THAT(std::hypot(plain.cos[i], plain.sin[i]), WithinRel(1.0, 1e-12));
  CHECK(scaled.sin[4] == plain.sin[4]);  // frequency 1
  // Position 1, frequency 500000^(-3/4): its wavelength is above 8192, so it is slowed 8 times.
  CHECK_THAT(scaled.sin[7], WithinRel(plain.sin[7] / 8, 1e-6));
  ThreadPool pool(1);
  const RotaryKernel kernel{shape_of(1, 1, 8), 16, 1};
  std::vector<double> x(16 * 24);
  const auto q = values(8, 3), k = values(8, 4);
  for (std::size_t t = 0; t < 16; ++t) {
    std::copy(q.begin(), q.end(), x.begin() + static_cast<std::ptrdiff_t>(t * 24));
    std::copy(k.begin(), k.end(), x.begin() + static_cast<std::ptrdiff_t>(t * 24 + 8));
  }
  const auto y = kernel.forward<double>({x}, pool)[0];
  const auto score = [&](std::size_t i, std::size_t j) {
    double sum = 0;
    for (std::size_t e = 0; e < 8; ++e) sum += y[i * 24 + e] * y[j * 24 + 8 + e];
    return sum;
  };
  CHECK_THAT(score(9, 4), WithinRel(score(5, 0), 1e-10));
  CHECK(y[16] == x[16]);  // v is not turned
}

TEST_CASE("A row of the embedding's gradient is summed in token order") {
  ThreadPool pool(1);
  const std::vector<std::int32_t> ids = {1, 1, 1};
  const std::vector<float> dy = {1.0f, 1e8f, -1e8f};  // (1 + 1e8) - 1e8 = 0 in fp32; any other order gives 1
  std::vector<float> table(2, 5.0f);
  embedding_backward<float, float>(ids, 3, 1, dy, {table, true}, {}, pool);
  CHECK(table == std::vector<float>{5, 5});
}

TEST_CASE("Embedding refuses ids outside the vocabulary") {
  ThreadPool pool(1);
  EmbeddingKernel kernel;
  kernel.ids[2] = 7;
  CHECK_THROWS_WITH(kernel.forward(kernel.inputs(), pool), HasText("token id 7"));
  kernel.ids[2] = -1;
  CHECK_THROWS_AS(kernel.forward(kernel.inputs(), pool), InputError);
}

TEST_CASE("Activation names of configurations are understood or refused with the nearest") {
  CHECK(activation_function("gelu_new") == ActivationFunction::gelu_tanh);
  CHECK(activation_function("gelu") == ActivationFunction::gelu_erf);
  CHECK(activation_function("swish") == ActivationFunction::silu);
  CHECK_THROWS_WITH(activation_function("silo"), HasText("silu"));
  for (const char* name : {"gpt2", "llama-2-7b", "opt-125m"}) {
    const ModelSpec model = find_model(name);
    for (const GraphOp& op : model.kinds[1].ops) {
      if (op.kernel != Kernel::activation) continue;
      const ActivationShape shape = activation_shape(op);
      CHECK(shape.gated == (std::string(name) == "llama-2-7b"));
      CHECK(shape.width == op.out_features);
    }
  }
}

TEST_CASE("Tensor offsets follow the flat layout of the schedule") {
  for (const char* name : {"gpt2", "llama-3.2-1b", "qwen2-0.5b"}) {
    const ModelSpec model = find_model(name);
    for (const BlockKind& kind : model.kinds) {
      for (const DType type : {DType::bf16, DType::fp32}) {
        const auto offsets = tensor_offsets(kind, type);
        std::int64_t end = 0;
        for (std::size_t i = 0; i < offsets.size(); ++i) {
          if (kind.tensors[i].tied) continue;
          CHECK(offsets[i] * size_of(type) % 256 == 0);
          CHECK(offsets[i] >= end);
          end = offsets[i] + kind.tensors[i].elements();
        }
        const FlatLayout layout = flat_layout(kind, type, 1);
        CHECK(end <= layout.padded);
        CHECK(layout.padded - end < 256 / size_of(type));
      }
    }
  }
}

TEST_CASE("Sums add, accumulate and convert with one rounding") {
  ThreadPool pool(2);
  const auto a = as<Bf16>(values(40000, 1)), b = as<Bf16>(values(40000, 2)), c = as<Bf16>(values(40000, 3));
  const std::vector<std::span<const Bf16>> terms = {a, b, c};
  std::vector<Bf16> y = c;
  const std::vector<std::span<const Bf16>> in_place = {a, b, y};
  add_forward<Bf16>(in_place, y, pool);
  std::vector<Bf16> other(a.size());
  add_forward<Bf16>(terms, other, pool);
  std::vector<float> sum(a.size(), 0.5f);
  accumulate<Bf16, float>(a, sum, pool);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    wrong += y[i].bits != narrow<Bf16>(widen(a[i]) + widen(b[i]) + widen(c[i])).bits;
    wrong += y[i].bits != other[i].bits;
    wrong += sum[i] != 0.5f + widen(a[i]);
  }
  CHECK(wrong == 0);
  std::vector<Bf16> back(a.size());
  gradient_sum<Bf16>(a, {back, b}, pool);
  CHECK(widen(back[17]) == widen(narrow<Bf16>(widen(a[17]) + widen(b[17]))));
  CHECK_THROWS_AS(gradient_sum<Bf16>(a, {back, {}}, pool), std::logic_error);
}

TEST_CASE("Conversions to 16 bits round to nearest even, denormals, infinities and NaN included") {
  std::size_t wrong = 0;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float from_fp16 = widen(Fp16{half}), from_bf16 = widen(Bf16{half});
    wrong += narrow<Fp16>(from_fp16).bits != (std::isnan(from_fp16) ? 0x7e00 : half);
    wrong += narrow<Bf16>(from_bf16).bits != (std::isnan(from_bf16) ? 0x7fc0 : half);
    const int exponent = (half >> 10) & 31, mantissa = half & 1023;
    if (exponent < 31) {
      const double value = std::ldexp(exponent == 0 ? mantissa : 1024 + mantissa, std::max(exponent, 1) - 25);
      wrong += from_fp16 != static_cast<float>(half >= 0x8000 ? -value : value);
    }
  }
  CHECK(wrong == 0);
  std::mt19937 random(1);
  for (int i = 0; i < 300000; ++i) {
    const float x = std::ldexp(static_cast<float>(random()) - 2147483648.0f, static_cast<int>(random() % 48) - 60);
    const auto nearest = [&](int precision, int lowest) {  // on the grid of that exponent; ties to even
      const int exponent = std::max(std::ilogb(x == 0 ? 1.0f : x), lowest);
      const double unit = std::ldexp(1.0, exponent - precision);
      return std::nearbyint(static_cast<double>(x) / unit) * unit;
    };
    const double fp16 = nearest(10, -14);
    wrong += widen(narrow<Fp16>(x)) != (std::abs(fp16) > 65504 ? std::copysign(HUGE_VAL, fp16) : fp16);
    wrong += widen(narrow<Bf16>(x)) != nearest(7, -126);
  }
  CHECK(wrong == 0);
  CHECK(narrow<Fp16>(65519.0f).bits == 0x7bff);
  CHECK(narrow<Fp16>(65520.0f).bits == 0x7c00);
  CHECK(narrow<Bf16>(std::numeric_limits<float>::max()).bits == 0x7f80);
}

TEST_CASE("An exact sum does not depend on order, and adds through a plain fp32 all-reduce") {
  std::mt19937_64 random(7);
  std::vector<double> terms;
  for (int i = 0; i < 20000; ++i) {
    terms.push_back(std::ldexp(static_cast<double>(random() >> 11), static_cast<int>(random() % 500) - 330));
  }
  const auto sum_of = [&](std::span<const double> some) {
    ExactSum sum;
    for (const double term : some) sum.add(term);
    return sum;
  };
  const double forward = sum_of(terms).value();
  std::shuffle(terms.begin(), terms.end(), random);
  CHECK(sum_of(terms).value() == forward);
  std::array<float, ExactSum::kDigits> digits{}, part{};
  for (std::size_t first = 0; first < terms.size(); first += 1000) {
    sum_of(std::span(terms).subspan(first, 1000)).to_digits(part);
    for (std::size_t i = 0; i < digits.size(); ++i) digits[i] += part[i];
  }
  CHECK(ExactSum::from_digits(digits).value() == forward);
  long double reference = 0;
  std::sort(terms.begin(), terms.end());
  for (const double term : terms) reference += term;
  CHECK_THAT(forward, WithinRel(static_cast<double>(reference), 1e-15));
  ExactSum broken;
  broken.add(1.0);
  broken.add(std::numeric_limits<double>::infinity());
  CHECK(std::isnan(broken.value()));
  broken.to_digits(digits);
  CHECK(std::isnan(ExactSum::from_digits(digits).value()));
  CHECK_THROWS_AS(broken.add(-1.0), std::logic_error);
  CHECK(ExactSum().value() == 0);
}

TEST_CASE("The gradient norm has the same bits however the gradient is sharded") {
  ThreadPool one(1), three(3);
  std::mt19937 random(3);
  // 24-bit values over many exponents: sums of their squares round, so another grouping would show.
  std::vector<float> gradient(64 * 600);
  for (float& g : gradient) {
    g = std::ldexp(static_cast<float>(random() % (1u << 24)) - 0x1p23f, static_cast<int>(random() % 12) - 40);
  }
  const auto digits = [&](std::size_t shards, ThreadPool& pool) {
    ExactSum sum;
    const std::size_t each = gradient.size() / shards;
    for (std::size_t s = shards; s-- > 0;) {
      sum_of_squares<float>(std::span(gradient).subspan(s * each, each), sum, pool);
    }
    std::array<float, ExactSum::kDigits> all{};
    sum.to_digits(all);  // finer than value()
    return all;
  };
  const auto whole = digits(1, one);
  for (const std::size_t shards : {1u, 2u, 3u, 4u, 5u, 12u, 60u, 600u}) CHECK(digits(shards, three) == whole);
  double plain = 0;
  for (const float g : gradient) plain += static_cast<double>(g) * g;
  CHECK_THAT(ExactSum::from_digits(whole).value(), WithinRel(plain, 1e-12));
}

TEST_CASE("A pool covers every index once, hands exceptions on, and may be used from within") {
  ThreadPool pool(4);
  for (const std::int64_t count : {0, 1, 5, 64, 1000}) {
    std::vector<int> seen(static_cast<std::size_t>(count));
    pool.for_ranges(count, 3, [&](std::int64_t begin, std::int64_t end) {
      pool.for_ranges(end - begin, 1, [&](std::int64_t b, std::int64_t e) {
        for (std::int64_t i = begin + b; i < begin + e; ++i) ++seen[static_cast<std::size_t>(i)];
      });
    });
    CHECK(std::count(seen.begin(), seen.end(), 1) == count);
  }
  CHECK_THROWS_WITH(pool.for_ranges(100, 1, [](std::int64_t, std::int64_t) { throw InputError("inside"); }), "inside");
  int calls = 0;
  ThreadPool(1).for_ranges(7, 2, [&](std::int64_t, std::int64_t) { ++calls; });
  CHECK(calls == 1);
}
