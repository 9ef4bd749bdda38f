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
/// Throws InputError for a run that nobody has: more than 2^31 tokens a micro-step or 2^20 micro-steps (products leave
/// 64 bits).
void check_micro_steps(std::int64_t batch, std::int64_t seq_len, std::int64_t accumulation);
/// The same of a row of data/groundtruth or data/activations; also for a stage that is none, and a section of
/// DeepSpeed's configuration that is no object.
void check_row(const JsonValue& row);

}  // namespace zeroplan
