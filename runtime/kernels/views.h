#pragma once
// What kernels take. All buffers are dense row-major spans of a storage type T (Bf16, Fp16, float; double in tests);
// computation is in Wide<T>. "tokens" is batch x seq_len, sequences one after the other. A span of the wrong length is
// a std::logic_error. Shapes are in the comments, outermost first.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "runtime/numeric.h"

namespace zeroplan {

/// Where the gradient of a value goes: out = base + gradient, rounded once. `base` empty: overwritten; the same storage
/// as `out`: added in place; other storage: the older gradient of that value (ProgramStep with a read and a write
/// slot).
template <class T>
struct ValueGradient {
  std::span<T> out;
  std::span<const T> base = {};
};

/// Where the gradient of one parameter tensor goes; G is the type of the block's gradient buffer, T or float.
template <class G>
struct WeightGradient {
  std::span<G> out;
  bool accumulate = false;  // add to what is there (in Wide<G>, rounded once a call)
};

/// The pairs (values, gradients) that the kernels are built for.
template <class T, class G>
concept GradientOf = std::same_as<T, G> ||(std::same_as<G, float> && !std::same_as<T, double>);

inline void expect_count(std::size_t found, std::int64_t expected, const char* what) {
  if (static_cast<std::int64_t>(found) != expected) {
    throw std::logic_error(std::string(what) + ": expected " + std::to_string(expected) + " elements, found " +
                           std::to_string(found));
  }
}

template <class T>
void expect_gradient(const ValueGradient<T>& gradient, std::int64_t expected, const char* what) {
  expect_count(gradient.out.size(), expected, what);
  if (!gradient.base.empty()) expect_count(gradient.base.size(), expected, what);
}

}  // namespace zeroplan
