// Blocks of weights as GGUF files have them. See ggml's quants.
//
// A weight is scale * (integer - kMiddle) + offset. Integers are from 0 to
// kHighest, and 16 of them have one scale and one offset. A format unpacks 256
// weights into registers, a part: one block of kSize weights, or eight;
// blocks(i) says where block i is.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace native {

using Byte = std::uint8_t;
typedef Byte Bytes16 __attribute__((vector_size(16)));
typedef Byte Bytes32 __attribute__((vector_size(32)));
typedef std::int8_t Signed16 __attribute__((vector_size(16)));
typedef float Floats8 __attribute__((vector_size(32)));

constexpr std::size_t kGroup = 16;  // weights with one scale
constexpr std::size_t kPart = 256;

// A number for each group of a part.
struct Groups {
  Floats8 first, second;

  Groups operator*(float factor) const {
    return {first * factor, second * factor};
  }
};

struct Part {
  Bytes32 integers[kPart / sizeof(Bytes32)];
  Groups scales, offsets;
};

// The same in memory, one number after the other.
struct Numbers {
  Byte integers[kPart];
  float scales[kPart / kGroup], offsets[kPart / kGroup];
};
static_assert(sizeof(Part) == sizeof(Numbers));

template <class T>
inline T read(const Byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

inline float half(const Byte* from) {
  return static_cast<float>(read<_Float16>(from));
}

// In steps, as compilers have no vectors for one.
template <class V>
inline Groups to_floats(V bytes) {
  typedef std::int16_t Shorts16 __attribute__((vector_size(32)));
  typedef std::int32_t Ints8 __attribute__((vector_size(32)));
  const auto all = __builtin_convertvector(bytes, Shorts16);
  const auto wide = [](auto half) {
    return __builtin_convertvector(__builtin_convertvector(half, Ints8),
                                   Floats8);
  };
  return {
      wide(__builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7)),
      wide(__builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15)),
  };
}

// Returns a half float of each of eight blocks, twice.
template <class Blocks>
inline Groups halves(const Blocks& blocks, std::size_t place) {
  typedef std::uint16_t Halves __attribute__((vector_size(16)));
  const auto of = [&](std::size_t i) {
    return read<std::uint16_t>(blocks(i) + place);
  };
  const Halves all = {of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)};
#if defined(__F16C__)
  const auto floats = (Floats8)_mm256_cvtph_ps((__m128i)all);
#else
  typedef _Float16 Floats __attribute__((vector_size(16)));
  const auto floats = __builtin_convertvector((Floats)all, Floats8);
#endif
  return {__builtin_shufflevector(floats, floats, 0, 0, 1, 1, 2, 2, 3, 3),
          __builtin_shufflevector(floats, floats, 4, 4, 5, 5, 6, 6, 7, 7)};
}

inline Bytes32 join(Bytes16 first, Bytes16 second) {
  typedef std::int64_t Two __attribute__((vector_size(16)));
  return (Bytes32)__builtin_shufflevector((Two)first, (Two)second, 0, 1, 2, 3);
}

// Returns 16 for each of 32 bits that is set, else 0.
inline Bytes32 fifth_bits(const Byte* from) {
  typedef std::uint32_t Eight __attribute__((vector_size(32)));
  typedef std::uint64_t Four __attribute__((vector_size(32)));
  constexpr std::uint64_t kBits = 0x8040201008040201;
  const Bytes32 all = (Bytes32)(Eight{} + read<std::uint32_t>(from));
  const Bytes32 bytes = __builtin_shufflevector(
      all, all, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 18, 18, 18, 18,
      18, 18, 18, 18, 19, 19, 19, 19, 19, 19, 19, 19);
  return (Bytes32)((bytes & (Bytes32)(Four{} + kBits)) != 0) & 16;
}

// Returns the bits of each byte at other places. Those that come from its
// neighbour are to be masked.
inline Bytes32 shifted(Bytes32 bytes, int left) {
  typedef std::uint16_t Words __attribute__((vector_size(32)));
  return (Bytes32)(left > 0 ? (Words)bytes << left : (Words)bytes >> -left);
}

struct Q8_0 {
  static constexpr std::size_t kSize = 32, kBytes = 34;
  static constexpr int kMiddle = 128, kHighest = 255;

  template <class Blocks>
  static void unpack(const Blocks& blocks, Part& to) {
    to.scales = halves(blocks, 0);
    to.offsets = Groups{};
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kPart / kSize; ++i) {
      to.integers[i] = read<Bytes32>(blocks(i) + 2) ^ kMiddle;
    }
  }
};

