// Products of rows and weights in the blocks of GGUF files. See native.py.
//
// Rows become int8 with a scale for each 32 numbers. Weights of a few outputs
// are unpacked part by part, and all rows are multiplied with them.
// Each lane of a vector has the numbers of one group: integers are summed
// exactly within it, then it adds what its groups give in the order of the
// inputs. What rows are beside a row changes nothing.
//
// Legend: N rows, K inputs, A outputs.

#include <algorithm>
#include <numeric>
#include <vector>

#include "call.h"
#include "gguf_formats.h"
#include "integers.h"
#include "parallel.h"
#include "rows.h"
#include "vectors.h"

namespace native {
namespace {

constexpr std::size_t kOutputs = 4;  // that are computed together
constexpr std::size_t kRowsTogether = 4;  // that are rounded in a task
constexpr std::size_t kRowsInOrder = 8;  // whose sums fit into the registers
// Rows that a task takes at a time. If those are more, outputs share what is
// loaded of a row, which takes 1.8 times as long with AVX-512 (Zen 5).
#if defined(NATIVE_AVX512)
constexpr std::size_t kRowsInCache = kRowsInOrder;
#else
constexpr std::size_t kRowsInCache = 32;
#endif
constexpr std::size_t kCachedInputs = 1 << 14;  // of rows in the first cache
constexpr std::size_t kStretch = 1 << 11;  // of more rows, at a time
constexpr std::size_t kBlock = 32;  // numbers of a row with one scale
constexpr std::size_t kTaskBytes = 1 << 16;  // of weights
// Bytes between what few rows multiply and what is fetched: processors do not
// look beyond a page.
constexpr std::size_t kAhead = 4096;

// Numbers of as many groups as a vector has lanes. A lane has those of a group.
struct Chunk {
  Ints integers[kVectors];
  Floats scales, offsets;
};

// Interleaves the lanes of V in the first or second half of each 16 bytes.
template <class V, bool kIsSecond, std::size_t... I>
inline Ints zip(Ints a, Ints b, std::index_sequence<I...>) {
  constexpr std::size_t kHalf = 8 * sizeof...(I) / sizeof(V);
  return (Ints)__builtin_shufflevector(
      (V)a, (V)b,
      (I / (2 * kHalf) * 2 * kHalf + kIsSecond * kHalf + I % (2 * kHalf) / 2 +
       I % 2 * sizeof...(I))...);
}

// Returns vector i of a part.
template <std::size_t i>
inline Ints vector_at(const Bytes64* integers) {
#if defined(NATIVE_AVX512)
  return (Ints)integers[i];
#else
  constexpr std::size_t kEach = 32 / kVectorBytes;
  const Bytes64& two = integers[i / kEach / 2];
  const auto words = (Words32)(i / kEach % 2 ? two.second : two.first);
  if constexpr (kEach == 1) {
    return (Ints)words;
  } else {
    return (Ints)__builtin_shufflevector(words, words, i % 2 * 2,
                                         i % 2 * 2 + 1);
  }
#endif
}

template <std::size_t i, std::size_t kSize>
[[gnu::always_inline]] inline Chunk arrange(const Part<kSize>& part) {
  using Pairs = Vector<std::int64_t>;
  constexpr auto lanes = std::make_index_sequence<kLanes>();
  constexpr auto pairs = std::make_index_sequence<kLanes / 2>();
  const Bytes64* from = part.integers;
  const Ints a = vector_at<4 * i>(from), b = vector_at<4 * i + 1>(from);
  const Ints c = vector_at<4 * i + 2>(from), d = vector_at<4 * i + 3>(from);
  const Ints ab = zip<Ints, false>(a, b, lanes);
  const Ints cd = zip<Ints, false>(c, d, lanes);
  const Ints ab2 = zip<Ints, true>(a, b, lanes);
  const Ints cd2 = zip<Ints, true>(c, d, lanes);
  return {{zip<Pairs, false>(ab, cd, pairs), zip<Pairs, true>(ab, cd, pairs),
           zip<Pairs, false>(ab2, cd2, pairs),
           zip<Pairs, true>(ab2, cd2, pairs)},
          part.scales.of[i],
          part.offsets.of[i]};
}

// Calls run(i) for each chunk i of a part, which is a constant.
template <class Run, std::size_t... I>
[[gnu::always_inline]] inline void for_chunks(const Run& run,
                                              std::index_sequence<I...>) {
  (run(std::integral_constant<std::size_t, I>()), ...);
}
template <std::size_t kSize>
constexpr auto kChunksOf = std::make_index_sequence<kSize / kChunk>();

// A part in memory, whose numbers are in the order of inputs.
template <std::size_t kSize>
struct Numbers {
  Byte integers[kSize];
  float scales[kSize / kGroup], offsets[kSize / kGroup];

