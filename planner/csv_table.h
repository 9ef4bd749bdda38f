#pragma once
// CSV with a header (RFC 4180: quotes, doubled quotes, commas and newlines inside them).

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace zeroplan {

class CsvTable {
 public:
  struct Row {
    int line = 0;  // where it starts; the header is line 1
    std::vector<std::string> cells;
  };
  /// Throws InputError with the line on an open quote or a column named twice.
  static CsvTable parse(std::string_view text, const std::string& name);

  bool has(std::string_view column) const;
  std::size_t columns() const { return columns_.size(); }
  /// Throws InputError when there is no such column, or when the row is longer or shorter than the header.
  const std::string& at(const Row& row, std::string_view column) const;
  const std::vector<Row>& rows() const { return rows_; }

 private:
  std::string name_;
  std::map<std::string, std::size_t, std::less<>> columns_;
  std::vector<Row> rows_;
};

}  // namespace zeroplan
