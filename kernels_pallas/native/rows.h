// What products do with rows before and after them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "call.h"
#include "parallel.h"
#include "vectors.h"

namespace native {

// Returns a vector of the numbers from k on; zeros follow the last one.
template <class T>
[[gnu::always_inline]] inline Floats some(const T* from, std::size_t k,
                                          std::size_t size) {
  if (k + kLanes <= size) return widened(from + k);
  T rest[kLanes] = {};
  std::copy(from + k, from + size, rest);
  return widened(rest);
}

// Writes such a vector.
template <class T>
[[gnu::always_inline]] inline void store_some(T* to, std::size_t k,
                                              std::size_t size, Floats x) {
  if constexpr (std::is_same_v<T, float>) {
    if (k + kLanes <= size) return store(to + k, x);
  }
  for (std::size_t i = 0; k + i < size && i < kLanes; ++i) {
    to[k + i] = narrowed<T>(x[i]);
  }
}

// Returns numbers as T has them.
template <class T>
[[gnu::always_inline]] inline Floats rounded(Floats x) {
  if constexpr (std::is_same_v<T, float>) return x;
  T numbers[kLanes];
  store_some(numbers, 0, kLanes, x);
  return widened(numbers);
}

// Returns the highest of some numbers without their signs, at least 1e-30; or
// none if one of them is none.
[[gnu::always_inline]] inline float absmax(const float* from,
                                           std::size_t size) {
  // Without a sign, the bits of floats have the order of the numbers.
  Ints bits = {};
  for (std::size_t k = 0; k < size; k += kLanes) {
    const Ints next = (Ints)some(from, k, size) & 0x7fffffff;
    bits = next > bits ? next : bits;
  }
  const std::int32_t highest_bits = max_lane(bits);
  float highest;
  std::memcpy(&highest, &highest_bits, sizeof(highest));
  return std::isfinite(highest) ? std::max(highest, 1e-30f)
                                : std::numeric_limits<float>::quiet_NaN();
}

// Returns what a root-mean-square norm multiplies with, of sums of squares.
inline float norm_factor(Floats squares, float epsilon, std::size_t size) {
  float sums[4];
  store_sums(squares, squares, squares, squares, sums);
  return 1 / std::sqrt(sums[0] / size + epsilon);
}

// Writes the sum of two rows, and its root-mean-square norm.
template <class T, class To>
[[gnu::noinline]] void normalize(const T* x, const T* added, const float* scale,
                                 float epsilon, std::size_t size, T* total,
                                 To* normed) {
  Floats squares = {};
  for (std::size_t k = 0; k < size; k += kLanes) {
    store_some(total, k, size, some(x, k, size) + some(added, k, size));
    const Floats sum = some(total, k, size);
    squares = multiply_add(sum, sum, squares);
  }
  const float factor = norm_factor(squares, epsilon, size);
  for (std::size_t k = 0; k < size; k += kLanes) {
    const Floats of_row = some(total, k, size) * factor * some(scale, k, size);
    if constexpr (std::is_same_v<To, float>) {
      store_some(normed, k, size, rounded<T>(of_row));
    } else {
      store_some(normed, k, size, of_row);
    }
  }
}

// Returns x / (1 + e^-u).
inline Floats times_sigmoid(Floats x, Floats u) {
  const Ints is_negative = u < 0.0f;
  const Floats power = exp_of_negative(is_negative ? u : -u);
  return x * (is_negative ? power : Floats{} + 1.0f) / (power + 1.0f);
}

inline Floats silu(Floats x) { return times_sigmoid(x, x); }

// Returns GELU by its formula with tanh, which is a sigmoid, too.
inline Floats gelu(Floats x) {
  constexpr float kScale = 1.5957691216f;  // 2 * sqrt(2 / pi)
  return times_sigmoid(x, kScale * (x + 0.044715f * x * x * x));
}

enum Activation : std::int64_t { kNone, kSilu, kGelu };

// Writes act(first) * second.
[[gnu::noinline]] inline void gate(const float* first, const float* second,
                                   std::size_t size, std::int64_t activation,
                                   float* results) {
  for (std::size_t k = 0; k < size; k += kLanes) {
    const Floats x = some(first, k, size);
    const Floats active = activation == kSilu ? silu(x) : gelu(x);
    store_some(results, k, size, active * some(second, k, size));
  }
}

// Joins the two parts of outputs f32[N, 2, F].
inline void gate_rows(const Pool& pool, const float* product,
                      std::size_t num_rows, std::size_t size,
                      std::int64_t activation, float* results) {
  constexpr std::size_t kPart = 64 * kLanes;
  constexpr std::size_t kOperations = 16;  // of a number
  const std::size_t num_parts = divide_up(size, kPart);
  parallel_if(pool, num_rows * size * kOperations, num_rows * num_parts,
              [&](std::size_t i) {
                const std::size_t n = i / num_parts, k = i % num_parts * kPart;
                const float* first = product + 2 * n * size + k;
                gate(first, first + size, std::min(kPart, size - k), activation,
                     results + n * size + k);
              });
}

// Calls run(T()), T being the type of the numbers of an array.
template <class Run>
void with_type(const Array& array, const Run& run) {
  if (array.type() == XLA_FFI_DataType_F32) return run(float());
  check_type<BFloat16Bits>(array.type());
  run(BFloat16Bits());
}

// What is around a product. Its weights are the arguments from `kWeights` on.
//
// Rows to which nothing is added have no norm, and come as they are. A row of
// zeros, as padding is, gives zeros: no work is done for it.
struct Around {
  static constexpr std::size_t kWeights = 3;

