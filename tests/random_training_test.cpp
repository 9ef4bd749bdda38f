// Random small GPT-2, Llama and Mistral models under random plans: twenty steps, the same bits for plans that form
// their sums in the same order.

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "models/error.h"
#include "tests/catch.h"
#include "tests/child_process.h"
#include "tests/plan_variants.h"

using namespace zeroplan;
using namespace zeroplan::tests;
using Json = nlohmann::json;

namespace {

constexpr std::int64_t kMostPositions = 48;

Json random_gpt2(Random& random) {
  const std::int64_t heads = random.between(1, 5);
  return {{"model_type", "gpt2"},
          {"n_embd", heads * random.between(1, 9)},
          {"n_layer", random.between(1, 4)},
          {"n_head", heads},
          {"n_positions", kMostPositions},
          {"vocab_size", random.between(5, 130)},
          {"activation_function", random.pick<std::string>({"gelu_new", "gelu", "relu"})}};
}

// Heads may be wider or narrower than hidden / heads, and hidden may be odd; a rotary head is even.
Json random_llama(Random& random) {
  const std::int64_t kv_heads = random.between(1, 3), heads = kv_heads * random.between(1, 4);
  const std::int64_t head_dim = 2 * random.between(1, 6);
  const bool stated = random.chance(40);
  Json c = {{"model_type", random.chance(30) ? "mistral" : "llama"},
            {"hidden_size", stated ? random.between(3, 50) : heads * head_dim},
            {"intermediate_size", random.between(1, 90)},
            {"num_hidden_layers", random.between(1, 4)},
            {"num_attention_heads", heads},
            {"num_key_value_heads", kv_heads},
            {"vocab_size", random.between(5, 130)},
            {"max_position_embeddings", kMostPositions},
            {"rms_norm_eps", 1e-5},
            {"hidden_act", "silu"},
            {"tie_word_embeddings", random.chance(40)}};
  if (stated) c["head_dim"] = head_dim;
  if (c["model_type"] == "mistral") c["sliding_window"] = random.between(1, kMostPositions);
  if (c["model_type"] == "llama" && random.chance(30)) c["attention_bias"] = true;
  if (c["model_type"] == "llama" && random.chance(30)) c["mlp_bias"] = true;
  return c;
}

Plan random_base(Random& random, const ModelSpec& model) {
  const int ranks = random.pick<int>({1, 2, 2, 3, 4, 4, 6, 8});
  const DType type = random.pick<DType>({DType::fp32, DType::bf16, DType::bf16, DType::fp16});
  Plan plan =
      plain_plan(model, ranks, type, random.chance(10) ? 1 : random.between(2, kMostPositions), random.between(1, 3));
  plan.accumulation = random.chance(50) ? 1 : random.between(2, 4);
  plan.loss_chunk_tokens = random.chance(20) ? std::int64_t{1} << 40 : random.between(1, 64);
  plan.clip_norm = type == DType::fp16 ? 1.0 : random.pick<double>({0.0, 0.05, 1.0, 1.0});
  if (random.chance(50)) plan.precision.accumulation = DType::fp32;
  if (type == DType::bf16 && random.chance(40)) plan.precision.split_master = true;
  if (random.chance(20)) plan.precision.states = DType::bf16;
  return plan;
}

/// Empty, or what was wrong. One seed is one model, one batch shape and `plans` plans.
std::string check_case(std::uint64_t seed, int plans, int* compared) {
  Random random(seed);
  const Json config = random.chance(40) ? random_gpt2(random) : random_llama(random);
  const ModelSpec model = read_model(config.dump(), "random.json");
  const Plan base = random_base(random, model);
  HostJob job;
  job.steps = 20;
  job.adam.learning_rate = 3e-3;
  if (base.loss_scaling == LossScaling::dynamic) job.loss_scale = 256;
  const TemporaryDirectory scratch;
  job.options.memory.nvme_directory = scratch.path();
  job.options.memory.poison = true;
  const std::string name =
      fmt::format("seed {}, {}, {}{}{}, states {}, sums {}, clip {}, {} tokens, chunk {}", seed, config.dump(),
                  to_string(base.precision.weights), base.precision.master ? " master" : "",
                  base.precision.split_master ? " split" : "", to_string(base.precision.states),
                  to_string(base.precision.accumulation), base.clip_norm, base.seq_len, base.loss_chunk_tokens);
  return check_invariance(name, model, variants(base, model, random, plans), job, random, compared);
}

}  // namespace

