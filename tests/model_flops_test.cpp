// FLOPs and kept activations against hand-checked values (reference: transformer arithmetic, sections 2.4 and 3).

#include <cmath>

#include "models/block_program.h"
#include "tests/catch.h"
#include "tests/model_test_support.h"

using namespace zeroplan;
using zeroplan::test::first_layer;
using zeroplan::test::kept_bytes;

namespace {

struct FlopRow {
  const char* model;
  std::int64_t seq;
  double matrix_elements;  // N_mm
  double full, causal;     // GFLOP a token, training
};

// Own counts published with the formulas 6 N_mm + 12 s a d L and 6 N_mm + 6 s a d L.
constexpr FlopRow kRows[] = {
    {"gpt2-xl", 1024, 1554971200, 10.27, 9.80},
    {"gpt3-175b", 2048, 174563733504, 1076.37, 1061.88},
    {"mt-nlg-530b", 2048, 529530880000, 3230.03, 3203.61},
    {"llama-2-7b", 4096, 6607077376, 46.08, 42.86},
    {"llama-3-8b", 8192, 7504658432, 57.91, 51.47},
    {"llama-3-70b", 8192, 69501714432, 481.43, 449.22},
    {"llama-3.1-405b", 8192, 403747897344, 2625.42, 2523.96},
    {"mixtral-8x7b", 4096, 12748587008, 82.93, 79.71},
    {"qwen3-30b-a3b", 4096, 3041656832, 27.91, 23.08},
    {"deepseek-v3", 4096, 36624596992, 281.15, 250.45},
};

double sum_forward(const ModelSpec& model, TokenShape shape, bool attention) {
  double sum = 0;
  for (const int index : model.sequence) {
    const BlockKind& kind = model.kinds[static_cast<std::size_t>(index)];
    for (const GraphOp& op : kind.ops) {
      if ((op.kernel == Kernel::attention) == attention) sum += forward_flops(op, shape).base();
    }
    if (!attention && kind.role == BlockRole::head) sum += head_flops(kind, model.hidden, shape).base();
  }
  return sum;
}

}  // namespace

TEST_CASE("Matrix elements and model FLOPs agree with the check values") {
  for (const FlopRow& row : kRows) {
    const ModelSpec model = find_model(row.model);
    const TokenShape shape{1, row.seq};
    CAPTURE(row.model);
    const auto tokens = static_cast<double>(shape.tokens());
    CHECK(sum_forward(model, shape, false) == Approx(2 * row.matrix_elements * tokens).epsilon(1e-12));
    const double full = model_flops(model, shape, AttentionCount::full).base() / tokens / 1e9;
    const double causal = model_flops(model, shape, AttentionCount::causal).base() / tokens / 1e9;
    CHECK(std::abs(full - row.full) < 0.0051);
    // The table drops the 1 of (s + 1): at most 6 a d L FLOPs a token, below half a printed digit but for the largest.
    CHECK(std::abs(causal - row.causal) < 0.0051 + 6e-9 * static_cast<double>(model.hidden * model.num_layers) * 1.5);
  }
}

TEST_CASE("A micro-batch of two sequences costs twice one of one") {
  const ModelSpec model = find_model("gemma-3-1b");
  CHECK(model_flops(model, {2, 1000}, AttentionCount::causal).base() ==
        Approx(2 * model_flops(model, {1, 1000}, AttentionCount::causal).base()));
}

TEST_CASE("Windows and chunks are counted key by key") {
  GraphOp op;
  op.kernel = Kernel::attention;
  op.attention.heads = 3;
  op.attention.qk_dim = 8;
  op.attention.v_dim = 4;
  for (const bool chunked : {false, true}) {
    for (const std::int64_t window : {0, 1, 5, 16, 17, 40}) {
      op.attention.window = window;
      op.attention.chunked = chunked;
      constexpr std::int64_t kSeq = 17;
      double keys = 0;  // brute force over queries
      for (std::int64_t i = 0; i < kSeq; ++i) {
        std::int64_t seen = i + 1;
        if (window > 0) seen = chunked ? i % window + 1 : std::min(i + 1, window);
        keys += static_cast<double>(seen);
      }
      CAPTURE(chunked, window);
      CHECK(forward_flops(op, {2, kSeq}).base() == Approx(2 * keys * 2 * (8 + 4) * 3));
      CHECK(backward_flops(op, {2, kSeq}).base() == Approx(2.5 * 2 * keys * 2 * (8 + 4) * 3));
    }
  }
  op.attention.causal = false;
  op.attention.window = 0;
  CHECK(forward_flops(op, {1, 10}).base() == Approx(2.0 * 10 * 10 * 12 * 3));
}