  explicit Around(const Call& call)
      : pool(call.pool),
        rows(call.argument(0)),
        added(call.argument(1)),
        scale(call.argument(2).data<float>()),
        results(call.result(0).data<float>()),
        total(call.result(1)),
        epsilon(call.attribute<float>("epsilon")),
        activation(call.attribute<std::int64_t>("activation")) {}

  const Pool& pool;
  const Array rows, added;  // [N, K]; or no numbers
  const float* const scale;  // [K]
  float* const results;
  const Array total;  // as `added`
  const float epsilon;
  const std::int64_t activation;  // that joins two parts of the outputs

  // The numbers of the rows that are multiplied, R of the N.
  const std::vector<std::size_t> worked = find_worked();

  std::size_t num_all() const { return rows.dim(0); }
  std::size_t num_rows() const { return worked.size(); }
  std::size_t num_inputs() const { return rows.last_dim(); }

  // Returns the rows [R, K] that are multiplied, in `room` if they are new.
  template <class To>
  const To* normed(std::vector<To>& room) const {
    const std::size_t size = num_inputs();
    if (!added.size()) {
      const To* given = static_cast<const To*>(rows.bytes());
      if (leads()) return given;
      for (std::size_t n : worked) {
        room.insert(room.end(), given + n * size, given + (n + 1) * size);
      }
      return room.data();
    }
    room.resize(num_rows() * size);
    with_type(rows, [&](auto type) {
      using T = decltype(type);
      const T *x = rows.data<T>(), *others = added.data<T>();
      T* totals = total.data<T>();
      if (num_rows() < num_all()) std::fill_n(totals, total.size(), T());
      parallel_if(pool, room.size(), num_rows(), [&](std::size_t r) {
        const std::size_t i = worked[r] * size;
        normalize(x + i, others + i, scale, epsilon, size, totals + i,
                  room.data() + r * size);
      });
    });
    return room.data();
  }

  // Calls multiply(to), which writes f32[R, num_outputs].
  void gated(std::size_t num_outputs,
             const std::function<void(float*)>& multiply) const {
    const std::size_t size =
        activation == kNone ? num_outputs : num_outputs / 2;
    std::unique_ptr<float[]> room;
    float* to = results;
    if (!leads()) {
      room.reset(new float[num_rows() * size]);
      to = room.get();
    }
    if (activation == kNone) {
      multiply(to);
    } else {
      const std::unique_ptr<float[]> product(
          new float[num_rows() * num_outputs]);
      multiply(product.get());
      gate_rows(pool, product.get(), num_rows(), size, activation, to);
    }
    if (leads()) {
      std::fill(results + num_rows() * size, results + num_all() * size, 0.0f);
      return;
    }
    std::fill_n(results, num_all() * size, 0.0f);
    for (std::size_t r = 0; r < num_rows(); ++r) {
      std::copy_n(to + r * size, size, results + worked[r] * size);
    }
  }

 private:
  // Returns whether no row of zeros is in front of another one.
  bool leads() const { return worked.back() + 1 == worked.size(); }

  template <class T>
  bool has_numbers(const Array& of, std::size_t n) const {
    if (!of.size()) return false;
    const T* row = static_cast<const T*>(of.bytes()) + n * num_inputs();
    // All but the sign.
    return std::any_of(row, row + num_inputs(),
                       [](T bits) { return T(bits << 1) != 0; });
  }

  std::vector<std::size_t> find_worked() const {
    const bool is_wide = rows.type() == XLA_FFI_DataType_F32;
    const auto has = [&](const Array& of, std::size_t n) {
      return is_wide ? has_numbers<std::uint32_t>(of, n)
                     : has_numbers<std::uint16_t>(of, n);
    };
    std::vector<std::size_t> found;
    for (std::size_t n = 0; n < num_all(); ++n) {
      if (has(rows, n) || has(added, n)) found.push_back(n);
    }
    if (found.empty()) found.push_back(0);  // so that there is one
    return found;
  }
};

}  // namespace native
