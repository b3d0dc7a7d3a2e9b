// XLA's dtypes: the MPI types in which they are sent, and their names in messages.

#ifndef PYCOLLECTIVE_NATIVE_MPI_DTYPES_H_
#define PYCOLLECTIVE_NATIVE_MPI_DTYPES_H_

#include <cstdint>
#include <string>

#include "mpi/mpi.h"
#include "xla/ffi/api/ffi.h"

namespace pycollective {

// The name of a dtype, given as XLA's number: it may come from another rank. JAX's keys, which XLA does not know, have the
// numbers from kKeyDtypes on, one for each implementation.
const char* DtypeName(int32_t dtype);
inline constexpr int32_t kKeyDtypes = 1 << 16;
// The value in place of a dtype for a call whose tree has no arrays.
inline constexpr auto kEmptyTree = static_cast<int32_t>(xla::ffi::DataType::TOKEN);
// The number of a dtype that is no key; -1: it is unknown.
int32_t DtypeNumber(const std::string& name);
// Finds the type in which `dtype` is sent unchanged. Returns false if there is none: for dtypes smaller than a byte.
bool MoveType(xla::ffi::DataType dtype, Type* type);
// Finds the type in which MPI reduces `dtype`. Returns false if MPI's arithmetic is not that of the dtype.
bool ReduceType(xla::ffi::DataType dtype, int64_t op, Type* type);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_DTYPES_H_
