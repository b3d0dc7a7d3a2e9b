// Decodes the arguments of handlers, and exports the C functions that XLA calls.
//
// The first operand and the first result of each handler are tokens of XLA, which order the calls of a program. (The halves
// of an allreduce differ: allreduce_halves.cc.) Attributes are int64, with the names that Python gives them.

#ifndef PYCOLLECTIVE_NATIVE_XLA_DECODE_H_
#define PYCOLLECTIVE_NATIVE_XLA_DECODE_H_

#include <cstdint>
#include <optional>
#include <utility>

#include "base/exports.h"
#include "base/operations.h"
#include "calls/call.h"
#include "devices/buffers.h"
#include "mpi/collectives.h"
#include "mpi/elements.h"
#include "records/signature.h"
#include "xla/async_calls.h"
#include "xla/ffi/api/ffi.h"
#include "xla/started_calls.h"

// Reads a StreamOfDevice from the context of a call.
template <>
struct xla::ffi::CtxDecoding<pycollective::StreamOfDevice> {
  using Type = pycollective::StreamOfDevice;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context, DiagnosticEngine& diagnostic) {
    const auto stream = CtxDecoding<PlatformStream<void*>>::Decode(api, context, diagnostic);
    const auto ordinal = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    if (!stream.has_value() || !ordinal.has_value()) return std::nullopt;
    return Type{*stream, *ordinal};
  }
};

