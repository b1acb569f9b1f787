// Blocks of weights as GGUF files have them. See ggml's quants.
//
// A weight is scale * (integer - kMiddle) + offset. Integers are from 0 to
// kHighest, and 16 of them have one scale and one offset. A format unpacks kPart
// weights into registers: one block of kSize weights, or a few.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "integers.h"
#include "vectors.h"

namespace native {

using Byte = std::uint8_t;
typedef Byte Bytes16 __attribute__((vector_size(16)));
typedef Byte Bytes32 __attribute__((vector_size(32)));

constexpr std::size_t kGroup = 16;  // weights with one scale
constexpr std::size_t kVectors = 4;  // of a chunk, which has a group a lane
constexpr std::size_t kChunk = kVectors * kVectorBytes;
constexpr std::size_t kLarge = 256;  // weights of a large block
// Those of small blocks that are unpacked together.
constexpr std::size_t kSmall = std::max<std::size_t>(kChunk, 128);
constexpr std::size_t kLargeGroups = kLarge / kGroup;

// Each 32 of 128 weights are in this order, which suits pairs of them in a file.
constexpr std::size_t kOrder[] = {0, 2, 1, 3, 4, 6, 5, 7};

// Returns the group of a lane. Four vectors are read four bytes at a time, so
// that neighbouring lanes come from different ones.
constexpr std::size_t group_of(std::size_t lane) {
  const std::size_t i = lane % kLanes;
  const std::size_t place = lane - i + i % kVectors * (kLanes / kVectors) +
                            i / kVectors;
  return 2 * kOrder[place / 2] + place % 2;
}

// A number for each group, in the order of lanes.
template <std::size_t kSize>
struct Lanes {
  Floats of[kSize / kChunk];

  Lanes operator*(float factor) const {
    Lanes result;
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kSize / kChunk; ++i) {
      result.of[i] = of[i] * factor;
    }
    return result;
  }
};

template <class T>
inline T read(const Byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

#if defined(__aarch64__)
typedef __fp16 Half;  // GCC has the other name since version 13
#else
typedef _Float16 Half;
#endif

inline float half(const Byte* from) {
  return static_cast<float>(read<Half>(from));
}

typedef std::uint64_t Words32 __attribute__((vector_size(32)));

#if defined(NATIVE_AVX512)
typedef Byte Bytes64 __attribute__((vector_size(64)));
typedef std::uint64_t Words64 __attribute__((vector_size(64)));

inline Bytes64 join(Bytes32 first, Bytes32 second) {
  return (Bytes64)__builtin_shufflevector((Words32)first, (Words32)second, 0, 1,
                                          2, 3, 4, 5, 6, 7);
}

// Shifts each half to the right, bits between neighbours, too.
inline Bytes64 shifted(Bytes64 bytes, std::uint64_t first,
                       std::uint64_t second) {
  return (Bytes64)((Words64)bytes >> Words64{first, first, first, first, second,
                                             second, second, second});
}
#else
// Compilers are bad at vectors that are wider than those of the processor.
struct Bytes64 {
  Bytes32 first, second;

  Bytes64 operator&(Byte x) const { return {first & x, second & x}; }
  Bytes64 operator^(Byte x) const { return {first ^ x, second ^ x}; }
  Bytes64 operator>>(int x) const { return {first >> x, second >> x}; }
  Bytes64 operator|(Bytes64 x) const {
    return {first | x.first, second | x.second};
  }
};

inline Bytes64 join(Bytes32 first, Bytes32 second) { return {first, second}; }

inline Bytes64 shifted(Bytes64 bytes, std::uint64_t first,
                       std::uint64_t second) {
  return {(Bytes32)((Words32)bytes.first >> first),
          (Bytes32)((Words32)bytes.second >> second)};
}
#endif

// Not in one load: with those, products of eight rows took 1.5 times as long as
// soon as weights came from memory (Zen 5).
inline Bytes64 read64(const Byte* from) {
  return join(read<Bytes32>(from), read<Bytes32>(from + 32));
}

template <std::size_t kSize>
struct Part {
  Bytes64 integers[kSize / sizeof(Bytes64)];
  Lanes<kSize> scales, offsets;
};

// Returns lanes of bytes of T. Compilers have no vectors for it in one step.
template <class T>
inline Lanes<kLarge> to_lanes(Bytes16 bytes) {
  Lanes<kLarge> result;
  constexpr bool kIsSigned = std::is_signed_v<T>;
#if defined(NATIVE_AVX512)
  const auto x = (__m128i)bytes;
  const __m512i all =
      kIsSigned ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x);
  result.of[0] = (Floats)_mm512_cvtepi32_ps(all);
#elif defined(__AVX2__)
#pragma GCC unroll 2
  for (std::size_t i = 0; i < kLarge / kChunk; ++i) {
    const __m128i x = i ? _mm_srli_si128((__m128i)bytes, 8) : (__m128i)bytes;
    const __m256i all =
        kIsSigned ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x);
    result.of[i] = (Floats)_mm256_cvtepi32_ps(all);
  }
