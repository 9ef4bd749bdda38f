#pragma once
// Which instruction sets this processor runs.

namespace zeroplan {

bool cpu_has_avx2();    // AVX2, FMA and F16C
bool cpu_has_avx512();  // AVX-512 F, BW, DQ, VL and the above

}  // namespace zeroplan
