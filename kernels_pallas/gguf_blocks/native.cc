// Products of rows and weights in the blocks of GGUF files. See native.py.
//
// Rows become int8 with a scale for each 32 numbers. A few outputs are unpacked
// at a time, then all rows are multiplied with them. Integers are summed
// exactly, 16 of a group in four lanes; each lane adds what its groups give in
// the order of the inputs. What rows are beside a row changes nothing.
//
// Legend: N rows, K inputs, A outputs.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "formats.h"
#include "integers.h"
#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace native {
namespace {

namespace ffi = xla::ffi;

constexpr std::size_t kOutputs = 4;  // that are unpacked together
constexpr std::size_t kRowsInCache = 32;
constexpr std::size_t kBlock = 32;  // numbers of a row with one scale
constexpr std::size_t kTaskBytes = 1 << 16;  // of weights

std::size_t round_up(std::size_t size, std::size_t unit) {
  return (size + unit - 1) / unit * unit;
}

// Integers with scales and offsets of their groups, filled up with zeros. Of
// rows, offsets are sums: what the offset of a weight is multiplied by.
class Numbers {
 public:
  Numbers(std::size_t count, std::size_t num_inputs)
      : size(round_up(num_inputs, kVectorBytes)),
        num_groups(round_up(size / kGroup, kLanes)),
        integers_(count * size),
        scales_(count * num_groups),
        offsets_(count * num_groups) {}

  Place at(std::size_t i) const {
    return {integers_.data() + i * size, scales_.data() + i * num_groups,
            offsets_.data() + i * num_groups};
  }

  const std::size_t size, num_groups;

 private:
  Aligned<std::int8_t> integers_;
  Aligned<float> scales_, offsets_;
};

// Rounds a block of a row to integers.
void round_block(const float* from, Place to) {
  std::uint32_t bits[kBlock], highest_bits = 0;
  std::memcpy(bits, from, sizeof(bits));
  for (std::uint32_t x : bits) {
    highest_bits = std::max(highest_bits, x & 0x7fffffffu);
  }
  float highest;
  std::memcpy(&highest, &highest_bits, sizeof(highest));
  if (!std::isfinite(highest)) {
    const float none = std::numeric_limits<float>::quiet_NaN();
    both(to.scales, none);
    both(to.offsets, none);
    return;
  }
  highest = std::max(highest, 1e-30f);
  const float scale = highest / 127.0f, factor = 127.0f / highest;
  both(to.scales, scale);
  std::int32_t integers[kBlock];
  for (std::size_t k = 0; k < kBlock; k += kLanes) {
    // Above 1.5 * 2 ** 23, a float has no room for what is not an integer.
    const Floats large = load<float>(from + k) * factor + 12582912.0f;
    store(integers + k, (Ints)large - 0x4b400000);
  }
  for (std::size_t group = 0; group < kBlock / kGroup; ++group) {
    std::int32_t sum = 0;
    for (std::size_t k = group * kGroup; k < (group + 1) * kGroup; ++k) {
      sum += integers[k];
      to.integers[k] =
          static_cast<std::int8_t>(integers[k] ^ Integers::kOffset);
    }
    to.offsets[group] = scale * sum;
  }
}

void round_row(const float* row, std::size_t num_inputs, Place to) {
  for (std::size_t k = 0; k < num_inputs; k += kBlock) {
    round_block(row + k, {to.integers + k, to.scales + k / kGroup,
                          to.offsets + k / kGroup});
  }
}

// Unpacks the weights of an output.
template <class F>
void unpack(const Byte* from, std::size_t num_inputs, Place to) {
  for (std::size_t k = 0; k < num_inputs; k += F::kSize, from += F::kBytes) {
    F::unpack(from, {to.integers + k, to.scales + k / kGroup,
                     to.offsets + k / kGroup});
  }
}

// Returns the products of two scales for each group of a vector, in its lanes.
inline Floats scales_in_lanes(const float* scales, const float* others) {
#if defined(NATIVE_AVX512)
  const __m128 few = _mm_mul_ps(_mm_loadu_ps(scales), _mm_loadu_ps(others));
  const __m512i lanes =
      _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  return (Floats)_mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(few));
#else
  Floats wide;
  for (std::size_t i = 0; i < kLanes; ++i) wide[i] = scales[i / 4] * others[i / 4];
  return wide;
#endif
}

