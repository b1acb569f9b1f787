// Products of vectors of int8, summed in int32.
#pragma once

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
  static constexpr bool kTakesBytes = true;
#else
  static constexpr std::int8_t kOffset = 0;
  static constexpr bool kTakesBytes = false;
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

  // Returns the products of some vectors of rows, as they are, and weights from
  // 0 to kHighest. Above 63 those have a sign unless `kTakesBytes`.
  template <int kHighest, std::size_t kCount>
  static Sum multiply(const Ints (&weights)[kCount],
                      const Ints (&rows)[kCount]) {
    Sum sum = {};
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kCount; ++i) {
      const auto weight = (Wide)weights[i], row = (Wide)rows[i];
#if defined(__AVX2__)
      // So many sums of two products fit into 16 bits.
      constexpr std::size_t kFitting =
          kTakesBytes ? 0 : 32767 / (2 * 127 * kHighest);
      if constexpr (kFitting > 0) {
        __m256i pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (std::size_t j = 0; j < kFitting; ++j) {
          if (i + j == kCount) break;
          const __m256i next = _mm256_maddubs_epi16((__m256i)weights[i + j],
                                                    (__m256i)rows[i + j]);
          pairs = _mm256_add_epi16(pairs, next);
        }
        sum += (Sum)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        i += kFitting - 1;
        continue;
      }
#endif
      // What has no sign is the row of `add`.
      sum = kTakesBytes ? add(sum, row, weight) : add(sum, weight, row);
    }
    return sum;
  }
};

}  // namespace native