TEST_CASE("Backward of a linear is twice its forward, and pointwise kernels count nothing") {
  for (const char* name : {"llama-2-7b", "qwen3-30b-a3b", "deepseek-v2-lite", "bert-base-uncased"}) {
    const ModelSpec model = find_model(name);
    for (const GraphOp& op : first_layer(model).ops) {
      const double forward = forward_flops(op, {1, 64}).base();
      const double backward = backward_flops(op, {1, 64}).base();
      if (op.kernel == Kernel::attention) {
        CHECK(backward == Approx(2.5 * forward));
      } else {
        CHECK(backward == 2 * forward);
      }
      if (op.pointwise) CHECK(forward == 0);
    }
  }
}

TEST_CASE("A fused Llama layer keeps 2(6h + 2rh + 3f) + 4a + 8 bytes a token") {
  struct Row {
    const char* model;
    std::int64_t hidden, heads, kv_heads, width, bytes;
  };
  // Last column: check values of the fused norm + fused SwiGLU form.
  const Row rows[] = {{"llama-2-7b", 4096, 32, 32, 11008, 131720}, {"llama-3-8b", 4096, 32, 8, 14336, 139400},
                      {"llama-3-70b", 8192, 64, 8, 28672, 274696}, {"llama-3.1-405b", 16384, 128, 8, 53248, 520712},
                      {"llama-3.2-1b", 2048, 32, 8, 8192, 75912},  {"qwen2.5-7b", 3584, 28, 4, 18944, 158840},
                      {"tinyllama-1.1b", 2048, 32, 4, 5632, 59528}};
  for (const Row& row : rows) {
    CAPTURE(row.model);
    const std::int64_t formula =
        2 * (6 * row.hidden + 2 * row.hidden * row.kv_heads / row.heads + 3 * row.width) + 4 * row.heads + 8;
    CHECK(formula == row.bytes);
    CHECK(kept_bytes(first_layer(find_model(row.model))) == row.bytes);
  }
}

TEST_CASE("Layers of other families keep what their kernels read") {
  const auto kept = [](const char* name) { return kept_bytes(first_layer(find_model(name))); };
  // GPT-2 without dropout: 32h + 4a + 16.
  CHECK(kept("gpt2-xl") == 32 * 1600 + 4 * 25 + 16);
  CHECK(kept("gpt3-175b") == 32 * 12288 + 4 * 96 + 16);
  // One norm instead of two (GPT-J, f = 4h): 4h and one pair of statistics less.
  CHECK(kept("gpt-j-6b") == 28 * 4096 + 4 * 16 + 8);
  // QK-norm per head: + 2(a + k)d + 4(a + k).
  const std::int64_t h = 2560, a = 32, k = 8, d = 128, f = 9728;
  CHECK(kept("qwen3-4b") == 8 * h + 4 * a * d + 4 * k * d + 4 * a + 6 * f + 8 + 2 * (a + k) * d + 4 * (a + k));
  // Gemma 2: each extra norm keeps its input (2h) and a statistic.
  CHECK(kept("gemma-2-2b") == 8 * 2304 + 4 * 8 * 256 + 4 * 4 * 256 + 4 * 8 + 6 * 9216 + 8 + 2 * (2 * 2304 + 4));
  // DeepSeek-V2-Lite, dense first layer; attention without q_a: 4h + 4kr + 2dr + 4a(dn+dr) + 2a(dn+dv) + 2a dv + 4a
  // + 8.
  const std::int64_t mla = 4 * 2048 + 4 * 512 + 2 * 64 + 4 * 16 * 192 + 2 * 16 * 256 + 2 * 16 * 128 + 4 * 16 + 8;
  CHECK(kept("deepseek-v2-lite") == mla + 4 * 2048 + 4 + 6 * 10944);
}