  static Numbers of(const Part<kSize>& part) {
    Numbers numbers;
    const auto* bytes = reinterpret_cast<const Byte*>(part.integers);
    for (std::size_t i = 0; i < kSize / kBlock; ++i) {
      std::memcpy(numbers.integers + kOrder[i] * kBlock, bytes + i * kBlock,
                  kBlock);
    }
    for (std::size_t i = 0; i < kSize / kGroup; ++i) {
      const std::size_t group = group_of(i);
      numbers.scales[group] = part.scales.of[i / kLanes][i % kLanes];
      numbers.offsets[group] = part.offsets.of[i / kLanes][i % kLanes];
    }
    return numbers;
  }

  Part<kSize> part() const {
    Part<kSize> part;
    auto* bytes = reinterpret_cast<Byte*>(part.integers);
    for (std::size_t i = 0; i < kSize / kBlock; ++i) {
      std::memcpy(bytes + i * kBlock, integers + kOrder[i] * kBlock, kBlock);
    }
    for (std::size_t i = 0; i < kSize / kGroup; ++i) {
      const std::size_t group = group_of(i);
      part.scales.of[i / kLanes][i % kLanes] = scales[group];
      part.offsets.of[i / kLanes][i % kLanes] = offsets[group];
    }
    return part;
  }
};

// Rounds block i of a part of a row to integers.
void round_block(const float* from, std::size_t i, Numbers<kSmall>& to) {
  const float highest = absmax(from, kBlock);
  const float scale = highest / 127.0f, factor = 127.0f / highest;
  std::int32_t integers[kBlock];
  for (std::size_t k = 0; k < kBlock; k += kLanes) {
    store(integers + k, nearest(load<float>(from + k) * factor));
  }
  for (std::size_t k = 0; k < kBlock; ++k) {
    to.integers[i * kBlock + k] = static_cast<Byte>(integers[k]);
  }
  for (std::size_t group = 0; group < 2; ++group) {
    const std::int32_t* first = integers + group * kGroup;
    // Without a sign: of what is no number there are integers that overflow.
    const std::uint32_t sum = std::accumulate(first, first + kGroup, 0u);
    to.scales[2 * i + group] = scale;
    to.offsets[2 * i + group] = scale * static_cast<std::int32_t>(sum);
  }
}

// Rows as integers, chunk by chunk for all of them. Rows of zeros follow, as
// 1, 2, 4 or `kRowsInOrder` are multiplied together.
class Rows {
 public:
  Rows(std::size_t count, std::size_t num_inputs)
      : count(count),
        stride(divide_up(count, together(count)) * together(count)),
        num_inputs(num_inputs),
        chunks_(divide_up(num_inputs, kSmall) * kSmall / kChunk * stride) {}

  const Chunk* at(std::size_t chunk) const {
    return chunks_.data() + chunk * stride;
  }

  void round(std::size_t n, const float* row) {
    for (std::size_t k = 0; k < num_inputs; k += kSmall) {
      const std::size_t size = std::min(kSmall, num_inputs - k);
      Numbers<kSmall> numbers = {};
      for (std::size_t i = 0; i < size / kBlock; ++i) {
        round_block(row + k + i * kBlock, i, numbers);
      }
      const Part<kSmall> part = numbers.part();
      for_chunks([&](auto i) {
        chunks_.data()[(k / kChunk + i()) * stride + n] = arrange<i()>(part);
      }, kChunksOf<kSmall>);
    }
  }

