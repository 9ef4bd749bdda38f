#include "runtime/kernels/exponential.h"

#include <cmath>

#include "runtime/cpu_features.h"
#include "runtime/kernels/exponential_loop.h"

namespace zeroplan {
namespace {

ExponentialLoop* choose_loop() {
#ifdef ZEROPLAN_X86_KERNELS
  if (cpu_has_avx512()) return exponentials_avx512;
  if (cpu_has_avx2()) return exponentials_avx2;
#endif
  return exponentials_portable;
}

}  // namespace

void exponentials_portable(float* x, std::int64_t count, float scale, float shift) {
  exponential_loop(x, count, scale, shift);
}

void exponentials(float* x, std::int64_t count, float scale, float shift) {
  static ExponentialLoop* const loop = choose_loop();
  loop(x, count, scale, shift);
}

void exponentials(double* x, std::int64_t count, double scale, double shift) {
  for (std::int64_t i = 0; i < count; ++i) x[i] = std::exp(x[i] * scale - shift);
}

}  // namespace zeroplan