TEST_CASE("A Mixtral layer keeps the rows of its experts") {
  const ModelSpec model = find_model("mixtral-8x7b");
  const std::int64_t h = 4096, a = 32, k = 8, d = 128, f = 14336, experts = 8, top = 2;
  // Attention side and norms as Llama; then gathered rows 2Kh, gate and up 4Kf, product 2Kf, expert output 2Kh,
  // top-k weights and indices 8K, fp32 probabilities 4E.
  const std::int64_t moe = 2 * top * h + 6 * top * f + 2 * top * h + 8 * top + 4 * experts;
  CHECK(kept_bytes(first_layer(model)) == 8 * h + 4 * a * d + 4 * k * d + 4 * a + 8 + moe);
}

TEST_CASE("Every graph is well formed") {
  for (const std::string& name : model_names()) {
    const ModelSpec model = find_model(name);
    for (const BlockKind& kind : model.kinds) {
      CAPTURE(name, kind.name);
      std::vector<bool> made(kind.values.size(), false);
      std::vector<int> used(kind.tensors.size(), 0);
      for (const int v : {kind.input, kind.memory}) {
        if (v >= 0) made[static_cast<std::size_t>(v)] = true;
      }
      for (const GraphOp& op : kind.ops) {
        CAPTURE(op.name);
        for (const int v : op.inputs) CHECK(made.at(static_cast<std::size_t>(v)));
        for (const int v : op.outputs) {
          CHECK_FALSE(made.at(static_cast<std::size_t>(v)));
          made[static_cast<std::size_t>(v)] = true;
        }
        for (const int v : op.keeps) CHECK(made.at(static_cast<std::size_t>(v)));
        for (const int t : op.tensors) ++used.at(static_cast<std::size_t>(t));
        if (op.in_place >= 0) {
          const int from = op.inputs.at(static_cast<std::size_t>(op.in_place));
          CHECK(kind.values[static_cast<std::size_t>(from)].per_token ==
                kind.values[static_cast<std::size_t>(op.outputs[0])].per_token);
        }
      }
      for (std::size_t t = 0; t < used.size(); ++t) {
        const bool output_matrix = static_cast<int>(t) == kind.head_tensor || static_cast<int>(t) == kind.head_bias;
        CHECK(used[t] == (output_matrix ? 0 : 1));
      }
      CHECK(std::all_of(made.begin(), made.end(), [](bool b) { return b; }));
      REQUIRE(kind.output >= 0);
      CHECK(kind.values[static_cast<std::size_t>(kind.output)].per_token == model.hidden);
    }
  }
}

TEST_CASE("Every block has a program in each recompute mode, with adapters too") {
  for (const std::string& name : model_names()) {
    for (const bool adapters : {false, true}) {
      ModelSpec model = find_model(name);
      if (adapters) apply_lora(model, 4);
      for (const BlockKind& kind : model.kinds) {
        CAPTURE(name, kind.name, adapters);
        for (const Recompute mode : {Recompute::none, Recompute::selective, Recompute::full}) {
          CHECK_NOTHROW(build_program(kind, mode));
        }
      }
    }
  }
}

TEST_CASE("Selective recompute leaves 2(4h + 2rh + 2f) + 4a + 8 of a Llama layer") {
  const BlockKind kind = first_layer(find_model("llama-2-7b"));
  const BlockProgram program = build_program(kind, Recompute::selective);
  std::int64_t bytes = 0;
  for (const int slot : program.saved) {
    const Value& value = kind.values[static_cast<std::size_t>(program.slots[static_cast<std::size_t>(slot)].value)];
    bytes += value.per_token * (value.type == ValueType::activation ? 2 : 4);
  }
  CHECK(bytes == 2 * (4 * 4096 + 2 * 4096 + 2 * 11008) + 4 * 32 + 8);
}
