#include "planner/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "models/error.h"
#include "planner/row_config.h"
#include "planner/row_values.h"
#include "planner/validate_earlier.h"
#include "planner/validate_memory.h"
#include "planner/validate_rows.h"

namespace zeroplan {
namespace {

ErrorTable summarize(const std::string& source, Measured quantity, RowGroup group,
                     const std::vector<Comparison>& comparisons) {
  ErrorTable table;
  table.source = source;
  table.quantity = quantity;
  table.group = group;
  for (const Comparison& each : comparisons) {
    if (each.quantity != quantity || (group != RowGroup::all && each.group != group)) continue;
    const double error = each.error();
    ++table.rows;
    table.mean_error += std::abs(error);
    table.bias += error;
    if (each.high > Bytes()) {
      ++table.intervals;
      table.inside += each.inside() ? 1 : 0;
    }
    if (table.rows == 1 || std::abs(error) > table.largest_error) {
      table.largest_error = std::abs(error);
      table.worst = each;
    }
  }
  if (table.rows > 0) {
    table.mean_error /= table.rows;
    table.bias /= table.rows;
  }
  return table;
}

void add_tables(const std::string& source, const std::vector<Comparison>& comparisons, Validation& validation) {
  for (int i = 0; i < kNumMeasured; ++i) {
    const auto quantity = static_cast<Measured>(i);
    ErrorTable all = summarize(source, quantity, RowGroup::all, comparisons);
    if (all.rows == 0) continue;
    const int rows = all.rows;
    validation.tables.push_back(std::move(all));
    if (quantity != Measured::reserved) continue;
    for (const RowGroup group : {RowGroup::stages_0_to_2, RowGroup::stage_3}) {
      ErrorTable part = summarize(source, quantity, group, comparisons);
      if (part.rows > 0 && part.rows < rows) validation.tables.push_back(std::move(part));
    }
  }
}

/// By reason: which rows, and the first of them in words.
std::string reasons_text(std::string_view title, const std::vector<Unpredicted>& list) {
  std::map<std::pair<std::string, std::string>, std::vector<const Unpredicted*>> reasons;
  for (const Unpredicted& each : list) reasons[{each.source, each.reason}].push_back(&each);
  std::string out = reasons.empty() ? "" : fmt::format("\n{}\n", title);
  for (const auto& [key, rows] : reasons) {
    std::string lines;
    for (const Unpredicted* row : rows) lines += fmt::format("{}{}", lines.empty() ? "" : " ", row->line);
    out += fmt::format("  {}: {}\n    {} {} ({}): {}\n", key.first, key.second, rows.size() == 1 ? "row" : "rows",
                       lines, rows.size(), rows.front()->row);
  }
  return out;
}

void add_skipped(const std::string& source, const std::vector<SkippedStep>& skipped, Validation& validation) {
  for (const SkippedStep& each : skipped)
    validation.unpredicted.push_back({source, each.line, each.row, "step time: " + each.reason});
}

void add_step_times(const std::string& source, std::span<const MeasuredStep> steps, Validation& validation) {
  std::vector<SkippedStep> skipped;
  for (StepTimeTable& table : step_time_tables(source, steps, skipped))
    validation.step_times.push_back(std::move(table));
  add_skipped(source, skipped, validation);
}

void validate_published_memory(std::string_view text, const std::string& name, double margin, Validation& validation) {
  PublishedMemory memory = read_published_memory(text, name, margin);
  for (Verdict& verdict : memory.verdicts) {
    verdict.source = name;
    validation.verdicts.push_back(std::move(verdict));
  }
  add_tables(name, memory.comparisons, validation);
  for (const SkippedStep& each : memory.skipped)
    validation.no_verdict.push_back({name, each.line, each.row, each.reason});
}

void validate_published_steps(std::string_view text, const std::string& name, Validation& validation) {
  const MeasuredSteps steps = read_published_steps(text, name);
  validation.rows += steps.rows;
  add_skipped(name, steps.skipped, validation);
  add_step_times(name, steps.steps, validation);
}

void add_measured_step(const JsonValue& row, int line, const std::string& source, GroundtruthSteps& reader,
                       std::vector<MeasuredStep>& steps, Validation& validation) {
  const std::string label = RowPredictor::describe(row);
  try {
    if (auto step = reader.read(row, label)) {
      step->line = line;
      steps.push_back(std::move(*step));
    }
  } catch (const InputError& error) {
    add_skipped(source, {{line, label, error.what()}}, validation);
  }
}

std::string percent(double share) { return fmt::format("{:.3f} %", 100 * share); }

}  // namespace

std::string_view to_string(Measured quantity) {
  switch (quantity) {
    case Measured::allocated_after:
      return "allocated_after";
    case Measured::allocated_fwd:
      return "allocated_fwd";
    case Measured::allocated_bwd:
      return "allocated_bwd";
    case Measured::allocated_step:
      return "allocated_step";
    case Measured::reserved:
      return "reserved";
    case Measured::device_used:
      return "device_used";
    case Measured::host:
      return "host";
    case Measured::init_peak:
      return "init_peak";
    case Measured::saved:
      return "saved";
    case Measured::fwd_peak:
      return "fwd_peak";
    case Measured::bwd_peak:
      return "bwd_peak";
    case Measured::published_reserved:
      return "published_reserved";
    case Measured::published_allocated:
      return "published_allocated";
    case Measured::published_used:
      return "published_used";
  }
  return "";
}

std::string_view to_string(RowGroup group) {
  switch (group) {
    case RowGroup::all:
      return "all";
    case RowGroup::stages_0_to_2:
      return "stages 0-2";
    case RowGroup::stage_3:
      return "stage 3";
  }
  return "";
}

int Validation::verdict_errors() const { return static_cast<int>(std::ranges::count_if(verdicts, &Verdict::wrong)); }

std::vector<VerdictTable> Validation::verdict_tables() const {
  std::vector<VerdictTable> by_source;
  for (const Verdict& each : verdicts) {
    auto found = std::ranges::find(by_source, each.source, &VerdictTable::source);
    if (found == by_source.end()) {
      VerdictTable fresh;
      fresh.source = each.source;
      by_source.push_back(fresh);
      found = std::prev(by_source.end());
    }
    ++(each.measured_fits ? found->fitted : found->out_of_memory);
    if (each.wrong()) ++(each.measured_fits ? found->called_too_large : found->called_fitting);
  }
  return by_source;
}

namespace {

/// Spreadsheets write a byte order mark.
std::string_view without_mark(std::string_view text) {
  constexpr std::string_view kMark = "\xef\xbb\xbf";
  return text.starts_with(kMark) ? text.substr(kMark.size()) : text;
}

/// Neither a CSV with known columns nor JSON.
void refuse_other_text(std::string_view text, const std::string& name) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) throw InputError(fmt::format("{}:1: the file is empty, expected rows", name));
  if (text[first] == '{' || text[first] == '[') return;
  constexpr std::size_t kShown = 40;
  const std::string_view line = text.substr(first, text.find_first_of("\r\n", first) - first);
  throw InputError(fmt::format(
      "{}:1: expected a JSON object a line (tests/data/groundtruth, tests/data/activations) or the columns of "
      "tests/data/published, found \"{}{}\"",
      name, line.substr(0, kShown), line.size() > kShown ? "..." : ""));
}

}  // namespace

