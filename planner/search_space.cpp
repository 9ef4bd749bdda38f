#include "planner/search_space.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "models/error.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kDefaultTokens = 512 * 1024;  // global batch (spec, Defaults)
constexpr std::int64_t kDefaultSeqLen = 4096;

std::int64_t default_batch(std::int64_t seq_len, std::int64_t multiple) {
  const std::int64_t sequences = (kDefaultTokens + seq_len - 1) / seq_len;
  return (sequences + multiple - 1) / multiple * multiple;
}

/// What a default batch of `ranks` shares takes from the search when a share is a prime: no micro-batch but 1 and the
/// whole share. Empty otherwise; 2 and 3 leave out nothing worth a word.
std::string prime_share(std::int64_t batch, std::int64_t ranks) {
  const std::int64_t share = batch / ranks;
  const auto divides = [](std::int64_t number) { return [=](std::int64_t d) { return number % d == 0; }; };
  std::vector<std::int64_t> factors;
  for (std::int64_t d = 2; d * d <= share; ++d) factors.push_back(d);
  if (share < 5 || std::ranges::any_of(factors, divides(share))) return "";
  const std::int64_t better = (share + 3) / 4 * 4;  // the next with 2 and 4
  std::vector<std::int64_t> divisors;
  for (std::int64_t d = 1; d <= better; ++d) {
    if (better % d == 0) divisors.push_back(d);
  }
  return fmt::format(
      "the default batch, {} sequences on {}, leaves micro-batches of 1 and {} alone: {} is a prime; --global-batch {} "
      "has {}",
      batch, ranks == 1 ? "1 rank" : fmt::format("{} ranks", ranks), share, share, better * ranks,
      fmt::join(divisors, ", "));
}

}  // namespace

Workload workload_of(const Request& request, std::vector<Assumption>& assumptions, std::vector<std::string>& warnings) {
  Workload w;
  const std::int64_t longest = request.model.max_positions;
  if (request.seq_len) {
    w.seq_len = *request.seq_len;
    if (w.seq_len < 1) throw InputError(fmt::format("--seq-len {}: expected at least 1", w.seq_len));
    if (longest > 0 && w.seq_len > longest) {
      warnings.push_back(fmt::format("--seq-len {} is beyond the {} positions that {} was made for", w.seq_len, longest,
                                     request.model.name));
    }
  } else {
    w.seq_len = longest > 0 ? std::min(longest, kDefaultSeqLen) : kDefaultSeqLen;
    assumptions.push_back({"sequence length", std::to_string(w.seq_len),
                           "default: the smaller of 4096 and the model's maximum; --seq-len"});
  }
  const std::int64_t ranks = request.machine.ranks();
  const std::int64_t unit = ranks * request.constraints.micro_batch.value_or(1);
  if (request.global_batch) {
    w.global_batch = *request.global_batch;
    if (w.global_batch < 1 || w.global_batch % unit != 0) {
      const std::int64_t up = (std::max<std::int64_t>(w.global_batch, 1) + unit - 1) / unit * unit;
      throw InputError(
          fmt::format("--global-batch {}: expected a multiple of {} ranks x micro-batch {} = {} sequences, such as {}",
                      w.global_batch, ranks, request.constraints.micro_batch.value_or(1), unit, up));
    }
  } else {
    w.global_batch = default_batch(w.seq_len, unit);
    assumptions.push_back(
        {"global batch",
         fmt::format("{} sequences ({} tokens)", w.global_batch, format_count(w.global_batch * w.seq_len)),
         "default: 512 Ki tokens, rounded up to a multiple of the ranks; --global-batch"});
    if (std::string warning = prime_share(w.global_batch, ranks);
        !request.constraints.micro_batch && !warning.empty()) {
      warnings.push_back(std::move(warning));
    }
  }
  return w;
}

std::vector<int> stages_of(const Request& request) {
  std::vector<int> stages = request.constraints.stages;
  // One rank has nothing to shard: stages 1 to 3 are one plan, and stage 3 may offload the most.
  if (stages.empty()) stages = request.machine.ranks() == 1 ? std::vector<int>{0, 3} : std::vector<int>{0, 1, 2, 3};
  std::sort(stages.begin(), stages.end());
  stages.erase(std::unique(stages.begin(), stages.end()), stages.end());
  return stages;
}

std::vector<int> shard_groups_of(const Request& request, int stage) {
  const MachineSpec& m = request.machine;
  if (stage == 0) return {1};
  if (m.nodes > 1 && m.gpus_per_node > 1) return {m.ranks(), m.gpus_per_node};
  return {m.ranks()};
}

