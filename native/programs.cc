// What a compiled program holds of the communicators that it names, and whether any program or call holds one.
//
// XLA makes the state of a handler when it makes an executable, for each call of the program, and deletes it with the
// executable. XLA's CPU client keeps an executable while it runs. So a communicator whose entry nobody shares but the table
// is in no program of this process, and in no call.

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "communicators.h"
#include "exports.h"
#include "kept_arguments.h"
#include "settings.h"
#include "xla/ffi/api/ffi.h"

namespace pycollective {
namespace {

namespace ffi = xla::ffi;

struct InProgram {
  static ffi::TypeId id;
  std::shared_ptr<Communicator> communicator;  // null: the program comes from another process, and its calls are errors
};
ffi::TypeId InProgram::id = XLA_FFI_UNKNOWN_TYPE_ID;

XLA_FFI_TypeInfo type_info = ffi::MakeTypeInfo<InProgram>();

}  // namespace
}  // namespace pycollective

// The handler that XLA calls for each call of a program when it makes an executable.
PYCOLLECTIVE_EXPORT XLA_FFI_Error* pycollective_instantiate(XLA_FFI_CallFrame* call_frame) {
  using pycollective::InProgram;
  static xla::ffi::Ffi* const handler =
      xla::ffi::Ffi::BindInstantiate()
          .Attrs()
          .To([](xla::ffi::Dictionary attributes) -> xla::ffi::ErrorOr<std::unique_ptr<InProgram>> {
            const auto comm = attributes.get<xla::ffi::Span<const int64_t>>("comm");
            if (comm.has_error()) return xla::ffi::Unexpected(comm.error());
            auto held = std::make_unique<InProgram>();
            if (comm->size() > 0) held->communicator = pycollective::FindCommunicator((*comm)[0]);
            return held;
          })
          .release();
  // XLA must know the type before the handler. It asks the handler what it is when it registers it: that call comes first.
  static XLA_FFI_Error* const registered = xla::ffi::Ffi::RegisterTypeId(
      call_frame->api, "pycollective_program", &InProgram::id, &pycollective::type_info);
  return registered != nullptr ? registered : handler->Call(call_frame);
}

// Whether a program or a call of this process holds a communicator or a part of it.
PYCOLLECTIVE_EXPORT bool pycollective_communicator_is_held(int64_t number) { return pycollective::IsHeld(number); }

// Lets a communicator be held for ever: by a program whose end nobody tells.
PYCOLLECTIVE_EXPORT void pycollective_communicator_hold(int64_t number) {
  static auto& held = *new std::vector<std::shared_ptr<pycollective::Communicator>>;
  const auto communicator = pycollective::FindCommunicator(number);
  if (std::find(held.begin(), held.end(), communicator) == held.end()) held.push_back(communicator);
}

namespace {
const pycollective::Listed listed{PYCOLLECTIVE_TYPED(communicator_is_held), PYCOLLECTIVE_TYPED(communicator_hold)};
}  // namespace
