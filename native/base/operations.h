// The table of operations: their names, what differs between them, and how XLA calls them.
//
// A row makes the operation's constant (kAllgather), its name in messages, the handlers that the library exports
// (pycollective_allgather and pycollective_async_allgather for CPU devices, pycollective_device_allgather for accelerators), and
// the name under which Python registers them (transport/native.py). A row COLLECTIVE also declares the function in class Library.
//
// To add a collective of one array:
// 1. mpi/library_of.h: write Outcome Name(const Channel&, const Arguments&) in class LibraryOf; it calls MPI. If no
//    operation has called that MPI function before, mpi/mpi.h needs a row for it, and one for its nonblocking form.
// 2. Here: add a row COLLECTIVE.
// Then a Python primitive with the row's name can call it. Only if programs shall call it over named axes of several
// CPU devices of each rank: write Outcome Name(const Arguments&) in class TeamCollective too, and name it in the row. Only if
// ranks of one host shall make it without MPI: add it to the functions of shared_memory/combine.cc.

#ifndef PYCOLLECTIVE_NATIVE_BASE_OPERATIONS_H_
#define PYCOLLECTIVE_NATIVE_BASE_OPERATIONS_H_

#include <cstdint>

namespace pycollective {

// The columns of a row.
enum Attributes { kNone = 0, kOp = 1, kRoot = 2 };
enum Layout { kWhole, kBlocks };

// COLLECTIVE(name, Name, attributes, operand, result, on a team): a collective of one array, which all ranks call.
//   attributes: kNone, kOp for a reduction, kRoot, or kOp | kRoot.
//   operand, result: kWhole; or kBlocks for an array that holds one block for each rank.
//   on a team: the function for several devices of a rank that work together, or nullptr.
//   collective_handlers.cc makes the handlers of these rows.
// OTHER(name, Name, is collective, binding): an operation with a handler of its own.
//   is collective: whether all ranks call it. Then they compare the call; ranks do not compare messages.
//   binding: what XLA hands to the handler (decode.h), which is Name<Place>, a function in other_handlers.cc.
#define PYCOLLECTIVE_OPERATIONS(COLLECTIVE, OTHER)                                                   \
  COLLECTIVE(allgather, Allgather, kNone, kWhole, kBlocks, &TeamCollective::Allgather)               \
  COLLECTIVE(alltoall, Alltoall, kNone, kBlocks, kBlocks, &TeamCollective::Alltoall)                 \
  COLLECTIVE(reduce_scatter, ReduceScatter, kOp, kBlocks, kWhole, &TeamCollective::ReduceScatter)    \
  COLLECTIVE(bcast, Bcast, kRoot, kWhole, kWhole, &TeamCollective::Bcast)                            \
  COLLECTIVE(reduce, Reduce, kOp | kRoot, kWhole, kWhole, &TeamCollective::Reduce)                   \
  COLLECTIVE(gather, Gather, kRoot, kWhole, kBlocks, nullptr)                                        \
  COLLECTIVE(scatter, Scatter, kRoot, kBlocks, kWhole, nullptr)                                      \
  COLLECTIVE(scan, Scan, kOp, kWhole, kWhole, nullptr)                                               \
  COLLECTIVE(exscan, Exscan, kOp, kWhole, kWhole, nullptr)                                           \
  OTHER(allreduce, Allreduce, true, BindArrays<Place>("op", "bucket_bytes"))                         \
  OTHER(ppermute, Ppermute, true, BindPpermute<Place>())                                             \
  OTHER(barrier, Barrier, true, BindTokens<Place>())                                                 \
  OTHER(sendrecv, Sendrecv, false, BindArray<Place>("dest", "send_tag", "source", "recv_tag", "process", "status")) \
  OTHER(send, Send, false, BindOperand<Place>("dest", "tag"))                                        \
  OTHER(recv, Recv, false, BindArray<Place>("source", "tag", "process", "status"))

// HALF(name, Name, binding): half of an allreduce, for accelerators alone. Its handler, the function Name, stands in
// allreduce_halves.cc.
#define PYCOLLECTIVE_DEVICE_OPERATIONS(HALF)                                        \
  HALF(allreduce_start, AllreduceStart, BindArrays<Place>("op", "bucket_bytes"))    \
  HALF(allreduce_done, AllreduceDone, BindCall<Place>().RemainingArgs().RemainingRets())

// GUARD(name, Name, binding): a handler that stands before or after an operation that another library carries out, on CPU
// devices alone. Its handler, the function Name, stands in guards.cc.
#define PYCOLLECTIVE_GUARDS(GUARD)                                                                 \
  GUARD(enter, Enter, BindGuard<Place>("operation", "process", "op", "root", "pattern"))           \
  GUARD(leave, Leave, BindGuard<Place>("operation", "check", "status", "copy_to", "status_bytes"))

// The index of an operation in the table. Signature::operation holds it.
enum Operation : int32_t {
#define PYCOLLECTIVE_CONSTANT(name, Name, ...) k##Name,
  PYCOLLECTIVE_OPERATIONS(PYCOLLECTIVE_CONSTANT, PYCOLLECTIVE_CONSTANT)
#undef PYCOLLECTIVE_CONSTANT
};

inline constexpr const char* kOperationNames[] = {
#define PYCOLLECTIVE_NAME(name, ...) #name,
    PYCOLLECTIVE_OPERATIONS(PYCOLLECTIVE_NAME, PYCOLLECTIVE_NAME)
#undef PYCOLLECTIVE_NAME
};
inline constexpr int32_t kOperationCount = sizeof(kOperationNames) / sizeof(kOperationNames[0]);

inline constexpr const char* kDeviceOperationNames[] = {
#define PYCOLLECTIVE_NAME(name, ...) #name,
    PYCOLLECTIVE_DEVICE_OPERATIONS(PYCOLLECTIVE_NAME)
#undef PYCOLLECTIVE_NAME
};

inline constexpr const char* kGuardNames[] = {
#define PYCOLLECTIVE_NAME(name, ...) #name,
    PYCOLLECTIVE_GUARDS(PYCOLLECTIVE_NAME)
#undef PYCOLLECTIVE_NAME
};

// Whether all ranks call the operation. `operation` may come from another rank: an unknown number is no collective.
constexpr bool IsCollective(int32_t operation) {
  constexpr bool kAnswers[] = {
#define PYCOLLECTIVE_YES(...) true,
#define PYCOLLECTIVE_AS_ROW_SAYS(name, Name, is_collective, ...) is_collective,
      PYCOLLECTIVE_OPERATIONS(PYCOLLECTIVE_YES, PYCOLLECTIVE_AS_ROW_SAYS)
#undef PYCOLLECTIVE_AS_ROW_SAYS
#undef PYCOLLECTIVE_YES
  };
  return operation >= 0 && operation < kOperationCount && kAnswers[operation];
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_BASE_OPERATIONS_H_
