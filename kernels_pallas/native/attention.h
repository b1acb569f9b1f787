// Attention over the rows that a token sees, in their order.
//
// The n-th row that a token sees always takes the same part in its sums, be it
// of the prefix or of a tree, and wherever it lies. So a token gets the same
// bits alone, in a chain and in a tree, with its rows in a cache or in pages.
//
// Legend: X blocks of tokens (or rows of a batch), T tokens of a block, M rows
// of the tree. G kv heads, Q query heads for each kv head, E head_dim. P pages,
// C pages of a table.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "exponentials.h"
#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace native {

namespace ffi = xla::ffi;
using Index = std::uint32_t;
using BFloat16Bits = std::uint16_t;

constexpr std::size_t kTogether = 4;  // rows, and vectors of values
constexpr std::size_t kQueries = kRows;  // that are computed together

inline Floats widened(const float* from) { return load<float>(from); }

inline Floats widened(const BFloat16Bits* from) {
  typedef BFloat16Bits Half
      __attribute__((vector_size(kVectorBytes / 2), aligned(1), may_alias));
  const Half bits = *reinterpret_cast<const Half*>(from);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

// Keys or values of a kv head. Row i begins `stride` * i numbers after `first`.
template <class T>
struct Rows {
  const T* first;
  std::size_t stride;

  const T* operator[](Index i) const { return first + i * stride; }
  Rows from(std::size_t column) const { return {first + column, stride}; }
};

// Writes the products of N queries with the keys of some rows.
//
// Args:
//   queries: [N, E].
//   keys: keys of the kv head.
//   seen: rows to multiply with, at least one.
//   head_dim: E.
//   scores: [N, room].
//   room: numbers from the scores of a query to the next.
template <std::size_t N, class T>
void multiply_keys(const float* queries, Rows<T> keys,
                   const std::vector<Index>& seen, std::size_t head_dim,
                   float* scores, std::size_t room) {
  const std::size_t last = seen.size() - 1;
  for (std::size_t i = 0; i < seen.size(); i += kTogether) {
    const T* of[kTogether];
    for (std::size_t m = 0; m < kTogether; ++m) {
      of[m] = keys[seen[std::min(i + m, last)]];
    }
    Floats sums[N][kTogether] = {};
    for (std::size_t e = 0; e < head_dim; e += kLanes) {
      Floats key[kTogether];
#pragma GCC unroll 8
      for (std::size_t m = 0; m < kTogether; ++m) key[m] = widened(of[m] + e);
#pragma GCC unroll 8
      for (std::size_t q = 0; q < N; ++q) {
        Floats query = load<float>(queries + q * head_dim + e);
        hold(query);
#pragma GCC unroll 8
        for (std::size_t m = 0; m < kTogether; ++m) sums[q][m] += query * key[m];
      }
    }
#pragma GCC unroll 8
    for (std::size_t q = 0; q < N; ++q) {
      store_sums(sums[q][0], sums[q][1], sums[q][2], sums[q][3],
                 scores + q * room + i);
    }
  }
}

// Makes weights of the scores of a query, which are not divided by their sum.
//
// Args:
//   scores: room for whole vectors.
//   count: number of scores.
//   scale: factor of the scores.
//   soft_cap: bound of the scores, 0 for none.
//   sink: score that takes a share and has no value, or null.
// Returns the sum of the weights.
[[gnu::noinline]] inline float weigh(float* scores, std::size_t count,
                                     float scale, float soft_cap,
                                     const float* sink) {
  const std::size_t num_shares = count + (sink ? 1 : 0);
  const std::size_t end = (num_shares + kLanes - 1) / kLanes * kLanes;
  constexpr float kLowest = -1e30f;
  Ints places;
  for (std::size_t i = 0; i < kLanes; ++i) places[i] = i;
  Floats highest = Floats{} + kLowest;
  for (std::size_t i = 0; i < end; i += kLanes) {
    Floats some = load<float>(scores + i) * scale;
    if (soft_cap) {
      for (std::size_t k = 0; k < kLanes; ++k) {
        some[k] = soft_cap * std::tanh(some[k] / soft_cap);
      }
    }
    some = places + std::int32_t(i) < std::int32_t(count) ? some
                                                          : Floats{} + kLowest;
    store(scores + i, some);
    highest = some > highest ? some : highest;
  }
  if (sink) scores[count] = *sink;
  float best = sink ? *sink : kLowest;
  for (std::size_t i = 0; i < kLanes; ++i) best = std::max(best, highest[i]);
  Floats total = {};
  for (std::size_t i = 0; i < end; i += kLanes) {
    const Floats weights = exp_of_negative(load<float>(scores + i) - best);
    store(scores + i, weights);
    total += weights;
  }
  float sums[4];
  store_sums(total, total, total, total, sums);
  return sums[0];
}

// Writes N weighted sums of C vectors of the values of some rows.
template <std::size_t N, std::size_t C, class T>
void mix_part(const float* weights, std::size_t room, Rows<T> values,
              const std::vector<Index>& seen, std::size_t head_dim,
              const float* totals, float* results) {
  Floats sums[N][C] = {};
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const T* row = values[seen[i]];
    Floats value[C];
#pragma GCC unroll 8
    for (std::size_t c = 0; c < C; ++c) value[c] = widened(row + c * kLanes);
#pragma GCC unroll 8
    for (std::size_t q = 0; q < N; ++q) {
      const Floats weight = Floats{} + weights[q * room + i];
#pragma GCC unroll 8
      for (std::size_t c = 0; c < C; ++c) sums[q][c] += weight * value[c];
    }
  }
#pragma GCC unroll 8
  for (std::size_t q = 0; q < N; ++q) {
#pragma GCC unroll 8
    for (std::size_t c = 0; c < C; ++c) {
      store(results + q * head_dim + c * kLanes, sums[q][c] / totals[q]);
    }
  }
}

