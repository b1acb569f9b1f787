// Tree attention over the rows that a token sees, in their order.
// See tree_attention/native.py.
//
// The n-th row that a token sees always takes the same part in its sums, be it
// of the prefix or of a tree, and whatever rows lie between. So a token gets
// the same bits alone, in a chain and in a tree.
//
// Legend: B rows of a batch, T tokens, M rows of the tree, S cache capacity, G
// kv heads, Q query heads for each kv head, E head_dim.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "exponentials.h"
#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace native {
namespace {

namespace ffi = xla::ffi;
using Index = std::uint32_t;

constexpr std::size_t kTogether = 4;  // rows, and vectors of values
#if defined(NATIVE_AVX512) || defined(__aarch64__)
constexpr std::size_t kQueries = 4;  // 32 registers
#else
constexpr std::size_t kQueries = 2;
#endif

inline Floats widened(const float* from) { return load<float>(from); }

inline Floats widened(const std::uint16_t* from) {  // of bfloat16
  typedef std::uint16_t Half
      __attribute__((vector_size(kVectorBytes / 2), aligned(1), may_alias));
  const Half bits = *reinterpret_cast<const Half*>(from);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

// Writes the products of N queries with the keys of some rows.
template <std::size_t N, class T>
void multiply_keys(const float* queries, const T* keys,
                   const std::vector<Index>& rows, std::size_t head_dim,
                   float* scores, std::size_t stride) {
  const std::size_t last = rows.size() - 1;
  for (std::size_t i = 0; i < rows.size(); i += kTogether) {
    const T* of[kTogether];
    for (std::size_t m = 0; m < kTogether; ++m) {
      of[m] = keys + rows[std::min(i + m, last)] * head_dim;
    }
    Floats sums[N][kTogether] = {};
    for (std::size_t e = 0; e < head_dim; e += kLanes) {
      Floats key[kTogether];
#pragma GCC unroll 8
      for (std::size_t m = 0; m < kTogether; ++m) key[m] = widened(of[m] + e);
#pragma GCC unroll 8
      for (std::size_t q = 0; q < N; ++q) {
        const Floats query = load<float>(queries + q * head_dim + e);
#pragma GCC unroll 8
        for (std::size_t m = 0; m < kTogether; ++m) sums[q][m] += query * key[m];
      }
    }
#pragma GCC unroll 8
    for (std::size_t q = 0; q < N; ++q) {
      store_sums(sums[q][0], sums[q][1], sums[q][2], sums[q][3],
                 scores + q * stride + i);
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
[[gnu::noinline]] float weigh(float* scores, std::size_t count, float scale,
                              float soft_cap, const float* sink) {
  const std::size_t num_shares = count + (sink ? 1 : 0);
  float best = sink ? *sink : -std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < count; ++i) {
    scores[i] *= scale;
    if (soft_cap) scores[i] = soft_cap * std::tanh(scores[i] / soft_cap);
    best = std::max(best, scores[i]);
  }
  if (sink) scores[count] = *sink;
  const std::size_t end = (num_shares + kLanes - 1) / kLanes * kLanes;
  std::fill(scores + num_shares, scores + end, -1e30f);
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
void mix_part(const float* weights, std::size_t stride, const T* values,
              const std::vector<Index>& rows, std::size_t head_dim,
              const float* totals, float* results) {
  Floats sums[N][C] = {};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const T* row = values + rows[i] * head_dim;
    Floats value[C];
#pragma GCC unroll 8
    for (std::size_t c = 0; c < C; ++c) value[c] = widened(row + c * kLanes);
#pragma GCC unroll 8
    for (std::size_t q = 0; q < N; ++q) {
      const Floats weight = Floats{} + weights[q * stride + i];
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
void mix_values(const float* weights, std::size_t stride, const T* values,
                const std::vector<Index>& rows, std::size_t head_dim,
                const float* totals, float* results) {
  std::size_t e = 0;
  for (; e + kTogether * kLanes <= head_dim; e += kTogether * kLanes) {
    mix_part<N, kTogether>(weights, stride, values + e, rows, head_dim, totals,
                           results + e);
  }
  for (; e < head_dim; e += kLanes) {
    mix_part<N, 1>(weights, stride, values + e, rows, head_dim, totals,
                   results + e);
  }
}

struct Scratch {
  std::vector<Index> rows;
  std::vector<float> queries, scores;
};

// The arguments of a call; pointers to bfloat16 are to their bits.
template <class T>
struct Call {
  std::size_t num_tokens, num_heads, num_groups, head_dim, capacity, tree_size;
  const T *queries, *keys, *values;
  const std::int32_t *lengths, *positions;
  const bool* mask;
  const float* sinks;  // null for none
  float scale;
  std::int64_t window;  // 0 for none
  float soft_cap;       // 0 for none
  float* results;

  // Attends with the queries of a kv head of a token.
  void attend(std::size_t b, std::size_t t, std::size_t g) const {
    static thread_local Scratch scratch;
    find_rows(b, t, scratch.rows);
    const std::size_t token = b * num_tokens + t;
    const std::size_t first = (token * num_heads + g) * num_groups * head_dim;
    float* to = results + first;
    if (scratch.rows.empty()) {
      std::fill(to, to + num_groups * head_dim, 0.0f);
      return;
    }
    scratch.queries.resize(num_groups * head_dim);
    for (std::size_t i = 0; i < num_groups * head_dim; i += kLanes) {
      store(&scratch.queries[i], widened(queries + first + i));
    }
    for (std::size_t q = 0; q < num_groups; q += kQueries) {
      switch (std::min(num_groups - q, kQueries)) {
        case 1:
          attend_some<1>(b, g, q, scratch, to);
          break;
        case 2:
          attend_some<2>(b, g, q, scratch, to);
          break;
        case 3:
          attend_some<std::min<std::size_t>(3, kQueries)>(b, g, q, scratch, to);
          break;
        default:
          attend_some<kQueries>(b, g, q, scratch, to);
      }
    }
  }

 private:
  // Finds the rows that a token sees, in their order.
  void find_rows(std::size_t b, std::size_t t, std::vector<Index>& rows) const {
    const std::int64_t length = std::min<std::int64_t>(lengths[b], capacity);
    const std::int64_t end =
        window ? positions[b * num_tokens + t] - window : -1;
    rows.clear();
    for (std::int64_t i = std::max<std::int64_t>(end + 1, 0); i < length; ++i) {
      rows.push_back(i);
    }
    const bool* seen = mask + (b * num_tokens + t) * tree_size;
    for (std::size_t m = 0; m < tree_size; ++m) {
      const std::int64_t i = length + m;
      if (seen[m] && i > end && i < std::int64_t(capacity)) rows.push_back(i);
    }
  }

  template <std::size_t N>
  void attend_some(std::size_t b, std::size_t g, std::size_t q,
                   Scratch& scratch, float* to) const {
    const std::size_t count = scratch.rows.size();
    const std::size_t stride = (count / kLanes + 2) * kLanes;
    scratch.scores.resize(N * stride);
    float* scores = scratch.scores.data();
    const std::size_t cache = (b * num_heads + g) * capacity * head_dim;
    multiply_keys<N>(&scratch.queries[q * head_dim], keys + cache, scratch.rows,
                     head_dim, scores, stride);
    float totals[N];
    for (std::size_t i = 0; i < N; ++i) {
      const float* sink = sinks ? sinks + g * num_groups + q + i : nullptr;
      totals[i] = weigh(scores + i * stride, count, scale, soft_cap, sink);
    }
    mix_values<N>(scores, stride, values + cache, scratch.rows, head_dim,
                  totals, to + q * head_dim);
  }
};

// Products below which other threads take longer to start than to help.
constexpr std::size_t kFewProducts = 1 << 16;

template <class T, class Array, class Lengths, class Mask, class Sinks,
          class Results>
ffi::Error run(ffi::ThreadPool pool, Array queries, Array keys, Array values,
               Lengths lengths, Mask mask, Lengths positions, Sinks sinks,
               Results results, float scale, std::int64_t window,
               float soft_cap) {
  const auto shape = queries.dimensions();
  Call<T> call;
  call.num_tokens = shape[1];
  call.num_heads = shape[2];
  call.num_groups = shape[3];
  call.head_dim = shape[4];
  call.capacity = keys.dimensions()[2];
  call.tree_size = mask.dimensions()[2];
  call.queries = static_cast<const T*>(queries.untyped_data());
  call.keys = static_cast<const T*>(keys.untyped_data());
  call.values = static_cast<const T*>(values.untyped_data());
  call.lengths = lengths.typed_data();
  call.positions = positions.typed_data();
  call.mask = mask.typed_data();
  call.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  call.scale = scale;
  call.window = window;
  call.soft_cap = soft_cap;
  call.results = results->typed_data();
  const std::size_t num_rows = shape[0];
  std::size_t num_seen = 0;
  for (std::size_t b = 0; b < num_rows; ++b) {
    num_seen += call.lengths[b] + call.tree_size;
  }
  auto attend = [&](std::size_t i) {
    const std::size_t token = i / call.num_heads;
    call.attend(token / call.num_tokens, token % call.num_tokens,
                i % call.num_heads);
  };
  const std::size_t count = num_rows * call.num_tokens * call.num_heads;
  const std::size_t num_products = num_seen * call.num_tokens *
                                   call.num_heads * call.num_groups *
                                   call.head_dim;
  if (num_products < kFewProducts) {
    for (std::size_t i = 0; i < count; ++i) attend(i);
  } else {
    parallel_for(pool, count, attend);
  }
  return ffi::Error::Success();
}

}  // namespace

#define NATIVE_TREE_ATTENTION(name, T, kType)                                \
  static ffi::Error name##_call(                                             \
      ffi::ThreadPool pool, ffi::Buffer<kType> queries,                      \
      ffi::Buffer<kType> keys, ffi::Buffer<kType> values,                    \
      ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::PRED> mask,            \
      ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::F32> sinks,          \
      ffi::ResultBuffer<ffi::F32> results, float scale,                      \
      std::int64_t window, float soft_cap) {                                 \
    return run<T>(pool, queries, keys, values, lengths, mask, positions,     \
                  sinks, results, scale, window, soft_cap);                  \
  }                                                                          \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, name##_call,                           \
                                ffi::Ffi::Bind()                             \
                                    .Ctx<ffi::ThreadPool>()                  \
                                    .Arg<ffi::Buffer<kType>>()               \
                                    .Arg<ffi::Buffer<kType>>()               \
                                    .Arg<ffi::Buffer<kType>>()               \
                                    .Arg<ffi::Buffer<ffi::S32>>()            \
                                    .Arg<ffi::Buffer<ffi::PRED>>()           \
                                    .Arg<ffi::Buffer<ffi::S32>>()            \
                                    .Arg<ffi::Buffer<ffi::F32>>()            \
                                    .Ret<ffi::Buffer<ffi::F32>>()            \
                                    .Attr<float>("scale")                    \
                                    .Attr<std::int64_t>("window")            \
                                    .Attr<float>("soft_cap"))

NATIVE_TREE_ATTENTION(tree_attention_float32, float, ffi::F32);
NATIVE_TREE_ATTENTION(tree_attention_bfloat16, std::uint16_t, ffi::BF16);

}  // namespace native
