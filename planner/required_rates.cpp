#include "planner/required_rates.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace zeroplan {
namespace {

constexpr double kEnough = 1.05;   // of the step with an endless rate
constexpr double kEndless = 1e-6;  // of the time that the resource takes
constexpr std::int64_t kMostTimes = 1024;
constexpr std::array kRoles{ResourceRole::network, ResourceRole::links, ResourceRole::dram, ResourceRole::nvme_read,
                            ResourceRole::nvme_write};

BytesPerSecond rate_of(ResourceRole role, const MachineSpec& machine) {
  switch (role) {
    case ResourceRole::network:
      return machine.network.bandwidth;
    case ResourceRole::links:
      return machine.nvlink;  // of PCIe boxes no single rate is the links'
    case ResourceRole::dram:
      return machine.dram_bandwidth;
    case ResourceRole::nvme_read:
      return machine.nvme.read;
    case ResourceRole::nvme_write:
      return machine.nvme.write;
    case ResourceRole::sm:
    case ResourceRole::hbm:
    case ResourceRole::h2d:
    case ResourceRole::d2h:
    case ResourceRole::cpu:
      return {};
  }
  return {};
}

class RateSearch {
 public:
  RateSearch(const Answer& answer, const Plan& plan)
      : plan_(plan),
        predictor_(answer.request.model, answer.request.machine),
        now_(predictor_.step_with(plan, ResourceRole::sm, 1)) {}

  /// Nothing when the resource costs too little.
  std::optional<RequiredRate> of(ResourceRole role) {
    const MachineSpec& machine = predictor_.machine();
    RequiredRate result;
    result.role = role;
    result.now = rate_of(role, machine);
    if (result.now <= BytesPerSecond()) return std::nullopt;
    result.unlimited = predictor_.step_with(plan_, role, kEndless);
    if (now_ <= result.unlimited * kEnough) return std::nullopt;
    result.name = role_name(role, machine);
    result.needed = result.now * needed_factor(role, result.unlimited * kEnough);
    result.by_micro_batch = role == ResourceRole::network || role == ResourceRole::links;
    result.batch = enough_batch(role, result.by_micro_batch);
    return result;
  }

 private:
  /// Times the rate of now, to 1 %. Between "not enough" and "endless".
  double needed_factor(ResourceRole role, Seconds limit) {
    double low = 0, high = 20;  // log2
    while (high - low > 0.014) {
      const double middle = (low + high) / 2;
      (predictor_.step_with(plan_, role, std::exp2(-middle)) <= limit ? high : low) = middle;
    }
    return std::exp2(high);
  }

  std::optional<std::int64_t> enough_batch(ResourceRole role, bool by_micro_batch) {
    for (std::int64_t times = 2; times <= kMostTimes; times *= 2) {
      Plan larger = plan_;
      (by_micro_batch ? larger.micro_batch : larger.accumulation) *= times;
      const Seconds with = predictor_.step_with(larger, role, 1);
      if (with <= predictor_.step_with(larger, role, kEndless) * kEnough) return larger.global_batch();
    }
    return std::nullopt;
  }

  const Plan& plan_;
  Predictor predictor_;
  Seconds now_;
};

}  // namespace

std::vector<RequiredRate> required_rates(const Answer& answer, const Candidate& candidate) {
  std::vector<RequiredRate> all;
  if (candidate.plan.engine != Engine::zeroplan) return all;
  RateSearch search(answer, candidate.plan);
  for (const ResourceRole role : kRoles) {
    if (std::optional<RequiredRate> rate = search.of(role)) all.push_back(std::move(*rate));
  }
  std::ranges::stable_sort(all, {}, &RequiredRate::unlimited);
  return all;
}

}  // namespace zeroplan