template <std::size_t N, class T>
void mix_values(const float* weights, std::size_t room, Rows<T> values,
                const std::vector<Index>& seen, std::size_t head_dim,
                const float* totals, float* results) {
  std::size_t e = 0;
  for (; e + kTogether * kLanes <= head_dim; e += kTogether * kLanes) {
    mix_part<N, kTogether>(weights, room, values.from(e), seen, head_dim,
                           totals, results + e);
  }
  for (; e < head_dim; e += kLanes) {
    mix_part<N, 1>(weights, room, values.from(e), seen, head_dim, totals,
                   results + e);
  }
}

// Where a cache has the rows of its blocks, which are pages of their own unless
// there is a table.
struct Layout {
  std::size_t block_stride, head_stride, row_stride;  // in numbers
  std::size_t page_size;
  std::size_t num_columns = 1;          // C
  const std::int32_t* table = nullptr;  // [X, C]
  std::int32_t num_pages = 1;           // P

  std::size_t capacity() const { return num_columns * page_size; }

  // Adds where the rows of a range are.
  void append(std::size_t block, std::size_t begin, std::size_t end,
              std::vector<Index>& rows) const {
    while (begin < end) {
      const std::size_t column = begin / page_size;
      const std::size_t stop = std::min(end, (column + 1) * page_size);
      // As JAX does, so that a wrong page is no address outside.
      const std::int32_t page =
          table ? std::clamp(table[block * num_columns + column], 0,
                             num_pages - 1)
                : 0;
      const std::size_t before = rows.size();
      rows.resize(before + stop - begin);
      std::iota(rows.begin() + before, rows.end(),
                Index(page * page_size + begin % page_size));
      begin = stop;
    }
  }
};

// The arguments of a call, without those of a layout.
struct Attention {
  ffi::AnyBuffer queries, keys, values;  // [X, T, G, Q, E], and any layout
  ffi::Buffer<ffi::S32> lengths;         // [X]
  ffi::Buffer<ffi::PRED> mask;           // [X, T, M]
  ffi::Buffer<ffi::S32> positions;       // [X, T]
  ffi::Buffer<ffi::F32> sinks;           // [G * Q], or none
  float* results;                        // as queries
  float scale;
  std::int64_t window;  // 0 for none
  float soft_cap;       // 0 for none
  Layout layout{};
  const std::int32_t* num_real = nullptr;  // [X] without padding; null for all

  std::size_t num_blocks = queries.dimensions()[0];
  std::size_t num_tokens = queries.dimensions()[1];
  std::size_t num_heads = queries.dimensions()[2];
  std::size_t num_groups = queries.dimensions()[3];
  std::size_t head_dim = queries.dimensions()[4];
  std::size_t tree_size = mask.dimensions()[2];

  std::size_t num_real_tokens(std::size_t block) const {
    return num_real ? num_real[block] : num_tokens;
  }

  // Finds the rows that a token sees, in their order.
  void find_rows(std::size_t block, std::size_t token,
                 std::vector<Index>& rows) const {
    rows.clear();
    const std::size_t num_tokens_here = num_real_tokens(block);
    if (token >= num_tokens_here) return;
    const std::int64_t capacity = layout.capacity();
    const std::int64_t length =
        std::min<std::int64_t>(lengths.typed_data()[block], capacity);
    const std::size_t index = block * num_tokens + token;
    const std::int64_t begin =
        window ? std::max<std::int64_t>(
                     positions.typed_data()[index] - window + 1, 0)
               : 0;
    layout.append(block, begin, length, rows);
    const std::size_t num_masked =
        num_real ? std::min(tree_size, num_tokens_here) : tree_size;
    const bool* seen = mask.typed_data() + index * tree_size;
    for (std::size_t m = 0; m < num_masked; ++m) {
      const std::int64_t row = length + m;
      if (seen[m] && row >= begin && row < capacity) {
        layout.append(block, row, row + 1, rows);
      }
    }
  }
};

