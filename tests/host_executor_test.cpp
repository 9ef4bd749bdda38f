// The host executor: every plan trains the model with the same bits.

#include "runtime/host_executor.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "models/error.h"
#include "runtime/kernels/kernels.h"
#include "tests/catch.h"
#include "tests/child_process.h"
#include "tests/host_job.h"
#include "tests/plan_variants.h"

using namespace zeroplan;
using namespace zeroplan::tests;
using Catch::Matchers::WithinRel;

namespace {

ModelSpec small_model(const std::string& family, std::int64_t hidden, std::int64_t heads, std::int64_t kv_heads,
                      std::int64_t layers, bool tied) {
  nlohmann::json c;
  if (family == "gpt2") {
    c = {{"model_type", "gpt2"}, {"n_embd", hidden}, {"n_layer", layers}, {"n_head", heads}, {"n_positions", 64},
         {"vocab_size", 97},     {"resid_pdrop", 0}, {"embd_pdrop", 0},   {"attn_pdrop", 0}};
  } else {
    c = {{"model_type", "llama"},
         {"hidden_size", hidden},
         {"intermediate_size", 2 * hidden + 8},
         {"num_hidden_layers", layers},
         {"num_attention_heads", heads},
         {"num_key_value_heads", kv_heads},
         {"vocab_size", 97},
         {"max_position_embeddings", 64},
         {"rms_norm_eps", 1e-5},
         {"hidden_act", "silu"},
         {"tie_word_embeddings", tied}};
  }
  return read_model(c.dump(), family + ".json");
}

std::string scratch_directory() {
  static const TemporaryDirectory directory;
  return directory.path();
}

HostJob with_scratch() {
  HostJob job;
  job.options.memory.nvme_directory = scratch_directory();
  job.options.memory.poison = true;
  return job;
}

}  // namespace

TEST_CASE("ZeRO stages, offload, recompute and prefetch leave every bit of losses, weights and moments alone") {
  Random random(20261130);
  const auto llama = small_model("llama", 32, 4, 2, 3, false);
  const auto tied = small_model("llama", 24, 4, 4, 2, true);
  const auto gpt2 = small_model("gpt2", 32, 4, 4, 2, true);
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const DType type : {DType::fp32, DType::bf16}) {
      for (const ModelSpec* model : {&llama, &tied, &gpt2}) {
        const std::string name = fmt::format("{} {}", model->family, to_string(type));
        Plan base = plain_plan(*model, ranks, type, 20, 2);
        const auto plans = variants(base, *model, random, ranks == 8 ? 2 : 5);
        CHECK(check_invariance(name, *model, plans, with_scratch(), random) == "");
        base.accumulation = 3;
        if (type == DType::bf16) base.precision.accumulation = DType::fp32;
        CHECK(check_invariance(name, *model, variants(base, *model, random, 3), with_scratch(), random) == "");
      }
    }
  }
}

namespace {

/// Models, data and numbers of tests/tools/make_reference.py, as graph_reference_test.cpp has them.
double reference_value(std::int64_t i, std::int64_t seed) {
  return static_cast<double>((31 * i * (i + seed) + 17 * i + 101 * seed) % 257 - 128) / 64;
}

class ReferenceCase {
 public:
  explicit ReferenceCase(const std::string& name)
      : right(nlohmann::json::parse(std::ifstream(ZEROPLAN_TESTS_DIR "/data/reference/models.json")).at(name)),
        model(read_model(right.at("config").dump(), name)) {
    std::int64_t seed = 0;
    std::size_t next = 0;
    const auto listed = list_tensors(model);
    for (const int k : model.sequence) {
      const BlockKind& kind = model.kinds[static_cast<std::size_t>(k)];
      auto& seeds = seeds_.emplace_back();
      for (const TensorSpec& tensor : kind.tensors) {
        names_.push_back(listed[next++].name);
        seeds.push_back(tensor.tied ? -1 : seed++);
      }
    }
  }

  float initial(int block, std::int64_t element) const {
    const BlockKind& kind = model.kinds[static_cast<std::size_t>(model.sequence[static_cast<std::size_t>(block)])];
    const auto offsets = tensor_offsets(kind, DType::fp32);
    for (std::size_t t = 0; t < offsets.size(); ++t) {
      const std::int64_t i = element - offsets[t];
      if (offsets[t] < 0 || i < 0 || i >= kind.tensors[t].elements()) continue;
      const double x = reference_value(i, seeds_[static_cast<std::size_t>(block)][t]);
      if (kind.tensors[t].name.ends_with(".bias")) return static_cast<float>(x / 32);
      return static_cast<float>(kind.tensors[t].shape.size() == 2 ? x / 16 : 1 + x / 2);
    }
    return 0;
  }