// Four or five bits, with an offset or with integers around zero.
template <bool kIsFive, bool kIsAround>
struct Small {
  static constexpr std::size_t kHead = kIsAround ? 2 : 4;
  static constexpr std::size_t kSize = 32;
  static constexpr std::size_t kBytes = kHead + (kIsFive ? 20 : 16);
  static constexpr int kHighest = kIsFive ? 31 : 15;
  static constexpr int kMiddle = kIsAround ? (kHighest + 1) / 2 : 0;

  template <class Blocks>
  static void unpack(const Blocks& blocks, Part& to) {
    to.scales = halves(blocks, 0);
    to.offsets = kIsAround ? Groups{} : halves(blocks, 2);
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kPart / kSize; ++i) {
      const Byte* block = blocks(i);
      const auto bytes = read<Bytes16>(block + kBytes - 16);
      to.integers[i] = join(bytes & 15, bytes >> 4);
      if constexpr (kIsFive) to.integers[i] |= fifth_bits(block + kHead);
    }
  }
};

// Returns a number for each group, eight bytes having one for two.
inline Groups in_pairs(std::uint32_t first, std::uint32_t second) {
  typedef std::uint32_t Words4 __attribute__((vector_size(16)));
  const auto bytes = (Bytes16)Words4{first, second};
  return to_floats(__builtin_shufflevector(bytes, bytes, 0, 0, 1, 1, 2, 2, 3, 3,
                                           4, 4, 5, 5, 6, 6, 7, 7));
}

// Eight scales and offsets of six bits in twelve bytes.
inline void read_sixths(const Byte* block, Part& to) {
  constexpr std::uint32_t kTwo = 0x03030303, kFour = 0x0f0f0f0f,
                          kSix = 0x3f3f3f3f;
  const auto low = read<std::uint32_t>(block + 4);
  const auto high = read<std::uint32_t>(block + 8);
  const auto last = read<std::uint32_t>(block + 12);
  to.scales = in_pairs(low & kSix, (last & kFour) | ((low >> 6) & kTwo) << 4) *
              half(block);
  to.offsets =
      in_pairs(high & kSix, ((last >> 4) & kFour) | ((high >> 6) & kTwo) << 4) *
      -half(block + 2);
}

// Four or five bits, with scales and offsets that are integers, too.
template <bool kIsFive>
struct Large {
  static constexpr std::size_t kSize = 256, kBytes = kIsFive ? 176 : 144;
  static constexpr int kMiddle = 0, kHighest = kIsFive ? 31 : 15;

  template <class Blocks>
  static void unpack(const Blocks& blocks, Part& to) {
    const Byte* block = blocks(0);
    read_sixths(block, to);
    const auto fifth = read<Bytes32>(block + 16);
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      const auto pairs = read<Bytes32>(block + kBytes - 128 + 32 * i);
      to.integers[2 * i] = pairs & 15;
      to.integers[2 * i + 1] = pairs >> 4;
      if constexpr (kIsFive) {
        to.integers[2 * i] |= shifted(fifth, 4 - 2 * i) & 16;
        to.integers[2 * i + 1] |= shifted(fifth, 3 - 2 * i) & 16;
      }
    }
  }
};

struct Q6_K {
  static constexpr std::size_t kSize = 256, kBytes = 210;
  static constexpr int kMiddle = 32, kHighest = 63;

  template <class Blocks>
  static void unpack(const Blocks& blocks, Part& to) {
    const Byte* block = blocks(0);
    to.scales = to_floats(read<Signed16>(block + 192)) * half(block + 208);
    to.offsets = Groups{};
#pragma GCC unroll 8
    for (std::size_t i = 0; i < 2; ++i) {
      const auto high = read<Bytes32>(block + 128 + 32 * i);
#pragma GCC unroll 8
      for (int j = 0; j < 2; ++j) {
        const auto low = read<Bytes32>(block + 64 * i + 32 * j);
        to.integers[4 * i + j] = (low & 15) | (shifted(high, 4 - 2 * j) & 48);
        to.integers[4 * i + j + 2] =
            (low >> 4) | (shifted(high, -2 * j) & 48);
      }
    }
  }
};

// Calls work with the format of a number, those of ggml_type. Returns whether
// there is one.
template <class Work>
bool with_format(std::int64_t number, const Work& work) {
  switch (number) {
    case 2:
      return work(Small<false, true>()), true;
    case 3:
      return work(Small<false, false>()), true;
    case 6:
      return work(Small<true, true>()), true;
    case 7:
      return work(Small<true, false>()), true;
    case 8:
      return work(Q8_0()), true;
    case 12:
      return work(Large<false>()), true;
    case 13:
      return work(Large<true>()), true;
    case 14:
      return work(Q6_K()), true;
    default:
      return false;
  }
}

}  // namespace native
