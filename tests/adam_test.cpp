// AdamW: every instruction set gives the same bits, for every type, tail and alignment, and the equation's result.

#include "runtime/adam.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "runtime/numeric.h"
#include "tests/catch.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

enum class Kind { fp32_alone, fp32_and_bf16, fp32_and_fp16, split };
struct Types {
  DType gradient = DType::bf16, moments = DType::fp32;
  Kind kind = Kind::fp32_and_bf16;
};

std::vector<Types> all_types() {
  std::vector<Types> all;
  for (const DType gradient : {DType::bf16, DType::fp16, DType::fp32}) {
    for (const DType moments : {DType::fp32, DType::bf16}) {
      for (const Kind kind : {Kind::fp32_alone, Kind::fp32_and_bf16, Kind::fp32_and_fp16, Kind::split}) {
        all.push_back({gradient, moments, kind});
      }
    }
  }
  return all;
}

/// The arrays of `count` parameters with `kGuard` untouched elements around them, starting at any element.
struct States {
  static constexpr std::size_t kGuard = 3;
  Types types;
  std::int64_t count;
  std::vector<std::uint8_t> gradient, first, second;
  std::vector<float> master;
  std::vector<std::int16_t> remainder;
  std::vector<std::uint16_t> weights;

  AdamRange range() {
    AdamRange r;
    r.count = count;
    r.gradient = gradient.data() + kGuard * static_cast<std::size_t>(size_of(types.gradient));
    r.gradient_type = types.gradient;
    r.moment_type = types.moments;
    r.first_moment = first.data() + kGuard * static_cast<std::size_t>(size_of(types.moments));
    r.second_moment = second.data() + kGuard * static_cast<std::size_t>(size_of(types.moments));
    if (types.kind == Kind::split) {
      r.remainder = remainder.data() + kGuard;
    } else {
      r.master = master.data() + kGuard;
    }
    if (types.kind != Kind::fp32_alone) r.weights = weights.data() + kGuard;
    r.weights_type = types.kind == Kind::fp32_and_fp16 ? DType::fp16 : DType::bf16;
    return r;
  }
  bool same_bits(const States& other) const {
    return gradient == other.gradient && first == other.first && second == other.second &&
           std::memcmp(master.data(), other.master.data(), master.size() * sizeof(float)) == 0 &&
           remainder == other.remainder && weights == other.weights;
  }
};

template <class Word>
void fill_random_bits(std::vector<Word>& array, std::mt19937_64& random) {
  for (std::size_t i = 0; i < array.size(); ++i) array[i] = static_cast<Word>(random());
}

float finite(std::mt19937_64& random, int lowest_exponent, int highest_exponent) {
  const int span = highest_exponent - lowest_exponent + 1;
  const auto sign = random() % 2 == 0 ? 1.0f : -1.0f;
  return sign * std::ldexp(1.0f + static_cast<float>(random() % (1u << 23)) * 0x1p-23f,
                           lowest_exponent + static_cast<int>(random() % static_cast<unsigned>(span)));
}

void put(std::vector<std::uint8_t>& array, DType type, std::size_t i, float value) {
  with_storage(type, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const T stored = narrow<T>(value);
    std::memcpy(array.data() + i * sizeof(T), &stored, sizeof(T));
  });
}
float get(const std::vector<std::uint8_t>& array, DType type, std::size_t i) {
  return with_storage(type, [&](auto tag) {
    typename decltype(tag)::Type stored;
    std::memcpy(&stored, array.data() + i * sizeof(stored), sizeof(stored));
    return static_cast<float>(widen(stored));
  });
}

/// Gradients, moments and masters over the whole range of floats: denormals and zeros; with `wild` any bits at all.
States random_states(Types types, std::int64_t count, unsigned seed, bool wild) {
  std::mt19937_64 random(seed);
  const std::size_t n = static_cast<std::size_t>(count) + 2 * States::kGuard;
  const auto bytes = [&](DType type) { return n * static_cast<std::size_t>(size_of(type)); };
  States s{types, count, {}, {}, {}, {}, {}, {}};
  s.gradient.resize(bytes(types.gradient));
  s.first.resize(bytes(types.moments));
  s.second.resize(bytes(types.moments));
  s.master.resize(n);
  s.remainder.resize(n);
  s.weights.resize(n);
  if (wild) {
    fill_random_bits(s.gradient, random);
    fill_random_bits(s.first, random);
    fill_random_bits(s.second, random);
    for (float& p : s.master) p = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    fill_random_bits(s.remainder, random);
    fill_random_bits(s.weights, random);
    return s;
  }
  for (std::size_t i = 0; i < n; ++i) {
    const bool tiny = random() % 8 == 0;
    put(s.gradient, types.gradient, i, tiny ? finite(random, -149, -120) : finite(random, -30, 3));
    put(s.first, types.moments, i, tiny ? finite(random, -149, -120) : finite(random, -30, 0));
    put(s.second, types.moments, i, std::abs(tiny ? finite(random, -149, -120) : finite(random, -40, 0)));
    s.master[i] = tiny ? finite(random, -149, -110) : finite(random, -12, 2);
  }
  split_master(s.master, s.weights, s.remainder);
  return s;
}