  std::int32_t token(std::int64_t step, std::int64_t sample, std::int64_t position) const {
    const std::int64_t i = sample * (right.at("seq_len").get<std::int64_t>() + 1) + position;
    return static_cast<std::int32_t>((7 * i * i + 3 * i + 13 * (step % 4)) % model.vocab);
  }

  nlohmann::json right;
  ModelSpec model;

 private:
  std::vector<std::vector<std::int64_t>> seeds_;  // of each block's tensors
  std::vector<std::string> names_;
};

}  // namespace

TEST_CASE("Twenty steps of ZeRO-3 on two ranks with offload follow PyTorch's fp64 losses and gradient norms") {
  for (const char* name : {"gpt2", "llama", "llama_tied"}) {
    INFO(name);
    const ReferenceCase c(name);
    const auto& losses = c.right.at("losses");
    Plan plan = plain_plan(c.model, 2, DType::fp32, c.right.at("seq_len").get<std::int64_t>(), 1);
    plan.zero_stage = 3;
    plan.shard_ranks = 2;
    plan.gradients = Tier::host;
    plan.optimizer = plan.parameters = Placement::all(Tier::host, plan.optimizer.total());
    plan.recompute = Recompute::full;
    plan.recompute_layers = static_cast<int>(c.model.num_layers);
    HostJob job;
    job.steps = static_cast<int>(losses.size());
    job.initial = [&](int block, std::int64_t element) { return c.initial(block, element); };
    job.token = [&](std::int64_t step, std::int64_t sample, std::int64_t k) { return c.token(step, sample, k); };
    const HostResult found = run_host_job(c.model, plan, job);
    for (std::size_t step = 0; step < losses.size(); ++step) {
      INFO("step " << step);
      // fp32 roundings, grown by the steps between: the bounds of graph_reference_test.cpp.
      CHECK_THAT(found.losses[step], WithinRel(losses[step].get<double>(), 1e-6));
      CHECK_THAT(found.norms[step], WithinRel(c.right.at("norms")[step].get<double>(), 2e-5));
    }
  }
}

TEST_CASE("One sequence a micro-step: eight ranks and eight micro-steps of one rank give the same bits in fp32") {
  const auto model = small_model("llama", 32, 4, 2, 2, false);
  HostResult first;
  for (const int ranks : {1, 2, 4, 8}) {
    INFO(ranks << " ranks");
    Plan plan = plain_plan(model, ranks, DType::fp32, 20, 1);
    plan.loss_chunk_tokens = 64;
    plan.accumulation = 8 / ranks;
    const bool pure = ranks == 1 || ranks == 8;
    const HostResult found = run_host_job(model, plan, {});
    if (ranks == 1) first = found;
    // Losses of the first step come before any sum of gradients; two and four ranks sum them in pairs and fours.
    CHECK(found.losses[0] == first.losses[0]);
    if (pure) {
      CHECK(found.losses == first.losses);
      CHECK((found.master == first.master));
    } else {
      CHECK_THAT(found.losses.back(), WithinRel(first.losses.back(), 1e-5));
    }
  }
}

TEST_CASE("fp16 with a loss scale: an overflow leaves every state alone, on all ranks") {
  const auto model = small_model("llama", 32, 4, 2, 2, false);
  Plan plan = plain_plan(model, 2, DType::fp16, 20, 2);
  plan.zero_stage = 2;
  plan.shard_ranks = 2;
  HostJob job;
  job.loss_scale = 1024;
  const HostResult right = run_host_job(model, plan, job);
  CHECK(right.losses.back() != right.losses.front());
  job.loss_scale = std::ldexp(1.0, 40);
  job.steps = 2;
  const HostResult overflow = run_host_job(model, plan, job);
  CHECK(std::isnan(overflow.norms[0]));
  for (const std::byte b : overflow.moments) REQUIRE(b == std::byte{0});
}

