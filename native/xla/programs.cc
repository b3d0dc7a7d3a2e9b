// The shares that compiled programs hold of their communicators.
//
// XLA makes a state of a handler for each call of a program when it makes the executable, and deletes the state with the
// executable. It keeps an executable while it runs. So if only the table shares a communicator, no program and no call of this
// process uses it.

#include <memory>

#include "base/exports.h"
#include "calls/communicators.h"
#include "xla/ffi/api/ffi.h"
#include "xla/kept_arguments.h"

namespace pycollective {
namespace {

namespace ffi = xla::ffi;

// A plugin for accelerators has a table of types of its own, so the state has a type for each table.
enum class Table { kHost, kPlugin };

template <Table table>
struct InProgram {
  static ffi::TypeId id;
  std::shared_ptr<Communicator> communicator;  // null: the program comes from another process, so its calls return errors
};
template <Table table>
ffi::TypeId InProgram<table>::id = XLA_FFI_UNKNOWN_TYPE_ID;

// The handler that XLA calls for each call of a program when it makes an executable.
template <Table table>
XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* call_frame) {
  using Held = InProgram<table>;
  static ffi::Ffi* const handler = ffi::Ffi::BindInstantiate()
                                       .Attrs()
                                       .To([](ffi::Dictionary attributes) -> ffi::ErrorOr<std::unique_ptr<Held>> {
                                         const auto comm = attributes.get<ffi::Span<const int64_t>>("comm");
                                         if (comm.has_error()) return ffi::Unexpected(comm.error());
                                         auto held = std::make_unique<Held>();
                                         if (comm->size() > 0) held->communicator = FindCommunicator((*comm)[0]);
                                         return held;
                                       })
                                       .release();
  // XLA must know the type before the handler. When XLA registers the handler, it calls it for its metadata: the first call,
  // which registers the type.
  static XLA_FFI_TypeInfo type_info = ffi::MakeTypeInfo<Held>();
  static XLA_FFI_Error* const registered = ffi::Ffi::RegisterTypeId(
      call_frame->api, table == Table::kHost ? "pycollective_program" : "pycollective_plugin_program", &Held::id, &type_info);
  return registered != nullptr ? registered : handler->Call(call_frame);
}

}  // namespace
}  // namespace pycollective

PYCOLLECTIVE_EXPORT XLA_FFI_Error* pycollective_instantiate(XLA_FFI_CallFrame* call_frame) {
  return pycollective::Instantiate<pycollective::Table::kHost>(call_frame);
}

PYCOLLECTIVE_EXPORT XLA_FFI_Error* pycollective_instantiate_by_plugin(XLA_FFI_CallFrame* call_frame) {
  return pycollective::Instantiate<pycollective::Table::kPlugin>(call_frame);
}

// Whether a program or a call of this process holds a communicator or a part of it.
PYCOLLECTIVE_EXPORT bool pycollective_communicator_is_held(int64_t number) { return pycollective::IsHeld(number); }

namespace {
const pycollective::Listed listed{PYCOLLECTIVE_TYPED(communicator_is_held)};
}  // namespace
