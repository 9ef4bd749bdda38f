// Initial weights: the same bits everywhere, independent of how they are asked for, of the right distribution.

#include "runtime/initial_weights.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "models/error.h"
#include "models/lower.h"
#include "runtime/kernels/kernels.h"
#include "runtime/random.h"
#include "tests/catch.h"
#include "tests/tiny_models.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

std::vector<float> tensor(const InitialWeights& weights, int block, int index, std::int64_t count,
                          std::int64_t begin = 0) {
  std::vector<float> values(static_cast<std::size_t>(count));
  weights.fill(block, index, begin, begin + count, values);
  return values;
}

std::vector<float> flat(const InitialWeights& weights, int block, DType type, std::int64_t begin, std::int64_t end) {
  std::vector<float> values(static_cast<std::size_t>(end - begin), -1.0f);
  weights.fill_flat(block, type, begin, end, values);
  return values;
}

struct Moments {
  double mean = 0, deviation = 0, fourth = 0;  // fourth: of the standardised values, 3 for a normal distribution
};
Moments moments(const std::vector<float>& values) {
  Moments m;
  const auto count = static_cast<double>(values.size());
  for (const float x : values) m.mean += x / count;
  for (const float x : values) m.deviation += (x - m.mean) * (x - m.mean) / count;
  m.deviation = std::sqrt(m.deviation);
  for (const float x : values) m.fourth += std::pow((x - m.mean) / m.deviation, 4) / count;
  return m;
}

}  // namespace

TEST_CASE("SplitMix64 gives its published numbers") {
  // Seed 1234567, as in the test of several public implementations (Rosetta Code, "Pseudo-random numbers/Splitmix64").
  CHECK(random_bits(1234567, 0) == 6457827717110365317u);
  CHECK(random_bits(1234567, 1) == 3203168211198807973u);
  CHECK(random_bits(1234567, 2) == 9817491932198370423u);
  CHECK(uniform(0) > 0);
  CHECK(uniform(~std::uint64_t{0}) < 1);
}

TEST_CASE("The inverse normal distribution agrees with Python's and with std::erfc") {
  // statistics.NormalDist().inv_cdf(p).hex() of Python 3.11.
  struct Case {
    double p, x;
  };
  for (const Case& c : std::vector<Case>{{0x1.56e1fc2f8f359p-997, -0x1.286074064c26ep+5},
                                         {0x1.203af9ee75616p-50, -0x1.fc3f007789667p+2},
                                         {0x1.0c6f7a0b5ed8dp-20, -0x1.30381a9799f7ep+2},
                                         {0x1.47ae147ae147bp-6, -0x1.06e13e8aadfdbp+1},
                                         {0x1.2f1a9fbe76c8bp-4, -0x1.72567aa9caedap+0},
                                         {0x1.3333333333333p-4, -0x1.7085226d3e523p+0},
                                         {0x1.374bc6a7ef9dbp-4, -0x1.6eb87f9160bcap+0},
                                         {0x1.3333333333333p-2, -0x1.0c7e39582c5fap-1},
                                         {0x1.fffd60e94ee39p-2, -0x1.a48add58fc7a3p-16},
                                         {0x1.6666666666666p-1, 0x1.0c7e39582c5fap-1},
                                         {0x1.d9a6b50b0f27cp-1, 0x1.70b374817af50p+0},
                                         {0x1.ffffde7210be9p-1, 0x1.30381a97985f1p+2},
                                         {0x1.fffffffffffffp-1, 0x1.06b48528cea51p+3}}) {
    CHECK_THAT(inverse_normal(c.p), WithinRel(c.x, 4 * std::numeric_limits<double>::epsilon()));
  }
  CHECK(inverse_normal(0.5) == 0);
  std::mt19937_64 random(3);
  for (int i = 0; i < 20000; ++i) {
    // Half of them in the tails: p = u^k.
    const double p = std::pow(uniform(random()), i % 2 == 0 ? 1.0 : 40.0);
    const double x = inverse_normal(p);
    CHECK_THAT(0.5 * std::erfc(-x / std::sqrt(2.0)), WithinRel(p, 1e-12));
  }
}

TEST_CASE("Weights have the bits that an independent program computes") {
  // Python: SplitMix64 streams and statistics.NormalDist().inv_cdf, tensors counted through the model.
  const ModelSpec model = tiny_gpt2();
  struct Case {
    std::uint64_t seed;
    int block, tensor;
    std::uint32_t bits[4];  // elements 0, 1, 2, 1000
  };
  for (const Case& c : {Case{1, 0, 0, {0xbc8ca04c, 0xbbec39d5, 0xbba08e48, 0x3c0f5c87}},      // 0: wte
                        Case{1, 1, 2, {0xba8dc2e2, 0x3b7ba904, 0xbc926daf, 0xbc0eacda}},      // 4: c_attn
                        Case{7, 1, 4, {0x3b7a2265, 0x3aab2afb, 0xbc1116d4, 0x39bd8a19}},      // 6: c_proj, scaled
                        Case{7, 1, 8, {0x3cdf137b, 0xbcbdc1c4, 0x3c9a2969, 0xbd0585ab}},      // 10: c_fc
                        Case{7, 1, 10, {0x3b90d260, 0xbb3ce0ec, 0x3bafaba1, 0x3b900b9b}}}) {  // 12: c_proj, scaled
    const InitialWeights weights(model, c.seed);
    const std::vector<float> values = tensor(weights, c.block, c.tensor, 1001);
    CHECK(std::bit_cast<std::uint32_t>(values[0]) == c.bits[0]);
    CHECK(std::bit_cast<std::uint32_t>(values[1]) == c.bits[1]);
    CHECK(std::bit_cast<std::uint32_t>(values[2]) == c.bits[2]);
    CHECK(std::bit_cast<std::uint32_t>(values[1000]) == c.bits[3]);
  }
}

