#pragma once
// Values of a measured row (data/groundtruth, data/activations), each with what a missing key means.

#include <cstdint>
#include <string>
#include <string_view>

#include "models/json_reader.h"
#include "models/units.h"

namespace zeroplan {

/// Larger counts in a row are mistakes.
inline constexpr std::int64_t kManyInRow = std::int64_t{1} << 40;

/// 0 to kManyInRow.
std::int64_t row_integer(const JsonValue& row, std::string_view key, std::int64_t otherwise);
/// 0, 1, false or true.
bool row_flag(const JsonValue& row, std::string_view key, bool otherwise);
std::string row_text(const JsonValue& row, std::string_view key, const std::string& otherwise);
/// "prec": bf16, fp16 or fp32. Throws InputError for another.
DType row_precision(const JsonValue& row);

}  // namespace zeroplan