void validate_rows(std::string_view text, const std::string& name, Validation& validation, double margin) {
  text = without_mark(text);
  const int rows = validation.rows;
  if (is_published_table(text)) {
    validate_published_steps(text, name, validation);
    validate_published_memory(text, name, margin, validation);
    if (validation.rows == rows) throw InputError(fmt::format("{}: expected rows below the header, found none", name));
    return;
  }
  refuse_other_text(text, name);
  GroundtruthSteps timed;
  std::vector<MeasuredStep> steps;
  RowPredictor predictor(margin);
  std::vector<Comparison> comparisons;
  int line = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view row_text = text.substr(0, end);
    text = end < text.size() ? text.substr(end + 1) : std::string_view{};
    ++line;
    if (row_text.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const JsonDocument document =
        JsonDocument::parse(row_text, fmt::format("{} row {}", name, line), JsonSyntax::strict);
    const JsonValue& row = document.root();
    if (!row.is_object()) row.fail("an object a line");
    row.at("model");  // in every kind of row: without it this is some other file
    ++validation.rows;
    try {
      check_row(row);
      if (row.find("peaks") != nullptr && row.find("stage") != nullptr) row_deepspeed_config(row, row_text);
      add_measured_step(row, line, name, timed, steps, validation);
      RowPredictor::Answer answer = predictor.predict(row, row_text);
      for (Comparison& each : answer.comparisons) {
        each.line = line;
        if (each.measured > Bytes()) comparisons.push_back(std::move(each));
      }
      for (Verdict& verdict : answer.verdicts) {
        verdict.source = name;
        verdict.line = line;
        validation.verdicts.push_back(std::move(verdict));
      }
    } catch (const InputError& error) {
      validation.unpredicted.push_back({name, line, RowPredictor::describe(row), error.what()});
    }
  }
  add_tables(name, comparisons, validation);
  add_step_times(name, steps, validation);
}

namespace {

std::string verdict_text(const Validation& validation) {
  if (validation.verdicts.empty()) return "";
  std::string out =
      fmt::format("\nFits or not: {} rows, {} wrong\n", validation.verdicts.size(), validation.verdict_errors());
  for (const VerdictTable& table : validation.verdict_tables()) {
    out += fmt::format(
        "  {}: {} fitted, {} of them called \"does not fit\" ({:.1f} %); {} out of memory, {} called \"fits\"\n",
        table.source, table.fitted, table.called_too_large,
        table.fitted == 0 ? 0.0 : 100.0 * table.called_too_large / table.fitted, table.out_of_memory,
        table.called_fitting);
  }
  for (const Verdict& each : validation.verdicts) {
    if (!each.wrong()) continue;
    out += fmt::format("  {} row {}: {}: called \"{}\", needs {} of {} {}\n", each.source, each.line, each.row,
                       each.predicted_fits ? "fits" : "does not fit", format_gib(each.need), format_gib(each.capacity),
                       each.why);
  }
  return out;
}

}  // namespace

