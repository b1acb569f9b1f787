// Vectors of the widest kind that the target of the compiler has.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace native {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define NATIVE_AVX512 1
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef T in_memory
      __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
};
template <class T>
using Vector = typename VectorOf<T>::type;
using Floats = Vector<float>;
using Ints = Vector<std::int32_t>;
using Words = Vector<std::uint32_t>;

constexpr std::size_t kLanes = kVectorBytes / sizeof(float);

// Sums that fit into the registers, beside what is multiplied, and rows of four
// sums if more has to.
#if defined(NATIVE_AVX512) || defined(__aarch64__)
constexpr std::size_t kSums = 24, kRows = 4;  // 32 registers
#else
constexpr std::size_t kSums = 10, kRows = 2;
#endif

inline std::size_t divide_up(std::size_t size, std::size_t unit) {
  return (size + unit - 1) / unit;
}

// Calls run(n), `n` being a constant: `size`, and `kMost` at most.
template <std::size_t kMost, class Run>
void with_size(std::size_t size, const Run& run) {
  if constexpr (kMost > 1) {
    if (size < kMost) return with_size<kMost - 1>(size, run);
  }
  run(std::integral_constant<std::size_t, kMost>());
}

// Returns a * b + sum, rounded once. It is not for the compiler to choose where:
// a row would have other bits beside other rows.
inline Floats multiply_add(Floats a, Floats b, Floats sum) {
#if defined(NATIVE_AVX512)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__ARM_NEON)
  return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + sum;
#endif
}

// Returns a number in all lanes. It is no sum with zeros: that would change -0,
// so compilers would keep it.
inline Floats in_all_lanes(float x) { return x - Floats{}; }

// Returns e^x for x up to 0, within 2 units of the last place; 0 below -87.
[[gnu::always_inline]] inline Floats exp_of_negative(Floats x) {
  constexpr float kLowest = -87.0f;
  const Ints is_low = x < kLowest;
  x = is_low ? Floats{} + kLowest : x;
  // x = n ln 2 + rest; adding 1.5 * 2^23 rounds to an integer.
  constexpr float kRound = 12582912.0f;
  const Floats shifted = x * 1.44269504f + kRound;
  const Floats n = shifted - kRound;
  const Floats rest = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  // Taylor's series, whose next term is below 2^-26.
  Floats sum = Floats{} + 1.0f / 5040;
  for (float next : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f,
                     1.0f}) {
    sum = multiply_add(sum, rest, Floats{} + next);
  }
  const Ints power = ((Ints)shifted - (Ints)(Floats{} + kRound) + 127) << 23;
  const Floats result = sum * (Floats)power;
  return is_low ? Floats{} : result;
}

// Returns a vector of T at any address.
template <class T>
inline Vector<T> load(const void* from) {
  return *static_cast<const typename VectorOf<T>::in_memory*>(from);
}

template <class V>
inline void store(void* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

// Numbers in memory are float or these.
using BFloat16Bits = std::uint16_t;
typedef BFloat16Bits HalfVector
    __attribute__((vector_size(kVectorBytes / 2), aligned(1), may_alias));

inline Floats widened(const float* from) { return load<float>(from); }
inline Floats widened(const BFloat16Bits* from) {
  const HalfVector bits = *reinterpret_cast<const HalfVector*>(from);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

// Returns a number in memory, rounded to the nearest, if need be to even.
template <class T>
inline T narrowed(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  return static_cast<T>(bits >> 16);
}

// Keeps a vector in a register, where a compiler would load it for each use.
template <class V>
[[gnu::always_inline]] inline void hold(V& vector) {
#if defined(NATIVE_AVX512)
  asm("" : "+v"(vector));
#endif
}

template <class V, std::size_t... I>
inline auto lower_half(V v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, I...);
}

template <class V, std::size_t... I>
inline auto upper_half(V v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, (sizeof...(I) + I)...);
}

// Returns the sums of the two halves of a vector, as one of half the lanes.
template <class V>
inline auto add_halves(V v) {
  constexpr std::size_t half = sizeof(V) / sizeof(v[0]) / 2;
  constexpr auto lanes = std::make_index_sequence<half>();
  return lower_half(v, lanes) + upper_half(v, lanes);
}

// Returns the highest lane.
template <class V>
inline auto max_lane(V v) {
  constexpr std::size_t half = sizeof(V) / sizeof(v[0]) / 2;
  if constexpr (half == 1) {
    return std::max(v[0], v[1]);
  } else {
    constexpr auto lanes = std::make_index_sequence<half>();
    const auto a = lower_half(v, lanes), b = upper_half(v, lanes);
    return max_lane(a > b ? a : b);
  }
}

// Returns the nearest integers, of two the even one. Numbers are below 2 ** 22.
inline Ints nearest(Floats x) {
  // Above 1.5 * 2 ** 23, a float has no room for what is not an integer.
  return (Ints)(x + 12582912.0f) - 0x4b400000;
}

// Adds neighbouring groups of `size` lanes of a and b: results alternate.
template <std::size_t size, class V, std::size_t... I>
inline V join(V a, V b, std::index_sequence<I...>) {
  constexpr std::size_t lanes = sizeof...(I);
  V first = __builtin_shufflevector(
      a, b, (I / size % 2 == 0 ? I : lanes + I - size)...);
  V second = __builtin_shufflevector(
      a, b, (I / size % 2 == 0 ? I + size : lanes + I)...);
  return first + second;
}

// Writes the sums of the lanes of four vectors, each in the same order.
template <class V, class T>
inline void store_sums(V a, V b, V c, V d, T* to) {
  constexpr auto lanes = std::make_index_sequence<sizeof(V) / sizeof(T)>();
  V all = join<2>(join<1>(a, b, lanes), join<1>(c, d, lanes), lanes);
  if constexpr (sizeof(V) == 64) {
    store(to, add_halves(add_halves(all)));
  } else if constexpr (sizeof(V) == 32) {
    store(to, add_halves(all));
  } else {
    store(to, all);
  }
}

// Zeros that begin where a line of the cache does.
template <class T>
class Aligned {
 public:
  explicit Aligned(std::size_t size) : memory_(size * sizeof(T) + kLine) {
    void* first = memory_.data();
    std::size_t space = memory_.size();
    data_ = static_cast<T*>(std::align(kLine, size * sizeof(T), first, space));
  }
  T* data() const { return data_; }

 private:
  static constexpr std::size_t kLine = 64;
  std::vector<unsigned char> memory_;
  T* data_;
};

}  // namespace native
