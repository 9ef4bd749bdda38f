#pragma once
// Runs that people reported, in the form of tests/data/user_cases/cases.jsonl (its README has the keys): does the
// prediction fit where the run did? Part of `zeroplan validate`.

#include <string_view>

#include "models/json_reader.h"
#include "planner/validate.h"

namespace zeroplan {

/// Whether a JSON line is such a case.
bool is_user_case(const JsonValue& row);

/// GPU and host of the case with `margin` of both left free. `text` is the row's own. Throws InputError with the reason
/// when the case is not to be compared or cannot be predicted.
Verdict user_case_verdict(const JsonValue& row, std::string_view text, double margin);

}  // namespace zeroplan
