// Implementation of reduction.h.

#include "mpi/reduction.h"

#include <algorithm>
#include <complex>

namespace pycollective {
namespace {

template <typename T>
struct IsComplex : std::false_type {};
template <typename T>
struct IsComplex<std::complex<T>> : std::true_type {};

template <Op kOp, typename T>
void ReduceAs(int operands, const OperandOf& operand_of, int64_t count, T* y) {
  if (operands == 2) {  // most calls: element i of y depends only on element i of the operands, so `sum` is not needed
    const T* const a = static_cast<const T*>(operand_of(0));
    const T* const b = static_cast<const T*>(operand_of(1));
    for (int64_t i = 0; i < count; ++i) y[i] = Apply<kOp>(a[i], b[i]);
    return;
  }
  constexpr int64_t kBlock = 512;
  T sum[kBlock];  // y may be the memory of one of the operands
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t n = std::min(kBlock, count - start);
    for (int number = 0; number < operands; ++number) {
      const T* x = static_cast<const T*>(operand_of(number)) + start;
      if (number == 0) {
        std::copy(x, x + n, sum);
      } else {
        for (int64_t i = 0; i < n; ++i) sum[i] = Apply<kOp>(sum[i], x[i]);
      }
    }
    std::copy(sum, sum + n, y + start);
  }
}

template <typename T>
void ReduceOf(int operands, const OperandOf& operand_of, int64_t count, void* y, Op op) {
  T* out = static_cast<T*>(y);
  switch (op) {
    case Op::kSum:
    case Op::kSumBfloat16: return ReduceAs<Op::kSum>(operands, operand_of, count, out);
    case Op::kProd: return ReduceAs<Op::kProd>(operands, operand_of, count, out);
#define PYCOLLECTIVE_CASE(constant, has_it) \
  case Op::constant:                        \
    if constexpr (has_it) return ReduceAs<Op::constant>(operands, operand_of, count, out); \
    break;
    PYCOLLECTIVE_CASE(kMin, !IsComplex<T>::value)
    PYCOLLECTIVE_CASE(kMax, !IsComplex<T>::value)
    PYCOLLECTIVE_CASE(kAnd, std::is_integral_v<T>)
    PYCOLLECTIVE_CASE(kOr, std::is_integral_v<T>)
    PYCOLLECTIVE_CASE(kXor, std::is_integral_v<T>)
#undef PYCOLLECTIVE_CASE
  }
}

}  // namespace

void ReduceInOrder(int operands, const OperandOf& operand_of, int64_t count, void* y, Type type, Op op) {
  switch (type) {
#define PYCOLLECTIVE_CASE(constant, cpp, mpi4py) \
  case Type::constant: return ReduceOf<cpp>(operands, operand_of, count, y, op);
    PYCOLLECTIVE_TYPES(PYCOLLECTIVE_CASE)
#undef PYCOLLECTIVE_CASE
  }
}

}  // namespace pycollective