#else
  for (std::size_t i = 0; i < kLargeGroups; ++i) {
    result.of[i / kLanes][i % kLanes] = static_cast<T>(bytes[i]);
  }
#endif
  return result;
}

template <std::size_t... I>
inline Bytes16 in_lanes(Bytes16 bytes, std::index_sequence<I...>) {
  return __builtin_shufflevector(bytes, bytes, group_of(I)...);
}

constexpr auto kAllGroups = std::make_index_sequence<kLargeGroups>();

// Returns the first numbers of the blocks of a part, which are half floats.
template <std::size_t kBytes>
[[gnu::always_inline]] inline Lanes<kSmall> halves(const Byte* from) {
  const auto at = [&](std::size_t lane) {
    return from + group_of(lane) / 2 * kBytes;
  };
  Lanes<kSmall> result;
#if defined(__AVX2__)
  // Lanes 0 to 3 and 4 to 7 have the same blocks, and so have the others.
  const auto of = [&](std::size_t i) { return read<short>(at(i)); };
#if defined(NATIVE_AVX512)
  const __m512 all = _mm512_castps256_ps512(_mm256_cvtph_ps(_mm_setr_epi16(
      of(0), of(1), of(2), of(3), of(8), of(9), of(10), of(11))));
  result.of[0] = (Floats)_mm512_shuffle_f32x4(all, all, 0b01010000);
#else
  result.of[0] = (Floats)_mm256_cvtph_ps(_mm_setr_epi16(
      of(0), of(1), of(2), of(3), of(0), of(1), of(2), of(3)));
#endif
#else
  for (std::size_t i = 0; i < kSmall / kGroup; ++i) {
    result.of[i / kLanes][i % kLanes] = half(at(i));
  }
#endif
  return result;
}

#if defined(__AVX2__)
// Returns the first words of the blocks of four lanes. `_mm256_setr_epi32` puts
// them together in memory with GCC 12, which took half the time of a product.
template <std::size_t kBytes>
[[gnu::always_inline]] inline __m128i four_words(const Byte* from,
                                                 std::size_t lane) {
  const auto at = [=](std::size_t i) {
    return from + group_of(lane + i) / 2 * kBytes;
  };
  __m128i words = _mm_cvtsi32_si128(read<int>(at(0)));
  words = _mm_insert_epi32(words, read<int>(at(1)), 1);
  words = _mm_insert_epi32(words, read<int>(at(2)), 2);
  return _mm_insert_epi32(words, read<int>(at(3)), 3);
}
#endif

// Reads the first two numbers of the blocks of a part.
template <std::size_t kBytes>
[[gnu::always_inline]] inline void read_halves(const Byte* from,
                                               Lanes<kSmall>& first,
                                               Lanes<kSmall>& second) {
#if defined(__AVX2__)
#if defined(NATIVE_AVX512)
  const auto all = (Floats)_mm512_cvtph_ps(_mm256_setr_m128i(
      four_words<kBytes>(from, 0), four_words<kBytes>(from, 8)));
  first.of[0] = __builtin_shufflevector(all, all, 0, 2, 4, 6, 0, 2, 4, 6, 8, 10,
                                        12, 14, 8, 10, 12, 14);
  second.of[0] = __builtin_shufflevector(all, all, 1, 3, 5, 7, 1, 3, 5, 7, 9,
                                         11, 13, 15, 9, 11, 13, 15);
#else
  const auto all = (Floats)_mm256_cvtph_ps(four_words<kBytes>(from, 0));
  first.of[0] = __builtin_shufflevector(all, all, 0, 2, 4, 6, 0, 2, 4, 6);
  second.of[0] = __builtin_shufflevector(all, all, 1, 3, 5, 7, 1, 3, 5, 7);
#endif
#else
  first = halves<kBytes>(from);
  second = halves<kBytes>(from + 2);
#endif
}

struct Q8_0 {
  static constexpr std::size_t kSize = 32, kBytes = 34, kPart = kSmall;
  static constexpr int kMiddle = Integers::kTakesBytes ? 128 : 0;
  static constexpr int kHighest = 255;

  [[gnu::always_inline]] static void unpack(const Byte* from, Part<kPart>& to) {
    to.scales = halves<kBytes>(from);
    to.offsets = {};
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kPart / 64; ++i) {
      const auto block = [&](std::size_t j) {
        return read<Bytes32>(from + kOrder[2 * i + j] * kBytes + 2);
      };
      to.integers[i] = join(block(0), block(1)) ^ Byte{kMiddle};
    }
  }
};