  const std::size_t count, stride, num_inputs;

 private:
  static std::size_t together(std::size_t count) {
    std::size_t rows = 1;
    while (rows < std::min(count, kRowsInOrder)) rows *= 2;
    return rows;
  }

  Aligned<Chunk> chunks_;
};

template <class F>
constexpr std::size_t kPartBytes = F::kPart / F::kSize * F::kBytes;

// Weights of a tensor.
template <class F>
class Weights {
 public:
  Weights(const Byte* first, std::size_t bytes, std::size_t num_inputs)
      : row_bytes(num_inputs / F::kSize * F::kBytes),
        num_outputs(bytes / row_bytes),
        first_(first) {}

  const Byte* of(std::size_t output) const {
    return first_ + output * row_bytes;
  }

  // Unpacks those of an output from input k on. What follows its last inputs is
  // of the next output, or zero; where rows are multiplied, theirs are zero.
  [[gnu::always_inline]] Part<F::kPart> unpack(std::size_t output,
                                               std::size_t k) const {
    const Byte* from = of(output) + k / F::kSize * F::kBytes;
    Byte rest[kPartBytes<F>];
    if (F::kSize < F::kPart && of(num_outputs) < from + kPartBytes<F>) {
      Byte* end = std::copy(from, of(num_outputs), rest);
      std::fill(end, rest + kPartBytes<F>, Byte());
      from = rest;
    }
    Part<F::kPart> part;
    F::unpack(from, part);
    return part;
  }

  const std::size_t row_bytes, num_outputs;

 private:
  const Byte* const first_;
};

// Returns chunk i of a part, ready to be multiplied.
template <class F, std::size_t i>
[[gnu::always_inline]] inline Chunk ready(const Part<F::kPart>& part) {
  Chunk chunk = arrange<i>(part);
  if constexpr (F::kMiddle != 0) {
    chunk.offsets -= float{F::kMiddle} * chunk.scales;
  }
  return chunk;
}

// Adds the products of two chunks to a sum.
template <class F>
[[gnu::always_inline]] inline void add(const Chunk& weights, const Chunk& row,
                                       Floats& sum) {
  const Ints products =
      Integers::multiply<F::kHighest>(weights.integers, row.integers);
  sum = multiply_add(__builtin_convertvector(products, Floats),
                     weights.scales * row.scales, sum);
  sum = multiply_add(weights.offsets, row.offsets, sum);
}

// Multiplies R rows, the last ones of which may be zeros, with outputs from m on,
// one after the other; or stretch by stretch, where the rows do not fit into the
// first cache. Memory is fetched in its order.
template <class F, std::size_t R>
void in_order(const Rows& rows, std::size_t first, std::size_t num_rows,
              const Weights<F>& weights, std::size_t m, std::size_t num_outputs,
              float* results, std::size_t result_stride) {
  const std::size_t num_inputs = rows.num_inputs;
  const bool is_cached = num_inputs <= kCachedInputs / R;
  const std::size_t step = is_cached ? num_inputs : kStretch / R;
  const Byte* later = weights.of(is_cached ? m : m + num_outputs) + kAhead;
  Floats sums[R][kOutputs] = {};
  for (std::size_t begin = 0; begin < num_inputs; begin += step) {
    const std::size_t end = std::min(num_inputs, begin + step);
    for (std::size_t a = 0; a < num_outputs; ++a) {
      Floats of_output[R];
#pragma GCC unroll 8
      for (std::size_t r = 0; r < R; ++r) of_output[r] = sums[r][a];
      const Chunk* row = rows.at(begin / kChunk) + first;
      for (std::size_t k = begin; k < end; k += F::kPart) {
#pragma GCC unroll 8
        for (std::size_t i = 0; i < kPartBytes<F>; i += 64) {
          __builtin_prefetch(later + i);
        }
        later += kPartBytes<F>;
        const Part<F::kPart> part = weights.unpack(m + a, k);
        for_chunks([&](auto i) {
          const Chunk chunk = ready<F, i()>(part);
#pragma GCC unroll 8
          for (std::size_t r = 0; r < R; ++r) {
            add<F>(chunk, row[r], of_output[r]);
          }
          row += rows.stride;
        }, kChunksOf<F::kPart>);
      }
#pragma GCC unroll 8
      for (std::size_t r = 0; r < R; ++r) sums[r][a] = of_output[r];
    }
  }
  for (std::size_t r = 0; r < num_rows; ++r, results += result_stride) {
    float found[kOutputs];
    const bool is_whole = num_outputs == kOutputs;
    store_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3],
               is_whole ? results : found);
    if (!is_whole) std::copy_n(found, num_outputs, results);
  }
}

