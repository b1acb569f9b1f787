// Products of few rows and a weight whose outputs have their inputs side by
// side. See few_rows/native.py.
//
// A sum has one accumulator, whose lanes add up every n-th product in the order
// of the inputs. How many rows and outputs are computed together changes
// nothing about that.
//
// Legend: N rows, K inputs, A outputs.

#include <algorithm>
#include <cmath>
#include <vector>

#include "call.h"
#include "integers.h"
#include "parallel.h"
#include "rows.h"
#include "vectors.h"

namespace native {
namespace {

// A format is a kind of weights and rows:
//   Weight, Row: their numbers in memory; Given: those of rows made ready
//   Sum: vector of accumulators; Wide: a step of weights made ready
//   kStep: number of inputs in a step; kOffset: what is added to rows, or 0

struct Float32 {
  using Weight = float;
  using Row = float;
  using Given = float;
  using Result = float;
  using Sum = Floats;
  using Wide = Floats;
  static constexpr std::size_t kStep = kLanes;
  static constexpr int kOffset = 0;

  static void prepare(const Row* row, Given* to) {
    std::memcpy(to, row, kStep * sizeof(Row));
  }
  static Wide widen(const Weight* weight) { return load<float>(weight); }
  static Wide given(const Given* row) { return load<float>(row); }
  static Sum add(Sum sum, Wide weight, Wide row) {
    return multiply_add(weight, row, sum);
  }
};

struct BFloat16 {
  using Weight = std::uint16_t;
  using Row = std::uint16_t;
  using Result = float;
  using Sum = Floats;
  static constexpr std::size_t kStep = 2 * kLanes;
  static constexpr int kOffset = 0;

#if defined(NATIVE_AVX512) && defined(__AVX512BF16__)
  using Given = std::uint16_t;
  using Wide = __m512bh;

  static void prepare(const Row* row, Given* to) {
    std::memcpy(to, row, kStep * sizeof(Row));
  }
  static Wide widen(const Weight* weight) {
    return (Wide)_mm512_loadu_si512(weight);
  }
  static Wide given(const Given* row) { return widen(row); }
  static Sum add(Sum sum, Wide weight, Wide row) {
    return _mm512_dpbf16_ps(sum, weight, row);
  }
#else
  using Given = float;  // those with even numbers, then the others
  struct Wide {
    Floats even, odd;
  };

  static Wide widen(const Weight* weight) {
    const Words pairs = load<std::uint32_t>(weight);
    return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)};
  }
  static void prepare(const Row* row, Given* to) {
    const Wide wide = widen(row);
    store(to, wide.even);
    store(to + kLanes, wide.odd);
  }
  static Wide given(const Given* row) {
    return {load<float>(row), load<float>(row + kLanes)};
  }
  static Sum add(Sum sum, Wide weight, Wide row) {
    sum = multiply_add(weight.even, row.even, sum);
    return multiply_add(weight.odd, row.odd, sum);
  }
#endif
};

struct Int8 : Integers {
  using Weight = std::int8_t;
  using Row = std::int8_t;
  using Given = std::int8_t;
  using Result = std::int32_t;
  static constexpr std::size_t kStep = kVectorBytes;

  static void prepare(const Row* row, Given* to) {
    for (std::size_t i = 0; i < kStep; ++i) to[i] = row[i] ^ kOffset;
  }
  static Wide widen(const Weight* weight) { return load<Weight>(weight); }
  static Wide given(const Given* row) { return load<Given>(row); }
};

constexpr std::size_t kOutputs = 4;  // of a block
constexpr std::size_t kFewRows = 8;  // that are one block
constexpr std::size_t kCachedBytes = 1 << 13;  // of rows
// Of weights, between those that are multiplied and those that are fetched.
constexpr std::size_t kAhead = 1 << 13;

template <class F>
constexpr bool kHasOffset = F::kOffset != 0;

// Returns how many outputs R rows take at a time, so that all sums fit into the
// registers.
template <class F, std::size_t R>
constexpr std::size_t find_together() {
  std::size_t together = kOutputs;
  while (together > 1 && (R + kHasOffset<F>) * together > kSums) together /= 2;
  return together;
}
template <class F, std::size_t R>
constexpr std::size_t kTogether = find_together<F, R>();

// Rows of a block where there are many.
template <class F>
constexpr std::size_t kManyRows = kSums / kOutputs - kHasOffset<F>;

struct Range {
  std::size_t begin, end;
};

// Inputs of R rows that stay in the first cache while all outputs of a block take
// their turns.
template <class F, std::size_t R>
constexpr std::size_t kStretch =
    kCachedBytes / (R * sizeof(typename F::Given)) / F::kStep * F::kStep;

