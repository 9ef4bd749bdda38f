#pragma once
// What the model tests share: the fact tables of tests/data/models, and bytes kept by a layer.

#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "models/model_spec.h"

namespace zeroplan::test {

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

/// Rows of a CSV file without its header; quoted fields may hold commas.
inline std::vector<std::vector<std::string>> read_csv(const std::string& path) {
  std::vector<std::vector<std::string>> rows;
  std::istringstream in(read_file(path));
  std::string line;
  std::getline(in, line);
  while (std::getline(in, line)) {
    std::vector<std::string> fields(1);
    bool quoted = false;
    for (const char c : line) {
      if (c == '"') {
        quoted = !quoted;
      } else if (c == ',' && !quoted) {
        fields.emplace_back();
      } else if (c != '\r') {
        fields.back() += c;
      }
    }
    rows.push_back(std::move(fields));
  }
  return rows;
}

inline std::string data_path(const std::string& name) {
  return std::string(ZEROPLAN_TESTS_DIR) + "/data/models/" + name;
}

/// Bytes a token of the values that backward needs, in bf16, each counted once; in-place results share storage.
inline std::int64_t kept_bytes(const BlockKind& kind) {
  std::set<int> kept;
  for (const GraphOp& op : kind.ops) kept.insert(op.keeps.begin(), op.keeps.end());
  std::int64_t bytes = 0;
  for (const int v : kept) {
    const Value& value = kind.values[static_cast<std::size_t>(v)];
    const int size = value.type == ValueType::activation ? 2 : value.type == ValueType::fp32 ? 4 : 1;
    bytes += value.per_token * size;
  }
  return bytes;
}

inline const BlockKind& first_layer(const ModelSpec& model) {
  for (const int index : model.sequence) {
    const BlockKind& kind = model.kinds[static_cast<std::size_t>(index)];
    if (kind.role == BlockRole::layer) return kind;
  }
  throw std::runtime_error("no layers");
}

}  // namespace zeroplan::test
