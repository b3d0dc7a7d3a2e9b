// XLA FFI handlers before and after an operation of another library: the table of guards in operations.h. They make sure that
// the program names a live communicator of this process, that the ranks compare the calls of the other library, that the
// calls have records, and that a message of a wrong length is an error.

#include <cstdint>
#include <cstring>
#include <utility>

#include "base/operations.h"
#include "calls/call.h"
#include "devices/buffers.h"
#include "mpi/dtypes.h"
#include "records/signature.h"
#include "xla/decode.h"

namespace pycollective {
namespace {

// `operands`: the operands of the operation. `process`: the process in which the program was compiled.
template <typename Buffers>
ffi::Error Enter(Buffers buffers, const Participants& participants, InToken, ffi::RemainingArgs operands, OutToken,
                 int64_t operation, int64_t process, int64_t op, int64_t root, int64_t pattern) {
  // This check is the first: another build may have other numbers of operations, and the other library has written
  // addresses and handles into the program.
  const bool is_known = operation >= 0 && operation < kOperationCount;
  Call call = CallIn(buffers, is_known ? static_cast<Operation>(operation) : kBarrier, participants);
  const ffi::Error foreign = call.CheckProcess(process);
  if (foreign.failure()) return foreign;
  Signature signature{static_cast<int32_t>(operation), participants.DtypeOf(0, ffi::DataType::INVALID)};
  signature.reduce_op = static_cast<int32_t>(op);
  signature.root = static_cast<int32_t>(root);
  signature.pattern = pattern != 0 ? pattern : operation == kAllreduce ? 0 : participants.tree();
  int64_t nbytes = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto x = operands.get<ffi::AnyBuffer>(i);
    if (x.has_error()) return x.error();
    if (i == 0) {
      signature.dtype = participants.DtypeOf(0, x->element_type());
      signature.dimensions = Dimensions(x->dimensions());
    }
    if (operation != kRecv) call.AddOperandForNanCheck(*x);
    signature.count += Count(*x);
    nbytes += NBytes(*x);
  }
  return call.Enter(signature, nbytes);
}

// `results`: the results of the operation. `check`: whether the first one is a message, whose length is in `status`. `status`:
// the address at which the other library has written an MPI_Status of `status_bytes` bytes, or 0. `copy_to`: the address to
// which the status is copied, or 0.
template <typename Buffers>
ffi::Error Leave(Buffers buffers, const Participants& participants, InToken, ffi::RemainingArgs results, OutToken,
                 int64_t operation, int64_t check, int64_t status, int64_t copy_to, int64_t status_bytes) {
  Call call = CallIn(buffers, static_cast<Operation>(operation), participants);
  call.Leave();
  void* const written = reinterpret_cast<void*>(status);
  if (copy_to != 0) std::memcpy(reinterpret_cast<void*>(copy_to), written, static_cast<size_t>(status_bytes));
  if (check == 0) return ffi::Error::Success();
  const auto y = results.get<ffi::AnyBuffer>(0);
  if (y.has_error()) return y.error();
  Type type;
  if (!MoveType(y->element_type(), &type)) return call.Unsupported(y->element_type());
  const char* const name = operation == kRecv ? "MPI_Recv" : "MPI_Sendrecv";
  const Outcome outcome = library->CheckReceived(name, {nullptr, Count(*y), type, 0, 0, written});
  return outcome.ok() ? ffi::Error::Success() : call.ErrorOf(outcome);
}

// token, xs -> token
template <typename Buffers, typename... Names>
auto BindGuard(Names... names) {
  const auto bind = [] {
    return BindCall<Buffers>().template Arg<InToken>().RemainingArgs().template Ret<ffi::Token>();
  };
  return WithAttributes(bind, names...);
}

// Makes a handler as NewHandler does; the operation is an attribute.
template <typename Buffers, typename Binding, typename Function>
ffi::Ffi* NewGuard(Binding binding, Function function) {
  return std::move(binding)
      .To([function](auto where, ffi::RunId number, ffi::Span<const int64_t> comm, int64_t devices, int64_t replicated,
                     int64_t site, int64_t order, int64_t section, InToken token, ffi::RemainingArgs arrays, OutToken out_token,
                     int64_t operation, auto... attributes) {
        return CatchAsError(static_cast<Operation>(operation), [&] {
          const Participants participants{comm, devices, replicated != 0, site, order, SectionOf(section, number)};
          return function(Buffers(where), participants, token, arrays, out_token, operation, attributes...);
        });
      })
      .release();
}

}  // namespace

#define PYCOLLECTIVE_GUARD(name, Name, ...) \
  PYCOLLECTIVE_EXPORT_HANDLER(pycollective_##name, HostBuffers, (NewGuard<Buffers>(__VA_ARGS__, Name<Buffers>)))
PYCOLLECTIVE_GUARDS(PYCOLLECTIVE_GUARD)

}  // namespace pycollective
