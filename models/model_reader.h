#pragma once
// From a parsed config.json to a ModelSpec; model_catalog.cpp and read_model share it.

#include <string>

#include "models/json_reader.h"
#include "models/model_spec.h"

namespace zeroplan {

/// Throws InputError as read_model. `name` and `source` go into the result.
ModelSpec model_from_json(const JsonValue& root, std::string name, std::string source);

/// "dir/config.json" is called dir, "dir/x.json" is called x.
std::string model_name_of(const std::string& file_name);

/// `value` as JSON in one line, keys in their order.
std::string one_line_json(const JsonValue& value);

}  // namespace zeroplan
