// The numbers guard: finds NaN and Inf in a rank's operands of a call (PYCOLLECTIVE_CHECK=nan).

#ifndef PYCOLLECTIVE_NATIVE_CALLS_NUMBERS_H_
#define PYCOLLECTIVE_NATIVE_CALLS_NUMBERS_H_

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "records/signature.h"

namespace pycollective {

// An operand of a call, in host memory.
struct Operand {
  const void* data;
  int64_t count;  // elements
  int32_t dtype;  // XLA's number
  Dimensions dimensions;
};

// The elements of a rank's operands that are not finite, and the place of the first one.
struct BadNumbers {
  enum Kind : int32_t { kNan, kInf, kMinusInf };

  int64_t count = 0;     // the number of such elements
  int64_t array = 0;     // the number of the operand with the first one
  int64_t arrays = 1;    // the number of operands
  int64_t index = 0;     // the index of the first one in its operand, as in a flat array
  int32_t kind = kNan;   // the kind of the first one
  int32_t dtype = 0;     // the dtype of its operand
  int64_t rank = 0;      // the rank of its operand
  int64_t device = -1;   // the device, if several devices of the rank make the call together; else -1
  Dimensions dimensions;  // the dimensions of its operand
};
static_assert(std::is_trivially_copyable<BadNumbers>::value, "ranks send it as bytes");

// Checks all elements of float16, bfloat16, float32, float64, complex64 and complex128. Other dtypes have no bad numbers.
// For a maximum or minimum (`reduce_op`, an Op) Inf is allowed, since it is the neutral element of such a reduction.
BadNumbers FindBadNumbers(const std::vector<Operand>& operands, int32_t reduce_op);

// The text for messages: "2 NaN or Inf on rank 1, the first is nan at [0,2] of float32[2,3]".
std::string Describe(const BadNumbers& bad);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_NUMBERS_H_