TEST_CASE("Random models under random plans: the same bits after twenty steps") {
  int compared = 0;
  for (std::uint64_t seed = 1; seed <= 12; ++seed) CHECK(check_case(seed, 3, &compared) == "");
  CHECK(compared > 8);
}

TEST_CASE("Hundreds of random models under random plans: the same bits after twenty steps", "[.slow]") {
  constexpr std::uint64_t kFirst = 1000;
  int compared = 0;
  const auto cases = static_cast<std::uint64_t>(slow_cases(150));
  for (std::uint64_t seed = kFirst; seed < kFirst + cases; ++seed) CHECK(check_case(seed, 4, &compared) == "");
  WARN(cases << " cases from seed " << kFirst << ", " << compared << " pairs of plans compared");
}

namespace {

Json plain_llama(std::int64_t layers) {
  return {{"model_type", "llama"},    {"hidden_size", 8},
          {"intermediate_size", 12},  {"num_hidden_layers", layers},
          {"num_attention_heads", 2}, {"num_key_value_heads", 1},
          {"vocab_size", 11},         {"max_position_embeddings", 300},
          {"hidden_act", "silu"},     {"tie_word_embeddings", true},
          {"rms_norm_eps", 1e-5}};
}

/// Losses of two plans that must agree: plain ZeRO-0, and ZeRO-3 with all states on the host and full recompute.
void check_extreme(const Json& config, int ranks, std::int64_t seq_len, std::int64_t accumulation, int steps,
                   std::int64_t chunk = 24) {
  INFO(config.dump() << ", " << ranks << " ranks, " << seq_len << " tokens x " << accumulation);
  const ModelSpec model = read_model(config.dump(), "extreme.json");
  std::vector<Plan> plans(2, plain_plan(model, ranks, DType::bf16, seq_len, 1));
  for (Plan& plan : plans) {
    plan.accumulation = accumulation;
    plan.loss_chunk_tokens = chunk;
  }
  plans[1].zero_stage = 3;
  plans[1].shard_ranks = ranks;
  plans[1].gradients = Tier::host;
  plans[1].optimizer = plans[1].parameters = Placement::all(Tier::host, plans[1].optimizer.total());
  plans[1].recompute = Recompute::full;
  plans[1].recompute_layers = static_cast<int>(model.num_layers);
  Random random(1);
  HostJob job;
  job.steps = steps;
  int compared = 0;
  CHECK(check_invariance("extreme", model, plans, job, random, &compared) == "");
  CHECK(compared == (ranks > 1 || accumulation == 1 ? 1 : 0));
}

}  // namespace

TEST_CASE("Extremes: many layers, micro-steps and ranks; one layer, one token, one row of logits at a time") {
  check_extreme(plain_llama(200), 2, 4, 1, 2);
  check_extreme(plain_llama(1), 2, 3, 200, 2);
  check_extreme(plain_llama(1), 16, 5, 1, 3);
  check_extreme(plain_llama(1), 2, 1, 1, 3, 1);
  check_extreme(plain_llama(2), 1, 300, 1, 3, 1);
  check_extreme(plain_llama(2), 3, 299, 1, 2, std::int64_t{1} << 40);
}

TEST_CASE("A thousand layers; a thousand micro-steps", "[.slow]") {
  check_extreme(plain_llama(1000), 2, 4, 1, 2);
  check_extreme(plain_llama(4), 2, 3, 1000, 2);
}
