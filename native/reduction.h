// How a reduction combines two numbers, as XLA defines it.

#ifndef PYCOLLECTIVE_NATIVE_REDUCTION_H_
#define PYCOLLECTIVE_NATIVE_REDUCTION_H_

#include <type_traits>

#include "mpi.h"

namespace pycollective {

// Integer sums and products wrap around.
template <Op kOp, typename T>
T Apply(T a, T b) {
  if constexpr (std::is_integral_v<T> && (kOp == Op::kSum || kOp == Op::kProd)) {
    using U = std::make_unsigned_t<T>;
    using Wide = std::common_type_t<U, unsigned>;  // C++ would promote smaller types to a signed int
    const Wide wide = kOp == Op::kSum ? Wide(U(a)) + Wide(U(b)) : Wide(U(a)) * Wide(U(b));
    return static_cast<T>(static_cast<U>(wide));
  } else if constexpr (kOp == Op::kSum) {
    return a + b;
  } else if constexpr (kOp == Op::kProd) {
    return a * b;
  } else {
    const bool keep_b = kOp == Op::kMax ? b >= a : b <= a;
    return (keep_b || b != b) ? b : a;  // NaN wins, as in XLA: NaN in b fails both tests; NaN in a fails the first
  }
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_REDUCTION_H_
