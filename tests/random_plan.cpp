#include "tests/random_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <set>

namespace zeroplan::tests {

std::int64_t Random::between(std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
}

// --- models -----------------------------------------------------------------------------------------

const ModelSpec& catalog_model(Random& random) {
  static const std::vector<ModelSpec> all = [] {
    std::vector<ModelSpec> models;
    for (const std::string& name : model_names()) models.push_back(find_model(name));
    return models;
  }();
  return random.pick(all);
}

ModelSpec shortened(const ModelSpec& model, int layers, Random& random) {
  const auto kind = [&](std::size_t i) -> const BlockKind& {
    return model.kinds[static_cast<std::size_t>(model.sequence[i])];
  };
  std::vector<std::size_t> candidates;
  std::set<std::size_t> keep;
  bool decoder = false;
  for (std::size_t i = 0; i < model.sequence.size(); ++i) {
    if (kind(i).role != BlockRole::layer) continue;
    const bool first_of_decoder = kind(i).memory >= 0 && !decoder;
    decoder = decoder || first_of_decoder;
    if (kind(i).ends_encoder || first_of_decoder) {
      keep.insert(i);
    } else {
      candidates.push_back(i);
    }
  }
  while (static_cast<int>(keep.size()) < layers && !candidates.empty()) {
    const auto at = random.between(0, static_cast<std::int64_t>(candidates.size()) - 1);
    keep.insert(candidates[static_cast<std::size_t>(at)]);
    candidates.erase(candidates.begin() + at);
  }
  ModelSpec cut = model;
  cut.sequence.clear();
  cut.num_layers = 0;
  for (std::size_t i = 0; i < model.sequence.size(); ++i) {
    const bool layer = kind(i).role == BlockRole::layer;
    if (layer && !keep.contains(i)) continue;
    cut.sequence.push_back(model.sequence[i]);
    cut.num_layers += layer ? 1 : 0;
  }
  return cut;
}

std::string random_config(Random& random) {
  const auto layers = random.chance(90) ? random.between(1, 4) : random.between(5, 24);
  const auto head_dim = 8 * random.between(1, 16);
  const auto kv_heads = random.between(1, 4);
  const auto heads = kv_heads * random.between(1, 4);
  const auto hidden = random.chance(50) ? heads * head_dim : 8 * random.between(1, 64);
  const auto inner = random.between(1, 3000);
  const auto vocab = random.between(2, 70'000);
  const bool tied = random.chance(50);
  switch (random.between(0, 2)) {
    case 0:
      return fmt::format(
          R"({{"model_type": "llama", "hidden_size": {}, "num_hidden_layers": {}, "num_attention_heads": {}, )"
          R"("num_key_value_heads": {}, "head_dim": {}, "intermediate_size": {}, "vocab_size": {}, )"
          R"("max_position_embeddings": 8192, "tie_word_embeddings": {}}})",
          hidden, layers, heads, kv_heads, head_dim, inner, vocab, tied);
    case 1:
      return fmt::format(
          R"({{"model_type": "gpt2", "n_embd": {}, "n_layer": {}, "n_head": {}, "n_inner": {}, "vocab_size": {}, )"
          R"("n_positions": 4096, "tie_word_embeddings": {}}})",
          heads * head_dim, layers, heads, inner, vocab, tied);
    default: {
      const auto experts = random.between(2, 8);
      return fmt::format(
          R"({{"model_type": "mixtral", "hidden_size": {}, "num_hidden_layers": {}, "num_attention_heads": {}, )"
          R"("num_key_value_heads": {}, "head_dim": {}, "intermediate_size": {}, "vocab_size": {}, )"
          R"("num_local_experts": {}, "num_experts_per_tok": {}, "max_position_embeddings": 8192, )"
          R"("tie_word_embeddings": {}}})",
          hidden, layers, heads, kv_heads, head_dim, inner, vocab, experts, random.between(1, experts), tied);
    }
  }
}

ModelSpec random_model(Random& random) {
  const auto draw = random.between(0, 9);
  if (draw == 0) return catalog_model(random);
  if (draw <= 4) return read_model(random_config(random), "random.json");
  return shortened(catalog_model(random), static_cast<int>(random.between(1, 4)), random);
}

ModelSpec random_readable_model(Random& random) {
  return random.chance(50) ? catalog_model(random) : read_model(random_config(random), "random.json");
}

// --- machines ---------------------------------------------------------------------------------------

MachineSpec random_machine(Random& random) {
  static const std::vector<MachineSpec> all = [] {
    std::vector<MachineSpec> machines;
    for (const std::string& name : machine_names()) machines.push_back(find_machine(name));
    for (const std::string& gpu : gpu_names()) {
      for (const int count : {1, 2, 4}) machines.push_back(machine_for({count, gpu}, 1));
    }
    return machines;
  }();
  MachineSpec machine = random.pick(all);
  if (random.chance(30)) set_nodes(machine, static_cast<int>(random.between(2, 16)));
  if (random.chance(20)) set_nvme(machine, random.chance(50) ? "4x2TB" : "1x1TB@3GB/s");
  if (random.chance(20)) set_host_memory(machine, Bytes(static_cast<double>(random.between(16, 4096)) * kGiB));
  return machine;
}

// --- plans ------------------------------------------------------------------------------------------

namespace {

/// A divisor that is a part of a node or whole nodes.
int random_divisor(Random& random, int of, int ranks_per_node) {
  std::vector<int> divisors;
  for (int d = 1; d <= of; ++d) {
    if (of % d == 0 && (ranks_per_node % d == 0 || d % ranks_per_node == 0)) divisors.push_back(d);
  }
  return random.pick(divisors);
}

Placement random_placement(Random& random, int blocks, int least_hbm = 0) {
  Placement p;
  const auto draw = random.between(0, 5);
  if (draw == 0) return Placement::all(Tier::hbm, blocks);
  if (least_hbm == 0 && draw == 1) return Placement::all(Tier::host, blocks);
  if (least_hbm == 0 && draw == 2) return Placement::all(Tier::nvme, blocks);
  p.hbm = static_cast<int>(random.between(least_hbm, blocks));
  p.host = static_cast<int>(random.between(0, blocks - p.hbm));
  p.nvme = blocks - p.hbm - p.host;
  return p;
}

Precision random_precision(Random& random) {
  Precision p;
  const auto draw = random.between(0, 9);
  p.weights = draw < 6 ? DType::bf16 : draw < 8 ? DType::fp16 : DType::fp32;
  p.master = p.weights != DType::fp32;
  p.split_master = p.weights == DType::bf16 && random.chance(30);
  p.states = random.chance(70) ? DType::fp32 : DType::bf16;
  p.gradients = p.weights;
  p.accumulation = random.chance(50) ? DType::fp32 : p.gradients;
  return p;
}

void choose_offload(Random& random, Plan& plan, int blocks) {
  plan.optimizer = plan.parameters = Placement::all(Tier::hbm, blocks);
  plan.gradients = Tier::hbm;
  plan.update = random.chance(60) ? UpdateOn::host : UpdateOn::device;
  if (plan.zero_stage == 0 || random.chance(30)) return;
  plan.optimizer = random_placement(random, blocks);
  if (plan.zero_stage == 3 && random.chance(60)) {
    plan.parameters = random_placement(random, blocks, plan.optimizer.hbm);
    if (plan.parameters.hbm < blocks) plan.update = UpdateOn::host;
  }
  if (plan.optimizer.hbm < blocks && random.chance(50)) plan.gradients = Tier::host;
}

}  // namespace

Plan random_plan(Random& random, const ModelSpec& model, int ranks, int ranks_per_node, std::int64_t max_micro_layers) {
  const auto blocks = static_cast<int>(model.sequence.size());
  const auto layers = static_cast<int>(model.num_layers);
  Plan p;
  p.ranks = ranks;
  p.zero_stage = static_cast<int>(random.between(0, 3));
  p.shard_ranks = p.zero_stage == 0 ? 1 : random.chance(60) ? ranks : random_divisor(random, ranks, ranks_per_node);
  p.seq_len = random.chance(50) ? std::int64_t{1} << random.between(4, 13) : random.between(1, 3000);
  p.micro_batch = random.between(1, 4);
  const std::int64_t most = std::clamp<std::int64_t>(max_micro_layers / std::max(1, layers), 1, 40);
  p.accumulation = random.chance(30) ? 1 : random.between(1, most);
  p.precision = random_precision(random);
  p.loss_scaling = p.precision.weights == DType::fp16 ? LossScaling::dynamic : LossScaling::none;
  choose_offload(random, p, blocks);
  p.recompute = random.pick<Recompute>({Recompute::none, Recompute::selective, Recompute::full});
  if (p.recompute != Recompute::none) {
    p.recompute_layers = random.chance(50) ? layers : static_cast<int>(random.between(1, layers));
  }
  p.prefetch_layers = static_cast<int>(random.between(0, 3));
  p.reduce_each = p.zero_stage >= 2 || random.chance(50) ? ReduceEach::micro_step : ReduceEach::step;
  if (p.gradients == Tier::host && p.zero_stage < 2) p.reduce_each = ReduceEach::micro_step;
  p.loss_chunk_tokens =
      random.chance(50) ? 2048 : random.between(1, 4) * std::max<std::int64_t>(1, p.micro_step().tokens() / 7);
  p.clip_norm = random.chance(50) ? 1.0 : 0.0;
  check_plan(p, model, "random plan");
  return p;
}

Scenario random_scenario(Random& random) {
  Scenario s;
  s.model = random_model(random);
  const int ranks = static_cast<int>(random.chance(20) ? 1 : random.chance(50) ? random.between(2, 64) : 8);
  s.plan = random_plan(random, s.model, ranks, ranks);
  return s;
}

std::string name_of(const Scenario& scenario) {
  std::string blocks;
  for (const int kind : scenario.model.sequence) blocks += fmt::format("{} ", kind);
  return fmt::format("{} {} blocks [{}] {}", scenario.model.name, scenario.model.config, blocks,
                     plan_keys_json(scenario.plan, -1));
}

std::int64_t slow_cases(std::int64_t otherwise) {
  const char* text = std::getenv("ZEROPLAN_PROPERTY_CASES");
  return text == nullptr ? otherwise : std::max<std::int64_t>(1, std::atoll(text));
}

}  // namespace zeroplan::tests
