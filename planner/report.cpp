#include "planner/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "planner/report_layout.h"

namespace zeroplan {
namespace {

Bytes spare(const TierMemory& memory, double margin) { return memory.capacity * (1 - margin) - memory.peak; }

std::string tokens_text(double tokens) {
  constexpr double kBillion = 1e9;
  if (tokens >= 1e3 * kBillion) return fmt::format("{:g} trillion", tokens / (1e3 * kBillion));
  return tokens >= kBillion ? fmt::format("{:g} billion", tokens / kBillion) : format_count(std::llround(tokens));
}

std::string header(const Answer& answer) {
  const Request& request = answer.request;
  const MachineSpec& machine = request.machine;
  std::string text = fmt::format("{}: {} parameters", request.model.name, format_count(request.model.parameters()));
  if (request.lora_rank > 0) {
    const ModelSpec trained = adapted_model(request.model, request.lora_rank);
    text += fmt::format(" and {} of adapters, which alone are trained", format_count(trained.trainable_parameters()));
  }
  text += fmt::format(", {} layers\n", request.model.num_layers);
  text += fmt::format("{} ({}): {}, {} host memory{}", machine.name, machine.provider, gpus_text(machine),
                      format_gib(machine.dram), machine.nodes > 1 ? " each" : "");
  if (machine.nvme.drives > 0) {
    text += fmt::format(", NVMe {} x {:.3g} TB", machine.nvme.drives,
                        machine.nvme.capacity.base() / machine.nvme.drives / 1e12);
  }
  text += fmt::format("\n{}\n", price_text(machine));
  const std::int64_t batch = request.global_batch.value_or(0);
  const std::int64_t seq_len = request.seq_len.value_or(0);
  return text + fmt::format("{} sequences of {} tokens a step ({} tokens), {}\n", batch, format_count(seq_len),
                            format_count(batch * seq_len), to_string(request.precision));
}

std::string verdict(const Answer& answer, const Candidate& best, const PlanReport& extra, const ReportStyle& style) {
  const Prediction& p = best.prediction;
  std::vector<std::string> spares;
  for (const NamedTier& tier : tiers_of(p)) {
    spares.push_back(
        fmt::format("{} {} {}", tier.name, format_gib(spare(*tier.memory, answer.request.margin)), tier.scope));
  }
  std::string text =
      inked("Fits", Ink::good, style) + fmt::format(", and beyond the margin of {:g} % there is to spare: {}\n",
                                                    100 * answer.request.margin, fmt::join(spares, ", "));
  text += fmt::format("  {}\n", describe(best.plan));
  text += fmt::format("  {} a step, {} ({} a GPU)", format_seconds(p.step), format_speed(p.tokens_per_second),
                      format_speed(p.tokens_per_second_per_gpu));
  if (p.mfu) text += fmt::format(", MFU {:.1f} %", 100 * *p.mfu);
  if (p.hfu) text += fmt::format(", HFU {:.1f} %", 100 * *p.hfu);
  text += p.mfu ? " (attention counted causally)\n" : "\n";
  const auto cost = cost_of(answer.request.machine, p);
  if (cost) text += fmt::format("  {:.3g} USD a million tokens\n", cost->usd_per_million_tokens);
  if (extra.num_tokens) {
    const double hours = hours_for(*extra.num_tokens, p);
    text += fmt::format("  {} tokens take {} hours", tokens_text(*extra.num_tokens),
                        hours < 100 ? fmt::format("{:.1f}", hours) : format_count(std::llround(hours)));
    if (cost) text += fmt::format(" and {} USD", format_count(std::llround(hours * cost->usd_per_hour)));
    text += "\n";
  }
  return text;
}

std::string shortfall_section(const Shortfall& shortfall, double margin, const ReportStyle& style) {
  std::string text = inked("Does not fit", Ink::bad, style) + "\n";
  for (const Shortfall::Lack& lack : shortfall.lacks) {
    text +=
        fmt::format("  {} missing in {}: {} needed, {} there after the margin of {:g} %\n", format_gib(lack.missing()),
                    tier_title(lack.tier), format_gib(lack.needed), format_gib(lack.available), 100 * margin);
  }
  text += fmt::format("  master and Adam states alone: {}, all GPUs together, at fp32\n",
                      format_gib(shortfall.optimizer_states));
  text += fmt::format("  nearest plan: {}\n\n", describe(shortfall.nearest.plan));
  text += inked("What would make it fit, each planned", Ink::bold, style) + "\n";
  if (shortfall.changes.empty()) return text + "  nothing that was tried\n";
  TextTable table({{"flag", Align::left}, {"step"}, {"tokens/s"}, {"change and its plan", Align::left}});
  for (const Shortfall::Change& change : shortfall.changes) {
    const Prediction& p = change.result.prediction;
    const std::string plan = describe(change.result.plan);
    const bool said = change.what.find(plan) != std::string::npos;
    table.add({change.flag, format_seconds(p.step), fmt::format("{:.0f}", p.tokens_per_second),
               said ? change.what : fmt::format("{}: {}", change.what, plan)});
  }
  return text + table.text();
}

std::string optional_gib(const std::optional<TierMemory>& memory) {
  return memory ? fmt::format("{:.1f}", memory->peak.base() / kGiB) : "-";
}

/// "no, missing GPU 3.1 GiB" for a stage that does not fit.
std::string fit_text(const Candidate& candidate, double margin) {
  if (candidate.fits) return "yes";
  std::vector<std::string> over;
  for (const NamedTier& tier : tiers_of(candidate.prediction)) {
    const Bytes left = spare(*tier.memory, margin);
    if (left.base() < 0) over.push_back(fmt::format("{} {}", tier.name, format_gib(-1.0 * left)));
  }
  return fmt::format("no, missing {}", fmt::join(over, ", "));
}

std::string plans_table(const Answer& answer, const ReportStyle& style) {
  if (answer.plans.size() < 2) return "";
  const bool stages = answer.request.per_stage;
  std::vector<TextTable::Column> columns = {{"step"}, {"tokens/s"}, {"MFU"}, {"GPU GiB"}, {"host GiB"}, {"NVMe GiB"}};
  if (stages) columns.push_back({"fits", Align::left});
  columns.push_back({"plan", Align::left});
  TextTable table(columns);
  // Where some steps were played, the others are only bounds.
  const bool any_played = answer.search.simulated > 0;
  for (const Candidate& candidate : answer.plans) {
    const Prediction& p = candidate.prediction;
    std::vector<std::string> cells = {(any_played && !p.simulated ? ">= " : "") + format_seconds(p.step),
                                      fmt::format("{:.0f}", p.tokens_per_second),
                                      p.mfu ? fmt::format("{:.1f} %", 100 * *p.mfu) : "-",
                                      fmt::format("{:.1f}", p.gpu.peak.base() / kGiB),
                                      optional_gib(p.host),
                                      optional_gib(p.nvme)};
    if (stages) cells.push_back(fit_text(candidate, answer.request.margin));
    cells.push_back(describe(candidate.plan));
    table.add(std::move(cells));
  }
  const std::string_view title = stages ? "Each stage at its best (where it does not fit: the plan that comes nearest)"
                                        : "Alternatives, best first";
  return inked(title, Ink::bold, style) + "\n" + table.text() + "\n";
}

std::string advice_section(const std::vector<Advice>& advice, const ReportStyle& style) {
  constexpr std::size_t kMost = 4;
  std::string text = inked("What would help", Ink::bold, style) + "\n";
  if (advice.empty()) return text + "  no single resource: twice as fast, none saves 2 % of the step\n";
  for (std::size_t i = 0; i < std::min(advice.size(), kMost); ++i) {
    text += fmt::format("  {:<34} {:.2f} x as fast\n", advice[i].what, advice[i].speedup);
  }
  return text;
}

std::string rates_section(const std::vector<RequiredRate>& rates, const ReportStyle& style) {
  if (rates.empty()) return "";
  std::string text =
      inked("Rates at which it would not be waited for (a step within 5 % of an endless rate)", Ink::bold, style) +
      "\n";
  for (const RequiredRate& rate : rates) {
    const auto gbps = [](BytesPerSecond r) { return fmt::format("{:.3g} GB/s", r.base() / 1e9); };
    const std::string bits =
        rate.role == ResourceRole::network ? fmt::format(" ({:.0f} Gb/s a node)", 8 * rate.needed.base() / 1e9) : "";
    const std::string batch = rate.batch
                                  ? fmt::format("; as it is, from {} sequences a step on{}", format_count(*rate.batch),
                                                rate.by_micro_batch ? " (larger micro-batches, if they fit)" : "")
                                  : "; as it is, at no batch up to 1024 times this one";
    text += fmt::format("  {:<22} {} now, {}{} needed for {}{}\n", rate.name, gbps(rate.now), gbps(rate.needed), bits,
                        format_seconds(rate.unlimited * 1.05), batch);
  }
  return text + "\n";
}

std::string simulate_line(std::string_view folder) {
  return fmt::format("  zeroplan simulate {}/plan.json    # played op by op; --trace FILE for Perfetto\n", folder);
}

std::string next_section(const PlanReport& extra, const Candidate* best, const ReportStyle& style) {
  std::string text = inked("Next", Ink::bold, style) + "\n";
  if (best == nullptr) return extra.fix_command.empty() ? "" : text + fmt::format("  {}\n", extra.fix_command);
  if (extra.written_to.empty()) {
    text += fmt::format("  {} --out plan    # plan.json, deepspeed.json, accelerate_fsdp.yaml, launch.sh, trace.json\n",
                        extra.command);
    return text + simulate_line("plan");
  }
  text += fmt::format("  written to {}: {}\n", extra.written_to, fmt::join(extra.written, ", "));
  if (std::ranges::find(extra.written, "launch.sh") != extra.written.end()) {
    text += fmt::format("  less {}/launch.sh    # how DeepSpeed and accelerate start it, and where they differ\n",
                        extra.written_to);
  }
  return text + simulate_line(extra.written_to);
}

std::string search_line(const SearchStats& search) {
  return fmt::format("{} plans in the search space, {} evaluated, {} simulated, in {:.0f} ms\n",
                     format_count(static_cast<std::int64_t>(search.space)),
                     format_count(static_cast<std::int64_t>(search.evaluated)), search.simulated, 1e3 * search.seconds);
}

}  // namespace

const Candidate* best_of(const Answer& answer) {
  const Candidate* best = nullptr;
  for (const Candidate& candidate : answer.plans) {
    if (!candidate.fits) continue;
    if (best == nullptr) best = &candidate;
    if (!answer.request.per_stage) break;
    if (candidate.prediction.tokens_per_second > best->prediction.tokens_per_second) best = &candidate;
  }
  return best;
}

std::string report_plan(const Answer& answer, const PlanReport& extra, const ReportStyle& style) {
  const Candidate* best = answer.feasible ? best_of(answer) : nullptr;
  std::string text = header(answer) + "\n";
  if (best != nullptr) {
    text += verdict(answer, *best, extra, style) + "\n";
    text += memory_section(best->prediction, style);
    if (!extra.under_deepspeed.empty()) text += "  under DeepSpeed: " + extra.under_deepspeed + "\n";
    text += "\n" + time_section(best->prediction, style) + "\n";
    text += advice_section(extra.advice, style) + "\n";
    text += rates_section(extra.rates, style);
  } else if (answer.shortfall) {
    text += shortfall_section(*answer.shortfall, answer.request.margin, style) + "\n";
    text += memory_section(answer.shortfall->nearest.prediction, style) + "\n";
  }
  text += plans_table(answer, style);
  text += assumptions_section(answer.assumptions, style) + "\n";
  if (const std::string next = next_section(extra, best, style); !next.empty()) text += next + "\n";
  return text + search_line(answer.search);
}

}  // namespace zeroplan