struct Scratch {
  std::vector<Index> seen;
  std::vector<float> queries, scores;
};

// Attends with N queries from the one with number q of a kv head on.
template <std::size_t N, class T>
void attend_some(const Attention& call, std::size_t block, std::size_t head,
                 std::size_t q, Scratch& scratch, float* results) {
  const std::size_t count = scratch.seen.size();
  const std::size_t room = (count / kLanes + 2) * kLanes;
  scratch.scores.resize(N * room);
  float* scores = scratch.scores.data();
  const std::size_t first =
      block * call.layout.block_stride + head * call.layout.head_stride;
  auto rows = [&](const ffi::AnyBuffer& cache) {
    return Rows<T>{static_cast<const T*>(cache.untyped_data()) + first,
                   call.layout.row_stride};
  };
  multiply_keys<N>(&scratch.queries[q * call.head_dim], rows(call.keys),
                   scratch.seen, call.head_dim, scores, room);
  float totals[N];
  for (std::size_t i = 0; i < N; ++i) {
    const float* sink = call.sinks.element_count()
                            ? call.sinks.typed_data() +
                                  head * call.num_groups + q + i
                            : nullptr;
    totals[i] =
        weigh(scores + i * room, count, call.scale, call.soft_cap, sink);
  }
  mix_values<N>(scores, room, rows(call.values), scratch.seen, call.head_dim,
                totals, results + q * call.head_dim);
}

// Attends with the queries of a kv head of a token.
//
// S is the type of the queries, T that of keys and values.
template <class S, class T>
void attend(const Attention& call, std::size_t block, std::size_t token,
            std::size_t head) {
  static thread_local Scratch scratch;
  call.find_rows(block, token, scratch.seen);
  const std::size_t size = call.num_groups * call.head_dim;
  const std::size_t first =
      ((block * call.num_tokens + token) * call.num_heads + head) * size;
  float* results = call.results + first;
  if (scratch.seen.empty()) {
    std::fill(results, results + size, 0.0f);
    return;
  }
  scratch.queries.resize(size);
  const S* queries = static_cast<const S*>(call.queries.untyped_data()) + first;
  for (std::size_t i = 0; i < size; i += kLanes) {
    store(&scratch.queries[i], widened(queries + i));
  }
  for (std::size_t q = 0; q < call.num_groups; q += kQueries) {
    with_size<kQueries>(call.num_groups - q, [&](auto size) {
      attend_some<size(), T>(call, block, head, q, scratch, results);
    });
  }
}

// Products below which other threads take longer to start than to help.
constexpr std::size_t kFewProducts = 1 << 16;

template <class S, class T>
void attend_all(ffi::ThreadPool& pool, const Attention& call) {
  const std::size_t num_queries = call.num_tokens * call.num_heads;
  std::size_t num_products = 0;
  for (std::size_t x = 0; x < call.num_blocks; ++x) {
    num_products += (call.lengths.typed_data()[x] + call.tree_size) *
                    call.num_real_tokens(x) * call.num_heads *
                    call.num_groups * call.head_dim;
  }
  auto work = [&](std::size_t i) {
    const std::size_t token = i / call.num_heads;
    attend<S, T>(call, token / call.num_tokens, token % call.num_tokens,
                 i % call.num_heads);
  };
  const std::size_t count = call.num_blocks * num_queries;
  if (num_products < kFewProducts) {
    for (std::size_t i = 0; i < count; ++i) work(i);
  } else {
    parallel_for(pool, count, work);
  }
}

// Attends with arrays of float32 or bfloat16.
inline ffi::Error attend_all(ffi::ThreadPool& pool, const Attention& call) {
  const auto dtype = call.queries.element_type();
  const auto stored = call.keys.element_type();
  if (dtype == ffi::F32 && stored == ffi::F32) {
    attend_all<float, float>(pool, call);
  } else if (dtype == ffi::BF16 && stored == ffi::F32) {
    attend_all<BFloat16Bits, float>(pool, call);
  } else if (dtype == ffi::BF16 && stored == ffi::BF16) {
    attend_all<BFloat16Bits, BFloat16Bits>(pool, call);
  } else {
    return ffi::Error::InvalidArgument(
        "neither float32 nor bfloat16, or queries wider than the cache");
  }
  return ffi::Error::Success();
}

// Binds what all kinds of attention take first.
inline auto bind_attention() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()           // queries
      .Arg<ffi::AnyBuffer>()           // keys
      .Arg<ffi::AnyBuffer>()           // values
      .Arg<ffi::Buffer<ffi::S32>>()    // lengths
      .Arg<ffi::Buffer<ffi::PRED>>()   // mask
      .Arg<ffi::Buffer<ffi::S32>>()    // positions
      .Arg<ffi::Buffer<ffi::F32>>();   // sinks
}

}  // namespace native
