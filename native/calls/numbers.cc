// Implementation of numbers.h. An element is read as an unsigned integer. Without the sign bit, Inf has exactly the bits of
// the exponent, and NaN is a larger integer. So one addition sets the highest bit for bad numbers only. Compilers vectorize
// this test.

#include "calls/numbers.h"

#include <algorithm>

#include "mpi/mpi.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace pycollective {
namespace {

// The length of a block. The number of bad elements of a block fits into the smallest element type.
constexpr int64_t kBlock = 1 << 14;

// Finds bad numbers of a float with the exponent bits `exponent`: the highest bit of (x & mask) + lift is set for them.
template <typename U>
struct Test {
  Test(U exponent, bool inf_is_bad)
      : mask(inf_is_bad ? exponent : kWithoutSign),
        lift(static_cast<U>(inf_is_bad ? kSign - exponent : kSign - 1 - exponent)) {}

  static constexpr U kSign = static_cast<U>(U{1} << (8 * sizeof(U) - 1));
  static constexpr U kWithoutSign = static_cast<U>(kSign - 1);

  U operator()(U x) const { return static_cast<U>(static_cast<U>((x & mask) + lift) >> (8 * sizeof(U) - 1)); }

  U mask;
  U lift;
};

// Counts the bad elements among `count` elements of kParts floats each; `count` is at most kBlock.
template <typename U, int kParts>
int64_t CountBad(const U* x, int64_t count, Test<U> test) {
  U bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    U one = test(x[kParts * i]);
    if constexpr (kParts == 2) one = static_cast<U>(one | test(x[2 * i + 1]));
    bad = static_cast<U>(bad + one);
  }
  return static_cast<int64_t>(bad);
}

// Adds the bad numbers of one operand to `found`.
template <typename U, int kParts>
void Look(const Operand& operand, int64_t number, U exponent, bool inf_is_bad, BadNumbers* found) {
  const U* const x = static_cast<const U*>(operand.data);
  const Test<U> test(exponent, inf_is_bad);
  for (int64_t start = 0; start < operand.count; start += kBlock) {
    const U* const block = x + kParts * start;
    const int64_t bad = CountBad<U, kParts>(block, std::min(kBlock, operand.count - start), test);
    if (bad > 0 && found->count == 0) {
      const U* const first = std::find_if(block, block + kParts * kBlock, [&](U one) { return test(one) != 0; });
      found->array = number;
      found->index = start + (first - block) / kParts;
      found->dtype = operand.dtype;
      found->dimensions = operand.dimensions;
      const bool is_inf = (*first & Test<U>::kWithoutSign) == exponent;
      found->kind = !is_inf ? BadNumbers::kNan : (*first & Test<U>::kSign) != 0 ? BadNumbers::kMinusInf : BadNumbers::kInf;
    }
    found->count += bad;
  }
}

// The index as a user writes it, "[0,2]". If not all dimensions are known, it is the index in the flat array.
std::string IndexText(const Dimensions& dimensions, int64_t index) {
  if (dimensions.rank > static_cast<int64_t>(Dimensions::kShown)) return "element " + std::to_string(index);
  std::string text;
  for (int64_t axis = dimensions.rank - 1; axis >= 0; --axis) {
    const int64_t size = std::max<int64_t>(1, dimensions.first[static_cast<size_t>(axis)]);
    text = std::to_string(index % size) + (text.empty() ? "" : ",") + text;
    index /= size;
  }
  return "[" + text + "]";
}

}  // namespace

BadNumbers FindBadNumbers(const std::vector<Operand>& operands, int32_t reduce_op) {
  const bool inf_is_bad = reduce_op != static_cast<int32_t>(Op::kMax) && reduce_op != static_cast<int32_t>(Op::kMin);
  BadNumbers found;
  found.arrays = static_cast<int64_t>(operands.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    const Operand& x = operands[i];
    const auto number = static_cast<int64_t>(i);
    switch (static_cast<ffi::DataType>(x.dtype)) {
      case ffi::F16: Look<uint16_t, 1>(x, number, 0x7C00, inf_is_bad, &found); break;
      case ffi::BF16: Look<uint16_t, 1>(x, number, 0x7F80, inf_is_bad, &found); break;
      case ffi::F32: Look<uint32_t, 1>(x, number, 0x7F800000, inf_is_bad, &found); break;
      case ffi::F64: Look<uint64_t, 1>(x, number, 0x7FF0000000000000, inf_is_bad, &found); break;
      case ffi::C64: Look<uint32_t, 2>(x, number, 0x7F800000, inf_is_bad, &found); break;
      case ffi::C128: Look<uint64_t, 2>(x, number, 0x7FF0000000000000, inf_is_bad, &found); break;
      default: break;
    }
  }
  return found;
}

std::string Describe(const BadNumbers& bad) {
  constexpr const char* kKinds[] = {"nan", "inf", "-inf"};
  std::string text = std::to_string(bad.count) + " NaN or Inf on rank " + std::to_string(bad.rank);
  if (bad.device >= 0) text += ", device " + std::to_string(bad.device);
  text += std::string(", the first is ") + kKinds[bad.kind] + " at " + IndexText(bad.dimensions, bad.index) + " of ";
  if (bad.arrays > 1) text += "array " + std::to_string(bad.array + 1) + " of " + std::to_string(bad.arrays) + ", ";
  return text + DescribeArray(bad.dimensions, bad.dtype);
}

}  // namespace pycollective
