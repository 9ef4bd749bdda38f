#pragma once
// The AdamW pass of each instruction set. No inline functions here: see runtime/CMakeLists.txt.

#include <cstdint>

#include "runtime/adam.h"

namespace zeroplan {

/// Updates elements [begin, end) of a checked range. `stream`: the 16-bit weights bypass the caches (same bits).
using AdamPass = void(const AdamScalars& scalars, const AdamRange& range, std::int64_t begin, std::int64_t end,
                      bool stream);
AdamPass adam_pass_scalar, adam_pass_avx2, adam_pass_avx512;

}  // namespace zeroplan