namespace pycollective {

namespace ffi = xla::ffi;

using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;
using InToken = ffi::Token;
using OutToken = ffi::Result<ffi::Token>;

inline int64_t Count(const ffi::AnyBuffer& buffer) { return static_cast<int64_t>(buffer.element_count()); }
inline int64_t NBytes(const ffi::AnyBuffer& buffer) { return static_cast<int64_t>(buffer.size_bytes()); }
inline ResultMemory ResultOf(const ffi::AnyBuffer& y) { return {y.untyped_data(), y.size_bytes()}; }

inline View ViewOf(const ffi::AnyBuffer& buffer, Type type, int64_t blocks = 1) {
  return {buffer.untyped_data(), Count(buffer) / blocks, kTypeBytes[int(type)], blocks};
}

inline Signature SignatureOf(Operation operation, const Participants& participants, const ffi::AnyBuffer& x,
                             int64_t reduce_op = -1, int64_t root = -1, int64_t pattern = 0) {
  Signature signature{operation, participants.DtypeOf(0, x.element_type()), Count(x), static_cast<int32_t>(reduce_op),
                      static_cast<int32_t>(root), pattern};
  signature.dimensions = Dimensions(x.dimensions());
  return signature;
}

template <typename Buffers>
Call CallIn(const Buffers& buffers, Operation operation, const Participants& participants) {
  return Call(operation, participants, buffers.lane_id(), buffers.staging(), buffers.piece_bytes());
}

// Bindings -------------------------------------------------------------------------------------------------------

// Returns the binding that `bind` makes, with int64 attributes of these names. (XLA's bindings cannot be copied or
// moved.)
template <typename Bind>
auto WithAttributes(Bind bind) {
  return bind();
}
template <typename Bind, typename... Names>
auto WithAttributes(Bind bind, const char* name, Names... names) {
  return WithAttributes([=] { return bind().template Attr<int64_t>(name); }, names...);
}

// The arguments of all handlers: the buffers, from XLA, and the participants, from the program's attributes.
template <typename Buffers>
auto BindCall() {
  const auto with_participants = [](auto&& binding) {
    auto with_comm = std::move(binding).template Attr<ffi::Span<const int64_t>>("comm");
    auto with_devices = std::move(with_comm).template Attr<int64_t>("devices").template Attr<int64_t>("replicated");
    auto with_site = std::move(with_devices).template Attr<int64_t>("site").template Attr<int64_t>("order");
    return std::move(with_site).template Attr<int64_t>("section");
  };
  if constexpr (Buffers::kInHostMemory) {
    return with_participants(ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::RunId>());
  } else {
    return with_participants(ffi::Ffi::Bind().Ctx<StreamOfDevice>().Ctx<ffi::RunId>());
  }
}

// token -> token
template <typename Buffers>
auto BindTokens() {
  return BindCall<Buffers>().template Arg<InToken>().template Ret<ffi::Token>();
}

// token, x -> token
template <typename Buffers, typename... Names>
auto BindOperand(Names... names) {
  const auto bind = [] {
    return BindCall<Buffers>().template Arg<InToken>().template Arg<In>().template Ret<ffi::Token>();
  };
  return WithAttributes(bind, names...);
}

// token, x -> token, y
template <typename Buffers, typename... Names>
auto BindArray(Names... names) {
  const auto bind = [] {
    auto binding = BindCall<Buffers>().template Arg<InToken>().template Arg<In>();
    return std::move(binding).template Ret<ffi::Token>().template Ret<ffi::AnyBuffer>();
  };
  return WithAttributes(bind, names...);
}

// token, xs -> token, ys
template <typename Buffers, typename... Names>
auto BindArrays(Names... names) {
  const auto bind = [] {
    auto binding = BindCall<Buffers>().template Arg<InToken>().RemainingArgs();
    return std::move(binding).template Ret<ffi::Token>().RemainingRets();
  };
  return WithAttributes(bind, names...);
}

// The section of a call, from its attribute, whose lowest bit says that the call begins a section (ordering/sections.py).
inline Section SectionOf(int64_t attribute, ffi::RunId run) { return {attribute >> 1, (attribute & 1) != 0, run.run_id}; }

// Makes a handler from a binding and function(buffers, participants, arguments of the binding...). It is never deleted.
template <typename Buffers, typename Binding, typename Function>
ffi::Ffi* NewHandler(Operation operation, Binding binding, Function function) {
  const auto run = [operation, function](auto where, const Participants& participants, auto... arguments) {
    const Buffers buffers(where);
    ffi::Error error = CatchAsError(operation, [&] {
      if constexpr (!Buffers::kInHostMemory) {
        ffi::Error abandoned = FindAbandoned(buffers, participants.section.run);
        if (abandoned.failure()) return abandoned;
      }
      return function(buffers, participants, arguments...);
    });
    if constexpr (!Buffers::kInHostMemory) {
      if (error.failure()) ForgetStarted(buffers.lane_id());  // XLA ends the program now, and gives its arrays away
    }
    NoteEnd(error);
    return error;
  };
  return std::move(binding)
      .To([operation, run](auto where, ffi::RunId number, ffi::Span<const int64_t> comm, int64_t devices, int64_t replicated,
                           int64_t site, int64_t order, int64_t section, auto... arguments) {
        const Section own = SectionOf(section, number);
        if constexpr (Buffers::kIsAsync) {
          const auto make_call = [=](ffi::Span<const int64_t> comm, auto... arguments) {
            return run(where, {comm, devices, replicated != 0, site, order, own}, arguments...);
          };
          return RunAsync(make_call, comm, arguments...);
        } else {
          return run(where, {comm, devices, replicated != 0, site, order, own}, arguments...);
        }
      })
      .release();
}

// Exports a handler as a C function. `new_handler`, an ffi::Ffi*, may use the type Buffers.
#define PYCOLLECTIVE_EXPORT_HANDLER(symbol, BuffersType, new_handler)             \
  PYCOLLECTIVE_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame* call_frame) {    \
    using Buffers = BuffersType;                                                    \
    static ffi::Ffi* const handler = new_handler;                               \
    return handler->Call(call_frame);                                           \
  }

// Exports the handlers of an operation: for CPU devices, for calls on them that overlap with computation, and for accelerators.
#define PYCOLLECTIVE_EXPORT_HANDLERS(name, ...)                                              \
  PYCOLLECTIVE_EXPORT_HANDLER(pycollective_##name, HostBuffers, (__VA_ARGS__))                 \
  PYCOLLECTIVE_EXPORT_HANDLER(pycollective_async_##name, AsyncHostBuffers, (__VA_ARGS__))      \
  PYCOLLECTIVE_EXPORT_HANDLER(pycollective_device_##name, DeviceBuffers, (__VA_ARGS__))

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_XLA_DECODE_H_