// The accumulators are registers only if all of this is unrolled in one place.
template <class F, std::size_t R>
struct Sums {
  typename F::Sum of[R + kHasOffset<F>][kOutputs] = {};

  // Adds the products of a step for some outputs.
  template <std::size_t kFirst, std::size_t kEnd>
  [[gnu::always_inline]] void add(const typename F::Given* rows,
                                  const typename F::Weight* weights,
                                  std::size_t num_inputs) {
    typename F::Wide wide[kOutputs];
#pragma GCC unroll 8
    for (std::size_t m = kFirst; m < kEnd; ++m) {
      wide[m] = F::widen(weights + m * num_inputs);
    }
#pragma GCC unroll 8
    for (std::size_t r = 0; r < R; ++r) {
      auto row = F::given(rows + r * num_inputs);
      hold(row);
#pragma GCC unroll 8
      for (std::size_t m = kFirst; m < kEnd; ++m) {
        of[r][m] = F::add(of[r][m], wide[m], row);
      }
    }
    if constexpr (kHasOffset<F>) {  // a row of zeros: what the offset adds
#pragma GCC unroll 8
      for (std::size_t m = kFirst; m < kEnd; ++m) {
        of[R][m] = F::add(of[R][m], wide[m], F::zeros());
      }
    }
  }

  // Adds those of some inputs, turn by turn. Meanwhile a part of the outputs
  // that follow in some blocks comes into the second cache.
  template <std::size_t... I>
  [[gnu::always_inline]] void add_all(const typename F::Given* rows,
                                      const typename F::Weight* weights,
                                      std::size_t num_inputs, Range inputs,
                                      Range fetched,
                                      std::index_sequence<I...>) {
    const std::size_t ahead =
        divide_up(kAhead, kOutputs * num_inputs * sizeof(*weights)) * kOutputs;
    auto turn = [&](auto i) {
      constexpr std::size_t kFirst = i() * kTogether<F, R>;
      constexpr std::size_t kEnd = kFirst + kTogether<F, R>;
      for (std::size_t k = inputs.begin; k < inputs.end; k += F::kStep) {
        if (fetched.begin <= k && k < fetched.end) {
#pragma GCC unroll 8
          for (std::size_t m = kFirst; m < kEnd; ++m) {
            __builtin_prefetch(weights + (ahead + m) * num_inputs + k, 0, 2);
          }
        }
        add<kFirst, kEnd>(rows + k, weights + k, num_inputs);
      }
    };
    (turn(std::integral_constant<std::size_t, I>()), ...);
  }
};

// Multiplies R rows with `kOutputs` outputs; the inputs are whole steps.
template <class F, std::size_t R>
void block(const typename F::Given* rows, const typename F::Weight* weights,
           std::size_t num_inputs, Range fetched, typename F::Result* results,
           std::size_t result_stride) {
  constexpr std::make_index_sequence<kOutputs / kTogether<F, R>> kTurns;
  Sums<F, R> sums;
  const std::size_t size =
      1 < kTurns.size() && R > 1 ? kStretch<F, R> : num_inputs;
  for (std::size_t k = 0; k < num_inputs; k += size) {
    sums.add_all(rows, weights, num_inputs,
                 {k, std::min(num_inputs, k + size)}, fetched, kTurns);
  }
#pragma GCC unroll 8
  for (std::size_t r = 0; r < R; ++r) {
    auto* of = sums.of[r];
    if constexpr (kHasOffset<F>) {
#pragma GCC unroll 8
      for (std::size_t m = 0; m < kOutputs; ++m) of[m] -= sums.of[R][m];
    }
    store_sums(of[0], of[1], of[2], of[3], results + r * result_stride);
  }
}

// Multiplies all rows with `kOutputs` outputs.
template <class F>
void all_rows(std::size_t num_rows, const typename F::Given* rows,
              const typename F::Weight* weights, std::size_t num_inputs,
              typename F::Result* results, std::size_t result_stride) {
  const std::size_t num_blocks =
      num_rows <= kFewRows ? 1 : divide_up(num_rows, kManyRows<F>);
  const auto part = [=](std::size_t size, std::size_t i) {
    return i * size / num_blocks;
  };
  for (std::size_t i = 0; i < num_blocks; ++i) {
    const std::size_t n = part(num_rows, i);
    with_size<kFewRows>(part(num_rows, i + 1) - n, [&](auto size) {
      block<F, size()>(rows + n * num_inputs, weights, num_inputs,
                       {part(num_inputs, i), part(num_inputs, i + 1)},
                       results + n * result_stride, result_stride);
    });
  }
}

