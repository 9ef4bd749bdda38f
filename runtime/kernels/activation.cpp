#include <array>
#include <numbers>
#include <utility>

#include "models/error.h"
#include "runtime/kernels/exponential.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/loops.h"

namespace zeroplan {
namespace {

constexpr std::array<std::pair<std::string_view, ActivationFunction>, 7> kNames = {{
    {"gelu", ActivationFunction::gelu_erf},
    {"gelu_new", ActivationFunction::gelu_tanh},
    {"gelu_pytorch_tanh", ActivationFunction::gelu_tanh},
    {"gelu_fast", ActivationFunction::gelu_tanh},
    {"silu", ActivationFunction::silu},
    {"swish", ActivationFunction::silu},
    {"relu", ActivationFunction::relu},
}};

template <class W>
struct Point {
  W value, slope;
};

// gelu_tanh: x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks & Gimpel, arXiv
// 1606.08415).
constexpr double kCubic = 0.044715;
constexpr double kTwoRoot = 2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi;  // 2 sqrt(2 / pi)

/// The argument of the one exponential in f and f'.
template <ActivationFunction F, class W>
W exponent(W x) {
  if constexpr (F == ActivationFunction::gelu_tanh) return -W(kTwoRoot) * (x + W(kCubic) * x * x * x);
  if constexpr (F == ActivationFunction::gelu_erf) return W(-0.5) * x * x;
  if constexpr (F == ActivationFunction::silu) return -x;
  return x;
}

/// f(x) and f'(x), given e = exp(exponent(x)).
template <ActivationFunction F, class W>
Point<W> evaluate(W x, W e) {
  if constexpr (F == ActivationFunction::gelu_tanh) {
    const W s = W{1} / (W{1} + e);
    return {x * s, s + x * s * (W{1} - s) * W(kTwoRoot) * (W{1} + W(3 * kCubic) * x * x)};
  } else if constexpr (F == ActivationFunction::gelu_erf) {
    const W below = W(0.5) * std::erfc(-x * W(std::numbers::sqrt2 / 2));  // the normal distribution's mass below x
    return {x * below, below + x * e * W(std::numbers::inv_sqrtpi * std::numbers::sqrt2 / 2)};
  } else if constexpr (F == ActivationFunction::silu) {
    const W s = W{1} / (W{1} + e);
    return {x * s, s * (W{1} + x * (W{1} - s))};
  } else {
    static_assert(F == ActivationFunction::relu);
    return {x > W{0} ? x : W{0}, x > W{0} ? W{1} : W{0}};
  }
}

/// A piece of a row on the stack: x widened, and e as evaluate() takes it.
template <class W>
struct Piece {
  W at[kPiece], e[kPiece];

