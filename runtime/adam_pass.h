#pragma once
// The AdamW loop over an instruction set, included once by each adam_<set>.cpp. Everything has internal linkage, and
// nothing from the standard library is called, so that no copy with special instructions can reach other files.
//
// `Isa` has: kLanes; V (kLanes floats), Half (kLanes 16-bit words); load, store, load_half, store_half, stream_pair,
// fence, prefetch; set, mul, fma, div, sqrt, quiet (every NaN becomes 0x7fc00000); from_bf16, from_fp16, to_bf16,
// to_fp16 (of quiet values); join and split (master bits = (high << 16) + low).

#include <cstdint>

#include "runtime/adam_paths.h"

// What the loop is made of has to be in it: g++ left parts of some loops as calls, and a call that does nothing but
// prefetch as nothing at all (it has no result).
#define ZEROPLAN_IN_LOOP inline __attribute__((always_inline))

namespace zeroplan {
namespace {

enum class Master { fp32_alone, fp32, split };

/// Arrays of one call, advanced to the element at hand.
struct Cursor {
  const void* gradient;
  float* master;
  std::int16_t* remainder;
  void* first;
  void* second;
  std::uint16_t* weights;
};

template <DType G>
using GradientWord = std::conditional_t<G == DType::fp32, float, std::uint16_t>;
template <DType M>
using MomentWord = std::conditional_t<M == DType::fp32, float, std::uint16_t>;

template <class Isa, DType Type>
ZEROPLAN_IN_LOOP typename Isa::V load_as(const void* from) {
  if constexpr (Type == DType::fp32) return Isa::load(static_cast<const float*>(from));
  const auto half = Isa::load_half(static_cast<const std::uint16_t*>(from));
  if constexpr (Type == DType::bf16) return Isa::from_bf16(half);
  if constexpr (Type == DType::fp16) return Isa::from_fp16(half);
}

template <class Isa, DType Type>
ZEROPLAN_IN_LOOP void store_as(void* to, typename Isa::V value) {
  if constexpr (Type == DType::fp32) {
    Isa::store(static_cast<float*>(to), value);
  } else {
    Isa::store_half(static_cast<std::uint16_t*>(to), Isa::to_bf16(value));
  }
}

/// Scalars in every lane.
template <class Isa>
struct Lanes {
  typename Isa::V gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, minus_step, correction,
      epsilon;
  explicit Lanes(const AdamScalars& s)
      : gradient_scale(Isa::set(s.gradient_scale)),
        beta1(Isa::set(s.beta1)),
        one_minus_beta1(Isa::set(s.one_minus_beta1)),
        beta2(Isa::set(s.beta2)),
        one_minus_beta2(Isa::set(s.one_minus_beta2)),
        decay(Isa::set(s.decay)),
        minus_step(Isa::set(-s.step_size)),
        correction(Isa::set(s.inverse_correction)),
        epsilon(Isa::set(s.epsilon)) {}
};

/// kLanes elements: states updated in place; returns the weights as 16 bits (zeros with Master::fp32_alone).
template <class Isa, DType G, DType M, Master K, DType W>
ZEROPLAN_IN_LOOP typename Isa::Half update(const Lanes<Isa>& s, const Cursor& c) {
  using V = typename Isa::V;
  const V g = Isa::mul(load_as<Isa, G>(c.gradient), s.gradient_scale);
  const V m = Isa::quiet(Isa::fma(s.beta1, load_as<Isa, M>(c.first), Isa::mul(s.one_minus_beta1, g)));
  const V v = Isa::quiet(Isa::fma(s.beta2, load_as<Isa, M>(c.second), Isa::mul(Isa::mul(s.one_minus_beta2, g), g)));
  V p;
  if constexpr (K == Master::split) {
    p = Isa::join(Isa::load_half(c.weights), Isa::load_half(reinterpret_cast<const std::uint16_t*>(c.remainder)));
  } else {
    p = Isa::load(c.master);
  }
  const V ratio = Isa::div(m, Isa::fma(Isa::sqrt(v), s.correction, s.epsilon));
  p = Isa::quiet(Isa::fma(s.minus_step, ratio, Isa::mul(p, s.decay)));
  store_as<Isa, M>(c.first, m);
  store_as<Isa, M>(c.second, v);
  if constexpr (K == Master::split) {
    typename Isa::Half low;
    const typename Isa::Half high = Isa::split(p, low);
    Isa::store_half(reinterpret_cast<std::uint16_t*>(c.remainder), low);
    return high;
  } else {
    Isa::store(c.master, p);
    if constexpr (K == Master::fp32_alone) return typename Isa::Half{};
    return W == DType::bf16 ? Isa::to_bf16(p) : Isa::to_fp16(p);
  }
}

/// The arrays that this kind of master has, from element i on.
template <DType G, DType M, Master K>
ZEROPLAN_IN_LOOP Cursor cursor_at(const AdamRange& r, std::int64_t i) {
  Cursor c{};
  c.gradient = static_cast<const GradientWord<G>*>(r.gradient) + i;
  c.first = static_cast<MomentWord<M>*>(r.first_moment) + i;
  c.second = static_cast<MomentWord<M>*>(r.second_moment) + i;
  if constexpr (K == Master::split) {
    c.remainder = r.remainder + i;
  } else {
    c.master = r.master + i;
  }
  if constexpr (K != Master::fp32_alone) c.weights = static_cast<std::uint16_t*>(r.weights) + i;
  return c;
}

template <class Word>
void copy_words(void* to, const void* from, std::int64_t count) {
  if (to != nullptr && from != nullptr) __builtin_memcpy(to, from, static_cast<std::size_t>(count) * sizeof(Word));
}

/// Fewer than kLanes elements, through a buffer on the stack.
template <class Isa, DType G, DType M, Master K, DType W>
__attribute__((noinline)) void update_some(const Lanes<Isa>& s, const Cursor& c, std::int64_t count) {
  GradientWord<G> gradient[Isa::kLanes] = {};
  float master[Isa::kLanes] = {};
  std::int16_t remainder[Isa::kLanes] = {};
  MomentWord<M> first[Isa::kLanes] = {}, second[Isa::kLanes] = {};
  std::uint16_t weights[Isa::kLanes] = {};
  const Cursor local{gradient, master, remainder, first, second, weights};
  copy_words<GradientWord<G>>(gradient, c.gradient, count);
  copy_words<float>(master, c.master, count);
  copy_words<std::int16_t>(remainder, c.remainder, count);
  copy_words<MomentWord<M>>(first, c.first, count);
  copy_words<MomentWord<M>>(second, c.second, count);
  copy_words<std::uint16_t>(weights, c.weights, count);
  Isa::store_half(weights, update<Isa, G, M, K, W>(s, local));
  copy_words<float>(c.master, master, count);
  copy_words<std::int16_t>(c.remainder, remainder, count);
  copy_words<MomentWord<M>>(c.first, first, count);
  copy_words<MomentWord<M>>(c.second, second, count);
  if constexpr (K != Master::fp32_alone) copy_words<std::uint16_t>(c.weights, weights, count);
}

/// Elements from the one at hand to those fetched. Five arrays are more than the processor's own prefetcher keeps up
/// with: measured on a Xeon, this takes 16 threads from 0.96 to 1.06 of the read-modify-write bandwidth and one from
/// 0.76 to 0.92; half the distance does the same but for one thread (docs/benchmarks.md).
constexpr std::int64_t kAhead = 512;

template <class Isa, std::int64_t Elements, class Word>
ZEROPLAN_IN_LOOP void fetch(const Word* at) {
  constexpr std::uintptr_t kLine = 64;
  const auto from = reinterpret_cast<std::uintptr_t>(at) + kAhead * sizeof(Word);  // may lie past the end: a hint only
  for (std::uintptr_t line = 0; line < Elements * sizeof(Word); line += kLine) {
    Isa::prefetch(reinterpret_cast<const void*>(from + line));
  }
}

/// What the next `Elements` elements read, kAhead elements early. Weights are read only with a split master.
template <class Isa, DType G, DType M, Master K, std::int64_t Elements>
ZEROPLAN_IN_LOOP void fetch_ahead(const Cursor& c) {
  fetch<Isa, Elements>(static_cast<const GradientWord<G>*>(c.gradient));
  fetch<Isa, Elements>(static_cast<const MomentWord<M>*>(c.first));
  fetch<Isa, Elements>(static_cast<const MomentWord<M>*>(c.second));
  if constexpr (K == Master::split) {
    fetch<Isa, Elements>(c.weights);
    fetch<Isa, Elements>(c.remainder);
  } else {
    fetch<Isa, Elements>(c.master);
  }
}

/// Elements [i, end) with weights written past the caches, two vectors at a time; returns where it stopped.
template <class Isa, DType G, DType M, Master K, DType W>
std::int64_t update_streaming(const Lanes<Isa>& s, const AdamRange& range, std::int64_t i, std::int64_t end) {
  constexpr std::int64_t kPair = 2 * Isa::kLanes;
  constexpr std::uintptr_t kAlignment = kPair * sizeof(std::uint16_t);
  const auto at = reinterpret_cast<std::uintptr_t>(static_cast<std::uint16_t*>(range.weights) + i);
  std::int64_t head = static_cast<std::int64_t>((kAlignment - at % kAlignment) % kAlignment / sizeof(std::uint16_t));
  while (head > 0 && i < end) {
    std::int64_t some = head < Isa::kLanes ? head : Isa::kLanes;
    if (some > end - i) some = end - i;
    update_some<Isa, G, M, K, W>(s, cursor_at<G, M, K>(range, i), some);
    i += some;
    head -= some;
  }
  for (; i + kPair <= end; i += kPair) {
    const Cursor c = cursor_at<G, M, K>(range, i);
    fetch_ahead<Isa, G, M, K, kPair>(c);
    const auto low = update<Isa, G, M, K, W>(s, c);
    const auto high = update<Isa, G, M, K, W>(s, cursor_at<G, M, K>(range, i + Isa::kLanes));
    Isa::stream_pair(c.weights, low, high);
  }
  Isa::fence();
  return i;
}

template <class Isa, DType G, DType M, Master K, DType W>
void update_range(const AdamScalars& scalars, const AdamRange& range, std::int64_t begin, std::int64_t end,
                  bool stream) {
  const Lanes<Isa> s(scalars);
  std::int64_t i = begin;
  if (K == Master::fp32 && stream) i = update_streaming<Isa, G, M, K, W>(s, range, i, end);
  for (; i + Isa::kLanes <= end; i += Isa::kLanes) {
    const Cursor c = cursor_at<G, M, K>(range, i);
    if (stream) fetch_ahead<Isa, G, M, K, Isa::kLanes>(c);
    const auto weights = update<Isa, G, M, K, W>(s, c);
    if constexpr (K != Master::fp32_alone) Isa::store_half(c.weights, weights);
  }
  if (i < end) update_some<Isa, G, M, K, W>(s, cursor_at<G, M, K>(range, i), end - i);
}

template <class Isa, DType G, DType M>
void choose_master(const AdamScalars& s, const AdamRange& r, std::int64_t begin, std::int64_t end, bool stream) {
  if (r.master == nullptr) {
    update_range<Isa, G, M, Master::split, DType::bf16>(s, r, begin, end, stream);
  } else if (r.weights == nullptr) {
    update_range<Isa, G, M, Master::fp32_alone, DType::bf16>(s, r, begin, end, stream);
  } else if (r.weights_type == DType::bf16) {
    update_range<Isa, G, M, Master::fp32, DType::bf16>(s, r, begin, end, stream);
  } else {
    update_range<Isa, G, M, Master::fp32, DType::fp16>(s, r, begin, end, stream);
  }
}

template <class Isa, DType G>
void choose_moments(const AdamScalars& s, const AdamRange& r, std::int64_t begin, std::int64_t end, bool stream) {
  if (r.moment_type == DType::fp32) {
    choose_master<Isa, G, DType::fp32>(s, r, begin, end, stream);
  } else {
    choose_master<Isa, G, DType::bf16>(s, r, begin, end, stream);
  }
}

template <class Isa>
void choose_gradient(const AdamScalars& s, const AdamRange& r, std::int64_t begin, std::int64_t end, bool stream) {
  if (r.gradient_type == DType::bf16) {
    choose_moments<Isa, DType::bf16>(s, r, begin, end, stream);
  } else if (r.gradient_type == DType::fp16) {
    choose_moments<Isa, DType::fp16>(s, r, begin, end, stream);
  } else {
    choose_moments<Isa, DType::fp32>(s, r, begin, end, stream);
  }
}

}  // namespace
}  // namespace zeroplan
