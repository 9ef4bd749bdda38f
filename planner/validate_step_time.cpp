#include "planner/validate_step_time.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "models/error.h"
#include "planner/validate_step_time_rows.h"

namespace zeroplan {
namespace {

/// A prediction beside its measurement.
struct Outcome {
  const MeasuredStep* step;
  Seconds predicted;
  double error() const { return predicted / step->measured - 1; }
};

/// Model FLOPs of a step on one GPU over its peak: what a constant MFU would have to explain.
double flop_time(const MeasuredStep& step) {
  const EngineTimeRun& run = step.run;
  const TokenShape all{run.tokens.batch * run.accumulation + run.remainder_batch, run.tokens.seq_len};
  const GpuSpec& gpu = step.machine.gpu;
  const FlopsPerSecond peak =
      std::max(gpu.peak_bf16.value_or(FlopsPerSecond()), gpu.peak_fp16.value_or(FlopsPerSecond()));
  return model_flops(*step.model, all, AttentionCount::full) / peak / run.tensor_parallel / Seconds(1);
}

/// Mean error of the best constant utilisation of each GPU on these rows (the median ratio).
double constant_mfu_error(const std::vector<Outcome>& outcomes) {
  std::map<std::string, std::vector<double>> ratios;  // measured over FLOP time
  for (const Outcome& each : outcomes)
    ratios[each.step->machine.gpu.name].push_back(each.step->measured.base() / flop_time(*each.step));
  double sum = 0;
  for (auto& [gpu, list] : ratios) {
    std::sort(list.begin(), list.end());
    const double median = list[list.size() / 2];
    for (const double ratio : list) sum += std::abs(median / ratio - 1);
  }
  return outcomes.empty() ? 0 : sum / static_cast<double>(outcomes.size());
}

StepTimeTable summarize(const std::string& source, const std::string& group, const std::vector<Outcome>& outcomes) {
  StepTimeTable table;
  table.source = source;
  table.group = group;
  table.rows = static_cast<int>(outcomes.size());
  std::vector<double> errors;
  for (const Outcome& each : outcomes) {
    const double error = each.error();
    errors.push_back(std::abs(error));
    table.mean_error += std::abs(error) / table.rows;
    table.bias += error / table.rows;
    if (table.worst_line == 0 || std::abs(error) > table.largest_error) {
      table.largest_error = std::abs(error);
      table.worst_line = each.step->line;
      table.worst_row = each.step->row;
      table.worst_predicted = each.predicted;
      table.worst_measured = each.step->measured;
    }
  }
  std::sort(errors.begin(), errors.end());
  table.p90_error = errors[static_cast<std::size_t>(std::ceil(0.9 * static_cast<double>(errors.size()))) - 1];
  table.constant_mfu_error = constant_mfu_error(outcomes);
  return table;
}

}  // namespace

EngineTime predict_step(const MeasuredStep& step, const EngineTimeFit& fit) {
  constexpr double kGiga = 1e9;
  EngineTimeRun run = step.run;
  if (step.host_adam) run.host_adam = fit[*step.host_adam] * kGiga;
  EngineTime time = predict_engine_time(*step.model, step.machine, run, fit);
  if (step.engine_timers) {
    time.step -= time.overhead;
    time.host -= time.overhead;
    time.overhead = {};
  }
  return time;
}

bool is_published_table(std::string_view text) { return text.starts_with("row_id,source_id,"); }

MeasuredSteps read_published_steps(std::string_view text, const std::string& name) {
  const CsvTable table = CsvTable::parse(text, name);
  MeasuredSteps result;
  for (const std::string_view column : {"model", "framework", "gpu", "n_gpus"}) {
    if (table.has(column)) continue;
    // Tables of another kind: hardware, largest models, theory.
    result.rows = static_cast<int>(table.rows().size());
    for (const CsvTable::Row& row : table.rows())
      result.skipped.push_back(
          {row.line, row.cells.front(), fmt::format("no training step: the table has no column \"{}\"", column)});
    return result;
  }
  PublishedRows rows(table);
  for (const CsvTable::Row& row : table.rows()) {
    ++result.rows;
    try {
      result.steps.push_back(rows.read(row));
    } catch (const InputError& error) {
      result.skipped.push_back({row.line, rows.describe(row), error.what()});
    }
  }
  return result;
}

std::vector<StepTimeTable> step_time_tables(const std::string& source, std::span<const MeasuredStep> steps,
                                            std::vector<SkippedStep>& skipped, const EngineTimeFit& fit) {
  std::vector<std::string> names = {"all"};
  std::vector<std::vector<Outcome>> groups(1);
  for (const MeasuredStep& step : steps) {
    try {
      const Outcome outcome{&step, predict_step(step, fit).step};
      groups[0].push_back(outcome);
      for (const std::string& group : step.groups) {
        const auto found = std::find(names.begin(), names.end(), group);
        const auto index = static_cast<std::size_t>(found - names.begin());
        if (found == names.end()) {
          names.push_back(group);
          groups.emplace_back();
        }
        groups[index].push_back(outcome);
      }
    } catch (const InputError& error) {
      skipped.push_back({step.line, step.row, error.what()});
    }
  }
  std::vector<StepTimeTable> tables;
  for (std::size_t i = 0; i < names.size(); ++i)
    if (!groups[i].empty()) tables.push_back(summarize(source, names[i], groups[i]));
  return tables;
}

std::string step_time_text(std::span<const StepTimeTable> tables) {
  std::string out, source;
  for (const StepTimeTable& table : tables) {
    if (table.source != source) {
      source = table.source;
      out += fmt::format("\n{}: step_seconds\n  {:<36}{:>5}{:>9}{:>9}{:>9}{:>10}{:>14}  worst row\n", source, "rows",
                         "n", "MAPE", "p90", "max", "bias", "constant MFU");
    }
    const auto percent = [](double share) { return fmt::format("{:.1f} %", 100 * share); };
    out += fmt::format("  {:<36}{:>5}{:>9}{:>9}{:>9}{:>10}{:>14}  {}: {} ({} for {})\n", table.group, table.rows,
                       percent(table.mean_error), percent(table.p90_error), percent(table.largest_error),
                       fmt::format("{:+.1f} %", 100 * table.bias), percent(table.constant_mfu_error), table.worst_line,
                       table.worst_row, format_seconds(table.worst_predicted), format_seconds(table.worst_measured));
  }
  return out;
}

}  // namespace zeroplan