// Does so with any number of rows, R or fewer at a time.
template <class F, std::size_t R = kRowsInOrder>
void few_rows(const Rows& rows, std::size_t first, std::size_t num_rows,
              const Weights<F>& weights, std::size_t m, std::size_t num_outputs,
              float* results, std::size_t result_stride) {
  if constexpr (R > 1) {
    if (num_rows <= R / 2) {
      return few_rows<F, R / 2>(rows, first, num_rows, weights, m, num_outputs,
                                results, result_stride);
    }
  }
  for (std::size_t n = 0; n < num_rows; n += R) {
    in_order<F, R>(rows, first + n, std::min(R, num_rows - n), weights, m,
                   num_outputs, results + n * result_stride, result_stride);
  }
}

// Multiplies up to `kRowsInCache` rows with `kOutputs` outputs from m on.
template <class F>
void many_rows(const Rows& rows, std::size_t first, std::size_t num_rows,
               const Weights<F>& weights, std::size_t m, float* results,
               std::size_t result_stride) {
  Floats sums[kRowsInCache][kOutputs];
  std::fill_n(&sums[0][0], num_rows * kOutputs, Floats{});
  const Byte* next = weights.of(m + kOutputs);
  for (std::size_t k = 0; k < rows.num_inputs; k += F::kPart) {
    Part<F::kPart> parts[kOutputs];
    for (std::size_t a = 0; a < kOutputs; ++a) {
      parts[a] = weights.unpack(m + a, k);
    }
    for_chunks([&](auto i) {
      Chunk chunks[kOutputs];
      for (std::size_t a = 0; a < kOutputs; ++a) {
        chunks[a] = ready<F, i()>(parts[a]);
      }
      const Chunk* row = rows.at(k / kChunk + i()) + first;
      for (std::size_t r = 0; r < num_rows; ++r) {
        Chunk given = row[r];
#pragma GCC unroll 8
        for (std::size_t a = 0; a < kOutputs; ++a) {
          add<F>(chunks[a], given, sums[r][a]);
        }
      }
    }, kChunksOf<F::kPart>);
    for (std::size_t i = 0; i < kOutputs * kPartBytes<F>; i += 64) {
      __builtin_prefetch(next + i, 0, 2);
    }
    next += kOutputs * kPartBytes<F>;
  }
  for (std::size_t r = 0; r < num_rows; ++r) {
    store_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3],
               results + r * result_stride);
  }
}

// Multiplies all rows with the outputs of a range.
template <class F>
void outputs(const Rows& rows, const Weights<F>& weights, std::size_t begin,
             std::size_t end, float* results, std::size_t result_stride) {
  for (std::size_t n = 0; n < rows.count; n += kRowsInCache) {
    const std::size_t some = std::min(kRowsInCache, rows.count - n);
    for (std::size_t m = begin; m < end; m += kOutputs) {
      const std::size_t size = std::min(kOutputs, end - m);
      float* to = results + n * result_stride + m;
      if (some > kRowsInOrder && size == kOutputs) {
        many_rows(rows, n, some, weights, m, to, result_stride);
      } else {
        few_rows(rows, n, some, weights, m, size, to, result_stride);
      }
    }
  }
}