AdamScalars scalars() { return adam_scalars({.learning_rate = 3e-3, .weight_decay = 0.1}, 7, 0.37); }

/// Runs every path on a copy and compares with the scalar one.
void check_paths(const States& start, ThreadPool& pool) {
  States right = start;
  adam_step(scalars(), right.range(), pool, AdamPath::scalar);
  for (const AdamPath path : adam_paths()) {
    States found = start;
    adam_step(scalars(), found.range(), pool, path);
    INFO(to_string(path) << ", gradients " << to_string(start.types.gradient) << ", moments "
                         << to_string(start.types.moments) << ", kind " << static_cast<int>(start.types.kind)
                         << ", count " << start.count);
    CHECK(found.same_bits(right));
  }
}

}  // namespace

TEST_CASE("All paths of AdamW give the same bits on a million parameters, denormals included") {
  ThreadPool pool(2);
  for (const Kind kind : {Kind::fp32_and_bf16, Kind::fp32_and_fp16, Kind::split}) {
    // Above 2^20 elements the 16-bit weights are streamed.
    check_paths(random_states({DType::bf16, DType::fp32, kind}, 1'100'003, 1, false), pool);
  }
  check_paths(random_states({DType::fp32, DType::bf16, Kind::fp32_and_bf16}, 1'000'000, 2, false), pool);
}

