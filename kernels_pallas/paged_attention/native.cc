// Attention over rows in pages. See paged_attention/native.py.

#include "attention.h"

namespace native {
namespace {

// Keys and values are [P, Z, G * E].
ffi::Error paged_attention_call(
    ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::AnyBuffer keys,
    ffi::AnyBuffer values, ffi::Buffer<ffi::S32> lengths,
    ffi::Buffer<ffi::PRED> mask, ffi::Buffer<ffi::S32> positions,
    ffi::Buffer<ffi::F32> sinks, ffi::Buffer<ffi::S32> table,
    ffi::Buffer<ffi::S32> num_tokens, ffi::ResultBuffer<ffi::F32> results,
    float scale, std::int64_t window, float soft_cap) {
  Attention call{queries, keys,    values,  lengths,
                 mask,    positions, sinks, results->typed_data(),
                 scale,   window,  soft_cap};
  call.num_real = num_tokens.typed_data();
  call.layout.row_stride = keys.dimensions()[2];
  call.layout.head_stride = call.head_dim;
  call.layout.num_pages = keys.dimensions()[0];
  call.layout.page_size = keys.dimensions()[1];
  call.layout.num_columns = table.dimensions()[1];
  call.layout.table = table.typed_data();
  return attend_all(pool, call);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_attention, paged_attention_call,
                              bind_attention()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<std::int64_t>("window")
                                  .Attr<float>("soft_cap"));

}  // namespace native