// The same with weights that are no whole block: zeros fill it up.
template <class F>
void ragged(std::size_t num_rows, const typename F::Given* rows,
            std::size_t stride, const typename F::Weight* weights,
            std::size_t num_inputs, std::size_t num_outputs,
            typename F::Result* results, std::size_t result_stride) {
  // One block more, as the next one is prefetched.
  Aligned<typename F::Weight> whole(2 * kOutputs * stride);
  std::vector<typename F::Result> found(num_rows * kOutputs);
  for (std::size_t m = 0; m < num_outputs; ++m) {
    std::copy_n(weights + m * num_inputs, num_inputs,
                whole.data() + m * stride);
  }
  all_rows<F>(num_rows, rows, whole.data(), stride, found.data(), kOutputs);
  for (std::size_t n = 0; n < num_rows; ++n) {
    std::copy_n(&found[n * kOutputs], num_outputs, results + n * result_stride);
  }
}

// Multiplies rows with a range of outputs, for all of them one after the other.
template <class F>
void outputs(const typename F::Given* rows, std::size_t num_rows,
             std::size_t stride, const typename F::Weight* weights,
             std::size_t num_inputs, std::size_t begin, std::size_t end,
             typename F::Result* results, std::size_t result_stride) {
  for (std::size_t a = begin; a < end; a += kOutputs) {
    const auto* some = weights + a * num_inputs;
    if (num_inputs == stride && a + kOutputs <= end) {
      all_rows<F>(num_rows, rows, some, num_inputs, results + a, result_stride);
    } else {
      ragged<F>(num_rows, rows, stride, some, num_inputs,
                std::min(kOutputs, end - a), results + a, result_stride);
    }
  }
}

// Rows that stay in the second cache, beside the weights of a task.
constexpr std::size_t kCachedRows = 64;

// The same for any number of rows. Of more than those a few stay in the first
// cache, and the weights of a task in the second.
template <class F>
void groups(const typename F::Given* rows, std::size_t num_rows,
            std::size_t stride, const typename F::Weight* weights,
            std::size_t num_inputs, std::size_t begin, std::size_t end,
            typename F::Result* results, std::size_t result_stride) {
  const std::size_t step = num_rows > kCachedRows ? 2 * kManyRows<F> : num_rows;
  for (std::size_t n = 0; n < num_rows; n += step) {
    outputs<F>(rows + n * stride, std::min(step, num_rows - n), stride, weights,
               num_inputs, begin, end, results + n * result_stride,
               result_stride);
  }
}

// Rows in whole steps, filled up with zeros, in the form of a format.
template <class F>
class Prepared {
 public:
  Prepared(const typename F::Row* rows, std::size_t num_rows,
           std::size_t num_inputs, std::size_t stride)
      : copy_(is_needed(num_inputs, stride) ? num_rows * stride : 0) {
    if (!is_needed(num_inputs, stride)) {
      rows_ = reinterpret_cast<const typename F::Given*>(rows);
      return;
    }
    rows_ = copy_.data();
    for (std::size_t n = 0; n < num_rows; ++n) {
      for (std::size_t k = 0; k < num_inputs; k += F::kStep) {
        typename F::Row step[F::kStep] = {};
        std::memcpy(step, rows + n * num_inputs + k,
                    std::min(F::kStep, num_inputs - k) * sizeof(step[0]));
        F::prepare(step, copy_.data() + n * stride + k);
      }
    }
  }
  const typename F::Given* data() const { return rows_; }

 private:
  static bool is_needed(std::size_t num_inputs, std::size_t stride) {
    return !std::is_same_v<typename F::Row, typename F::Given> ||
           kHasOffset<F> || num_inputs != stride;
  }

  Aligned<typename F::Given> copy_;
  const typename F::Given* rows_;
};

constexpr std::size_t kTaskBytes = 1 << 17;  // of weights

// Calls work(begin, end) for ranges of outputs that are whole blocks.
template <class F, class Work>
void in_ranges(const Pool& pool, std::size_t num_inputs,
               std::size_t num_outputs, const Work& work) {
  const std::size_t fitting =
      kTaskBytes / (num_inputs * sizeof(typename F::Weight));
  const std::size_t size =
      std::max<std::size_t>(fitting / kOutputs, 1) * kOutputs;
  parallel_for(pool, divide_up(num_outputs, size), [&](std::size_t i) {
    work(i * size, std::min(num_outputs, (i + 1) * size));
  });
}

template <class F>
std::size_t whole_steps(std::size_t num_inputs) {
  return divide_up(num_inputs, F::kStep) * F::kStep;
}

