// Sizes and addresses in arrays of MPI's element types.

#ifndef PYCOLLECTIVE_NATIVE_ELEMENTS_H_
#define PYCOLLECTIVE_NATIVE_ELEMENTS_H_

#include <cstddef>
#include <cstdint>

#include "mpi.h"

namespace pycollective {

inline size_t Bytes(int64_t count, Type type) { return static_cast<size_t>(count * kTypeBytes[int(type)]); }

// The address of element `index`.
inline void* At(void* base, int64_t index, Type type) { return static_cast<char*>(base) + Bytes(index, type); }
inline const void* At(const void* base, int64_t index, Type type) {
  return static_cast<const char*>(base) + Bytes(index, type);
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_ELEMENTS_H_
