#include "tests/plan_variants.h"

#include <fmt/format.h>

#include <cmath>
#include <map>

#include "models/error.h"

namespace zeroplan::tests {
namespace {

std::vector<int> divisors(int n) {
  std::vector<int> result;
  for (int d = 1; d <= n; ++d) {
    if (n % d == 0) result.push_back(d);
  }
  return result;
}

Placement random_placement(Random& random, int blocks) {
  Placement place;
  place.hbm = static_cast<int>(random.between(0, blocks));
  place.host = static_cast<int>(random.between(0, blocks - place.hbm));
  place.nvme = blocks - place.hbm - place.host;
  return place;
}

void place_at_random(Plan& p, Random& random, int blocks) {
  p.optimizer = random_placement(random, blocks);
  p.update = random.chance(50) ? UpdateOn::host : UpdateOn::device;
  if (random.chance(50)) p.gradients = Tier::host;
  if (p.zero_stage == 3 && random.chance(50)) {
    p.parameters = random_placement(random, blocks);
    p.update = UpdateOn::host;
  }
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](double x, double y) {
           return x == y || (std::isnan(x) && std::isnan(y));
         });
}

std::string difference(const HostResult& a, const HostResult& b) {
  for (std::size_t step = 0; step < a.losses.size(); ++step) {
    if (a.losses[step] != b.losses[step]) {
      return fmt::format("loss of step {} is {:a}, expected {:a}", step, a.losses[step], b.losses[step]);
    }
  }
  if (!same_bits(a.norms, b.norms)) return "gradient norms differ";
  for (std::size_t i = 0; i < a.master.size(); ++i) {
    if (a.master[i] != b.master[i]) {
      return fmt::format("weight {} is {:a}, expected {:a}", i, a.master[i], b.master[i]);
    }
  }
  return a.moments == b.moments ? "" : "moments differ";
}

std::string memory_error(const HostResult& found) {
  for (std::size_t m = 0; m < found.used.size(); ++m) {
    if (found.used[m] == found.planned[m]) continue;
    return fmt::format("{}: used {} bytes of {} planned", to_string(static_cast<Memory>(m)), found.used[m],
                       found.planned[m]);
  }
  return "";
}

}  // namespace

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
  return key;
}

std::vector<Plan> variants(const Plan& base, const ModelSpec& model, Random& random, int count) {
  const int blocks = static_cast<int>(model.sequence.size());
  std::vector<Plan> plans;
  for (int tries = 0; static_cast<int>(plans.size()) < count && tries < 40 * count; ++tries) {
    Plan p = base;
    p.zero_stage = static_cast<int>(random.between(0, 3));
    p.shard_ranks = p.zero_stage == 0 ? 1 : random.chance(70) ? p.ranks : random.pick(divisors(p.ranks));
    if (p.zero_stage > 0 && random.chance(60)) place_at_random(p, random, blocks);
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

std::string check_invariance(const std::string& name, const ModelSpec& model, const std::vector<Plan>& plans,
                             HostJob job, Random& random, int* compared) {
  std::map<std::string, HostResult> first;
  for (const Plan& plan : plans) {
    job.options.compute_threads = static_cast<int>(random.between(1, 2));
    const std::string what =
        fmt::format("{}: {} ranks, groups of {}, {}, prefetch {}, reduce each {}", name, plan.ranks, plan.shard_ranks,
                    describe(plan), plan.prefetch_layers, to_string(plan.reduce_each));
    HostResult found;
    try {
      found = run_host_job(model, plan, job);
    } catch (const std::exception& e) {
      return what + ": " + e.what();
    }
    std::string wrong = memory_error(found);
    const auto [it, fresh] = first.try_emplace(sum_order(plan), found);
    if (fresh && !std::isfinite(found.losses.back())) wrong = "the loss is not finite";
    if (fresh && found.losses.back() == found.losses.front()) wrong = "the loss does not change";
    if (!fresh && wrong.empty()) wrong = difference(found, it->second);
    if (!fresh && compared != nullptr) ++*compared;
    if (!wrong.empty()) return what + ": " + wrong;
  }
  return "";
}

}  // namespace zeroplan::tests
