// Tree attention over the rows of a cache. See tree_attention/native.py.

#include "attention.h"

namespace native {
namespace {

// Keys and values are [B, G, S, E].
ffi::Error tree_attention_call(
    ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::AnyBuffer keys,
    ffi::AnyBuffer values, ffi::Buffer<ffi::S32> lengths,
    ffi::Buffer<ffi::PRED> mask, ffi::Buffer<ffi::S32> positions,
    ffi::Buffer<ffi::F32> sinks, ffi::ResultBuffer<ffi::F32> results,
    float scale, std::int64_t window, float soft_cap) {
  Attention call{queries, keys,    values,  lengths,
                 mask,    positions, sinks, results->typed_data(),
                 scale,   window,  soft_cap};
  const std::size_t capacity = keys.dimensions()[2];
  call.layout.row_stride = call.head_dim;
  call.layout.head_stride = capacity * call.head_dim;
  call.layout.block_stride = call.num_heads * call.layout.head_stride;
  call.layout.page_size = capacity;
  return attend_all(pool, call);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(tree_attention, tree_attention_call,
                              bind_attention()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<std::int64_t>("window")
                                  .Attr<float>("soft_cap"));

}  // namespace native
