// XLA's types and the operations: which of MPI's they are, and how messages call them.

#ifndef PYCOLLECTIVE_NATIVE_NAMES_H_
#define PYCOLLECTIVE_NATIVE_NAMES_H_

#include <cstdint>
#include <string>

#include "communicators.h"
#include "mpi.h"
#include "xla/ffi/api/ffi.h"

namespace pycollective {

// What Signature::operation counts.
inline constexpr const char* kOperations[] = {
    "allreduce", "allgather", "alltoall", "reduce_scatter", "bcast",    "reduce", "gather", "scatter",
    "scan",      "exscan",    "ppermute", "barrier",        "sendrecv", "send",   "recv"};
enum Operation : int32_t {
  kAllreduce, kAllgather, kAlltoall, kReduceScatter, kBcast, kReduce, kGather, kScatter,
  kScan, kExscan, kPpermute, kBarrier, kSendrecv, kSend, kRecv
};
constexpr bool IsCollective(int32_t operation) { return operation >= 0 && operation < kSendrecv; }

const char* DtypeName(int32_t dtype);
// The type that moves `dtype` unchanged. False for types packed below a byte.
bool MoveType(xla::ffi::DataType dtype, Type* type);
// The type that MPI reduces `dtype` as. False where MPI's arithmetic would not be the dtype's.
bool ReduceType(xla::ffi::DataType dtype, int64_t op, Type* type);

// A call, as messages write it; `staging`: with the way that its arrays take.
std::string Describe(const Signature& signature, bool staging);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_NAMES_H_
