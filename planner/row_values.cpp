#include "planner/row_values.h"

#include <fmt/format.h>

#include "models/error.h"

namespace zeroplan {

std::int64_t row_integer(const JsonValue& row, std::string_view key, std::int64_t otherwise) {
  const JsonValue* value = row.find(key);
  return value == nullptr ? otherwise : value->as_int(0, kManyInRow);
}
bool row_flag(const JsonValue& row, std::string_view key, bool otherwise) {
  const JsonValue* value = row.find(key);
  if (value == nullptr) return otherwise;
  return value->kind() == JsonValue::Kind::boolean ? value->as_bool() : value->as_int(0, 1) == 1;
}
std::string row_text(const JsonValue& row, std::string_view key, const std::string& otherwise) {
  const JsonValue* value = row.find(key);
  return value == nullptr ? otherwise : value->as_string();
}

DType row_precision(const JsonValue& row) {
  const std::string name = row_text(row, "prec", "bf16");
  if (name == "bf16") return DType::bf16;
  if (name == "fp16") return DType::fp16;
  if (name == "fp32") return DType::fp32;
  throw InputError(fmt::format("prec: expected bf16, fp16 or fp32, found \"{}\"", name));
}

}  // namespace zeroplan
