// The host executor: every plan trains the model with the same bits.

#include "runtime/host_executor.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "models/error.h"
#include "runtime/kernels/kernels.h"
#include "tests/catch.h"
#include "tests/host_job.h"
#include "tests/random_plan.h"

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
  const auto path = std::filesystem::temp_directory_path() / "zeroplan_executor_test";
  std::filesystem::create_directories(path);
  return path.string();
}

/// Plans whose sums are formed in one order: their results have the same bits. What differs:
/// - the shard group: sums inside groups come before sums across them, each rounded;
/// - whole gradients that stay (one rank, or reduce_each = step): backward adds to them, so tied tables and loss chunks
///   enter one by one, and fp32 sums are never rounded to 16 bits in between;
/// - hosts sum across replicas in each micro-step.
std::string sum_order(const Plan& p) {
  const bool resident =
      (p.zero_stage <= 1 && p.reduce_each == ReduceEach::step) || (p.ranks == 1 && p.gradients != Tier::host);
  const bool mixed = p.ranks == 1 && p.gradients == Tier::host && p.optimizer.hbm > 0;
  std::string key;
  if (p.accumulation > 1 || p.precision.accumulation != p.precision.gradients) {
    key += mixed ? fmt::format("mixed {} ", p.optimizer.hbm) : resident ? "resident " : "reduced ";
  }
  const int group = p.zero_stage == 0 ? p.ranks : p.shard_ranks;
  if (p.ranks > 1 && group != p.ranks && group != 1) {
    key += fmt::format("groups of {} ", group);
    if (p.accumulation > 1 && p.gradients == Tier::host) key += fmt::format("host {} ", p.optimizer.hbm);
  }
  if (p.ranks > 1 && group == 1 && p.zero_stage > 0 && p.accumulation > 1) key += "";
  return key;
}

/// Plan choices that may not change results, on top of `base`.
std::vector<Plan> variants(const Plan& base, const ModelSpec& model, Random& random, int count) {
  const int blocks = static_cast<int>(model.sequence.size());
  std::vector<Plan> plans;
  for (int tries = 0; static_cast<int>(plans.size()) < count && tries < 40 * count; ++tries) {
    Plan p = base;
    p.zero_stage = static_cast<int>(random.between(0, 3));
    std::vector<int> divisors;
    for (int d = 1; d <= p.ranks; ++d) {
      if (p.ranks % d == 0) divisors.push_back(d);
    }
    p.shard_ranks = p.zero_stage == 0 ? 1 : random.chance(70) ? p.ranks : random.pick(divisors);
    const auto split = [&](int at_most_hbm) {
      Placement place;
      place.hbm = static_cast<int>(random.between(0, at_most_hbm));
      place.host = static_cast<int>(random.between(0, blocks - place.hbm));
      place.nvme = blocks - place.hbm - place.host;
      return place;
    };
    if (p.zero_stage > 0 && random.chance(60)) {
      p.optimizer = split(blocks);
      p.update = random.chance(50) ? UpdateOn::host : UpdateOn::device;
      if (random.chance(50)) p.gradients = Tier::host;
      if (p.zero_stage == 3 && random.chance(50)) {
        p.parameters = split(blocks);
        p.update = UpdateOn::host;
      }
    }
    p.recompute = random.pick<Recompute>({Recompute::none, Recompute::selective, Recompute::full});
    p.recompute_layers = p.recompute == Recompute::none ? 0 : static_cast<int>(random.between(1, model.num_layers));
    p.prefetch_layers = static_cast<int>(random.between(0, 3));
    p.reduce_each = p.zero_stage < 2 && random.chance(30) ? ReduceEach::step : ReduceEach::micro_step;
    try {
      check_plan(p, model, "plan");
    } catch (const InputError&) {
      continue;
    }
    plans.push_back(p);
  }
  return plans;
}

struct Base {
  std::string name;
  ModelSpec model;
  Plan plan;
  HostJob job;
};

void check_invariance(const Base& base, Random& random, int count) {
  std::map<std::string, HostResult> first;
  HostJob job = base.job;
  job.options.memory.nvme_directory = scratch_directory();
  job.options.memory.poison = true;
  for (const Plan& plan : variants(base.plan, base.model, random, count)) {
    job.options.compute_threads = static_cast<int>(random.between(1, 2));
    const std::string name =
        fmt::format("{}: {} ranks, groups of {}, {}, prefetch {}, reduce each {}", base.name, plan.ranks,
                    plan.shard_ranks, describe(plan), plan.prefetch_layers, to_string(plan.reduce_each));
    INFO(name);
    const HostResult found = run_host_job(base.model, plan, job);
    for (int m = 0; m < kNumMemories; ++m) {
      INFO("memory " << to_string(static_cast<Memory>(m)));
      CHECK(found.used[static_cast<std::size_t>(m)] == found.planned[static_cast<std::size_t>(m)]);
    }
    const auto [it, fresh] = first.try_emplace(sum_order(plan), found);
    if (fresh) {
      CHECK(std::isfinite(found.losses.back()));
      CHECK(found.losses.back() != found.losses.front());
      continue;
    }
    CHECK(found.losses == it->second.losses);
    CHECK(found.norms == it->second.norms);
    CHECK((found.master == it->second.master));
    CHECK((found.moments == it->second.moments));
  }
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
        Base base{
            fmt::format("{} {}", model->family, to_string(type)), *model, plain_plan(*model, ranks, type, 20, 2), {}};
        check_invariance(base, random, ranks == 8 ? 2 : 5);
        base.plan.accumulation = 3;
        if (type == DType::bf16) base.plan.precision.accumulation = DType::fp32;
        check_invariance(base, random, 3);
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

TEST_CASE("A failing rank ends the step of every other rank with an error that names it") {
  const auto model = small_model("llama", 32, 4, 2, 2, false);
  Plan plan = plain_plan(model, 3, DType::fp32, 20, 1);
  plan.zero_stage = 3;
  plan.shard_ranks = 3;
  HostJob job;
  job.token = [](std::int64_t, std::int64_t sample, std::int64_t) { return sample == 1 ? 5000 : 3; };
  CHECK_THROWS_AS(run_host_job(model, plan, job), Error);
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
