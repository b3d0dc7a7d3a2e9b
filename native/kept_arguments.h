// What XLA hands to a handler, kept for a thread that works on when the handler has returned.
//
// XLA's descriptions of arrays, shapes and attributes are gone then. The arrays themselves stay until the handler's future
// is fulfilled.

#ifndef PYCOLLECTIVE_NATIVE_KEPT_ARGUMENTS_H_
#define PYCOLLECTIVE_NATIVE_KEPT_ARGUMENTS_H_

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace pycollective {

// The description of one array.
class KeptBuffer {
 public:
  explicit KeptBuffer(const xla::ffi::AnyBuffer& buffer)
      : dimensions_(buffer.dimensions().begin(), buffer.dimensions().end()) {
    description_.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    description_.dtype = static_cast<XLA_FFI_DataType>(buffer.element_type());
    description_.data = buffer.untyped_data();
    description_.rank = static_cast<int64_t>(dimensions_.size());
    description_.dims = dimensions_.data();
  }
  KeptBuffer(const KeptBuffer&) = delete;
  KeptBuffer& operator=(const KeptBuffer&) = delete;

  XLA_FFI_Buffer* description() { return &description_; }
  xla::ffi::AnyBuffer buffer() const { return xla::ffi::AnyBuffer(&description_); }

 private:
  std::vector<int64_t> dimensions_;
  XLA_FFI_Buffer description_{};
};

// One argument of a handler: get() returns it again.
template <typename T>
class Kept {  // a number
 public:
  explicit Kept(T value) : value_(value) {}
  T get() const { return value_; }

 private:
  T value_;
};

// Handlers do not look at tokens: XLA keeps the order by them.
template <>
class Kept<xla::ffi::Token> {
 public:
  explicit Kept(const xla::ffi::Token&) {}
  xla::ffi::Token get() const { return xla::ffi::Token(&none_); }

 private:
  XLA_FFI_Buffer none_{};
};

template <>
class Kept<xla::ffi::AnyBuffer> {
 public:
  explicit Kept(const xla::ffi::AnyBuffer& buffer) : kept_(buffer) {}
  xla::ffi::AnyBuffer get() const { return kept_.buffer(); }

 private:
  KeptBuffer kept_;
};

template <typename T>
class Kept<xla::ffi::Result<T>> {
 public:
  explicit Kept(xla::ffi::Result<T> result) : kept_(*result) {}
  xla::ffi::Result<T> get() const { return kept_.get(); }

 private:
  Kept<T> kept_;
};

template <typename T>
class Kept<xla::ffi::Span<const T>> {
 public:
  explicit Kept(xla::ffi::Span<const T> span) : values_(span.begin(), span.end()) {}
  xla::ffi::Span<const T> get() const { return {values_.data(), values_.size()}; }

 private:
  std::vector<T> values_;
};

// The descriptions of any number of arrays.
class KeptBuffers {
 public:
  // Of index i, buffer_at(i) returns the array. One that cannot be read is left out, and so are those after it: the handler
  // finds too few and says so.
  template <typename BufferAt>
  KeptBuffers(size_t count, BufferAt buffer_at) {
    for (size_t i = 0; i < count; ++i) {
      auto buffer = buffer_at(i);
      if (buffer.has_error()) break;
      buffers_.push_back(std::make_unique<KeptBuffer>(BufferOf(*buffer)));
      descriptions_.push_back(buffers_.back()->description());
    }
  }

  int64_t size() const { return static_cast<int64_t>(descriptions_.size()); }
  void** descriptions() { return descriptions_.data(); }

 private:
  static xla::ffi::AnyBuffer BufferOf(const xla::ffi::AnyBuffer& buffer) { return buffer; }
  static xla::ffi::AnyBuffer BufferOf(xla::ffi::Result<xla::ffi::AnyBuffer> result) { return *result; }

  std::vector<std::unique_ptr<KeptBuffer>> buffers_;
  std::vector<void*> descriptions_;
};

template <>
class Kept<xla::ffi::RemainingArgs> {
 public:
  explicit Kept(const xla::ffi::RemainingArgs& args)
      : kept_(args.size(), [&](size_t i) { return args.get<xla::ffi::AnyBuffer>(i); }),
        types_(static_cast<size_t>(kept_.size()), XLA_FFI_ArgType_BUFFER),
        all_{XLA_FFI_Args_STRUCT_SIZE, nullptr, kept_.size(), types_.data(), kept_.descriptions()} {}
  xla::ffi::RemainingArgs get() const { return {&all_, 0}; }

 private:
  KeptBuffers kept_;
  std::vector<XLA_FFI_ArgType> types_;
  XLA_FFI_Args all_;
};

template <>
class Kept<xla::ffi::RemainingRets> {
 public:
  explicit Kept(const xla::ffi::RemainingRets& rets)
      : kept_(rets.size(), [&](size_t i) { return rets.get<xla::ffi::AnyBuffer>(i); }),
        types_(static_cast<size_t>(kept_.size()), XLA_FFI_RetType_BUFFER),
        all_{XLA_FFI_Rets_STRUCT_SIZE, nullptr, kept_.size(), types_.data(), kept_.descriptions()} {}
  xla::ffi::RemainingRets get() const { return {&all_, 0}; }

 private:
  KeptBuffers kept_;
  std::vector<XLA_FFI_RetType> types_;
  XLA_FFI_Rets all_;
};

// The arguments of a handler.
template <typename... T>
class KeptArguments {
 public:
  explicit KeptArguments(const T&... arguments) : kept_(arguments...) {}

  // Returns function(arguments...).
  template <typename Function>
  auto Apply(Function function) {
    return std::apply([&](auto&... kept) { return function(kept.get()...); }, kept_);
  }

 private:
  std::tuple<Kept<T>...> kept_;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_KEPT_ARGUMENTS_H_
