// Checkpointing beyond "every block": every second layer, kept operators, inputs on the host; llm-foundry's and
// Megatron's code. No recorded step has them, so what is checked follows from what each keeps.

#include "models/eager_step.h"
#include "models/error.h"
#include "tests/catch.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kBatch = 2, kLength = 512, kTokens = kBatch * kLength;

EagerOptions options_of(bool checkpointing) {
  EagerOptions options;
  options.tokens = {kBatch, kLength};
  options.checkpointing = checkpointing;
  return options;
}

double saved(const ModelSpec& model, const EagerOptions& options) {
  return eager_peaks(eager_step(model, options)).saved.base();
}

/// A micro-step's products of two matrices, gradients included.
int num_products(const EagerStep& step) {
  int count = 0;
  for (const EagerEvent& event : step.events) {
    if (event.kind == EagerEventKind::kernel &&
        std::holds_alternative<Gemm>(step.works[static_cast<std::size_t>(event.id)].kernel))
      ++count;
  }
  return count;
}

}  // namespace

TEST_CASE("Checkpointing every second layer keeps half of both") {
  const ModelSpec model = find_model("tinyllama-1.1b");
  EagerOptions second = options_of(true);
  second.checkpoint_every = 2;
  const double none = saved(model, options_of(false)), full = saved(model, options_of(true));
  CHECK(saved(model, second) == Approx((none + full) / 2).epsilon(0.002));
  second.checkpoint_every = 1000;  // no layer is the thousandth
  CHECK(saved(model, second) == none);
  second.checkpoint_every = 0;
  CHECK_THROWS_AS(eager_step(model, second), InputError);
}

TEST_CASE("Kept operators: every second product and the attention of a layer") {
  const ModelSpec model = find_model("llama-2-7b");
  EagerOptions kept = options_of(true);
  kept.keeps_operators = true;
  // Llama's products in order: q, k, v, o, gate, up, down. Kept: q, v, gate, down, and attention's output (16-bit) with
  // a sum a row and head (fp32).
  const double hidden = 4096, width = 11008, heads = 32, layers = 32;
  const double per_token = 2 * (hidden + hidden + width + hidden) + 2 * hidden + 4 * heads;
  const double more = saved(model, kept) - saved(model, options_of(true));
  CHECK(more == Approx(layers * kTokens * per_token).epsilon(1e-4));

  // Four of seven products and the attention are not made again.
  EagerOptions full = options_of(true);
  const int whole = num_products(eager_step(model, full)), with_kept = num_products(eager_step(model, kept));
  CHECK(whole - with_kept >= 3 * 32);
  CHECK(whole - with_kept <= 4 * 32);

  kept.checkpointing = false;
  CHECK_THROWS_AS(eager_step(model, kept), InputError);
}

TEST_CASE("Checkpoints on the host: what is saved loses each layer's input and nothing else") {
  const ModelSpec model = find_model("llama-2-7b");
  EagerOptions away = options_of(true);
  away.offloads_checkpoints = true;
  const double input = 2.0 * kTokens * 4096;
  // The first layer's input is the embedding's output; the last one's output stays for the norm.
  CHECK(saved(model, options_of(true)) - saved(model, away) == Approx(32 * input).epsilon(1e-3));
  CHECK(eager_peaks(eager_step(model, away)).backward < eager_peaks(eager_step(model, options_of(true))).backward);
}

TEST_CASE("llm-foundry's MPT: activations of a layer by hand") {
  const ModelSpec model = read_model(R"({"model_type": "mpt", "vocab_size": 50368, "d_model": 2048, "n_layers": 24,
    "n_heads": 16, "max_seq_len": 2048, "no_bias": true, "attn_config": {"alibi": false}})",
                                     "mpt-1b");
  EagerOptions options = options_of(false);
  options.code = EagerCode::llm_foundry;
  options.keeps_output = true;
  // A layer keeps: two norms' inputs and outputs, packed q, k, v, attention's output and sums, what GELU reads and
  // makes. The attention's output is out_proj's input.
  const double hidden = 2048, heads = 16, layers = 24, vocab = 50368;
  const double per_token = 2 * (4 * hidden + 3 * hidden + hidden + 8 * hidden) + 4 * heads + 4 * 4;
  const double outside = 2 * (2 * hidden + vocab) + 4 + 2 * 4;  // last norm, logits, sums
  CHECK(saved(model, options) == Approx(kTokens * (layers * per_token + outside)).epsilon(0.005));

  const EagerPeaks now = eager_peaks(eager_step(model, options));
  options.code = EagerCode::llm_foundry_early;
  const EagerPeaks early = eager_peaks(eager_step(model, options));
  CHECK(early.saved > now.saved);
  CHECK(early.backward > now.backward);

  options.attention = EagerAttention::eager;
  CHECK_THROWS_AS(eager_step(model, options), InputError);
  options.attention = EagerAttention::sdpa;
  CHECK_THROWS_AS(eager_step(find_model("mpt-7b"), options), InputError);  // ALiBi
  CHECK_THROWS_AS(eager_step(find_model("gpt2"), options), InputError);
}

TEST_CASE("Megatron's loss works in one fp32 buffer, its GELU keeps its input") {
  const ModelSpec model = find_model("gpt2-xl");
  EagerOptions options = options_of(true);
  options.attention = EagerAttention::eager;
  const EagerPeaks transformers = eager_peaks(eager_step(model, options));
  options.code = EagerCode::megatron;
  const EagerPeaks megatron = eager_peaks(eager_step(model, options));
  const double logits = static_cast<double>(kTokens) * 50257;
  CHECK(transformers.forward.base() - megatron.forward.base() > 3.9 * logits);
  CHECK(megatron.backward < transformers.backward);
  CHECK_THROWS_AS(eager_step(find_model("llama-2-7b"), options), InputError);
}

}  // namespace zeroplan
