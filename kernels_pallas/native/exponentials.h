// The exponential function of vectors, the same bits wherever it is used.
#pragma once

#include "vectors.h"

namespace native {

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

}  // namespace native
