// Products of vectors of int8, summed in int32.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include <cstddef>
#include <cstdint>

#include "vectors.h"

namespace native {

// Numbers of rows are at least -127.
struct Integers {
  using Sum = Ints;
  using Wide = Vector<std::int8_t>;
#if defined(NATIVE_AVX512) || defined(__AVXVNNI__)
  // The instruction takes rows without a sign: 128 more.
  static constexpr std::int8_t kOffset = -128;
#else
  static constexpr std::int8_t kOffset = 0;
#endif

  static Wide zeros() { return Wide{} + kOffset; }
  static Sum add(Sum sum, Wide weight, Wide row) {
#if defined(NATIVE_AVX512)
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)row, (__m512i)weight);
#elif defined(__AVXVNNI__)
    return (Sum)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)row,
                                        (__m256i)weight);
#elif defined(__AVX2__)
    // Two products of at most 127 * 128 each fit into 16 bits.
    const __m256i w = (__m256i)weight;
    const __m256i pairs = _mm256_maddubs_epi16(
        _mm256_abs_epi8(w), _mm256_sign_epi8((__m256i)row, w));
    return sum + (Sum)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (Sum)vdotq_s32((int32x4_t)sum, (int8x16_t)weight, (int8x16_t)row);
#else
    for (std::size_t i = 0; i < sizeof(Wide); ++i) {
      sum[i / 4] += weight[i] * row[i];
    }
    return sum;
#endif
  }
};

}  // namespace native
