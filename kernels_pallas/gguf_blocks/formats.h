// Blocks of weights as GGUF files have them. See ggml's quants.
//
// A weight is scale * integer + offset. A format unpacks one block: kSize
// integers and, for each 16 of them, a scale and an offset. It may have none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace native {

using Byte = std::uint8_t;
typedef Byte Bytes16 __attribute__((vector_size(16)));
typedef Byte Bytes32 __attribute__((vector_size(32)));

constexpr std::size_t kGroup = 16;  // weights with one scale

// Where numbers of a row are in memory.
struct Place {
  std::int8_t* integers;
  float* scales;
  float* offsets;
};

template <class T>
inline T read(const Byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

inline float half(const Byte* from) {
  return static_cast<float>(read<_Float16>(from));
}

template <class V>
inline void write(V value, std::int8_t* to) {
  std::memcpy(to, &value, sizeof(V));
}

// Gives two groups the same number.
inline void both(float* to, float number) { to[0] = to[1] = number; }

// Returns 16 for each of 16 bits that is set, else 0.
inline Bytes16 fifth_bits(const Byte* from) {
  const Bytes16 bit = {1, 2, 4, 8, 16, 32, 64, 128,
                       1, 2, 4, 8, 16, 32, 64, 128};
  typedef std::uint64_t Two __attribute__((vector_size(16)));
  constexpr std::uint64_t kOnes = 0x0101010101010101;
  const Bytes16 all = (Bytes16)Two{from[0] * kOnes, from[1] * kOnes};
  return (Bytes16)((all & bit) != 0) & 16;
}

struct Q8_0 {
  static constexpr std::size_t kSize = 32, kBytes = 34;
  static constexpr bool kHasOffsets = false;

  static void unpack(const Byte* block, Place to) {
    both(to.scales, half(block));
    std::memcpy(to.integers, block + 2, kSize);
  }
};

// Four or five bits, with an offset or with integers around zero.
template <bool kIsFive, bool kIsAround>
struct Small {
  static constexpr std::size_t kHead = kIsAround ? 2 : 4;
  static constexpr std::size_t kSize = 32;
  static constexpr std::size_t kBytes = kHead + (kIsFive ? 20 : 16);
  static constexpr bool kHasOffsets = !kIsAround;
  static constexpr Byte kMiddle = !kIsAround ? 0 : kIsFive ? 16 : 8;

  static void unpack(const Byte* block, Place to) {
    both(to.scales, half(block));
    if constexpr (kHasOffsets) both(to.offsets, half(block + 2));
    const auto bytes = read<Bytes16>(block + kBytes - 16);
    Bytes16 first = bytes & 15, second = bytes >> 4;
    if constexpr (kIsFive) {
      first |= fifth_bits(block + kHead);
      second |= fifth_bits(block + kHead + 2);
    }
    write(first - kMiddle, to.integers);
    write(second - kMiddle, to.integers + 16);
  }
};

// Eight scales and offsets of six bits in twelve bytes.
inline void read_sixths(const Byte* block, Place to) {
  const float scale = half(block), offset = -half(block + 2);
  const Byte* bytes = block + 4;
  for (std::size_t i = 0; i < 4; ++i) {
    const Byte low = bytes[i], high = bytes[i + 4], last = bytes[i + 8];
    both(to.scales + 2 * i, scale * (low & 63));
    both(to.offsets + 2 * i, offset * (high & 63));
    both(to.scales + 2 * i + 8, scale * ((last & 15) | (low >> 6 << 4)));
    both(to.offsets + 2 * i + 8, offset * ((last >> 4) | (high >> 6 << 4)));
  }
}

// Four or five bits, with scales and offsets that are integers, too.
template <bool kIsFive>
struct Large {
  static constexpr std::size_t kSize = 256, kBytes = kIsFive ? 176 : 144;
  static constexpr bool kHasOffsets = true;

  static void unpack(const Byte* block, Place to) {
    read_sixths(block, to);
    const auto fifth = read<Bytes32>(block + 16);
    const Byte* bytes = block + kBytes - 128;
    for (std::size_t i = 0; i < 4; ++i) {
      const auto pairs = read<Bytes32>(bytes + 32 * i);
      Bytes32 first = pairs & 15, second = pairs >> 4;
      if constexpr (kIsFive) {
        first |= ((fifth >> (2 * i)) & 1) << 4;
        second |= ((fifth >> (2 * i + 1)) & 1) << 4;
      }
      write(first, to.integers + 64 * i);
      write(second, to.integers + 64 * i + 32);
    }
  }
};

struct Q6_K {
  static constexpr std::size_t kSize = 256, kBytes = 210;
  static constexpr bool kHasOffsets = false;

  static void unpack(const Byte* block, Place to) {
    const float scale = half(block + 208);
    for (std::size_t i = 0; i < 16; ++i) {
      to.scales[i] = scale * static_cast<std::int8_t>(block[192 + i]);
    }
    for (std::size_t i = 0; i < 2; ++i) {
      const auto high = read<Bytes32>(block + 128 + 32 * i);
      std::int8_t* integers = to.integers + 128 * i;
      for (std::size_t j = 0; j < 2; ++j) {
        const auto low = read<Bytes32>(block + 64 * i + 32 * j);
        const Bytes32 first = (low & 15) | (((high >> (2 * j)) & 3) << 4);
        const Bytes32 second = (low >> 4) | (((high >> (2 * j + 4)) & 3) << 4);
        write(first - 32, integers + 32 * j);
        write(second - 32, integers + 32 * j + 64);
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