// Returns rows as integers.
Rows rounded(const Pool& pool, const float* rows, std::size_t num_rows,
             std::size_t num_inputs) {
  Rows result(num_rows, num_inputs);
  parallel_for(pool, divide_up(num_rows, kRowsTogether), [&](std::size_t i) {
    const std::size_t end = std::min(num_rows, (i + 1) * kRowsTogether);
    for (std::size_t n = i * kRowsTogether; n < end; ++n) {
      result.round(n, rows + n * num_inputs);
    }
  });
  return result;
}

// A part of the outputs of a tensor.
struct Task {
  std::int64_t kind;
  const Byte* weights;  // the tensor's
  std::size_t bytes;
  std::size_t begin, end;
  std::size_t first;  // among all outputs, that of the tensor
};

void multiply(const Call& call) {
  const Around around(call);
  const std::int64_t* kinds = call.integers("kinds");
  const std::int64_t* starts = call.integers("starts");
  const std::size_t num_rows = around.num_rows();
  const std::size_t num_inputs = around.num_inputs();
  std::size_t num_outputs = 0;
  std::vector<Task> tasks;
  for (std::size_t i = 0; i + around.kWeights < call.num_arguments(); ++i) {
    const Array tensor = call.argument(around.kWeights + i);
    const Byte* first = tensor.data<Byte>() + starts[i];
    const std::size_t bytes = tensor.size() - starts[i];
    with_format(kinds[i], [&](auto format) {
      const Weights<decltype(format)> weights(first, bytes, num_inputs);
      const std::size_t size =
          std::max<std::size_t>(kTaskBytes / weights.row_bytes / kOutputs, 1) *
          kOutputs;
      for (std::size_t m = 0; m < weights.num_outputs; m += size) {
        tasks.push_back({kinds[i], first, bytes, m,
                         std::min(weights.num_outputs, m + size), num_outputs});
      }
      num_outputs += weights.num_outputs;
    });
  }
  std::vector<float> room;
  const Rows given =
      rounded(call.pool, around.normed(room), num_rows, num_inputs);
  around.gated(num_outputs, [&](float* to) {
    parallel_for(call.pool, tasks.size(), [&](std::size_t i) {
      const Task& task = tasks[i];
      with_format(task.kind, [&](auto format) {
        const Weights<decltype(format)> weights(task.weights, task.bytes,
                                                num_inputs);
        outputs(given, weights, task.begin, task.end, to + task.first,
                num_outputs);
      });
    });
  });
}

void take(const Call& call) {
  const Array table = call.argument(0), indices = call.argument(1);
  const auto start = call.attribute<std::int64_t>("start");
  const std::size_t num_inputs = call.result(0).last_dim();
  const Byte* first = table.data<Byte>() + start;
  const std::size_t bytes = table.size() - start;
  const auto* wanted = indices.data<std::int32_t>();
  float* result = call.result(0).data<float>();
  with_format(call.attribute<std::int64_t>("kind"), [&](auto format) {
    using F = decltype(format);
    const Weights<F> weights(first, bytes, num_inputs);
    const std::int32_t last = weights.num_outputs - 1;
    for (std::size_t i = 0; i < indices.size(); ++i) {
      // As XLA does with indices of no row.
      const auto index = std::clamp(wanted[i], 0, last);
      for (std::size_t k = 0; k < num_inputs; k += F::kPart) {
        const auto numbers = Numbers<F::kPart>::of(weights.unpack(index, k));
        const std::size_t size = std::min(F::kPart, num_inputs - k);
        for (std::size_t j = 0; j < size; ++j) {
          const auto integer =
              static_cast<std::int8_t>(numbers.integers[j] - F::kMiddle);
          *result++ = numbers.scales[j / kGroup] * integer +
                      numbers.offsets[j / kGroup];
        }
      }
    }
  });
}

}  // namespace

NATIVE_KERNEL(gguf_multiply, multiply)
NATIVE_KERNEL(gguf_take, take)

}  // namespace native
