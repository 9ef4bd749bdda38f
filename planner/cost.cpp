#include "planner/cost.h"

#include <fmt/format.h>

#include <vector>

namespace zeroplan {
namespace {

constexpr double kMillion = 1e6;

}  // namespace

std::optional<RunCost> cost_of(const MachineSpec& machine, const Prediction& prediction) {
  if (!machine.price) return std::nullopt;
  const double per_hour = machine.price->usd_per_hour * machine.nodes;
  const double tokens_per_hour = prediction.tokens_per_second * kSecondsPerHour;
  return RunCost{per_hour, per_hour / tokens_per_hour * kMillion};
}

double hours_for(double tokens, const Prediction& prediction) {
  return tokens / prediction.tokens_per_second / kSecondsPerHour;
}

std::string price_text(const MachineSpec& machine) {
  if (!machine.price) return "no price known";
  const PriceSpec& price = *machine.price;
  std::vector<std::string> details;
  if (!price.region.empty()) details.push_back(price.region);
  if (!price.date.empty()) details.push_back(price.date);
  if (!price.source.empty()) details.push_back(price.source);
  std::string text = fmt::format("{:.2f} USD an hour", price.usd_per_hour * machine.nodes);
  if (machine.nodes > 1) text += fmt::format(" ({} x {:.2f})", machine.nodes, price.usd_per_hour);
  if (!details.empty()) text += fmt::format(" ({})", fmt::join(details, ", "));
  return text;
}

}  // namespace zeroplan
