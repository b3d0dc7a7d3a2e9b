// The table of operations: their names, what differs between them, and how XLA calls them.
//
// A row makes the operation's constant (kAllgather), its name in messages, the handlers that the library exports
// (pycollective_allgather and pycollective_async_allgather for CPU devices, pycollective_device_allgather for accelerators), and
// the name under which Python registers them (transport/native.py). A row COLLECTIVE also declares the function in class Library.
//
// docs/contributing.md has the steps. Only a collective that programs call over named axes of several CPU devices of each rank
// needs a function Outcome Name(const Arguments&) in class TeamCollective, which its row names. Only a collective that ranks of one
// host make without MPI needs a case in Combine (shared_memory/combine.cc); its row says kBuffered or more.

#ifndef PYCOLLECTIVE_NATIVE_BASE_OPERATIONS_H_
#define PYCOLLECTIVE_NATIVE_BASE_OPERATIONS_H_

#include <cstdint>

namespace pycollective {

// The columns of a row.
enum Attributes { kNone = 0, kOp = 1, kRoot = 2 };
enum Layout { kWhole, kBlocks };

// The ranks on whose data the result of a rank depends.
enum Dataflow {
  kAllToAll,   // all ranks
  kFromRoot,   // the root
  kToRoot,     // all ranks; the other ranks than the root have no result
  kFromLower,  // the ranks below this one; in a scan itself as well
  kPermuted,   // the rank that a permutation names
  kNoData,     // there are no data; the ranks wait for each other
  kMessage,    // it is a message, not a collective
};

// How the ranks of one host exchange the arrays.
enum HostExchange {
  kByMpi,         // MPI carries them
  kBuffered,      // through shared buffers: results may lie where others have not read the operands yet
  kReadable,      // through shared buffers, or each rank reads the others' operands in their memory
  kReadableOnce,  // the same; and no element is read by two ranks
};

// Whether the collective is hierarchical where ranks are on several hosts: within each host, and between hosts.
enum Hierarchy {
  kFlat,
  kHierarchical,
  kHierarchicalIfEqual,  // where all hosts have as many ranks, in blocks or in turns
};

// COLLECTIVE(name, Name, attributes, operand, result, dataflow, host exchange, hierarchy, on a team): a collective of one
// array, which all ranks call.
//   attributes: kNone, kOp for a reduction, kRoot, or kOp | kRoot.
//   operand, result: kWhole; or kBlocks for an array that holds one block for each rank. Unless the row is kByMpi,
//     no other rank reads a rank's own block of an operand.
//   on a team: the function for several devices of a rank that work together, or nullptr.
//   collective_handlers.cc makes the handlers of these rows.
// OTHER(name, Name, dataflow, host exchange, hierarchy, binding): an operation with a handler of its own.
//   dataflow: collectives are compared before they begin; messages are not.
//   binding: what XLA hands to the handler (decode.h), which is Name<Buffers>, a function in other_handlers.cc.
#define PYCOLLECTIVE_OPERATIONS(COLLECTIVE, OTHER)                                                                    \
  COLLECTIVE(allgather, Allgather, kNone, kWhole, kBlocks, kAllToAll, kReadable, kHierarchicalIfEqual,                \
             &TeamCollective::Allgather)                                                                              \
  COLLECTIVE(alltoall, Alltoall, kNone, kBlocks, kBlocks, kAllToAll, kReadableOnce, kHierarchicalIfEqual,             \
             &TeamCollective::Alltoall)                                                                               \
  COLLECTIVE(reduce_scatter, ReduceScatter, kOp, kBlocks, kWhole, kAllToAll, kReadable, kHierarchicalIfEqual,         \
             &TeamCollective::ReduceScatter)                                                                          \
  COLLECTIVE(bcast, Bcast, kRoot, kWhole, kWhole, kFromRoot, kReadable, kHierarchical, &TeamCollective::Bcast)        \
  COLLECTIVE(reduce, Reduce, kOp | kRoot, kWhole, kWhole, kToRoot, kBuffered, kHierarchical, &TeamCollective::Reduce) \
  COLLECTIVE(gather, Gather, kRoot, kWhole, kBlocks, kToRoot, kReadableOnce, kFlat, nullptr)                          \
  COLLECTIVE(scatter, Scatter, kRoot, kBlocks, kWhole, kFromRoot, kReadableOnce, kFlat, nullptr)                      \
  COLLECTIVE(scan, Scan, kOp, kWhole, kWhole, kFromLower, kBuffered, kFlat, nullptr)                                  \
  COLLECTIVE(exscan, Exscan, kOp, kWhole, kWhole, kFromLower, kBuffered, kFlat, nullptr)                              \
  OTHER(allreduce, Allreduce, kAllToAll, kReadable, kHierarchical, BindArrays<Buffers>("op", "bucket_bytes"))         \
  OTHER(ppermute, Ppermute, kPermuted, kReadableOnce, kFlat, BindPpermute<Buffers>())                                 \
  OTHER(ragged_alltoall, RaggedAlltoall, kAllToAll, kByMpi, kFlat, BindRaggedAlltoall<Buffers>())                     \
  OTHER(barrier, Barrier, kNoData, kByMpi, kFlat, BindTokens<Buffers>())                                              \
  OTHER(sendrecv, Sendrecv, kMessage, kByMpi, kFlat,                                                                  \
        BindArray<Buffers>("dest", "send_tag", "source", "recv_tag", "process", "status"))                            \
  OTHER(send, Send, kMessage, kByMpi, kFlat, BindOperand<Buffers>("dest", "tag"))                                     \
  OTHER(recv, Recv, kMessage, kByMpi, kFlat, BindArray<Buffers>("source", "tag", "process", "status"))                \
  OTHER(isendrecv, Isendrecv, kMessage, kByMpi, kFlat, BindIsendrecv<Buffers>())                                      \
  OTHER(wait, WaitRequest, kMessage, kByMpi, kFlat, BindArrays<Buffers>())

// HALF(name, Name, binding): half of an allreduce, for accelerators alone. Its handler, the function Name, stands in
// allreduce_halves.cc.
#define PYCOLLECTIVE_DEVICE_OPERATIONS(HALF)                                       \
  HALF(allreduce_start, AllreduceStart, BindArrays<Buffers>("op", "bucket_bytes")) \
  HALF(allreduce_done, AllreduceDone, BindCall<Buffers>().RemainingArgs().RemainingRets())

// GUARD(name, Name, binding): a handler that stands before or after an operation that another library carries out, on CPU
// devices alone. Its handler, the function Name, stands in guards.cc.
#define PYCOLLECTIVE_GUARDS(GUARD)                                                         \
  GUARD(enter, Enter, BindGuard<Buffers>("operation", "process", "op", "root", "pattern")) \
  GUARD(leave, Leave, BindGuard<Buffers>("operation", "check", "status", "copy_to", "status_bytes"))

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

// What a row says of its operation, besides.
struct Traits {
  Dataflow dataflow;
  HostExchange host_exchange;
  Hierarchy hierarchy;
  Layout operand, result;
};
inline constexpr Traits kTraits[] = {
#define PYCOLLECTIVE_COLLECTIVE(name, Name, attributes, operand, result, dataflow, host_exchange, hierarchy, on_team) \
  {dataflow, host_exchange, hierarchy, operand, result},
#define PYCOLLECTIVE_OTHER(name, Name, dataflow, host_exchange, hierarchy, ...) \
  {dataflow, host_exchange, hierarchy, kWhole, kWhole},
    PYCOLLECTIVE_OPERATIONS(PYCOLLECTIVE_COLLECTIVE, PYCOLLECTIVE_OTHER)
#undef PYCOLLECTIVE_OTHER
#undef PYCOLLECTIVE_COLLECTIVE
};
inline constexpr Traits kUnknownTraits = {kMessage, kByMpi, kFlat, kWhole, kWhole};

// `operation` may come from another rank: an unknown number is no collective.
constexpr const Traits& TraitsOf(int32_t operation) {
  return operation >= 0 && operation < kOperationCount ? kTraits[operation] : kUnknownTraits;
}

// Whether all ranks call the operation.
constexpr bool IsCollective(int32_t operation) { return TraitsOf(operation).dataflow != kMessage; }

// Whether no rank can end the call before all have come to it.
constexpr bool IsSynchronizing(int32_t operation) {
  const Dataflow dataflow = TraitsOf(operation).dataflow;
  return dataflow == kAllToAll || dataflow == kNoData;
}

// Whether the data of all ranks have the same part in the call.
constexpr bool IsSymmetric(int32_t operation) {
  const Dataflow dataflow = TraitsOf(operation).dataflow;
  return dataflow == kAllToAll || dataflow == kFromLower || dataflow == kPermuted;
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_BASE_OPERATIONS_H_
