#include "runtime/kernels/exponential_loop.h"

namespace zeroplan {

void exponentials_avx2(float* x, std::int64_t count, float scale, float shift) {
  exponential_loop(x, count, scale, shift);
}

}  // namespace zeroplan
