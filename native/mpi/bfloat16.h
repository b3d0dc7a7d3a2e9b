// bfloat16: the upper half of a float32.

#ifndef PYCOLLECTIVE_NATIVE_MPI_BFLOAT16_H_
#define PYCOLLECTIVE_NATIVE_MPI_BFLOAT16_H_

#include <cstdint>
#include <cstring>

namespace pycollective {

// Rounds to nearest, ties to even, as XLA; NaN stays NaN.
inline uint16_t ToBfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>(x != x ? quiet : rounded);
}

inline float FromBfloat16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_BFLOAT16_H_
