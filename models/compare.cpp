#include "models/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <stdexcept>

#include "models/error.h"

namespace zeroplan {
namespace {

void check_measurement(const Schedule& flat, std::string_view plan, int ranks, const Measured& m,
                       const std::string& name) {
  if (m.plan != plan) {
    throw InputError(
        fmt::format("{}: /plan: measured on another plan or model: expected {}, got {}; run this plan with --measure",
                    name, plan, m.plan));
  }
  if (m.ranks != ranks) {
    throw InputError(fmt::format("{}: /ranks: expected the plan's {}, got {}", name, ranks, m.ranks));
  }
  if (m.ops.size() != flat.ops().size()) {
    throw InputError(fmt::format("{}: /ops: expected the {} ops of the plan's schedule, got {}", name,
                                 flat.ops().size(), m.ops.size()));
  }
  for (std::size_t i = 0; i < m.ops.size(); ++i) {
    const bool collective = std::holds_alternative<Collective>(flat.work(flat.ops()[i]));
    if (m.ops[i].transfer_start.has_value() != collective) {
      throw InputError(fmt::format(
          "{}: /ops/{}/transfer_start: expected {}", name, i,
          collective ? "when the last rank had arrived: the op is a collective" : "none: the op is no collective"));
    }
  }
}

std::vector<ComparedTier> compared_memory(const PredictedStep& predicted, const Measured& measured) {
  std::vector<ComparedTier> tiers;
  for (const Tier tier : {Tier::hbm, Tier::host, Tier::nvme}) {
    ComparedTier compared{tier, 0, 0};
    bool there = false;
    for (const MeasuredTier& t : predicted.memory) {
      if (t.tier == tier) compared.predicted = t.planned, there = true;
    }
    for (const MeasuredTier& t : measured.memory) {
      if (t.tier == tier) compared.measured = t.used, there = true;
    }
    if (there) tiers.push_back(compared);
  }
  return tiers;
}

std::optional<double> median_error(const std::vector<ComparedOp>& ops) {
  std::array<Seconds, kNumOpKinds> predicted{}, measured{};
  for (const ComparedOp& op : ops) {
    predicted[static_cast<std::size_t>(op.kind)] += op.predicted;
    measured[static_cast<std::size_t>(op.kind)] += op.measured;
  }
  std::vector<double> errors;
  for (std::size_t k = 0; k < predicted.size(); ++k) {
    if (const auto error = relative_error(predicted[k], measured[k])) errors.push_back(std::abs(*error));
  }
  if (errors.empty()) return std::nullopt;
  std::sort(errors.begin(), errors.end());
  const std::size_t half = errors.size() / 2;
  return errors.size() % 2 == 1 ? errors[half] : 0.5 * (errors[half - 1] + errors[half]);
}

}  // namespace

bool Comparison::memory_equal() const {
  return std::ranges::all_of(memory, [](const ComparedTier& t) { return t.predicted == t.measured; });
}

std::optional<double> relative_error(Seconds predicted, Seconds measured) {
  if (!(measured > Seconds())) return std::nullopt;
  return (predicted - measured) / measured;
}

Coverage coverage(const Trace& trace, Seconds step) {
  std::vector<Span> spans = trace.ops;
  std::ranges::sort(spans, [](const Span& a, const Span& b) { return a.start < b.start; });
  Seconds covered, until;
  for (const Span& span : spans) {
    const Seconds from = std::max(span.start, until);
    if (span.end <= from) continue;
    covered += span.end - from;
    until = span.end;
  }
  return {covered, step - covered};
}

Comparison compare(const Schedule& flat, const ModelSpec& model, std::string_view plan, int ranks,
                   const PredictedStep& predicted, const Measured& measured, const std::string& measured_name) {
  const std::size_t count = flat.ops().size();
  if (predicted.trace.ops.size() != count || predicted.transfer_starts.size() != count ||
      predicted.seconds.size() != count) {
    throw std::logic_error("compare: the prediction is of another schedule");
  }
  check_measurement(flat, plan, ranks, measured, measured_name);
  Comparison result;
  result.predicted_step = predicted.step;
  result.measured_step = measured.step();
  result.memory = compared_memory(predicted, measured);
  std::map<std::pair<Phase, OpKind>, ComparedRow> rows;
  Trace shown;
  for (std::uint32_t i = 0; i < count; ++i) {
    const Op& op = flat.ops()[i];
    const MeasuredOp& m = measured.ops[i];
    shown.ops.push_back(m.span);
    const OpKind kind = op_kind(flat.work(op), model);
    const Span& span = predicted.trace.ops[i];
    if (m.transfer_start) {
      result.predicted_wait += predicted.transfer_starts[i] - span.start;
      result.measured_wait += *m.transfer_start - m.span.start;
    }
    const Seconds expected = predicted.seconds[i];
    ComparedRow& row = rows.try_emplace({op.phase, kind}, ComparedRow{op.phase, kind, 0, {}, {}}).first->second;
    ++row.count;
    row.predicted += expected;
    row.measured += m.seconds;
    if (kind != OpKind::bookkeeping) result.ops.push_back({i, kind, op.phase, expected, m.seconds});
  }
  for (auto& [key, row] : rows) result.rows.push_back(row);
  result.predicted_coverage = coverage(predicted.trace, predicted.step);
  result.measured_coverage = coverage(shown, measured.step_seconds[static_cast<std::size_t>(measured.median_step)]);
  result.median_kind_error = median_error(result.ops);
  return result;
}

}  // namespace zeroplan
