#include "planner/validate_earlier.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "models/error.h"
#include "models/json_reader.h"

namespace zeroplan {
namespace {

constexpr double kRounding = 1e-6;  // percent
constexpr double kAnyError = std::numeric_limits<double>::max();

std::string file_name(std::string_view path) { return std::string(path.substr(path.find_last_of('/') + 1)); }

/// One table of either kind; verdicts have a quantity of their own and no errors.
struct Table {
  std::string source, quantity, group;
  std::int64_t rows = 0;
  std::vector<std::pair<std::string, double>> figures;
};

using TableKey = std::tuple<std::string, std::string, std::string>;
TableKey key_of(const Table& table) { return {table.source, table.quantity, table.group}; }

std::int64_t count(const JsonValue& object, std::string_view key) {
  return object.at(key).as_int(0, std::numeric_limits<std::int64_t>::max());
}

/// Both runs are read from their JSON, so that both are compared by what they print.
std::vector<Table> tables_of(const JsonDocument& document) {
  const JsonValue& root = document.root();
  if (!root.is_object() || root.find("tables") == nullptr || root.find("verdict_tables") == nullptr) {
    root.fail("what `zeroplan validate --json` prints");
  }
  if (root.at("schema").as_int(0, 1000) != 1) root.at("schema").fail("schema 1");
  std::vector<Table> tables;
  for (const JsonValue& each : root.at("tables").items()) {
    Table table{file_name(each.at("source").as_string()),
                each.at("quantity").as_string(),
                each.at("group").as_string(),
                count(each, "n"),
                {}};
    for (const char* figure : {"mape", "max"})
      table.figures.emplace_back(figure, each.at(figure).as_real(0, kAnyError));
    tables.push_back(std::move(table));
  }
  for (const JsonValue& each : root.at("verdict_tables").items()) {
    Table table{file_name(each.at("source").as_string()),
                "verdicts",
                "all",
                count(each, "fitted") + count(each, "out_of_memory"),
                {}};
    for (const char* figure : {"called_too_large", "called_fitting"}) {
      table.figures.emplace_back(figure, static_cast<double>(count(each, figure)));
    }
    tables.push_back(std::move(table));
  }
  return tables;
}

std::string label(const Table& table) { return fmt::format("{}: {} ({})", table.source, table.quantity, table.group); }

std::set<std::string> sources_of(const std::vector<Table>& tables) {
  std::set<std::string> sources;
  for (const Table& table : tables) sources.insert(table.source);
  return sources;
}

void compare(const Table& then, const Table* now, EarlierComparison& result) {
  const std::int64_t rows = now == nullptr ? 0 : now->rows;
  const auto worse = [&](const std::string& figure, double earlier, double today) {
    result.regressions.push_back({then.source, then.quantity, then.group, figure, earlier, today});
  };
  if (rows > then.rows) {
    result.not_compared.push_back(fmt::format("{}: {} rows then, {} now", label(then), then.rows, rows));
    return;
  }
  ++result.figures;
  if (rows < then.rows) worse("n", static_cast<double>(then.rows), static_cast<double>(rows));
  if (now == nullptr) return;
  for (std::size_t i = 0; i < then.figures.size(); ++i) {
    ++result.figures;
    const auto& [figure, earlier] = then.figures[i];
    if (now->figures[i].second > earlier + kRounding) worse(figure, earlier, now->figures[i].second);
  }
}

/// A file name that two sources share would be compared with the wrong one.
std::map<TableKey, const Table*> by_key(const std::vector<Table>& tables, const std::string& name) {
  std::map<TableKey, const Table*> found;
  for (const Table& table : tables) {
    if (found.emplace(key_of(table), &table).second) continue;
    throw InputError(
        fmt::format("{}: expected sources with different file names, found two of {}", name, table.source));
  }
  return found;
}

}  // namespace

EarlierComparison compare_with_earlier(const Validation& validation, std::string_view earlier,
                                       const std::string& name) {
  const std::vector<Table> then = tables_of(JsonDocument::parse(earlier, name, JsonSyntax::strict));
  const std::vector<Table> now = tables_of(JsonDocument::parse(validation_json(validation), "this run"));
  const std::map<TableKey, const Table*> today = by_key(now, "the files to validate");
  (void)by_key(then, name);
  const std::set<std::string> read_now = sources_of(now), read_then = sources_of(then);
  EarlierComparison result;
  for (const Table& table : then) {
    if (!read_now.contains(table.source)) continue;
    const auto found = today.find(key_of(table));
    compare(table, found == today.end() ? nullptr : found->second, result);
  }
  for (const std::string& source : read_then) {
    if (!read_now.contains(source)) result.not_compared.push_back(source + ": not read now");
  }
  for (const std::string& source : read_now) {
    if (!read_then.contains(source)) result.not_compared.push_back(source + ": not read then");
  }
  if (result.figures == 0) {
    throw InputError(
        fmt::format("{}: expected tables of the files to validate, found none that can be compared", name));
  }
  return result;
}

std::string earlier_text(const EarlierComparison& comparison, const std::string& name) {
  std::string out =
      fmt::format("\nBeside {}: {} figures, {} worse\n", name, comparison.figures, comparison.regressions.size());
  for (const Regression& each : comparison.regressions) {
    const bool percent = each.figure == "mape" || each.figure == "max";
    const auto figure = [&](double value) {
      return percent ? fmt::format("{:.4f} %", value) : fmt::format("{}", value);
    };
    out += fmt::format("  {}: {} ({}): {} {} -> {}\n", each.source, each.quantity, each.group, each.figure,
                       figure(each.earlier), figure(each.now));
  }
  for (const std::string& each : comparison.not_compared) out += fmt::format("  not compared: {}\n", each);
  return out;
}

}  // namespace zeroplan
