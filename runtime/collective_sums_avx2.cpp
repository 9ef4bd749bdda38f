// The sums of collective_sums.cpp, eight elements at a time. See runtime/CMakeLists.txt for what such a file may
// include.

#include <immintrin.h>

#include "runtime/collective_sums_paths.h"

namespace zeroplan {
namespace {

__m256i low_words(__m256i words) {
  const __m256i packed = _mm256_packus_epi32(words, words);  // each 128-bit half by itself
  return _mm256_permute4x64_epi64(packed, 0b1000);
}

struct Fp32Lanes {
  static constexpr int kBytes = 4;
  static __m256 load(const char* from) { return _mm256_loadu_ps(reinterpret_cast<const float*>(from)); }
  static void store(char* to, __m256 sum) { _mm256_storeu_ps(reinterpret_cast<float*>(to), sum); }
};

struct Bf16Lanes {
  static constexpr int kBytes = 2;
  static __m256 load(const char* from) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  }
  static void store(char* to, __m256 sum) {
    const __m256i bits = _mm256_castps_si256(sum);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i words = low_words(_mm256_srli_epi32(nearest, 16));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(words));
  }
};

struct Fp16Lanes {
  static constexpr int kBytes = 2;
  static __m256 load(const char* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store(char* to, __m256 sum) {
    const __m128i words = _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words);
  }
};

template <class Lanes>
std::int64_t sum(const SumArrays& arrays, std::int64_t count) {
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const std::int64_t low = i * Lanes::kBytes, high = low + 8 * Lanes::kBytes;
    const char* first = static_cast<const char*>(arrays.sources[0]);
    __m256 a = Lanes::load(first + low), b = Lanes::load(first + high);
    for (std::int64_t s = 1; s < arrays.source_count; ++s) {
      const char* source = static_cast<const char*>(arrays.sources[s]);
      a = _mm256_add_ps(a, Lanes::load(source + low));
      b = _mm256_add_ps(b, Lanes::load(source + high));
    }
    a = _mm256_blendv_ps(a, nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    b = _mm256_blendv_ps(b, nan, _mm256_cmp_ps(b, b, _CMP_UNORD_Q));
    for (std::int64_t t = 0; t < arrays.target_count; ++t) {
      char* target = static_cast<char*>(arrays.targets[t]);
      Lanes::store(target + low, a);
      Lanes::store(target + high, b);
    }
  }
  return i;
}

}  // namespace

std::int64_t sum_fp32_avx2(const SumArrays& arrays, std::int64_t count) { return sum<Fp32Lanes>(arrays, count); }
std::int64_t sum_bf16_avx2(const SumArrays& arrays, std::int64_t count) { return sum<Bf16Lanes>(arrays, count); }
std::int64_t sum_fp16_avx2(const SumArrays& arrays, std::int64_t count) { return sum<Fp16Lanes>(arrays, count); }

}  // namespace zeroplan
