// Sizes, addresses and shares in arrays of MPI's element types.

#ifndef PYCOLLECTIVE_NATIVE_MPI_ELEMENTS_H_
#define PYCOLLECTIVE_NATIVE_MPI_ELEMENTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "mpi/mpi.h"

namespace pycollective {

inline size_t Bytes(int64_t count, Type type) { return static_cast<size_t>(count * kTypeBytes[int(type)]); }

// The address of element `index`.
inline void* At(void* base, int64_t index, Type type) { return static_cast<char*>(base) + Bytes(index, type); }
inline const void* At(const void* base, int64_t index, Type type) {
  return static_cast<const char*>(base) + Bytes(index, type);
}

// The number of the largest power of two that is not above a number; 0 for smaller numbers than 2.
inline int PowerOfTwo(int64_t number) {
  int power = 0;
  for (; number > 1; number /= 2) ++power;
  return power;
}

// Cuts an array of `count` elements into shares for the first ranks. Shares begin at cache lines.
struct Shares {
  Shares() = default;
  Shares(int64_t whole, int num_shares, Type type) : count(whole) {
    constexpr int64_t kLineBytes = 64;
    const int64_t line = std::max<int64_t>(1, kLineBytes / kTypeBytes[int(type)]);
    each = ((count + num_shares - 1) / num_shares + line - 1) / line * line;
  }
  int64_t Begin(int64_t rank) const { return std::min(count, rank * each); }
  int64_t CountOf(int64_t rank) const { return Begin(rank + 1) - Begin(rank); }
  int64_t count = 0, each = 0;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_ELEMENTS_H_
