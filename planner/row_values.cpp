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

void check_micro_steps(std::int64_t batch, std::int64_t seq_len, std::int64_t accumulation) {
  constexpr std::int64_t kTokens = std::int64_t{1} << 31, kSteps = std::int64_t{1} << 20;
  if (batch > 0 && seq_len > kTokens / batch)
    throw InputError(fmt::format("no micro-step has {} x {} tokens", batch, seq_len));
  if (accumulation > kSteps) throw InputError(fmt::format("no step has {} micro-steps", accumulation));
}

void check_row(const JsonValue& row) {
  check_micro_steps(row_integer(row, "mb", 1), row_integer(row, "seq", 1), row_integer(row, "gas", 1));
  constexpr std::int64_t kRanks = 1 << 20, kAdapterRank = 1 << 16;
  const auto within = [&](std::string_view key, std::int64_t most) {
    if (const JsonValue* value = row.find(key)) value->as_int(0, most);
  };
  within("stage", 3);
  within("ndev", kRanks);
  within("lora", kAdapterRank);
  for (const char* key : {"zero", "extra", "prec_opts"}) {
    const JsonValue* section = row.find(key);
    if (section != nullptr && !section->is_object()) section->fail("an object");
  }
}

}  // namespace zeroplan
