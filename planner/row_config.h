#pragma once
// The DeepSpeed configuration of a measured row (data/groundtruth).

#include <string_view>

#include "models/config_text.h"
#include "models/json_reader.h"

namespace zeroplan {

/// What tools/measure_deepspeed.py gave to deepspeed.initialize(): its own keys, `zero` and `prec_opts` inside their
/// sections, and those of `extra` in place of any of the same name. `text` is the row's. Throws InputError naming a key
/// that DeepSpeed does not know or that no rule of the prediction reads: nothing in a row is passed over.
ConfigText row_deepspeed_config(const JsonValue& row, std::string_view text);

}  // namespace zeroplan