namespace {

/// Gradient of the output matrix after one step: the first moment is (1 - beta1) of it.
std::vector<double> head_gradient(const ModelSpec& model, DType type, const HostResult& result, double beta1) {
  std::size_t start = 0;
  for (std::size_t b = 0; b + 1 < model.sequence.size(); ++b) {
    const BlockKind& kind = model.kinds[static_cast<std::size_t>(model.sequence[b])];
    start += static_cast<std::size_t>(flat_layout(kind, type, 1).padded);
  }
  const BlockKind& head = model.kinds[static_cast<std::size_t>(model.sequence.back())];
  const auto tensor = static_cast<std::size_t>(head.head_tensor);
  start += static_cast<std::size_t>(tensor_offsets(head, type)[tensor]);
  std::vector<double> gradient;
  for (std::size_t i = 0; i < static_cast<std::size_t>(head.tensors[tensor].elements()); ++i) {
    float first = 0;
    std::memcpy(&first, result.moments.data() + 2 * (start + i) * sizeof first, sizeof first);
    gradient.push_back(first / (1 - beta1));
  }
  return gradient;
}

/// A number of 7 bits that looks random, the same for an element of a tensor whatever the layout.
float short_weight(const ModelSpec& model, DType type, int block, std::int64_t element) {
  const BlockKind& kind = model.kinds[static_cast<std::size_t>(model.sequence[static_cast<std::size_t>(block)])];
  std::int64_t offset = 0, tensor = 0;
  for (const std::int64_t begins : tensor_offsets(kind, type)) {
    if (begins <= element) offset = begins, ++tensor;
  }
  const auto key = static_cast<std::uint64_t>(((element - offset) * 8 + block) * 16 + tensor);
  const std::uint64_t x = key * 0x9e3779b97f4a7c15u;
  return static_cast<float>(static_cast<int>(((x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u) >> 57) - 64) / 512;
}

/// Root of the mean squared difference over that of `right`.
double rms_error(const std::vector<double>& found, const std::vector<double>& right) {
  double wrong = 0, all = 0;
  for (std::size_t i = 0; i < right.size(); ++i) {
    wrong += (found[i] - right[i]) * (found[i] - right[i]);
    all += right[i] * right[i];
  }
  return std::sqrt(wrong / all);
}

}  // namespace

TEST_CASE("What chunks of the loss cost in bf16: the output matrix's gradient against fp32") {
  const ModelSpec model = read_model(R"({"model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false})",
                                     "chunks.json");
  HostJob job;
  job.steps = 1;
  job.token = [](std::int64_t, std::int64_t sample, std::int64_t k) {
    return static_cast<std::int32_t>((static_cast<std::uint64_t>(sample * 1000 + k) * 0x9e3779b97f4a7c15u) >> 56);
  };
  const auto gradient = [&](DType type, std::int64_t chunks, DType sums) {
    Plan plan = plain_plan(model, 1, type, 128, 8);
    plan.clip_norm = 0;
    plan.precision.accumulation = sums;
    plan.loss_chunk_tokens = 1024 / chunks;
    job.initial = [&](int block, std::int64_t element) { return short_weight(model, type, block, element); };
    return head_gradient(model, type, run_host_job(model, plan, job), job.adam.beta1);
  };
  const auto right = gradient(DType::fp32, 1, DType::fp32);
  CHECK(rms_error(gradient(DType::fp32, 16, DType::fp32), right) < 1e-6);
  const auto error = [&](std::int64_t chunks, DType sums) {
    return rms_error(gradient(DType::bf16, chunks, sums), right);
  };
  const double once = error(1, DType::bf16), many = error(16, DType::bf16), most = error(256, DType::bf16);
  const double wide = error(256, DType::fp32);
  // The figures of docs/runtime.md.
  CHECK_THAT(once, WithinRel(2.3e-3, 0.1));
  CHECK_THAT(error(4, DType::bf16), WithinRel(2.9e-3, 0.1));
  CHECK_THAT(many, WithinRel(4.7e-3, 0.1));
  CHECK_THAT(most, WithinRel(1.74e-2, 0.1));
  CHECK_THAT(wide, WithinRel(1.6e-3, 0.1));
}

TEST_CASE("A failing rank ends the step of every other rank with an error that names it") {
  const auto model = small_model("llama", 32, 4, 2, 2, false);
  Plan plan = plain_plan(model, 3, DType::fp32, 20, 1);
  plan.zero_stage = 3;
  plan.shard_ranks = 3;
  plan.accumulation = 2;
  HostJob job;
  job.options.memory.nvme_directory = scratch_directory();
  // Token 5000 is beyond the vocabulary: a kernel throws in the middle of the third step's second micro-step.
  job.token = [](std::int64_t step, std::int64_t sample, std::int64_t) { return step == 2 && sample == 4 ? 5000 : 3; };
  CHECK_THROWS_WITH(run_host_job(model, plan, job), HasText("5000"));
  const int blocks = plan.optimizer.total();
  for (const Tier tier : {Tier::host, Tier::nvme}) {
    INFO("states in " << to_string(tier));
    plan.optimizer = plan.parameters = Placement::all(tier, blocks);
    plan.gradients = Tier::host;
    CHECK_THROWS_WITH(run_host_job(model, plan, job), HasText("5000"));
  }
}

TEST_CASE("What has no kernel is refused before anything is allocated") {
  const auto model = read_model(R"({"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
    "max_position_embeddings": 64})",
                                "qwen3.json");
  CHECK_THROWS_AS(run_host_job(model, plain_plan(model, 1, DType::bf16, 16, 1), {}), InputError);
  const auto small = small_model("llama", 32, 4, 2, 2, false);
  Plan plan = plain_plan(small, 1, DType::bf16, 16, 1);
  plan.zero_stage = 1;
  plan.optimizer = Placement::all(Tier::nvme, plan.optimizer.total());
  CHECK_THROWS_AS(run_host_job(small, plan, {}), InputError);
}