// Multiplies R rows with a tile of outputs; results are [R, kOutputs].
template <bool kHasOffsets, std::size_t R>
void block(const Numbers& rows, std::size_t first, const Numbers& tile,
           float* results) {
  Place row[R], output[kOutputs];
  for (std::size_t r = 0; r < R; ++r) row[r] = rows.at(first + r);
  for (std::size_t m = 0; m < kOutputs; ++m) output[m] = tile.at(m);
  Floats sums[R][kOutputs] = {};
  for (std::size_t k = 0; k < tile.size; k += kVectorBytes) {
    const std::size_t group = k / kGroup;
#pragma GCC unroll 8
    for (std::size_t m = 0; m < kOutputs; ++m) {
      const auto weight = load<std::int8_t>(output[m].integers + k);
      Ints start = {};  // takes off what the offset of rows adds
      if constexpr (Integers::kOffset != 0) {
        start -= Integers::add(start, weight, Integers::zeros());
      }
#pragma GCC unroll 8
      for (std::size_t r = 0; r < R; ++r) {
        const Ints sum = Integers::add(
            start, weight, load<std::int8_t>(row[r].integers + k));
        sums[r][m] +=
            __builtin_convertvector(sum, Floats) *
            scales_in_lanes(output[m].scales + group, row[r].scales + group);
      }
    }
  }
  if constexpr (kHasOffsets) {
    for (std::size_t i = 0; i < tile.num_groups; i += kLanes) {
#pragma GCC unroll 8
      for (std::size_t m = 0; m < kOutputs; ++m) {
        const auto offsets = load<float>(output[m].offsets + i);
#pragma GCC unroll 8
        for (std::size_t r = 0; r < R; ++r) {
          sums[r][m] += offsets * load<float>(row[r].offsets + i);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (std::size_t r = 0; r < R; ++r) {
    store_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3],
               results + r * kOutputs);
  }
}

// Multiplies up to `kRows` rows with a tile of outputs.
template <bool kHasOffsets>
void some_rows(std::size_t num_rows, const Numbers& rows, std::size_t first,
               const Numbers& tile, float* results) {
  with_rows(num_rows, [&](auto size) {
    block<kHasOffsets, size()>(rows, first, tile, results);
  });
}

// Multiplies all rows with the outputs of a range.
template <class F>
void outputs(const Numbers& rows, std::size_t num_rows, const Byte* weights,
             std::size_t num_inputs, std::size_t begin, std::size_t end,
             float* results, std::size_t result_stride) {
  const std::size_t row_bytes = num_inputs / F::kSize * F::kBytes;
  const Numbers tile(kOutputs, num_inputs);
  float found[kRows * kOutputs];
  for (std::size_t start = 0; start < num_rows; start += kRowsInCache) {
    const std::size_t stop = std::min(num_rows, start + kRowsInCache);
    for (std::size_t a = begin; a < end; a += kOutputs) {
      const std::size_t size = std::min(kOutputs, end - a);
      for (std::size_t m = 0; m < size; ++m) {
        unpack<F>(weights + (a + m) * row_bytes, num_inputs, tile.at(m));
      }
      for (std::size_t n = start; n < stop; n += kRows) {
        const std::size_t some = std::min(kRows, stop - n);
        some_rows<F::kHasOffsets>(some, rows, n, tile, found);
        for (std::size_t r = 0; r < some; ++r) {
          std::copy_n(found + r * kOutputs, size,
                      results + (n + r) * result_stride + a);
        }
      }
    }
  }
}

// Returns rows as integers.
Numbers rounded(ffi::ThreadPool& pool, const float* rows, std::size_t num_rows,
                std::size_t num_inputs) {
  Numbers result(num_rows, num_inputs);
  const std::size_t num_tasks =
      (num_rows + kRowsInCache - 1) / kRowsInCache;
  parallel_for(pool, num_tasks, [&](std::size_t i) {
    const std::size_t end = std::min(num_rows, (i + 1) * kRowsInCache);
    for (std::size_t n = i * kRowsInCache; n < end; ++n) {
      round_row(rows + n * num_inputs, num_inputs, result.at(n));
    }
  });
  return result;
}

struct Task {
  std::int64_t kind;
  const Byte* weights;
  std::size_t begin, end;
  float* results;
};

ffi::Error multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rows,
                    ffi::RemainingArgs tensors,
                    ffi::ResultBuffer<ffi::F32> results,
                    ffi::Span<const std::int64_t> kinds,
                    ffi::Span<const std::int64_t> starts) {
  const std::size_t num_rows = rows.dimensions().front();
  const std::size_t num_inputs = rows.dimensions().back();
  const std::size_t num_outputs = results->dimensions().back();
  float* result = results->typed_data();
  std::vector<Task> tasks;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto tensor = tensors.get<ffi::Buffer<ffi::U8>>(i);
    if (tensor.has_error()) return tensor.error();
    const Byte* weights = tensor->typed_data() + starts[i];
    const std::size_t bytes = tensor->element_count() - starts[i];
    with_format(kinds[i], [&](auto format) {
      using F = decltype(format);
      const std::size_t row_bytes = num_inputs / F::kSize * F::kBytes;
      const std::size_t count = bytes / row_bytes;
      const std::size_t size =
          std::max<std::size_t>(kTaskBytes / row_bytes / kOutputs, 1) *
          kOutputs;
      for (std::size_t a = 0; a < count; a += size) {
        tasks.push_back(
            {kinds[i], weights, a, std::min(count, a + size), result});
      }
      result += count;
    });
  }
  const Numbers given = rounded(pool, rows.typed_data(), num_rows, num_inputs);
  parallel_for(pool, tasks.size(), [&](std::size_t i) {
    const Task& task = tasks[i];
    with_format(task.kind, [&](auto format) {
      outputs<decltype(format)>(given, num_rows, task.weights, num_inputs,
                                task.begin, task.end, task.results,
                                num_outputs);
    });
  });
  return ffi::Error::Success();
}