template <class F>
void few_rows(const Call& call) {
  const Around around(call);
  const Array weights = call.argument(around.kWeights);
  const std::size_t num_rows = around.num_rows();
  const std::size_t num_inputs = around.num_inputs();
  const std::size_t num_outputs = weights.size() / num_inputs;
  const auto* weight = static_cast<const typename F::Weight*>(weights.bytes());
  const std::size_t stride = whole_steps<F>(num_inputs);
  std::vector<typename F::Row> room;
  const Prepared<F> given(around.normed(room), num_rows, num_inputs, stride);
  around.gated(num_outputs, [&](float* to) {
    in_ranges<F>(call.pool, num_inputs, num_outputs,
                 [&](std::size_t begin, std::size_t end) {
                   groups<F>(given.data(), num_rows, stride, weight, num_inputs,
                             begin, end, to, num_outputs);
                 });
  });
}

// Scales of the integers, over the highest number of a row. XLA's program of
// the reference multiplies by just these, so that results have its bits.
constexpr float kScale = 1.0f / 127.0f;
constexpr float kFiner = kScale * (1.0f / 254.0f);

// Rounds a row to integers, as `int8_products.quantize_rows` does. Returns its
// highest number, or none if one of the row is none.
float quantize(const float* row, std::size_t size, std::size_t num_terms,
               std::int8_t* const* terms) {
  typedef std::int8_t Bytes __attribute__((vector_size(kLanes)));
  const float highest = absmax(row, size);
  const float factor = 127.0f / highest;
  for (std::size_t k = 0; k < size; k += kLanes) {
    Floats rest = some(row, k, size) * factor;
    for (std::size_t i = 0; i < num_terms; ++i) {
      const Ints integers = nearest(rest);
      const auto bytes = __builtin_convertvector(integers, Bytes);
      if (k + kLanes <= size) {
        store(terms[i] + k, bytes);
      } else {
        std::memcpy(terms[i] + k, &bytes, size - k);
      }
      rest = (rest - __builtin_convertvector(integers, Floats)) * 254.0f;
    }
  }
  return highest;
}

Floats converted(const std::int32_t* from) {
  return __builtin_convertvector(load<std::int32_t>(from), Floats);
}

void few_rows_of_integers(const Call& call) {
  const Around around(call);
  const auto num_terms = call.attribute<std::int64_t>("num_terms");
  const Array weights = call.argument(around.kWeights);
  const auto* weight = weights.data<std::int8_t>();
  const float* scale = call.argument(around.kWeights + 1).data<float>();
  const std::size_t num_rows = around.num_rows();
  const std::size_t num_inputs = around.num_inputs();
  const std::size_t num_outputs = weights.size() / num_inputs;
  const std::size_t stride = whole_steps<Int8>(num_inputs);
  std::vector<float> room;
  const float* rows = around.normed(room);
  std::vector<std::int8_t> integers(num_terms * num_rows * num_inputs);
  std::vector<float> highest(num_rows);
  parallel_if(call.pool, integers.size(), num_rows, [&](std::size_t n) {
    std::int8_t* terms[2];
    for (std::int64_t i = 0; i < num_terms; ++i) {
      terms[i] = &integers[(i * num_rows + n) * num_inputs];
    }
    highest[n] = quantize(rows + n * num_inputs, num_inputs, num_terms, terms);
  });
  const Prepared<Int8> given(integers.data(), num_terms * num_rows, num_inputs,
                             stride);
  const auto multiply_range = [&](std::size_t begin, std::size_t end,
                                  float* to) {
    const std::size_t size = end - begin;
    std::vector<std::int32_t> sums(num_terms * num_rows * size + kLanes);
    groups<Int8>(given.data(), num_terms * num_rows, stride,
                 weight + begin * num_inputs, num_inputs, 0, size, sums.data(),
                 size);
    for (std::size_t n = 0; n < num_rows; ++n) {
      const Floats coarse = in_all_lanes(highest[n] * kScale);
      const Floats fine = in_all_lanes(highest[n] * kFiner);
      for (std::size_t a = 0; a < size; a += kLanes) {
        Floats total = converted(&sums[n * size + a]) * coarse;
        if (num_terms == 2) {
          total = multiply_add(converted(&sums[(num_rows + n) * size + a]),
                               fine, total);
        }
        store_some(to + n * num_outputs + begin, a, size,
                   total * some(scale + begin, a, size));
      }
    }
  };
  around.gated(num_outputs, [&](float* to) {
    in_ranges<Int8>(call.pool, num_inputs, num_outputs,
                    [&](std::size_t begin, std::size_t end) {
                      multiply_range(begin, end, to);
                    });
  });
}

}  // namespace

NATIVE_KERNEL(few_rows_float32, few_rows<Float32>)
NATIVE_KERNEL(few_rows_bfloat16, few_rows<BFloat16>)
NATIVE_KERNEL(few_rows_int8, few_rows_of_integers)

}  // namespace native
