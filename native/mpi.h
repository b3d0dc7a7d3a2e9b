// The part of MPI that the transport calls, bound at run time instead of by <mpi.h>.
//
// MPI's standard fixes the C signatures but not the type of a handle: an int in the MPICH family
// (MPICH, Intel MPI, MVAPICH), a pointer in Open MPI. `Functions<H>` is the table of entry points for
// either; its addresses come from the library that mpi4py has already loaded, so one build serves every
// MPI and none is needed to compile.

#ifndef PYCOLLECTIVE_NATIVE_MPI_H_
#define PYCOLLECTIVE_NATIVE_MPI_H_

#include <cstddef>
#include <cstdint>

namespace pycollective {

// One row per function: its name behind "MPI_" and its parameter types, H being any handle.
// MPI_Aint is ptrdiff_t in every implementation; MPI_Status* is passed as void*.
#define PYCOLLECTIVE_MPI_FUNCTIONS(X)                                                         \
  X(Allgather, const void*, int, H, void*, int, H, H)                                         \
  X(Allreduce, const void*, void*, int, H, H, H)                                              \
  X(Alltoall, const void*, int, H, void*, int, H, H)                                          \
  X(Barrier, H)                                                                               \
  X(Bcast, void*, int, H, int, H)                                                             \
  X(Comm_create_group, H, H, int, H*)                                                         \
  X(Comm_free, H*)                                                                            \
  X(Comm_group, H, H*)                                                                        \
  X(Comm_set_errhandler, H, H)                                                                \
  X(Error_string, int, char*, int*)                                                           \
  X(Exscan, const void*, void*, int, H, H, H)                                                 \
  X(Gather, const void*, int, H, void*, int, H, int, H)                                       \
  X(Get_count, const void*, H, int*)                                                          \
  X(Group_free, H*)                                                                           \
  X(Group_incl, H, int, const int*, H*)                                                       \
  X(Op_create, void (*)(void*, void*, int*, H*), int, H*)                                     \
  X(Recv, void*, int, H, int, int, H, void*)                                                  \
  X(Reduce, const void*, void*, int, H, H, int, H)                                            \
  X(Reduce_scatter_block, const void*, void*, int, H, H, H)                                   \
  X(Scan, const void*, void*, int, H, H, H)                                                   \
  X(Scatter, const void*, int, H, void*, int, H, int, H)                                      \
  X(Send, const void*, int, H, int, int, H)                                                   \
  X(Sendrecv, const void*, int, H, int, int, void*, int, H, int, int, H, void*)               \
  X(Type_commit, H*)                                                                          \
  X(Type_contiguous, int, H, H*)                                                              \
  X(Type_create_struct, int, const int*, const ptrdiff_t*, const H*, H*)                      \
  X(Type_free, H*)

template <typename H>
struct Functions {
#define PYCOLLECTIVE_DECLARE(name, ...) int (*name)(__VA_ARGS__);
  PYCOLLECTIVE_MPI_FUNCTIONS(PYCOLLECTIVE_DECLARE)
#undef PYCOLLECTIVE_DECLARE
};

// The same rows as names: the order in which bind() takes their addresses.
inline constexpr const char* kFunctionNames[] = {
#define PYCOLLECTIVE_NAME(name, ...) "MPI_" #name,
    PYCOLLECTIVE_MPI_FUNCTIONS(PYCOLLECTIVE_NAME)
#undef PYCOLLECTIVE_NAME
};
inline constexpr size_t kFunctionCount = sizeof(kFunctionNames) / sizeof(kFunctionNames[0]);

// Element types that MPI can reduce. Others of the same size travel as an unsigned integer.
enum class Type : int {
  kInt8, kInt16, kInt32, kInt64,
  kUint8, kUint16, kUint32, kUint64,
  kFloat32, kFloat64, kComplex64, kComplex128,
};
inline constexpr int kTypeCount = 12;
inline constexpr int64_t kTypeBytes[kTypeCount] = {1, 2, 4, 8, 1, 2, 4, 8, 4, 8, 8, 16};

// The last is a sum of float32 that goes between ranks as bfloat16; the others are MPI's.
enum class Op : int { kSum, kProd, kMin, kMax, kSumBfloat16 };
inline constexpr int kOpCount = 4;  // of MPI's

// What mpi4py knows of the library, handles widened to 64 bits. Filled by transport/native.py;
// the field order is part of the binding.
struct Binding {
  int64_t handle_bytes;
  int64_t in_place;       // the address MPI_IN_PLACE
  int64_t errors_return;  // the handler MPI_ERRORS_RETURN
  int64_t proc_null;
  int64_t any_tag;
  int64_t largest_tag;
  int64_t types[kTypeCount];
  int64_t ops[kOpCount];
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_H_
