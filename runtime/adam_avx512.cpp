#include <immintrin.h>

#include <type_traits>

#include "runtime/adam_pass.h"

namespace zeroplan {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  using V = __m512;
  using Half = __m256i;

  static V load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, V value) { _mm512_storeu_ps(to, value); }
  static Half load_half(const std::uint16_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static void store_half(std::uint16_t* to, Half value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value); }
  static void stream_pair(std::uint16_t* to, Half low, Half high) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
  static void fence() { _mm_sfence(); }
  ZEROPLAN_IN_LOOP static void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

  static V set(float value) { return _mm512_set1_ps(value); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V div(V a, V b) { return _mm512_div_ps(a, b); }
  static V sqrt(V a) { return _mm512_sqrt_ps(a); }
  static V quiet(V a) {
    const V nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), nan);
  }

  static V from_bf16(Half half) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)); }
  static V from_fp16(Half half) { return _mm512_cvtph_ps(half); }
  static Half to_bf16(V value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
  static Half to_fp16(V value) { return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V join(Half high, Half low) {
    const __m512i top = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
    return _mm512_castsi512_ps(_mm512_add_epi32(top, _mm512_cvtepi16_epi32(low)));
  }
  static Half split(V value, Half& low) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i high = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
    low = _mm512_cvtepi32_epi16(_mm512_sub_epi32(bits, _mm512_slli_epi32(high, 16)));
    return _mm512_cvtepi32_epi16(high);
  }
};

}  // namespace

void adam_pass_avx512(const AdamScalars& scalars, const AdamRange& range, std::int64_t begin, std::int64_t end,
                      bool stream) {
  choose_gradient<Avx512>(scalars, range, begin, end, stream);
}

}  // namespace zeroplan
