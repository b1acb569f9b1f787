// Attention over the rows that a token sees, in their order; and what writes
// those rows.
//
// The n-th row that a token sees always takes the same part in its sums, be it
// of the prefix or of a tree, and wherever it lies. So a token gets the same
// bits alone, in a chain and in a tree, with its rows in a cache or in pages.
//
// Legend: X blocks of tokens (or rows of a batch), T tokens of a block, M rows
// of the tree. G kv heads, Q query heads for each kv head, E head_dim. P pages,
// C pages of a table.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "call.h"
#include "parallel.h"
#include "rows.h"
#include "vectors.h"

namespace native {
namespace {

using Index = std::uint32_t;

constexpr std::size_t kTogether = 4;  // rows, and vectors of values
constexpr std::size_t kQueries = kRows;  // that are computed together
constexpr std::size_t kTokens = 8;  // that read the same rows in turn
constexpr std::size_t kTasks = 3;  // of a thread, at least, where tokens do so
constexpr std::size_t kStrip = 64;  // rows that stay in the first cache

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
//   seen: rows to multiply with.
//   count: their number, at least one.
//   head_dim: E.
//   scores: [N, room].
//   room: numbers from the scores of a query to the next.
//   later: values of the kv head, if these and the keys of the next strip are
//     to be fetched meanwhile, or null.
template <std::size_t N, class T>
void multiply_keys(const float* queries, Rows<T> keys, const Index* seen,
                   std::size_t count, std::size_t head_dim, float* scores,
                   std::size_t room, const Rows<T>* later) {
  const std::size_t last = count - 1;
  for (std::size_t i = 0; i < count; i += kTogether) {
    const T* of[kTogether];
#pragma GCC unroll 8
    for (std::size_t m = 0; m < kTogether; ++m) {
      const Index row = seen[std::min(i + m, last)];
      of[m] = keys[row];
      if (!later) continue;
      for (std::size_t e = 0; e < head_dim; e += 64 / sizeof(T)) {
        __builtin_prefetch((*later)[row] + e, 0, 2);
        __builtin_prefetch(keys[row + kStrip] + e, 0, 2);
      }
    }
    Floats sums[N][kTogether] = {};
    for (std::size_t e = 0; e < head_dim; e += kLanes) {
      Floats key[kTogether];
#pragma GCC unroll 8
      for (std::size_t m = 0; m < kTogether; ++m) {
        Floats loaded = widened(of[m] + e);
        hold(loaded);
        key[m] = loaded;
      }
#pragma GCC unroll 8
      for (std::size_t q = 0; q < N; ++q) {
        Floats query = load<float>(queries + q * head_dim + e);
        hold(query);
#pragma GCC unroll 8
        for (std::size_t m = 0; m < kTogether; ++m) {
          sums[q][m] = multiply_add(query, key[m], sums[q][m]);
        }
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
//   sink: score that takes a share and has no value, or null.
// Returns the sum of the weights.
[[gnu::noinline]] float weigh(float* scores, std::size_t count, float scale,
                              const float* sink) {
  const std::size_t num_shares = count + (sink ? 1 : 0);
  const std::size_t end = (num_shares + kLanes - 1) / kLanes * kLanes;
  constexpr float kLowest = -1e30f;
  Ints places;
  for (std::size_t i = 0; i < kLanes; ++i) places[i] = i;
  Floats highest = Floats{} + kLowest;
  for (std::size_t i = 0; i < end; i += kLanes) {
    Floats some = load<float>(scores + i) * scale;
    some = places + std::int32_t(i) < std::int32_t(count) ? some
                                                          : Floats{} + kLowest;
    store(scores + i, some);
    highest = some > highest ? some : highest;
  }
  if (sink) scores[count] = *sink;
  const float best = std::max(sink ? *sink : kLowest, max_lane(highest));
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

// Adds C vectors of the values of some rows, weighted, to N sums.
template <std::size_t N, std::size_t C, class T>
void mix_part(const float* weights, std::size_t room, Rows<T> values,
              const Index* seen, std::size_t count, std::size_t head_dim,
              float* results) {
  Floats sums[N][C];
#pragma GCC unroll 8
  for (std::size_t q = 0; q < N; ++q) {
#pragma GCC unroll 8
    for (std::size_t c = 0; c < C; ++c) {
      sums[q][c] = load<float>(results + q * head_dim + c * kLanes);
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    const T* row = values[seen[i]];
    Floats value[C];
#pragma GCC unroll 8
    for (std::size_t c = 0; c < C; ++c) value[c] = widened(row + c * kLanes);
#pragma GCC unroll 8
    for (std::size_t q = 0; q < N; ++q) {
      const Floats weight = in_all_lanes(weights[q * room + i]);
#pragma GCC unroll 8
      for (std::size_t c = 0; c < C; ++c) {
        sums[q][c] = multiply_add(weight, value[c], sums[q][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (std::size_t q = 0; q < N; ++q) {
#pragma GCC unroll 8
    for (std::size_t c = 0; c < C; ++c) {
      store(results + q * head_dim + c * kLanes, sums[q][c]);
    }
  }
}

template <std::size_t N, class T>
void mix_values(const float* weights, std::size_t room, Rows<T> values,
                const Index* seen, std::size_t count, std::size_t head_dim,
                float* results) {
  std::size_t e = 0;
  for (; e + kTogether * kLanes <= head_dim; e += kTogether * kLanes) {
    mix_part<N, kTogether>(weights, room, values.from(e), seen, count,
                           head_dim, results + e);
  }
  for (; e < head_dim; e += kLanes) {
    mix_part<N, 1>(weights, room, values.from(e), seen, count, head_dim,
                   results + e);
  }
}

// Where a cache [B, G, S, E] or [P, Z, G * E] has the rows of its heads. Its
// blocks are rows of a batch, or pages. Strides are in numbers.
struct Layout {
  std::size_t num_heads, num_blocks, block_size;
  std::size_t block_stride, row_stride, head_stride;

  Layout(const Array& cache, std::size_t num_heads, std::size_t head_dim)
      : num_heads(num_heads), num_blocks(cache.dim(0)) {
    const bool has_rows = cache.rank() == 4;
    block_size = cache.dim(has_rows ? 2 : 1);
    block_stride = block_size * num_heads * head_dim;
    row_stride = has_rows ? head_dim : num_heads * head_dim;
    head_stride = has_rows ? block_size * head_dim : head_dim;
  }

  std::size_t of(std::size_t place, std::size_t head) const {
    return place / block_size * block_stride +
           place % block_size * row_stride + head * head_stride;
  }
};

// The arguments of a call. Of rows of a cache there are no pages.
struct Attention {
  explicit Attention(const Call& call)
      : Attention(call, call.argument(0), call.argument(1), call.argument(4),
                  call.argument(7)) {}

  const float* queries;           // [X, T, G, Q, E]
  const void *keys, *values;      // as in `Layout`
  const std::int32_t* lengths;    // [X]
  const bool* mask;               // [X, T, M]
  const std::int32_t* positions;  // [X, T]; of rows -1 for padding
  const float* sinks;             // [G * Q], or null
  const std::int32_t* pages;      // [X, C], or null
  const std::int32_t* counts;     // [X] tokens without padding, if pages
  float* results;                 // as queries
  float scale;
  std::int64_t window;  // 0 for none
  std::size_t num_blocks, num_tokens, num_heads, num_groups, head_dim;
  std::size_t tree_size, num_columns;  // M, C
  Layout layout;

  std::size_t num_real_tokens(std::size_t block) const {
    return pages ? counts[block] : num_tokens;
  }

  // Adds where the rows of a range are.
  void append(std::size_t block, std::size_t begin, std::size_t end,
              std::vector<Index>& rows) const {
    const std::size_t page_size = layout.block_size;
    while (begin < end) {
      const std::size_t column = begin / page_size;
      const std::size_t stop = std::min(end, (column + 1) * page_size);
      // As JAX does, so that a wrong page is no address outside.
      const std::int32_t page =
          pages ? std::clamp<std::int32_t>(pages[block * num_columns + column],
                                           0, layout.num_blocks - 1)
                : 0;
      const std::size_t before = rows.size();
      rows.resize(before + stop - begin);
      std::iota(rows.begin() + before, rows.end(),
                Index(page * page_size + begin % page_size));
      begin = stop;
    }
  }

  // Finds the rows that a token sees, in their order.
  void find_rows(std::size_t block, std::size_t token,
                 std::vector<Index>& rows) const {
    rows.clear();
    const std::size_t num_tokens_here = num_real_tokens(block);
    if (token >= num_tokens_here) return;
    const std::int64_t capacity = num_columns * layout.block_size;
    const std::int64_t length =
        std::min<std::int64_t>(lengths[block], capacity);
    const std::size_t index = block * num_tokens + token;
    if (!pages && positions[index] < 0) return;
    const std::int64_t begin =
        window ? std::max<std::int64_t>(positions[index] - window + 1, 0) : 0;
    append(block, begin, length, rows);
    const std::size_t num_masked =
        pages ? std::min(tree_size, num_tokens_here) : tree_size;
    const bool* seen = mask + index * tree_size;
    for (std::size_t m = 0; m < num_masked; ++m) {
      const std::int64_t row = length + m;
      if (seen[m] && row >= begin && row < capacity) {
        append(block, row, row + 1, rows);
      }
    }
  }

 private:
  Attention(const Call& call, const Array& queries, const Array& keys,
            const Array& mask, const Array& pages)
      : queries(queries.data<float>()),
        keys(keys.bytes()),
        values(call.argument(2).bytes()),
        lengths(call.argument(3).data<std::int32_t>()),
        mask(mask.data<bool>()),
        positions(call.argument(5).data<std::int32_t>()),
        sinks(or_null<float>(call.argument(6))),
        pages(or_null<std::int32_t>(pages)),
        counts(call.argument(8).data<std::int32_t>()),
        results(call.result(0).data<float>()),
        scale(call.attribute<float>("scale")),
        window(call.attribute<std::int64_t>("window")),
        num_blocks(queries.dim(0)),
        num_tokens(queries.dim(1)),
        num_heads(queries.dim(2)),
        num_groups(queries.dim(3)),
        head_dim(queries.dim(4)),
        tree_size(mask.dim(2)),
        num_columns(pages.size() ? pages.dim(1) : 1),
        layout(keys, num_heads, head_dim) {}

  template <class T>
  static const T* or_null(const Array& array) {
    return array.size() ? array.data<T>() : nullptr;
  }
};

// A token of a block that sees at least one row.
struct Token {
  const float* queries;  // [Q, E] of a kv head
  float* results;        // the same
  std::vector<Index> seen;
  std::vector<float> scores;
  std::size_t room;  // for the scores of a query
};

// Calls run(token, rows, their number, its scores of them) for strips of rows:
// for all tokens, which mostly have the same rows there, before the next one.
template <class Run>
void in_strips(std::vector<Token>& tokens, const Run& run) {
  bool is_left = true;
  for (std::size_t i = 0; is_left; i += kStrip) {
    is_left = false;
    for (Token& token : tokens) {
      const std::size_t count = token.seen.size();
      if (count <= i) continue;
      is_left = true;
      run(token, &token.seen[i], std::min(kStrip, count - i),
          &token.scores[i]);
    }
  }
}

// Attends with N queries of each token from the one with number q of a kv head
// on.
template <std::size_t N, class T>
void attend_some(const Attention& call, std::size_t block, std::size_t head,
                 std::size_t q, std::vector<Token>& tokens) {
  const std::size_t head_dim = call.head_dim, from = q * head_dim;
  const std::size_t first =
      (call.pages ? 0 : block * call.layout.block_stride) +
      head * call.layout.head_stride;
  const auto rows = [&](const void* cache) {
    return Rows<T>{static_cast<const T*>(cache) + first,
                   call.layout.row_stride};
  };
  const Rows<T> keys = rows(call.keys), values = rows(call.values);
  in_strips(tokens, [&](Token& token, const Index* seen, std::size_t count,
                        float* scores) {
    multiply_keys<N>(token.queries + from, keys, seen, count, head_dim, scores,
                     token.room, &token == &tokens[0] ? &values : nullptr);
  });
  float totals[kTokens][N];
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    Token& token = tokens[t];
    for (std::size_t i = 0; i < N; ++i) {
      const float* sink =
          call.sinks ? call.sinks + head * call.num_groups + q + i : nullptr;
      totals[t][i] = weigh(&token.scores[i * token.room], token.seen.size(),
                           call.scale, sink);
    }
    std::fill_n(token.results + from, N * head_dim, 0.0f);
  }
  in_strips(tokens, [&](Token& token, const Index* seen, std::size_t count,
                        const float* weights) {
    mix_values<N>(weights, token.room, values, seen, count, head_dim,
                  token.results + from);
  });
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    float* result = tokens[t].results + from;
    for (std::size_t e = 0; e < N * head_dim; e += kLanes) {
      store(result + e, load<float>(result + e) / totals[t][e / head_dim]);
    }
  }
}

// Attends with the queries of a kv head of some tokens of a block.
template <class T>
[[gnu::noinline]] void attend(const Attention& call, std::size_t block,
                              std::size_t begin, std::size_t end,
                              std::size_t head) {
  static thread_local std::vector<Token> tokens;
  tokens.resize(end - begin);
  const std::size_t size = call.num_groups * call.head_dim;
  auto token = tokens.begin();
  for (std::size_t t = begin; t < end; ++t) {
    const std::size_t first =
        ((block * call.num_tokens + t) * call.num_heads + head) * size;
    call.find_rows(block, t, token->seen);
    if (token->seen.empty()) {
      std::fill_n(call.results + first, size, 0.0f);
      continue;
    }
    token->queries = call.queries + first;
    token->results = call.results + first;
    token->room = (token->seen.size() / kLanes + 2) * kLanes;
    token->scores.resize(std::min(kQueries, call.num_groups) * token->room);
    ++token;
  }
  tokens.erase(token, tokens.end());
  for (std::size_t q = 0; q < call.num_groups; q += kQueries) {
    with_size<kQueries>(call.num_groups - q, [&](auto size) {
      attend_some<size(), T>(call, block, head, q, tokens);
    });
  }
}

template <class T>
void attend_all(const Pool& pool, const Attention& call) {
  std::size_t num_products = 0;
  for (std::size_t x = 0; x < call.num_blocks; ++x) {
    num_products += (call.lengths[x] + call.tree_size) *
                    call.num_real_tokens(x) * call.num_heads *
                    call.num_groups * call.head_dim;
  }
  const std::size_t num_tokens = call.num_tokens, num_heads = call.num_heads;
  const std::size_t together = std::clamp<std::size_t>(
      call.num_blocks * num_tokens * num_heads / (kTasks * pool.num_threads()),
      1, kTokens);
  const std::size_t num_parts = divide_up(num_tokens, together);
  parallel_if(pool, num_products, call.num_blocks * num_parts * num_heads,
              [&](std::size_t i) {
                const std::size_t part = i / num_heads % num_parts;
                const std::size_t begin = part * together;
                attend<T>(call, i / num_heads / num_parts, begin,
                          std::min(num_tokens, begin + together),
                          i % num_heads);
              });
}

void attention_call(const Call& call) {
  const Attention attention(call);
  with_type(call.argument(1), [&](auto type) {
    attend_all<decltype(type)>(call.pool, attention);
  });
}

// Gives a head its root-mean-square norm.
template <class T>
[[gnu::noinline]] void norm_head(T* head, const float* scale, float epsilon,
                                 std::size_t head_dim) {
  Floats squares = {};
  for (std::size_t e = 0; e < head_dim; e += kLanes) {
    const Floats x = some(head, e, head_dim);
    squares = multiply_add(x, x, squares);
  }
  const float factor = norm_factor(squares, epsilon, head_dim);
  for (std::size_t e = 0; e < head_dim; e += kLanes) {
    const Floats x = some(head, e, head_dim) * factor;
    store_some(head, e, head_dim, x * some(scale, e, head_dim));
  }
}

// The heads are those of the results, as XLA gives these the same memory.
void norm_heads_call(const Call& call) {
  const float* query_scale = call.argument(1).data<float>();
  const float* key_scale = call.argument(2).data<float>();
  const auto epsilon = call.attribute<float>("epsilon");
  const Array heads = call.result(0);  // [N, G, Q + 2, E]
  const std::size_t num_heads = heads.dim(2), head_dim = heads.dim(3);
  with_type(heads, [&](auto type) {
    auto* first = heads.data<decltype(type)>();
    parallel_if(call.pool, heads.size(), heads.dim(0) * heads.dim(1),
                [&](std::size_t i) {
                  auto* head = first + i * num_heads * head_dim;
                  for (std::size_t h = 2; h < num_heads; ++h) {
                    norm_head(head, query_scale, epsilon, head_dim);
                    head += head_dim;
                  }
                  norm_head(head, key_scale, epsilon, head_dim);
                });
  });
}

// Rotates a head: its first and second half are the pairs.
template <class S>
void rotate(const S* head, const float* cos, const float* sin,
            std::size_t head_dim, float* to) {
  const std::size_t half = head_dim / 2;
  for (std::size_t e = 0; e < half; e += kLanes) {
    const Floats first = some(head, e, half);
    const Floats second = some(head + half, e, half);
    const Floats c = some(cos, e, half), s = some(sin, e, half);
    store_some(to, e, half, rounded<S>(first * c - second * s));
    store_some(to + half, e, half, rounded<S>(second * c + first * s));
  }
}

// Rotates the heads [G, Q + 2, E] of a token, whose type is S; writes its
// queries, and its key and value, of type T, to a place of the cache.
template <class S, class T>
[[gnu::noinline]] void keep_token(const S* head, const float* cos,
                                  const float* sin, std::size_t num_groups,
                                  std::size_t head_dim, const Layout& cache,
                                  std::int64_t place, float* query, T* keys,
                                  T* values) {
  const bool is_kept =
      0 <= place && place < std::int64_t(cache.num_blocks * cache.block_size);
  std::vector<float> key(head_dim);
  for (std::size_t g = 0; g < cache.num_heads; ++g) {
    for (std::size_t q = 0; q < num_groups; ++q) {
      rotate(head, cos, sin, head_dim, query);
      head += head_dim;
      query += head_dim;
    }
    rotate(head, cos, sin, head_dim, key.data());
    head += head_dim;
    if (is_kept) {
      const std::size_t to = cache.of(place, g);
      for (std::size_t e = 0; e < head_dim; e += kLanes) {
        store_some(keys + to, e, head_dim, some(key.data(), e, head_dim));
        store_some(values + to, e, head_dim, some(head, e, head_dim));
      }
    }
    head += head_dim;
  }
}

// Keys and values are those of the results: XLA gives these the same memory.
void rotate_and_write_call(const Call& call) {
  const Array heads = call.argument(0);  // [N, G, Q + 2, E]
  const float* cos = call.argument(1).data<float>();
  const float* sin = call.argument(2).data<float>();
  const auto* places = call.argument(5).data<std::int32_t>();
  float* queries = call.result(0).data<float>();
  const Array keys = call.result(1), values = call.result(2);
  const std::size_t num_groups = heads.dim(2) - 2, head_dim = heads.dim(3);
  const Layout cache(keys, heads.dim(1), head_dim);
  const std::size_t num_queries = heads.dim(1) * num_groups * head_dim;
  const std::size_t size = heads.size() / heads.dim(0), half = head_dim / 2;
  with_type(heads, [&](auto given) {
    with_type(keys, [&](auto stored) {
      const auto* from = heads.data<decltype(given)>();
      auto* to_keys = keys.data<decltype(stored)>();
      auto* to_values = values.data<decltype(stored)>();
      parallel_if(call.pool, heads.size(), heads.dim(0), [&](std::size_t n) {
        keep_token(from + n * size, cos + n * half, sin + n * half, num_groups,
                   head_dim, cache, places[n], queries + n * num_queries,
                   to_keys, to_values);
      });
    });
  });
}

// Moves row start + path[i] to start + i, for all i, in all heads of a cache
// [B, G, S, E] and one of its rows.
void keep_rows(const Array& cache, std::size_t batch_row, std::int64_t start,
               const std::int32_t* path, std::int64_t num_kept,
               std::int64_t num_rows) {
  const std::size_t num_heads = cache.dim(1);
  const std::int64_t capacity = cache.dim(2);
  const std::size_t row_bytes = cache.dim(3) * cache.number_bytes();
  const std::size_t head_bytes = capacity * row_bytes;
  num_rows = std::min(num_rows, capacity);
  const std::int64_t first =
      std::clamp<std::int64_t>(start, 0, capacity - num_rows);
  const std::int64_t to =
      std::clamp<std::int64_t>(start, 0, capacity - num_kept);
  std::vector<char> kept(num_kept * row_bytes);
  char* head =
      static_cast<char*>(cache.bytes()) + batch_row * num_heads * head_bytes;
  for (std::size_t g = 0; g < num_heads; ++g, head += head_bytes) {
    for (std::int64_t i = 0; i < num_kept; ++i) {
      const std::int64_t from =
          first + std::clamp<std::int64_t>(path[i] + start - first, 0,
                                           num_rows - 1);
      std::memcpy(&kept[i * row_bytes], head + from * row_bytes, row_bytes);
    }
    std::memcpy(head + to * row_bytes, kept.data(), kept.size());
  }
}

// The caches are those of the results: XLA gives these the same memory.
void kv_commit_call(const Call& call) {
  const auto* starts = call.argument(0).data<std::int32_t>();
  const Array path = call.argument(1);
  const auto* rows = path.data<std::int32_t>();
  const auto num_rows = call.attribute<std::int64_t>("num_rows");
  const std::size_t batch = path.dim(0), num_kept = path.dim(1);
  std::size_t num_bytes = 0;
  for (std::size_t i = 0; i < call.num_results(); ++i) {
    const Array cache = call.result(i);
    num_bytes +=
        batch * cache.dim(1) * num_kept * cache.dim(3) * cache.number_bytes();
  }
  parallel_if(call.pool, num_bytes / sizeof(float), call.num_results() * batch,
              [&](std::size_t i) {
                const std::size_t row = i % batch;
                keep_rows(call.result(i / batch), row, starts[row],
                          rows + row * num_kept, num_kept, num_rows);
              });
}

}  // namespace

NATIVE_KERNEL(attention, attention_call)
NATIVE_KERNEL(kv_commit, kv_commit_call)
NATIVE_KERNEL(norm_heads, norm_heads_call)
NATIVE_KERNEL(rotate_and_write, rotate_and_write_call)

}  // namespace native
