// The combination of two numbers in a reduction, as XLA defines it.

#ifndef PYCOLLECTIVE_NATIVE_MPI_REDUCTION_H_
#define PYCOLLECTIVE_NATIVE_MPI_REDUCTION_H_

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>

#include "mpi/mpi.h"

namespace pycollective {

// The larger or the smaller of two floats; NaN if one of them is NaN, as in XLA. Ranks combine the same numbers in different
// orders and must get the same bits. So 0 is larger than -0, and each NaN becomes the same NaN.
template <Op kOp, typename T>
T Extremum(T a, T b) {
  static_assert(kOp == Op::kMax || kOp == Op::kMin, "the larger or the smaller");
  using Bits = std::conditional_t<sizeof(T) == sizeof(uint32_t), uint32_t, uint64_t>;
  static_assert(sizeof(T) == sizeof(Bits), "a float or a double");
  const auto bits_of = [](T x) {
    Bits bits;
    std::memcpy(&bits, &x, sizeof(T));
    return bits;
  };
  const Bits one = bits_of((kOp == Op::kMax ? a > b : a < b) ? a : b);
  const Bits other = bits_of((kOp == Op::kMax ? b > a : b < a) ? b : a);
  // Of equal numbers only zeros differ in their bits, by the sign.
  const Bits both = kOp == Op::kMax ? one & other : one | other;
  const Bits bits = __builtin_isunordered(a, b) ? bits_of(std::numeric_limits<T>::quiet_NaN()) : both;
  T result;
  std::memcpy(&result, &bits, sizeof(T));
  return result;
}

constexpr bool IsBitwise(Op op) { return op == Op::kAnd || op == Op::kOr || op == Op::kXor; }

// Integer sums and products wrap around.
template <Op kOp, typename T>
T Apply(T a, T b) {
  if constexpr (std::is_integral_v<T> && (kOp == Op::kSum || kOp == Op::kProd)) {
    using U = std::make_unsigned_t<T>;
    using Wide = std::common_type_t<U, unsigned>;  // C++ promotes smaller types to a signed int
    const Wide wide = kOp == Op::kSum ? Wide(U(a)) + Wide(U(b)) : Wide(U(a)) * Wide(U(b));
    return static_cast<T>(static_cast<U>(wide));
  } else if constexpr (IsBitwise(kOp)) {
    static_assert(std::is_integral_v<T>, "only integers have bits to combine");
    return static_cast<T>(kOp == Op::kAnd ? a & b : kOp == Op::kOr ? a | b : a ^ b);
  } else if constexpr (kOp == Op::kSum) {
    return a + b;
  } else if constexpr (kOp == Op::kProd) {
    return a * b;
  } else if constexpr (std::is_floating_point_v<T>) {
    return Extremum<kOp>(a, b);
  } else {
    static_assert(kOp == Op::kMax || kOp == Op::kMin, "another reduction needs a branch of its own");
    return (kOp == Op::kMax ? a > b : a < b) ? a : b;
  }
}

// y[i] = op over operands of operand_of(number)[i], in their order. `y` may be the memory of one of them.
using OperandOf = std::function<const void*(int number)>;
void ReduceInOrder(int operands, const OperandOf& operand_of, int64_t count, void* y, Type type, Op op);

// y[i] = op(y[i], next[i]).
inline void ReduceInPlace(void* y, const void* next, int64_t count, Type type, Op op) {
  ReduceInOrder(2, [&](int number) { return number == 0 ? y : next; }, count, y, type, op);
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_REDUCTION_H_
