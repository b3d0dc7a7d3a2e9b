// The functions, element types and reductions of MPI that the transport uses. They are bound at run time, not by <mpi.h>.
//
// The MPI standard defines the C signatures but not the type of a handle: it is an int in the MPICH family (MPICH, Intel
// MPI, MVAPICH), and a pointer in Open MPI. `Functions<H>` holds the functions' addresses for both. The addresses come from
// the library that mpi4py has loaded. So one build works with all MPI libraries, and no MPI is needed to compile it.
//
// Python reads the names of each table through binding.cc, and passes the values in the order of the table.

#ifndef PYCOLLECTIVE_NATIVE_MPI_MPI_H_
#define PYCOLLECTIVE_NATIVE_MPI_MPI_H_

#include <complex>
#include <cstddef>
#include <cstdint>

namespace pycollective {

// One row for each function: its name without "MPI_", and the types of its parameters, where H is any handle.
// MPI_Aint is ptrdiff_t in every implementation; MPI_Status* is passed as void*.
#define PYCOLLECTIVE_MPI_FUNCTIONS(X)                                                         \
  X(Abort, H, int)                                                                            \
  X(Allgather, const void*, int, H, void*, int, H, H)                                         \
  X(Allreduce, const void*, void*, int, H, H, H)                                              \
  X(Alltoall, const void*, int, H, void*, int, H, H)                                          \
  X(Barrier, H)                                                                               \
  X(Bcast, void*, int, H, int, H)                                                             \
  X(Cancel, H*)                                                                               \
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
  X(Iallgather, const void*, int, H, void*, int, H, H, H*)                                    \
  X(Iallreduce, const void*, void*, int, H, H, H, H*)                                         \
  X(Ialltoall, const void*, int, H, void*, int, H, H, H*)                                     \
  X(Ibarrier, H, H*)                                                                          \
  X(Ibcast, void*, int, H, int, H, H*)                                                        \
  X(Iexscan, const void*, void*, int, H, H, H, H*)                                            \
  X(Igather, const void*, int, H, void*, int, H, int, H, H*)                                  \
  X(Iprobe, int, int, H, int*, void*)                                                         \
  X(Irecv, void*, int, H, int, int, H, H*)                                                    \
  X(Ireduce, const void*, void*, int, H, H, int, H, H*)                                       \
  X(Ireduce_scatter_block, const void*, void*, int, H, H, H, H*)                              \
  X(Iscan, const void*, void*, int, H, H, H, H*)                                              \
  X(Iscatter, const void*, int, H, void*, int, H, int, H, H*)                                 \
  X(Isend, const void*, int, H, int, int, H, H*)                                              \
  X(Op_create, void (*)(void*, void*, int*, H*), int, H*)                                     \
  X(Recv, void*, int, H, int, int, H, void*)                                                  \
  X(Reduce, const void*, void*, int, H, H, int, H)                                            \
  X(Reduce_scatter_block, const void*, void*, int, H, H, H)                                   \
  X(Scan, const void*, void*, int, H, H, H)                                                   \
  X(Scatter, const void*, int, H, void*, int, H, int, H)                                      \
  X(Send, const void*, int, H, int, int, H)                                                   \
  X(Sendrecv, const void*, int, H, int, int, void*, int, H, int, int, H, void*)               \
  X(Status_set_elements, void*, H, int)                                                       \
  X(Test, H*, int*, void*)                                                                    \
  X(Type_commit, H*)                                                                          \
  X(Type_contiguous, int, H, H*)                                                              \
  X(Type_create_struct, int, const int*, const ptrdiff_t*, const H*, H*)                      \
  X(Type_free, H*)                                                                            \
  X(Waitall, int, H*, void*)

template <typename H>
struct Functions {
#define PYCOLLECTIVE_DECLARE(name, ...) int (*name)(__VA_ARGS__);
  PYCOLLECTIVE_MPI_FUNCTIONS(PYCOLLECTIVE_DECLARE)
#undef PYCOLLECTIVE_DECLARE
};

// The names of the same functions, in the order in which pycollective_bind takes their addresses.
inline constexpr const char* kFunctionNames[] = {
#define PYCOLLECTIVE_NAME(name, ...) "MPI_" #name,
    PYCOLLECTIVE_MPI_FUNCTIONS(PYCOLLECTIVE_NAME)
#undef PYCOLLECTIVE_NAME
};
inline constexpr size_t kFunctionCount = sizeof(kFunctionNames) / sizeof(kFunctionNames[0]);

// Element types that MPI can reduce. One row for each: its constant, its C++ type, and mpi4py's name of its datatype.
// Other dtypes are sent as the unsigned integer of their size (dtypes.h).
#define PYCOLLECTIVE_TYPES(X)                             \
  X(kInt8, int8_t, "INT8_T")                              \
  X(kInt16, int16_t, "INT16_T")                           \
  X(kInt32, int32_t, "INT32_T")                           \
  X(kInt64, int64_t, "INT64_T")                           \
  X(kUint8, uint8_t, "UINT8_T")                           \
  X(kUint16, uint16_t, "UINT16_T")                        \
  X(kUint32, uint32_t, "UINT32_T")                        \
  X(kUint64, uint64_t, "UINT64_T")                        \
  X(kFloat32, float, "FLOAT")                             \
  X(kFloat64, double, "DOUBLE")                           \
  X(kComplex64, std::complex<float>, "C_FLOAT_COMPLEX")   \
  X(kComplex128, std::complex<double>, "C_DOUBLE_COMPLEX")

enum class Type : int {
#define PYCOLLECTIVE_CONSTANT(constant, cpp, mpi4py) constant,
  PYCOLLECTIVE_TYPES(PYCOLLECTIVE_CONSTANT)
#undef PYCOLLECTIVE_CONSTANT
};
inline constexpr const char* kTypeNames[] = {
#define PYCOLLECTIVE_NAME(constant, cpp, mpi4py) mpi4py,
    PYCOLLECTIVE_TYPES(PYCOLLECTIVE_NAME)
#undef PYCOLLECTIVE_NAME
};
inline constexpr int64_t kTypeBytes[] = {
#define PYCOLLECTIVE_BYTES(constant, cpp, mpi4py) sizeof(cpp),
    PYCOLLECTIVE_TYPES(PYCOLLECTIVE_BYTES)
#undef PYCOLLECTIVE_BYTES
};
inline constexpr int kTypeCount = sizeof(kTypeBytes) / sizeof(kTypeBytes[0]);

// Reductions. One row for each: its constant, our name, and mpi4py's name of MPI's operation.
#define PYCOLLECTIVE_MPI_OPS(X) \
  X(kSum, "sum", "SUM")         \
  X(kProd, "prod", "PROD")      \
  X(kMin, "min", "MIN")         \
  X(kMax, "max", "MAX")         \
  X(kAnd, "and", "BAND")        \
  X(kOr, "or", "BOR")           \
  X(kXor, "xor", "BXOR")
// The last one is not MPI's: a sum of float32 whose terms are sent between ranks as bfloat16.
#define PYCOLLECTIVE_OPS(X) PYCOLLECTIVE_MPI_OPS(X) X(kSumBfloat16, "sum_bfloat16", nullptr)

enum class Op : int {
#define PYCOLLECTIVE_CONSTANT(constant, name, mpi4py) constant,
  PYCOLLECTIVE_OPS(PYCOLLECTIVE_CONSTANT)
#undef PYCOLLECTIVE_CONSTANT
};
inline constexpr const char* kOpNames[] = {
#define PYCOLLECTIVE_NAME(constant, name, mpi4py) name,
    PYCOLLECTIVE_OPS(PYCOLLECTIVE_NAME)
#undef PYCOLLECTIVE_NAME
};
inline constexpr const char* kMpiOpNames[] = {
#define PYCOLLECTIVE_NAME(constant, name, mpi4py) mpi4py,
    PYCOLLECTIVE_MPI_OPS(PYCOLLECTIVE_NAME)
#undef PYCOLLECTIVE_NAME
};
inline constexpr int kOpCount = sizeof(kOpNames) / sizeof(kOpNames[0]);
inline constexpr int kMpiOpCount = sizeof(kMpiOpNames) / sizeof(kMpiOpNames[0]);

// Constants and handles of the MPI library, from mpi4py; handles are widened to 64 bits. transport/native.py fills it:
// the order of the fields is part of the interface.
struct Binding {
  int64_t handle_bytes;
  int64_t in_place;       // the address MPI_IN_PLACE
  int64_t errors_return;  // the handler MPI_ERRORS_RETURN
  int64_t world;          // MPI_COMM_WORLD
  int64_t proc_null;
  int64_t any_tag;
  int64_t largest_tag;
  int64_t status_source;  // the offset of MPI_SOURCE in an MPI_Status, in bytes
  int64_t status_tag;     // the offset of MPI_TAG, in bytes
  const int64_t* types;  // datatypes, in the order of kTypeNames
  const int64_t* ops;    // operations, in the order of kMpiOpNames
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_MPI_H_
