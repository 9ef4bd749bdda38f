#include "planner/csv_table.h"

#include <fmt/format.h>

#include "models/error.h"

namespace zeroplan {
namespace {

/// Takes one record off the front of `text`; `line` moves on.
std::vector<std::string> take_record(std::string_view& text, int& line, const std::string& name) {
  const int start = line;
  std::vector<std::string> cells(1);
  bool quoted = false;
  std::size_t i = 0;
  for (; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n') ++line;
    if (quoted) {
      if (c != '"') {
        cells.back() += c;
      } else if (i + 1 < text.size() && text[i + 1] == '"') {
        cells.back() += text[++i];
      } else {
        quoted = false;
      }
      continue;
    }
    if (c == '"') {
      quoted = true;
    } else if (c == ',') {
      cells.emplace_back();
    } else if (c == '\n') {
      break;
    } else if (c != '\r') {
      cells.back() += c;
    }
  }
  if (quoted) throw InputError(fmt::format("{}:{}: expected a closing quote, found the end of the file", name, start));
  text.remove_prefix(std::min(i + 1, text.size()));
  return cells;
}

}  // namespace

CsvTable CsvTable::parse(std::string_view text, const std::string& name) {
  CsvTable table;
  table.name_ = name;
  int line = 1;
  const std::vector<std::string> header = take_record(text, line, name);
  for (std::size_t i = 0; i < header.size(); ++i) {
    if (!table.columns_.emplace(header[i], i).second)
      throw InputError(fmt::format("{}:1: expected column names, found \"{}\" twice", name, header[i]));
  }
  while (!text.empty()) {
    Row row;
    row.line = line;
    row.cells = take_record(text, line, name);
    if (row.cells.size() == 1 && row.cells[0].empty()) continue;
    table.rows_.push_back(std::move(row));
  }
  return table;
}

bool CsvTable::has(std::string_view column) const { return columns_.find(column) != columns_.end(); }

const std::string& CsvTable::at(const Row& row, std::string_view column) const {
  const auto found = columns_.find(column);
  if (found == columns_.end()) throw InputError(fmt::format("{}: expected a column \"{}\"", name_, column));
  if (row.cells.size() != columns_.size())
    throw InputError(
        fmt::format("{}:{}: expected {} cells, found {}", name_, row.line, columns_.size(), row.cells.size()));
  return row.cells[found->second];
}

}  // namespace zeroplan