// Returns 16 for each of 64 bits that is set, else 0.
inline Bytes64 fifth_bits(std::uint32_t first, std::uint32_t second) {
#if defined(NATIVE_AVX512)
  const std::uint64_t mask = first | static_cast<std::uint64_t>(second) << 32;
  return (Bytes64)_mm512_maskz_set1_epi8(mask, 16);
#else
  typedef std::uint32_t Eight __attribute__((vector_size(32)));
  const auto bits_of = [](std::uint32_t word) {
    constexpr std::uint64_t kBits = 0x8040201008040201;
    const Bytes32 all = (Bytes32)(Eight{} + word);
    const Bytes32 bytes = __builtin_shufflevector(
        all, all, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 18, 18, 18,
        18, 18, 18, 18, 18, 19, 19, 19, 19, 19, 19, 19, 19);
    return (Bytes32)((bytes & (Bytes32)(Words32{} + kBits)) != 0) & 16;
  };
  return join(bits_of(first), bits_of(second));
#endif
}

// Returns the low four bits of 16 bytes, then the high ones; the rest is to be
// masked.
inline Bytes32 nibbles(const Byte* from) {
#if defined(__AVX2__)
  const auto twice =
      (Words32)_mm256_broadcastsi128_si256(read<__m128i>(from));
#else
  typedef std::uint64_t Words16 __attribute__((vector_size(16)));
  const auto pairs = read<Words16>(from);
  const Words32 twice = __builtin_shufflevector(pairs, pairs, 0, 1, 0, 1);
#endif
  return (Bytes32)(twice >> Words32{0, 0, 4, 4});
}

// Four or five bits, with an offset or with integers around zero.
template <bool kIsFive, bool kIsAround>
struct Small {
  static constexpr std::size_t kHead = kIsAround ? 2 : 4;
  static constexpr std::size_t kSize = 32, kPart = kSmall;
  static constexpr std::size_t kBytes = kHead + (kIsFive ? 20 : 16);
  static constexpr int kHighest = kIsFive ? 31 : 15;
  static constexpr int kMiddle = kIsAround ? (kHighest + 1) / 2 : 0;

  [[gnu::always_inline]] static void unpack(const Byte* from, Part<kPart>& to) {
    if constexpr (kIsAround) {
      to.scales = halves<kBytes>(from);
      to.offsets = {};
    } else {
      read_halves<kBytes>(from, to.scales, to.offsets);
    }
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kPart / 64; ++i) {
      const Byte* first = from + kOrder[2 * i] * kBytes;
      const Byte* second = from + kOrder[2 * i + 1] * kBytes;
      to.integers[i] = join(nibbles(first + kBytes - 16),
                            nibbles(second + kBytes - 16)) & 15;
      if constexpr (kIsFive) {
        to.integers[i] =
            to.integers[i] | fifth_bits(read<std::uint32_t>(first + kHead),
                                        read<std::uint32_t>(second + kHead));
      }
    }
  }
};

// Returns eight scales and then eight offsets, in lanes, from a head whose last
// twelve bytes have their six bits: first scales, first offsets, and in the last
// four bytes low bits of the others, whose high bits are above the first ones.
template <std::size_t... I>
[[gnu::always_inline]] inline Bytes32 sixths(Bytes16 head,
                                             std::index_sequence<I...>) {
  typedef std::uint16_t Pairs __attribute__((vector_size(32)));
  constexpr auto place = [](std::size_t i) { return group_of(i % kLargeGroups) / 2; };
  constexpr auto is_first = [=](std::size_t i) { return place(i) < 4; };
  constexpr auto is_scale = [](std::size_t i) { return i < kLargeGroups; };
  constexpr auto begin = [=](std::size_t i) { return is_scale(i) ? 4 : 8; };
  const Bytes32 low = __builtin_shufflevector(
      head, head,
      (place(I) + (is_first(I) ? begin(I) : 8) + I / kLargeGroups * 16)...);
  const Bytes32 high = __builtin_shufflevector(
      head, head, (place(I) % 4 + begin(I) + I / kLargeGroups * 16)...);
  constexpr Bytes32 kHere = {
      static_cast<Byte>(is_first(I) ? 63 : is_scale(I) ? 15 : 0)...};
  constexpr Bytes32 kAbove = {
      static_cast<Byte>(is_first(I) || is_scale(I) ? 0 : 15)...};
  constexpr Bytes32 kHigh = {static_cast<Byte>(is_first(I) ? 0 : 48)...};
  return (low & kHere) | ((Bytes32)((Pairs)low >> 4) & kAbove) |
         ((Bytes32)((Pairs)high >> 2) & kHigh);
}