TEST_CASE("Weights follow GPT-2's rule") {
  ModelSpec model = GENERATE(0, 1) == 0 ? tiny_gpt2() : tiny_llama(R"(, "initializer_range": 0.05)");
  const double deviation = model.family == "gpt2" ? 0.02 : 0.05;
  const InitialWeights weights(model, 5);
  for (int block = 0; block < static_cast<int>(model.sequence.size()); ++block) {
    const BlockKind& kind = model.kinds[static_cast<std::size_t>(model.sequence[static_cast<std::size_t>(block)])];
    for (int t = 0; t < static_cast<int>(kind.tensors.size()); ++t) {
      const TensorSpec& spec = kind.tensors[static_cast<std::size_t>(t)];
      INFO(spec.name);
      if (spec.tied) {
        CHECK_THROWS_AS(tensor(weights, block, t, 1), std::logic_error);
        continue;
      }
      if (spec.shape.size() == 1) {
        const bool norm = spec.name.find("norm") != std::string::npos || spec.name.find("ln_") != std::string::npos;
        const float expected = norm && spec.name.ends_with("weight") ? 1.0f : 0.0f;
        for (const float x : tensor(weights, block, t, spec.elements())) CHECK(x == expected);
        continue;
      }
      const bool ends_branch = spec.name.find("c_proj") != std::string::npos ||
                               spec.name.find("o_proj") != std::string::npos ||
                               spec.name.find("down_proj") != std::string::npos;
      const Moments m = moments(tensor(weights, block, t, 40000));      // more than it has: a function of the index
      const double expected = ends_branch ? deviation / 2 : deviation;  // 2 layers: 1 / sqrt(4)
      CHECK_THAT(m.mean, WithinAbs(0, 5 * expected / 200));             // 5 standard errors
      CHECK_THAT(m.deviation, WithinRel(expected, 0.02));
      CHECK_THAT(m.fourth, WithinAbs(3, 0.15));
    }
  }
}

TEST_CASE("Any part of a flat buffer is the same part of the whole, and padding is 0") {
  const ModelSpec model = GENERATE(0, 1) == 0 ? tiny_gpt2() : tiny_llama();
  const DType type = GENERATE(DType::bf16, DType::fp32);
  const InitialWeights weights(model, 5);
  std::mt19937 random(9);
  for (int block = 0; block < static_cast<int>(model.sequence.size()); ++block) {
    const BlockKind& kind = model.kinds[static_cast<std::size_t>(model.sequence[static_cast<std::size_t>(block)])];
    const std::int64_t padded = flat_layout(kind, type, 3).padded;
    const std::vector<float> whole = flat(weights, block, type, 0, padded);
    for (int i = 0; i < 20; ++i) {
      const auto begin = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(padded));
      const auto end = begin + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(padded - begin + 1));
      CHECK(flat(weights, block, type, begin, end) == std::vector<float>(whole.begin() + begin, whole.begin() + end));
    }
    std::vector<float> expected(whole.size(), 0.0f);
    const auto offsets = tensor_offsets(kind, type);
    for (std::size_t t = 0; t < offsets.size(); ++t) {
      if (offsets[t] < 0) continue;
      const auto values = tensor(weights, block, static_cast<int>(t), kind.tensors[t].elements());
      std::copy(values.begin(), values.end(), expected.begin() + offsets[t]);
    }
    CHECK(whole == expected);
  }
}

TEST_CASE("Equal layers, tensors and seeds have weights of their own") {
  const ModelSpec model = tiny_llama();
  const InitialWeights weights(model, 5);
  CHECK(tensor(weights, 1, 1, 100) != tensor(weights, 2, 1, 100));
  CHECK(tensor(weights, 1, 1, 100) != tensor(weights, 1, 2, 100));
  CHECK(tensor(weights, 1, 1, 100) != tensor(InitialWeights(model, 6), 1, 1, 100));
  CHECK(tensor(weights, 1, 1, 100) == tensor(InitialWeights(model, 5), 1, 1, 100));
}

TEST_CASE("A tensor without a rule is refused by name") {
  ModelSpec adapted = tiny_llama();
  apply_lora(adapted, 4);
  CHECK_NOTHROW(InitialWeights(tiny_llama(), 1));
  CHECK_THROWS_WITH(InitialWeights(adapted, 1), HasText("lora_A"));
  const ModelSpec t5 = find_model("t5-small");
  CHECK_THROWS_WITH(InitialWeights(t5, 1), HasText("relative_attention_bias"));
  CHECK_THROWS_AS(InitialWeights(tiny_llama(R"(, "initializer_range": "big")"), 1), InputError);
}