  template <ActivationFunction F, class T>
  void load(const T* x, std::int64_t count) {
    for (std::int64_t j = 0; j < count; ++j) at[j] = widen(x[j]);
    for (std::int64_t j = 0; j < count; ++j) e[j] = exponent<F>(at[j]);
    if constexpr (F != ActivationFunction::relu) exponentials(e, count, W{1}, W{0});
  }
};

template <ActivationFunction F, class T>
void forward_row(bool gated, std::int64_t width, const T* x, T* y) {
  using W = Wide<T>;
  Piece<W> piece;
  for_pieces(width, [&](std::int64_t first, std::int64_t count) {
    piece.template load<F>(x + first, count);
    for (std::int64_t j = 0; j < count; ++j) piece.at[j] = evaluate<F>(piece.at[j], piece.e[j]).value;
    if (gated) {
      const T* up = x + width + first;
      for (std::int64_t j = 0; j < count; ++j) piece.at[j] *= widen(up[j]);
    }
    for (std::int64_t j = 0; j < count; ++j) y[first + j] = narrow<T>(piece.at[j]);
  });
}

/// out[j] = base[j] + values[j]; base may be null or out.
template <class T>
void store(const Wide<T>* values, std::int64_t count, T* out, const T* base) {
  if (base == nullptr) {
    for (std::int64_t j = 0; j < count; ++j) out[j] = narrow<T>(values[j]);
  } else {
    for (std::int64_t j = 0; j < count; ++j) out[j] = narrow<T>(widen(base[j]) + values[j]);
  }
}

template <ActivationFunction F, class T>
void backward_row(bool gated, std::int64_t width, const T* dy, const T* x, T* out, const T* base) {
  using W = Wide<T>;
  Piece<W> piece;
  W up[kPiece];
  const auto base_at = [&](std::int64_t i) { return base == nullptr ? nullptr : base + i; };
  for_pieces(width, [&](std::int64_t first, std::int64_t count) {
    piece.template load<F>(x + first, count);
    for (std::int64_t j = 0; j < count; ++j) {
      const Point<W> f = evaluate<F>(piece.at[j], piece.e[j]);
      const W g = widen(dy[first + j]);
      piece.at[j] = g * f.slope;
      up[j] = g * f.value;
    }
    if (gated) {
      store(up, count, out + width + first, base_at(width + first));
      const T* factor = x + width + first;
      for (std::int64_t j = 0; j < count; ++j) piece.at[j] *= widen(factor[j]);
    }
    store(piece.at, count, out + first, base_at(first));
  });
}

template <ActivationFunction F>
struct Function {
  static constexpr ActivationFunction kValue = F;
};

template <class Use>
void with_function(ActivationFunction function, Use&& use) {
  switch (function) {
    case ActivationFunction::gelu_tanh:
      return use(Function<ActivationFunction::gelu_tanh>{});
    case ActivationFunction::gelu_erf:
      return use(Function<ActivationFunction::gelu_erf>{});
    case ActivationFunction::silu:
      return use(Function<ActivationFunction::silu>{});
    case ActivationFunction::relu:
      return use(Function<ActivationFunction::relu>{});
  }
}

}  // namespace

ActivationFunction activation_function(std::string_view name) {
  std::vector<std::string> known;
  for (const auto& [known_name, function] : kNames) {
    if (name == known_name) return function;
    known.emplace_back(known_name);
  }
  throw InputError("activation \"" + std::string(name) + "\" has no kernel in the runtime; " +
                   did_you_mean(name, known));
}

ActivationShape activation_shape(const GraphOp& op) {
  const std::size_t space = op.name.rfind(' ');
  if (op.kernel != Kernel::activation || space == std::string::npos) {
    throw std::logic_error("activation_shape: \"" + op.name + "\" names no activation");
  }
  return {activation_function(std::string_view(op.name).substr(space + 1)), op.in_features == 2 * op.out_features,
          op.out_features};
}

template <class T>
void activation_forward(const ActivationShape& shape, std::span<const T> x, std::span<T> y, ThreadPool& pool) {
  const std::int64_t in = shape.width * (shape.gated ? 2 : 1),
                     rows = rows_of(y.size(), shape.width, "activation output");
  expect_count(x.size(), rows * in, "activation input");
  with_function(shape.function, [&](auto f) {
    for_rows(rows, in, pool, [&](std::int64_t row) {
      forward_row<decltype(f)::kValue>(shape.gated, shape.width, x.data() + row * in, y.data() + row * shape.width);
    });
  });
}

template <class T>
void activation_backward(const ActivationShape& shape, std::span<const T> dy, std::span<const T> x, ValueGradient<T> dx,
                         ThreadPool& pool) {
  const std::int64_t in = shape.width * (shape.gated ? 2 : 1);
  const std::int64_t rows = rows_of(dy.size(), shape.width, "activation output gradient");
  expect_count(x.size(), rows * in, "activation input");
  expect_gradient(dx, rows * in, "activation input gradient");
  with_function(shape.function, [&](auto f) {
    for_rows(rows, in, pool, [&](std::int64_t row) {
      backward_row<decltype(f)::kValue>(shape.gated, shape.width, dy.data() + row * shape.width, x.data() + row * in,
                                        dx.out.data() + row * in,
                                        dx.base.empty() ? nullptr : dx.base.data() + row * in);
    });
  });
}

#define ZEROPLAN_ACTIVATION(T)                                                                                        \
  template void activation_forward(const ActivationShape&, std::span<const T>, std::span<T>, ThreadPool&);            \
  template void activation_backward(const ActivationShape&, std::span<const T>, std::span<const T>, ValueGradient<T>, \
                                    ThreadPool&)
ZEROPLAN_ACTIVATION(Bf16);
ZEROPLAN_ACTIVATION(Fp16);
ZEROPLAN_ACTIVATION(float);
ZEROPLAN_ACTIVATION(double);

}  // namespace zeroplan
