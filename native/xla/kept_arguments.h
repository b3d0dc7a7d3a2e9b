// Copies of a handler's arguments, for a thread that continues after the handler has returned.
//
// By then XLA has freed its descriptions of arrays, shapes and attributes. The arrays themselves stay until the handler's
// future is fulfilled.

#ifndef PYCOLLECTIVE_NATIVE_XLA_KEPT_ARGUMENTS_H_
#define PYCOLLECTIVE_NATIVE_XLA_KEPT_ARGUMENTS_H_

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace pycollective {

// The copy of one argument of a handler. get() returns the argument.
template <typename T>
class Kept {  // a number
 public:
  explicit Kept(T value) : value_(value) {}
  T get() const { return value_; }

 private:
  T value_;
};

// Handlers do not read tokens; XLA uses them for the order.
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
  explicit Kept(const xla::ffi::AnyBuffer& buffer)
      : dimensions_(buffer.dimensions().begin(), buffer.dimensions().end()) {
    description_.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    description_.dtype = static_cast<XLA_FFI_DataType>(buffer.element_type());
    description_.data = buffer.untyped_data();
    description_.rank = static_cast<int64_t>(dimensions_.size());
    description_.dims = dimensions_.data();
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

  XLA_FFI_Buffer* description() { return &description_; }
  xla::ffi::AnyBuffer get() const { return xla::ffi::AnyBuffer(&description_); }

 private:
  std::vector<int64_t> dimensions_;
  XLA_FFI_Buffer description_{};
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

// Any number of operands or results. `Description`: XLA's structure for them. `kSize`: its size. `kBuffer`: the value by which
// it marks an array.
template <typename Remaining, typename Description, size_t kSize, auto kBuffer>
class KeptRemaining {
 public:
  // An item that cannot be read is left out, with all later items. The handler then reports that there are too few.
  explicit KeptRemaining(const Remaining& arrays) {
    for (size_t i = 0; i < arrays.size(); ++i) {
      auto array = arrays.template get<xla::ffi::AnyBuffer>(i);
      if (array.has_error()) break;
      kept_.push_back(std::make_unique<Kept<xla::ffi::AnyBuffer>>(BufferOf(*array)));
      descriptions_.push_back(kept_.back()->description());
      types_.push_back(kBuffer);
    }
    all_ = {kSize, nullptr, static_cast<int64_t>(kept_.size()), types_.data(), descriptions_.data()};
  }
  KeptRemaining(const KeptRemaining&) = delete;
  KeptRemaining& operator=(const KeptRemaining&) = delete;

  Remaining get() const { return {&all_, 0}; }

 private:
  static xla::ffi::AnyBuffer BufferOf(const xla::ffi::AnyBuffer& operand) { return operand; }
  static xla::ffi::AnyBuffer BufferOf(xla::ffi::Result<xla::ffi::AnyBuffer> result) { return *result; }

  std::vector<std::unique_ptr<Kept<xla::ffi::AnyBuffer>>> kept_;
  std::vector<void*> descriptions_;
  std::vector<decltype(kBuffer)> types_;
  Description all_{};
};

template <>
class Kept<xla::ffi::RemainingArgs>
    : public KeptRemaining<xla::ffi::RemainingArgs, XLA_FFI_Args, XLA_FFI_Args_STRUCT_SIZE, XLA_FFI_ArgType_BUFFER> {
 public:
  using KeptRemaining::KeptRemaining;
};
template <>
class Kept<xla::ffi::RemainingRets>
    : public KeptRemaining<xla::ffi::RemainingRets, XLA_FFI_Rets, XLA_FFI_Rets_STRUCT_SIZE, XLA_FFI_RetType_BUFFER> {
 public:
  using KeptRemaining::KeptRemaining;
};

// Copies of all arguments of a handler.
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

#endif  // PYCOLLECTIVE_NATIVE_XLA_KEPT_ARGUMENTS_H_
