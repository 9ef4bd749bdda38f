// Speed of the host kernels, bf16: ninja kernels_bench && build/.../kernels_bench [threads]. Prints the least time of
// several runs; the figures of docs/benchmarks.md are this output.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <vector>

#include "runtime/kernels/kernels.h"

namespace zeroplan {
namespace {

template <class Body>
double least_seconds(Body&& body) {
  constexpr int kRuns = 5;
  double least = 1e300;
  for (int i = 0; i < kRuns; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    body();
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return least;
}

std::vector<Bf16> values(std::int64_t count) {
  std::vector<Bf16> result(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < result.size(); ++i)
    result[i] = narrow<Bf16>(static_cast<float>(i * 37 % 101) * 0.01f - 0.5f);
  return result;
}

void linears(ThreadPool& pool) {
  for (const auto& [tokens, in, out] :
       {std::array<std::int64_t, 3>{512, 256, 256}, {1024, 768, 2304}, {1024, 384, 8192}}) {
    const auto x = values(tokens * in), weight = values(out * in);
    auto y = values(tokens * out), dx = values(tokens * in), dw = values(out * in);
    const std::array<LinearPart<Bf16>, 1> parts{{{weight, {}}}};
    const std::array<LinearPartGradient<Bf16>, 1> to{{{{dw, false}, {}}}};
    const double flops = 2e-9 * static_cast<double>(tokens * in * out);
    const double forward = least_seconds([&] { linear_forward<Bf16>(x, parts, in, y, pool); });
    const double data = least_seconds([&] { linear_backward_data<Bf16>(y, parts, in, {dx, {}}, pool); });
    const double gradient = least_seconds([&] { linear_backward_weight<Bf16, Bf16>(y, x, to, in, pool); });
    fmt::print("linear {} x {} x {}: forward {:.0f}, data {:.0f}, weight {:.0f} GFLOP/s\n", tokens, in, out,
               flops / forward, flops / data, flops / gradient);
  }
}

void attentions(ThreadPool& pool) {
  for (const auto& [seq_len, heads, d] : {std::array<std::int64_t, 3>{256, 6, 64}, {1024, 12, 64}, {2048, 8, 64}}) {
    AttentionShape shape;
    shape.heads = shape.kv_heads = heads;
    shape.qk_dim = shape.v_dim = d;
    const auto qkv = values(seq_len * 3 * heads * d);
    auto out = values(seq_len * heads * d), dqkv = values(seq_len * 3 * heads * d);
    std::vector<float> log_sum(static_cast<std::size_t>(seq_len * heads));
    const double flops = 2e-9 * static_cast<double>((seq_len + 1) * d * heads * seq_len);  // causal, forward
    const double forward = least_seconds([&] { attention_forward<Bf16>(shape, seq_len, qkv, out, log_sum, pool); });
    const double backward = least_seconds([&] {
      attention_backward<Bf16>(shape, seq_len, out, qkv, out, log_sum, {dqkv, {}}, pool);
    });
    fmt::print("attention {} tokens, {} heads of {}: forward {:.0f}, backward {:.0f} GFLOP/s\n", seq_len, heads, d,
               flops / forward, 2.5 * flops / backward);
  }
}

void pointwise(ThreadPool& pool) {
  constexpr std::int64_t kTokens = 1024, kWidth = 3072, kVocab = 8192, kRows = 512;
  const auto per = [](double time, std::int64_t count) { return time * 1e9 / static_cast<double>(count); };
  const auto x = values(kTokens * 2 * kWidth), weight = values(kWidth);
  auto y = values(kTokens * kWidth), dx = values(kTokens * 2 * kWidth), dw = values(kWidth);
  const auto half = std::span(x).first(y.size());
  const auto half_gradient = std::span(dx).first(y.size());
  const std::pair<const char*, ActivationFunction> functions[] = {{"SwiGLU", ActivationFunction::silu},
                                                                  {"GELU (tanh), gated", ActivationFunction::gelu_tanh},
                                                                  {"GELU (erf), gated", ActivationFunction::gelu_erf}};
  for (const auto& [name, function] : functions) {
    const ActivationShape shape{function, true, kWidth};
    const double forward = least_seconds([&] { activation_forward<Bf16>(shape, x, y, pool); });
    const double backward = least_seconds([&] { activation_backward<Bf16>(shape, y, x, {dx, {}}, pool); });
    fmt::print("{}: forward {:.2f}, backward {:.2f} ns an output\n", name, per(forward, kTokens * kWidth),
               per(backward, kTokens * kWidth));
  }
  const NormShape norm{NormFunction::rms, kWidth, 1e-5};
  std::vector<float> statistics(kTokens);
  const double forward = least_seconds([&] { norm_forward<Bf16>(norm, half, weight, {}, y, statistics, pool); });
  const double backward = least_seconds([&] {
    norm_backward<Bf16, Bf16>(norm, y, half, weight, statistics, {half_gradient, {}}, {dw, false}, {}, pool);
  });
  fmt::print("RMSNorm: forward {:.2f}, backward {:.2f} ns an element\n", per(forward, kTokens * kWidth),
             per(backward, kTokens * kWidth));
  auto logits = values(kRows * kVocab);
  const std::vector<std::int32_t> targets(kRows, 5);
  const double loss = least_seconds([&] { cross_entropy<Bf16>(logits, kVocab, targets, 1.0, 0.0, pool); });
  fmt::print("cross-entropy: {:.2f} ns a logit\n", per(loss, kRows * kVocab));
  const std::array<std::span<const Bf16>, 2> terms{half, half};
  const double add = least_seconds([&] { add_forward<Bf16>(terms, y, pool); });
  AttentionShape shape;
  shape.heads = shape.kv_heads = 16;
  shape.qk_dim = shape.v_dim = kWidth / 48;
  const RotaryTable table = make_rotary_table(kTokens, shape.qk_dim, 10000.0);
  const double rotary = least_seconds([&] { rotary_forward<Bf16>(shape, kTokens, table, half_gradient, pool); });
  fmt::print("add {:.2f}, rotary {:.2f} ns an element\n", per(add, kTokens * kWidth), per(rotary, kTokens * kWidth));
}

}  // namespace
}  // namespace zeroplan

int main(int argc, char** argv) {
  zeroplan::ThreadPool pool(argc > 1 ? std::atoi(argv[1]) : 1);
  zeroplan::linears(pool);
  zeroplan::attentions(pool);
  zeroplan::pointwise(pool);
}