ffi::Error take(ffi::Buffer<ffi::U8> table, ffi::Buffer<ffi::S32> indices,
                ffi::ResultBuffer<ffi::F32> results, std::int64_t kind,
                std::int64_t start) {
  const std::size_t num_inputs = results->dimensions().back();
  const Byte* weights = table.typed_data() + start;
  const std::size_t bytes = table.element_count() - start;
  const Numbers numbers(1, num_inputs);
  const Place row = numbers.at(0);
  float* result = results->typed_data();
  with_format(kind, [&](auto format) {
    using F = decltype(format);
    const std::size_t row_bytes = num_inputs / F::kSize * F::kBytes;
    const std::int32_t last = bytes / row_bytes - 1;
    for (std::size_t i = 0; i < indices.element_count(); ++i) {
      // As XLA does with indices of no row.
      const auto index = std::clamp(indices.typed_data()[i], 0, last);
      unpack<F>(weights + index * row_bytes, num_inputs, row);
      for (std::size_t k = 0; k < num_inputs; ++k) {
        const std::size_t group = k / kGroup;
        *result++ = row.scales[group] * row.integers[k] + row.offsets[group];
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    gguf_multiply, multiply,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .RemainingArgs()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<ffi::Span<const std::int64_t>>("kinds")
        .Attr<ffi::Span<const std::int64_t>>("starts"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(gguf_take, take,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<std::int64_t>("kind")
                                  .Attr<std::int64_t>("start"));

}  // namespace native