TEST_CASE("All paths of AdamW give the same bits for all types, on any bit patterns: infinities and NaN") {
  ThreadPool pool(1);
  for (const Types types : all_types()) {
    check_paths(random_states(types, 30'011, 3, false), pool);
    check_paths(random_states(types, 30'011, 4, true), pool);
  }
}

TEST_CASE("All tails of AdamW, and nothing outside the range is touched") {
  ThreadPool pool(1);
  for (const Types types : all_types()) {
    for (std::int64_t count = 0; count <= 67; ++count) check_paths(random_states(types, count, 5, false), pool);
  }
  for (const AdamPath path : adam_paths()) {
    const States before = random_states({}, 67, 6, false);
    States after = before;
    adam_step(scalars(), after.range(), pool, path);
    for (std::size_t i = 0; i < States::kGuard; ++i) {
      for (const std::size_t at : {i, after.master.size() - 1 - i}) {
        CHECK(after.master[at] == before.master[at]);
        CHECK(after.weights[at] == before.weights[at]);
        CHECK(get(after.first, DType::fp32, at) == get(before.first, DType::fp32, at));
      }
    }
    CHECK(after.master[States::kGuard] != before.master[States::kGuard]);
  }
}

TEST_CASE("AdamW computes its equation") {
  ThreadPool pool(1);
  const AdamSettings settings{.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
  constexpr std::int64_t kCount = 5000, kSteps = 6;
  std::mt19937_64 random(9);
  std::vector<float> gradient(kCount), master(kCount), first(kCount), second(kCount);
  std::vector<Bf16> weights(kCount);
  std::vector<double> p(kCount), m(kCount), v(kCount);
  for (std::size_t i = 0; i < kCount; ++i) p[i] = master[i] = finite(random, -6, 0);
  for (std::int64_t step = 1; step <= kSteps; ++step) {
    for (float& g : gradient) g = finite(random, -12, 4);
    AdamRange range;
    range.count = kCount;
    range.gradient = gradient.data();
    range.gradient_type = DType::fp32;
    range.master = master.data();
    range.first_moment = first.data();
    range.second_moment = second.data();
    range.weights = weights.data();
    adam_step(adam_scalars(settings, step, 0.5), range, pool);
    const auto t = static_cast<double>(step);
    for (std::size_t i = 0; i < kCount; ++i) {
      const double g = 0.5 * static_cast<double>(gradient[i]);
      p[i] *= 1 - settings.learning_rate * settings.weight_decay;
      m[i] = settings.beta1 * m[i] + (1 - settings.beta1) * g;
      v[i] = settings.beta2 * v[i] + (1 - settings.beta2) * g * g;
      const double corrected = std::sqrt(v[i] / (1 - std::pow(settings.beta2, t)));
      p[i] -= settings.learning_rate * (m[i] / (1 - std::pow(settings.beta1, t))) / (corrected + settings.epsilon);
    }
  }
  double worst = 0;
  for (std::size_t i = 0; i < kCount; ++i) {
    // Every update is at most a few learning rates: 1e-6 of a weight of size 1 is far below.
    worst = std::max(worst, std::abs(static_cast<double>(master[i]) - p[i]) / std::max(std::abs(p[i]), 1e-3));
    CHECK(weights[i].bits == narrow<Bf16>(master[i]).bits);
  }
  CHECK(worst < 2e-6);
}

TEST_CASE("A split master is exact, and AdamW on it gives the master that fp32 would") {
  std::mt19937_64 random(11);
  std::vector<float> master(300'000);
  for (float& p : master) p = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  std::vector<std::uint16_t> weights(master.size());
  std::vector<std::int16_t> remainder(master.size());
  std::vector<float> joined(master.size());
  split_master(master, weights, remainder);
  join_master(weights, remainder, joined);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < master.size(); ++i) {
    const float p = master[i];
    wrong += std::isnan(p) ? std::bit_cast<std::uint32_t>(joined[i]) != 0x7fc00000u
                           : std::bit_cast<std::uint32_t>(joined[i]) != std::bit_cast<std::uint32_t>(p);
    // Half up differs from nearest even at ties only, by one unit.
    const auto low = std::bit_cast<std::uint32_t>(p) & 0xffffu;
    if (!std::isnan(p) && low != 0x8000u) wrong += weights[i] != narrow<Bf16>(p).bits;
  }
  CHECK(wrong == 0);

  ThreadPool pool(1);
  States whole = random_states({DType::bf16, DType::fp32, Kind::fp32_and_bf16}, 10'007, 12, false);
  States split = whole;
  split.types.kind = Kind::split;
  for (int step = 0; step < 3; ++step) {
    adam_step(scalars(), whole.range(), pool);
    adam_step(scalars(), split.range(), pool);
  }
  std::vector<float> master_of_split(split.master.size());
  join_master(split.weights, split.remainder, master_of_split);
  CHECK(master_of_split == whole.master);
}

TEST_CASE("NaN and infinity leave the quiet NaN, in the touched parameter only") {
  ThreadPool pool(1);
  for (const AdamPath path : adam_paths()) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()}) {
      States s = random_states({DType::fp32, DType::fp32, Kind::fp32_and_bf16}, 40, 13, false);
      put(s.gradient, DType::fp32, States::kGuard + 20, bad);
      adam_step(scalars(), s.range(), pool, path);
      for (std::size_t i = States::kGuard; i < States::kGuard + 40; ++i) {
        const bool touched = i == States::kGuard + 20;
        CHECK(std::isnan(s.master[i]) == touched);
        if (touched) CHECK(std::bit_cast<std::uint32_t>(s.master[i]) == 0x7fc00000u);
        if (touched) CHECK(s.weights[i] == 0x7fc0);
      }
    }
  }
}

TEST_CASE("AdamW gives the same bits with any number of threads, and refuses half a range") {
  const States start = random_states({}, 200'000, 14, false);
  States one = start, four = start;
  ThreadPool alone(1), pool(4);
  adam_step(scalars(), one.range(), alone);
  adam_step(scalars(), four.range(), pool);
  CHECK(one.same_bits(four));
  AdamRange range = one.range();
  range.first_moment = nullptr;
  CHECK_THROWS_AS(adam_step(scalars(), range, alone), std::logic_error);
  range = one.range();
  range.remainder = one.remainder.data();
  CHECK_THROWS_AS(adam_step(scalars(), range, alone), std::logic_error);
  range = one.range();
  range.moment_type = DType::fp16;
  CHECK_THROWS_AS(adam_step(scalars(), range, alone), std::logic_error);
  CHECK_THROWS_AS(adam_scalars({}, 0, 1.0), std::logic_error);
}