std::string validation_text(const Validation& validation) {
  std::string out = fmt::format("{} rows, {} not predicted\n", validation.rows, validation.unpredicted.size());
  std::string source;
  for (const ErrorTable& table : validation.tables) {
    if (table.source != source) {
      source = table.source;
      out += fmt::format("\n{}\n  {:<28}{:>5}{:>11}{:>11}{:>12}  worst row\n", source, "quantity", "n", "MAPE", "max",
                         "bias");
    }
    std::string name(to_string(table.quantity));
    if (table.group != RowGroup::all) name += fmt::format(" ({})", to_string(table.group));
    out += fmt::format("  {:<28}{:>5}{:>11}{:>11}{:>12}  {}: {} ({} for {})\n", name, table.rows,
                       percent(table.mean_error), percent(table.largest_error),
                       fmt::format("{:+.3f} %", 100 * table.bias), table.worst.line, table.worst.row,
                       format_gib(table.worst.predicted), format_gib(table.worst.measured));
    if (table.intervals > 0) {
      out += fmt::format("  {:<28}{:>5} of {} measured values in the predicted interval\n", "", table.inside,
                         table.intervals);
    }
  }
  out += step_time_text(validation.step_times);
  out += verdict_text(validation);
  return out + reasons_text("Not predicted", validation.unpredicted) +
         reasons_text("Fits or not: no verdict", validation.no_verdict);
}

std::string validation_json(const Validation& validation, const EarlierComparison* earlier) {
  using Json = nlohmann::ordered_json;
  Json root;
  root["schema"] = 1;
  root["rows"] = validation.rows;
  root["tables"] = Json::array();
  for (const ErrorTable& table : validation.tables) {
    root["tables"].push_back({{"source", table.source},
                              {"quantity", to_string(table.quantity)},
                              {"group", to_string(table.group)},
                              {"n", table.rows},
                              {"mape", 100 * table.mean_error},
                              {"max", 100 * table.largest_error},
                              {"bias", 100 * table.bias},
                              {"intervals", table.intervals},
                              {"inside", table.inside},
                              {"worst",
                               {{"row", table.worst.line},
                                {"description", table.worst.row},
                                {"predicted", table.worst.predicted.base()},
                                {"measured", table.worst.measured.base()}}}});
  }
  for (const StepTimeTable& table : validation.step_times) {
    root["tables"].push_back({{"source", table.source},
                              {"quantity", "step_seconds"},
                              {"group", table.group},
                              {"n", table.rows},
                              {"mape", 100 * table.mean_error},
                              {"p90", 100 * table.p90_error},
                              {"max", 100 * table.largest_error},
                              {"bias", 100 * table.bias},
                              {"constant_mfu_mape", 100 * table.constant_mfu_error},
                              {"worst",
                               {{"row", table.worst_line},
                                {"description", table.worst_row},
                                {"predicted", table.worst_predicted.base()},
                                {"measured", table.worst_measured.base()}}}});
  }
  const auto reasons = [](const std::vector<Unpredicted>& list) {
    Json out = Json::array();
    for (const Unpredicted& each : list) {
      out.push_back({{"source", each.source}, {"row", each.line}, {"description", each.row}, {"reason", each.reason}});
    }
    return out;
  };
  root["unpredicted"] = reasons(validation.unpredicted);
  root["no_verdict"] = reasons(validation.no_verdict);
  root["verdict_errors"] = validation.verdict_errors();
  root["verdicts"] = Json::array();
  for (const Verdict& each : validation.verdicts) {
    root["verdicts"].push_back({{"source", each.source},
                                {"row", each.line},
                                {"id", each.id},
                                {"measured_fits", each.measured_fits},
                                {"predicted_fits", each.predicted_fits},
                                {"need_bytes", each.need.base()},
                                {"capacity_bytes", each.capacity.base()},
                                {"why", each.why}});
  }
  root["verdict_tables"] = Json::array();
  for (const VerdictTable& table : validation.verdict_tables()) {
    root["verdict_tables"].push_back({{"source", table.source},
                                      {"fitted", table.fitted},
                                      {"called_too_large", table.called_too_large},
                                      {"out_of_memory", table.out_of_memory},
                                      {"called_fitting", table.called_fitting}});
  }
  if (earlier != nullptr) {
    root["regressions"] = Json::array();
    for (const Regression& each : earlier->regressions) {
      root["regressions"].push_back({{"source", each.source},
                                     {"quantity", each.quantity},
                                     {"group", each.group},
                                     {"figure", each.figure},
                                     {"earlier", each.earlier},
                                     {"now", each.now}});
    }
    root["not_compared"] = earlier->not_compared;
  }
  return root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";  // rows may hold any bytes
}

}  // namespace zeroplan
