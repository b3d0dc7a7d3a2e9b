// The numbers guard: finds NaN and Inf in what a rank brings to a call (PYCOLLECTIVE_CHECK=nan).

#ifndef PYCOLLECTIVE_NATIVE_CALLS_NUMBERS_H_
#define PYCOLLECTIVE_NATIVE_CALLS_NUMBERS_H_

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "records/signature.h"

namespace pycollective {

// An array in host memory that a rank brings to a call.
struct Operand {
  const void* data;
  int64_t count;  // elements
  int32_t dtype;  // XLA's number
  Dimensions dimensions;
};

// The elements of a rank's operands that are not finite, and where the first one is.
struct BadNumbers {
  enum Kind : int32_t { kNan, kInf, kMinusInf };

  int64_t count = 0;     // 0: there is none
  int64_t array = 0;     // which operand has the first one
  int64_t arrays = 1;    // how many operands there are
  int64_t index = 0;     // where it is in that operand, whose dimensions count as one
  int32_t kind = kNan;   // what it is
  int32_t dtype = 0;     // of that operand
  int64_t rank = 0;      // who brings it
  int64_t device = -1;   // which of this rank's devices that make the call together; -1: it is one alone
  Dimensions dimensions;  // of that operand
};
static_assert(std::is_trivially_copyable<BadNumbers>::value, "ranks send it as bytes");

// Looks at all elements of float16, bfloat16, float32, float64, complex64 and complex128. Other dtypes have no bad
// numbers. For a maximum or a minimum (`reduce_op`, an Op) Inf is none, since it is where such a reduction begins.
BadNumbers FindBadNumbers(const std::vector<Operand>& operands, int32_t reduce_op);

// As messages write it: "2 NaN or Inf on rank 1, the first is nan at [0,2] of float32[2,3]".
std::string Describe(const BadNumbers& bad);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_NUMBERS_H_
