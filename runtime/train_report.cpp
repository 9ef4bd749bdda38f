#include "runtime/train_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>

namespace zeroplan {
namespace {

constexpr std::size_t kRows = 20;

/// The first and last steps, and the rest evenly.
std::set<std::size_t> shown_steps(std::size_t count) {
  std::set<std::size_t> rows;
  const std::size_t n = std::min(count, kRows);
  for (std::size_t i = 0; i < n; ++i) rows.insert(n == 1 ? 0 : i * (count - 1) / (n - 1));
  return rows;
}

double tokens_per_second(const PlanFile& file, const TrainResult& result) {
  const double tokens = static_cast<double>(file.plan.global_batch() * file.plan.seq_len);
  return tokens / result.measured.step().base();
}

std::string tier_name(Tier tier) {
  switch (tier) {
    case Tier::hbm:
      return "device, a rank";
    case Tier::host:
      return "host, a node";
    case Tier::nvme:
      return "NVMe, a node";
  }
  return "";
}

}  // namespace

std::string report_training(const PlanFile& file, const TrainResult& result) {
  std::string text = fmt::format("{} on {} {}, {}\n\n", file.model.name, file.plan.ranks,
                                 file.plan.ranks == 1 ? "rank" : "ranks", describe(file.plan));
  text += fmt::format("{:>8} {:>12} {:>14} {:>12}\n", "step", "loss", "gradient norm", "time");
  for (const std::size_t i : shown_steps(result.steps.size())) {
    const StepReport& r = result.steps[i];
    text += fmt::format("{:>8} {:>12.6f} {:>14.4f} {:>12}{}\n", r.step, r.loss, r.gradient_norm,
                        format_seconds(Seconds(r.seconds)), r.skipped ? "  skipped: overflow" : "");
  }
  text += fmt::format("\nmedian step {}, {:.0f} tokens/s\n", format_seconds(result.measured.step()),
                      tokens_per_second(file, result));
  text += "\nMemory                 planned B          used B\n";
  for (const MeasuredTier& tier : result.measured.memory) {
    text += fmt::format("  {:<16} {:>14} {:>15}\n", tier_name(tier.tier), tier.planned, tier.used);
  }
  for (const Assumption& a : result.assumptions) text += fmt::format("\n{}: {} ({})\n", a.what, a.value, a.source);
  return text;
}

std::string training_json(const PlanFile& file, const TrainResult& result) {
  using Json = nlohmann::ordered_json;
  Json j;
  j["plan"] = result.measured.plan;
  j["ranks"] = file.plan.ranks;
  j["first_step"] = result.first_step;
  j["losses"] = Json::array();
  j["steps"] = Json::array();
  for (const StepReport& r : result.steps) {
    j["losses"].push_back(r.loss);
    Json step{{"step", r.step}, {"loss", r.loss}, {"gradient_norm", r.gradient_norm}, {"seconds", r.seconds}};
    if (file.plan.loss_scaling == LossScaling::dynamic) {
      step["loss_scale"] = r.loss_scale;
      step["skipped"] = r.skipped;
    }
    j["steps"].push_back(step);
  }
  j["step_seconds"] = result.measured.step().base();
  j["tokens_per_second"] = tokens_per_second(file, result);
  j["memory"] = Json::array();
  for (const MeasuredTier& tier : result.measured.memory) {
    const char* name = tier.tier == Tier::hbm ? "gpu" : tier.tier == Tier::host ? "host" : "nvme";
    j["memory"].push_back({{"tier", name}, {"planned_bytes", tier.planned}, {"used_bytes", tier.used}});
  }
  j["assumptions"] = Json::array();
  for (const Assumption& a : result.assumptions) {
    j["assumptions"].push_back({{"what", a.what}, {"value", a.value}, {"source", a.source}});
  }
  j["notes"] = result.notes;
  return j.dump(2, ' ', false, decltype(j)::error_handler_t::replace) + "\n";
}

}  // namespace zeroplan
