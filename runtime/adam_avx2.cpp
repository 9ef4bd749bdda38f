#include <immintrin.h>

#include <type_traits>

#include "runtime/adam_pass.h"

namespace zeroplan {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  using V = __m256;
  using Half = __m128i;

  static V load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, V value) { _mm256_storeu_ps(to, value); }
  static Half load_half(const std::uint16_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static void store_half(std::uint16_t* to, Half value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value); }
  static void stream_pair(std::uint16_t* to, Half low, Half high) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_set_m128i(high, low));
  }
  static void fence() { _mm_sfence(); }
  ZEROPLAN_IN_LOOP static void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

  static V set(float value) { return _mm256_set1_ps(value); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V div(V a, V b) { return _mm256_div_ps(a, b); }
  static V sqrt(V a) { return _mm256_sqrt_ps(a); }
  static V quiet(V a) {
    const V nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(a, nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }

  static V from_bf16(Half half) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)); }
  static V from_fp16(Half half) { return _mm256_cvtph_ps(half); }
  static Half to_bf16(V value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return low_words(_mm256_srli_epi32(rounded, 16));
  }
  static Half to_fp16(V value) { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V join(Half high, Half low) {
    const __m256i top = _mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16);
    return _mm256_castsi256_ps(_mm256_add_epi32(top, _mm256_cvtepi16_epi32(low)));
  }
  static Half split(V value, Half& low) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i high = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
    const __m256i rest = _mm256_sub_epi32(bits, _mm256_slli_epi32(high, 16));
    low = low_words(_mm256_and_si256(rest, _mm256_set1_epi32(0xffff)));
    return low_words(high);
  }

 private:
  /// Eight 32-bit words below 2^16 as 16-bit words.
  static Half low_words(__m256i words) {
    const __m256i packed = _mm256_packus_epi32(words, words);  // each 128-bit half by itself
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
  }
};

}  // namespace

void adam_pass_avx2(const AdamScalars& scalars, const AdamRange& range, std::int64_t begin, std::int64_t end,
                    bool stream) {
  choose_gradient<Avx2>(scalars, range, begin, end, stream);
}

}  // namespace zeroplan
