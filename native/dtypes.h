// XLA's dtypes: which of MPI's element types they travel as, and what messages call them.

#ifndef PYCOLLECTIVE_NATIVE_DTYPES_H_
#define PYCOLLECTIVE_NATIVE_DTYPES_H_

#include <cstdint>

#include "mpi.h"
#include "xla/ffi/api/ffi.h"

namespace pycollective {

// The name of a dtype, given as XLA's number: it may come from another rank.
const char* DtypeName(int32_t dtype);
// Finds the type that carries `dtype` unchanged. Returns false if there is none: for dtypes packed below a byte.
bool MoveType(xla::ffi::DataType dtype, Type* type);
// Finds the type in which MPI reduces `dtype`. Returns false if MPI's arithmetic would not be that of the dtype.
bool ReduceType(xla::ffi::DataType dtype, int64_t op, Type* type);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_DTYPES_H_