[[gnu::always_inline]] inline void read_sixths(const Byte* block,
                                               Part<kLarge>& to) {
  constexpr auto half_of = std::make_index_sequence<kLargeGroups>();
  const Bytes16 head = read<Bytes16>(block);
  const Bytes32 all = sixths(head, std::make_index_sequence<2 * kLargeGroups>());
#if defined(__AVX2__)
  const __m128 factors = _mm_cvtph_ps((__m128i)head);
#else
  const float factors[] = {half(block), half(block + 2)};
#endif
  to.scales = to_lanes<Byte>(lower_half(all, half_of)) * factors[0];
  to.offsets = to_lanes<Byte>(upper_half(all, half_of)) * -factors[1];
}

// Four or five bits, with scales and offsets that are integers, too.
template <bool kIsFive>
struct Large {
  static constexpr std::size_t kSize = kLarge, kPart = kLarge;
  static constexpr std::size_t kBytes = kIsFive ? 176 : 144;
  static constexpr int kMiddle = 0, kHighest = kIsFive ? 31 : 15;

  [[gnu::always_inline]] static void unpack(const Byte* block,
                                            Part<kPart>& to) {
    read_sixths(block, to);
#pragma GCC unroll 2
    for (std::size_t i = 0; i < 2; ++i) {
      const Bytes64 pairs = read64(block + kBytes - 128 + 64 * i);
      to.integers[2 * i] = pairs & 15;
      to.integers[2 * i + 1] = pairs >> 4;
    }
    if constexpr (kIsFive) {
      // Bit i of a byte is of group i, and of two pairs in a vector.
      const auto bits = read<Bytes32>(block + 16);
      const Bytes64 low = join(bits << 4, bits << 2);
      const Bytes64 high = join(bits, bits >> 2);
      to.integers[0] = to.integers[0] | (low & 16);
      to.integers[1] = to.integers[1] | (shifted(low, 1, 1) & 16);
      to.integers[2] = to.integers[2] | (high & 16);
      to.integers[3] = to.integers[3] | (shifted(high, 1, 1) & 16);
    }
  }
};

struct Q6_K {
  static constexpr std::size_t kSize = kLarge, kPart = kLarge, kBytes = 210;
  static constexpr int kMiddle = 32, kHighest = 63;

  [[gnu::always_inline]] static void unpack(const Byte* block,
                                            Part<kPart>& to) {
    to.scales = to_lanes<std::int8_t>(
                    in_lanes(read<Bytes16>(block + 192), kAllGroups)) *
                half(block + 208);
    to.offsets = {};
#pragma GCC unroll 2
    for (std::size_t i = 0; i < 2; ++i) {
      const auto bits = read<Bytes32>(block + 128 + 32 * i);
      const Bytes64 high = join(bits << 4, bits);
#pragma GCC unroll 2
      for (std::size_t j = 0; j < 2; ++j) {
        const auto low = read<Bytes32>(block + 64 * i + 32 * j);
        to.integers[2 * i + j] =
            (shifted(join(low, low), 0, 4) & 15) |
            (shifted(high, 2 * j, 2 * j) & 48);
      }
    }
  }
};

// Numbers of the formats, those of ggml_type, that the library is compiled for.
#if !defined(NATIVE_KINDS)
#define NATIVE_KINDS 2, 3, 6, 7, 8, 12, 13, 14
#endif

constexpr bool is_wanted(std::int64_t number) {
  for (std::int64_t kind : {NATIVE_KINDS}) {
    if (kind == number) return true;
  }
  return false;
}

template <class Format, std::int64_t kNumber, class Work>
bool work_if(std::int64_t number, const Work& work) {
  if constexpr (is_wanted(kNumber)) {
    if (number == kNumber) {
      work(Format());
      return true;
    }
  }
  return false;
}

// Calls work with the format of a number. Throws if the library lacks it.
template <class Work>
void with_format(std::int64_t number, const Work& work) {
  const bool is_there = work_if<Small<false, true>, 2>(number, work) ||
                        work_if<Small<false, false>, 3>(number, work) ||
                        work_if<Small<true, true>, 6>(number, work) ||
                        work_if<Small<true, false>, 7>(number, work) ||
                        work_if<Q8_0, 8>(number, work) ||
                        work_if<Large<false>, 12>(number, work) ||
                        work_if<Large<true>, 13>(number, work) ||
                        work_if<Q6_K, 14>(number, work);
  if (!is_there) {
    throw std::invalid_argument("compiled without format " +
                                std::to_string(number));
  }
}

}  // namespace native
