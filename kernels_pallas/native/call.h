// What XLA calls a kernel with, as its C API has it.
//
// The C++ API of XLA takes 2.5 s to compile, and 1.5 s more for each kernel,
// while whoever starts for the first time waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include "vectors.h"
#include "xla/ffi/api/c_api.h"

namespace native {

template <class T>
constexpr XLA_FFI_DataType kTypeOf = XLA_FFI_DataType_INVALID;
template <>
constexpr XLA_FFI_DataType kTypeOf<float> = XLA_FFI_DataType_F32;
template <>
constexpr XLA_FFI_DataType kTypeOf<BFloat16Bits> = XLA_FFI_DataType_BF16;
template <>
constexpr XLA_FFI_DataType kTypeOf<std::int8_t> = XLA_FFI_DataType_S8;
template <>
constexpr XLA_FFI_DataType kTypeOf<std::uint8_t> = XLA_FFI_DataType_U8;
template <>
constexpr XLA_FFI_DataType kTypeOf<std::int32_t> = XLA_FFI_DataType_S32;
template <>
constexpr XLA_FFI_DataType kTypeOf<std::int64_t> = XLA_FFI_DataType_S64;
template <>
constexpr XLA_FFI_DataType kTypeOf<bool> = XLA_FFI_DataType_PRED;

// Throws unless T is the type of numbers that XLA has.
template <class T>
void check_type(XLA_FFI_DataType type) {
  if (type != kTypeOf<T>) {
    throw std::invalid_argument("type " + std::to_string(type) +
                                " of XLA_FFI_DataType, not " +
                                std::to_string(kTypeOf<T>));
  }
}

// An argument or a result.
class Array {
 public:
  explicit Array(const void* buffer)
      : buffer_(static_cast<const XLA_FFI_Buffer*>(buffer)) {}

  std::size_t rank() const { return buffer_->rank; }
  std::size_t dim(std::size_t i) const { return buffer_->dims[i]; }
  std::size_t last_dim() const { return dim(rank() - 1); }
  XLA_FFI_DataType type() const { return buffer_->dtype; }
  void* bytes() const { return buffer_->data; }

  std::size_t size() const {
    std::size_t product = 1;
    for (std::size_t i = 0; i < rank(); ++i) product *= dim(i);
    return product;
  }

  // Returns the bytes of a number, of types that a cache can have.
  std::size_t number_bytes() const {
    switch (type()) {
      case XLA_FFI_DataType_S8:
      case XLA_FFI_DataType_U8:
        return 1;
      case XLA_FFI_DataType_F16:
      case XLA_FFI_DataType_BF16:
        return 2;
      case XLA_FFI_DataType_S32:
      case XLA_FFI_DataType_F32:
        return 4;
      default:
        throw std::invalid_argument("no cache has type " +
                                    std::to_string(type()) +
                                    " of XLA_FFI_DataType");
    }
  }

  template <class T>
  T* data() const {
    check_type<T>(type());
    return static_cast<T*>(bytes());
  }

 private:
  const XLA_FFI_Buffer* buffer_;
};

// XLA's own threads.
class Pool {
 public:
  explicit Pool(const XLA_FFI_CallFrame& frame)
      : api_(frame.api), context_(frame.ctx) {}

  std::size_t num_threads() const {
    std::int64_t count = 0;
    XLA_FFI_ThreadPool_NumThreads_Args args{
        XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, context_,
        &count};
    is_done(api_->XLA_FFI_ThreadPool_NumThreads(&args));
    return count > 1 ? count : 1;
  }

  // Runs a task on one of the threads, or on this one if there are none.
  void schedule(std::function<void()> task) const {
    using Task = std::function<void()>;
    auto* kept = new Task(std::move(task));
    const auto run = [](void* data) {
      (*std::unique_ptr<Task>(static_cast<Task*>(data)))();
    };
    XLA_FFI_ThreadPool_Schedule_Args args{
        XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, context_, run,
        kept};
    if (!is_done(api_->XLA_FFI_ThreadPool_Schedule(&args))) run(kept);
  }

 private:
  bool is_done(XLA_FFI_Error* error) const {
    if (!error) return true;
    XLA_FFI_Error_Destroy_Args args{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE,
                                    nullptr, error};
    api_->XLA_FFI_Error_Destroy(&args);
    return false;
  }

  const XLA_FFI_Api* api_;
  XLA_FFI_ExecutionContext* context_;
};

// A call of a kernel.
class Call {
 public:
  explicit Call(const XLA_FFI_CallFrame& frame) : pool(frame), frame_(frame) {}

  std::size_t num_arguments() const { return frame_.args.size; }
  std::size_t num_results() const { return frame_.rets.size; }

  Array argument(std::size_t i) const {
    return Array(at(frame_.args.args, frame_.args.size, i));
  }
  Array result(std::size_t i) const {
    return Array(at(frame_.rets.rets, frame_.rets.size, i));
  }

  // Returns the number that an attribute is.
  template <class T>
  T attribute(const char* name) const {
    const auto& scalar = find<XLA_FFI_Scalar>(name, XLA_FFI_AttrType_SCALAR);
    check_type<T>(scalar.dtype);
    return *static_cast<const T*>(scalar.value);
  }

  // Returns the numbers of an attribute.
  const std::int64_t* integers(const char* name) const {
    const auto& array = find<XLA_FFI_Array>(name, XLA_FFI_AttrType_ARRAY);
    check_type<std::int64_t>(array.dtype);
    return static_cast<const std::int64_t*>(array.data);
  }

  const Pool pool;

 private:
  static const void* at(void* const* list, std::size_t size, std::size_t i) {
    if (i >= size) throw std::invalid_argument("too few arguments or results");
    return list[i];
  }

  template <class T>
  const T& find(const char* name, XLA_FFI_AttrType type) const {
    const XLA_FFI_Attrs& all = frame_.attrs;
    for (std::int64_t i = 0; i < all.size; ++i) {
      const XLA_FFI_ByteSpan& found = *all.names[i];
      if (all.types[i] == type && found.len == std::strlen(name) &&
          !std::memcmp(found.ptr, name, found.len)) {
        return *static_cast<const T*>(all.attrs[i]);
      }
    }
    throw std::invalid_argument(std::string("no attribute ") + name);
  }

  const XLA_FFI_CallFrame& frame_;
};

// Does the work of a kernel, or answers XLA's question what it is made for.
inline XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame,
                             void (*work)(const Call&)) {
  auto* extension = frame->extension_start;
  if (extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata metadata = {};
    metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
    metadata.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr,
                            XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    *reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata =
        metadata;
    return nullptr;
  }
  try {
    work(Call(*frame));
    return nullptr;
  } catch (const std::exception& error) {
    XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE,
                                   nullptr, error.what(),
                                   XLA_FFI_Error_Code_INVALID_ARGUMENT};
    return frame->api->XLA_FFI_Error_Create(&args);
  }
}

}  // namespace native

// Defines a function of the library that XLA can call.
#define NATIVE_KERNEL(name, work)                            \
  extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) { \
    return native::handle(frame, work);                      \
  }
