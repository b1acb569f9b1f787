// What products do with rows before and after them.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

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
      T rounded_to[kLanes];
      store_some(rounded_to, 0, kLanes, of_row);
      store_some(normed, k, size, widened(rounded_to));
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
inline void gate_rows(xla::ffi::ThreadPool& pool, const float* product,
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

// What is around a product.
//
// Rows to which nothing is added have no norm, and come as they are.
struct Around {
  xla::ffi::AnyBuffer rows, added;  // [N, K]; or no numbers
  xla::ffi::Buffer<xla::ffi::F32> scale;  // [K]
  xla::ffi::AnyBuffer total;              // as `added`
  float epsilon;
  std::int64_t activation;  // that joins two parts of the outputs

  std::size_t num_rows() const { return rows.dimensions().front(); }
  std::size_t num_inputs() const { return rows.dimensions().back(); }

  // Returns the rows that are multiplied, in `room` if they are new.
  template <class To>
  const To* normed(xla::ffi::ThreadPool& pool, std::vector<To>& room) const {
    if (!added.element_count()) {
      return static_cast<const To*>(rows.untyped_data());
    }
    room.resize(rows.element_count());
    const auto run = [&](auto type) {
      using T = decltype(type);
      parallel_if(
          pool, rows.element_count(), num_rows(), [&](std::size_t n) {
            const std::size_t i = n * num_inputs();
            normalize(static_cast<const T*>(rows.untyped_data()) + i,
                      static_cast<const T*>(added.untyped_data()) + i,
                      scale.typed_data(), epsilon, num_inputs(),
                      static_cast<T*>(total.untyped_data()) + i,
                      room.data() + i);
          });
    };
    if (rows.element_type() == xla::ffi::F32) {
      run(float());
    } else {
      run(BFloat16Bits());
    }
    return room.data();
  }

  // Calls multiply(to), which writes f32[N, num_outputs].
  template <class Multiply>
  void gated(xla::ffi::ThreadPool& pool, std::size_t num_outputs,
             float* results, const Multiply& multiply) const {
    if (activation == kNone) return multiply(results);
    const std::unique_ptr<float[]> product(new float[num_rows() * num_outputs]);
    multiply(product.get());
    gate_rows(pool, product.get(), num_rows(), num_outputs / 2, activation,
              results);
  }
};

// Binds the rows of a product; its weights are the arguments after them.
inline auto bind_rows() {
  namespace ffi = xla::ffi;
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()          // rows
      .Arg<ffi::AnyBuffer>()          // added
      .Arg<ffi::Buffer<ffi::F32>>();  // scale
}

// Binds what follows the weights.
template <class Binding>
auto bind_results(Binding binding) {
  namespace ffi = xla::ffi;
  return std::move(binding)
      .template Ret<ffi::Buffer<ffi::F32>>()
      .template Ret<ffi::AnyBuffer>()  // total
      .template Attr<float>("epsilon")
      .template Attr<std::int64_t>("activation");
}

}  // namespace native