std::vector<OffloadStyle> offloads_of(const Request& request, int stage) {
  const bool disk = request.machine.nvme.drives > 0;
  std::vector<OffloadStyle> styles;
  if (const auto& fixed = request.constraints.offload) {
    OffloadStyle s;
    s.whole = true;
    if (fixed->what == OffloadWhat::none) return {s};
    if (stage == 0 || (fixed->to == Tier::nvme && !disk)) return {};
    s.optimizer = fixed->to;
    if (fixed->what != OffloadWhat::optimizer) {
      if (stage < 3) return {};
      s.parameters = fixed->to;
    }
    if (fixed->what == OffloadWhat::all) {
      s.gradients = Tier::host;
      return {s};
    }
    styles.push_back(s);
    if (fixed->what == OffloadWhat::optimizer) {
      s.update = UpdateOn::device;
      styles.push_back(s);
    }
    return styles;
  }
  styles.push_back({});
  if (stage == 0) return styles;
  const auto add = [&](Tier parameters, Tier gradients, Tier optimizer, UpdateOn update) {
    styles.push_back({parameters, gradients, optimizer, update, false});
  };
  for (Tier optimizer : {Tier::host, Tier::nvme}) {
    if (optimizer == Tier::nvme && !disk) continue;
    add(Tier::hbm, Tier::hbm, optimizer, UpdateOn::host);
    add(Tier::hbm, Tier::hbm, optimizer, UpdateOn::device);
    if (stage >= 2) add(Tier::hbm, Tier::host, optimizer, UpdateOn::host);
    if (stage < 3) continue;
    add(Tier::host, Tier::hbm, optimizer, UpdateOn::host);
    add(Tier::host, Tier::host, optimizer, UpdateOn::host);
    if (optimizer == Tier::nvme) add(Tier::nvme, Tier::host, optimizer, UpdateOn::host);
  }
  return styles;
}

std::vector<Recompute> recomputes_of(const Request& request) {
  if (request.constraints.recompute) return {*request.constraints.recompute};
  return {Recompute::none, Recompute::selective, Recompute::full};
}

std::vector<std::int64_t> micro_batches_of(const Request& request, const Workload& workload, std::size_t most) {
  if (request.constraints.micro_batch) return {*request.constraints.micro_batch};
  const std::int64_t n = workload.per_rank(request.machine.ranks());
  std::vector<std::int64_t> low, high;
  for (std::int64_t d = 1; d * d <= n; ++d) {
    if (n % d != 0) continue;
    low.push_back(d);
    if (d != n / d) high.push_back(n / d);
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  // A micro-step beyond 2^31 tokens is no plan.
  std::erase_if(low, [&](std::int64_t b) { return b > (std::int64_t{1} << 31) / workload.seq_len; });
  if (low.size() <= most) return low;
  std::vector<std::int64_t> some;
  for (std::size_t k = 0; k < most; ++k) some.push_back(low[k * (low.size() - 1) / (most - 1)]);
  return some;
}

namespace {

Precision precision_of(const Request& request, const Choice& choice, std::int64_t accumulation) {
  Precision p;
  p.weights = p.gradients = request.precision;
  p.master = request.precision != DType::fp32;
  p.split_master = choice.split_master;
  // Many gradients of a 16-bit type lose small ones; a single one needs no wider sum.
  p.accumulation = accumulation > 1 && !choice.narrow_sum ? DType::fp32 : p.gradients;
  return p;
}

}  // namespace

Plan plan_of(const Request& request, const Workload& workload, const Choice& choice) {
  const int blocks = static_cast<int>(request.model.sequence.size());
  Plan plan;
  plan.engine = request.engine;
  plan.ranks = request.machine.ranks();
  plan.shard_ranks = choice.shard_ranks;
  plan.zero_stage = choice.stage;
  plan.lora_rank = request.lora_rank;
  plan.seq_len = workload.seq_len;
  plan.micro_batch = choice.micro_batch;
  plan.accumulation = workload.per_rank(plan.ranks) / choice.micro_batch;
  plan.precision = precision_of(request, choice, plan.accumulation);
  plan.optimizer = Placement::all(choice.offload.optimizer, blocks);
  plan.parameters = Placement::all(choice.offload.parameters, blocks);
  plan.gradients = choice.offload.gradients;
  plan.update = choice.offload.update;
  plan.recompute = choice.recompute;
  plan.recompute_layers = choice.recompute == Recompute::none ? 0 : static_cast<int>(request.model.num_layers);
  plan.reduce_each = choice.stage < 2 ? ReduceEach::step : ReduceEach::micro_step;
  plan.loss_scaling = request.precision == DType::fp16 ? LossScaling::dynamic : LossScaling::none;
  if (plan.recompute_layers == 0) plan.recompute = Recompute::none;
  return plan;
}

}  // namespace zeroplan
