// Implementation of dtypes.h.

#include "mpi/dtypes.h"

#include "mpi/reduction.h"

namespace ffi = xla::ffi;

namespace pycollective {
namespace {

// The reductions for which MPI's arithmetic on the type is right. For the bytes 0 and 1 of a bool, min is "and", max is "or".
enum Reductions { kNone = 0, kMinMax = 1, kSumProd = 2, kBitwise = 4, kReal = kMinMax | kSumProd, kAll = kReal | kBitwise };

// One row for each dtype: XLA's constant, its name, the type in which it is sent, the reductions in this type.
#define PYCOLLECTIVE_DTYPES(X)                            \
  X(PRED, "bool", kUint8, Reductions(kMinMax | kBitwise)) \
  X(S8, "int8", kInt8, kAll)                              \
  X(S16, "int16", kInt16, kAll)                           \
  X(S32, "int32", kInt32, kAll)                           \
  X(S64, "int64", kInt64, kAll)                           \
  X(U8, "uint8", kUint8, kAll)                            \
  X(U16, "uint16", kUint16, kAll)                         \
  X(U32, "uint32", kUint32, kAll)                         \
  X(U64, "uint64", kUint64, kAll)                         \
  X(F16, "float16", kUint16, kNone)                       \
  X(BF16, "bfloat16", kUint16, kNone)                     \
  X(F32, "float32", kFloat32, kReal)                      \
  X(F64, "float64", kFloat64, kReal)                      \
  X(C64, "complex64", kComplex64, kSumProd)               \
  X(C128, "complex128", kComplex128, kSumProd)            \
  X(F8E5M2, "float8_e5m2", kUint8, kNone)                 \
  X(F8E4M3, "float8_e4m3", kUint8, kNone)                 \
  X(F8E4M3FN, "float8_e4m3fn", kUint8, kNone)             \
  X(F8E4M3B11FNUZ, "float8_e4m3b11fnuz", kUint8, kNone)   \
  X(F8E5M2FNUZ, "float8_e5m2fnuz", kUint8, kNone)         \
  X(F8E4M3FNUZ, "float8_e4m3fnuz", kUint8, kNone)         \
  X(F8E3M4, "float8_e3m4", kUint8, kNone)                 \
  X(F8E8M0FNU, "float8_e8m0fnu", kUint8, kNone)

// The dtypes that are not sent: those smaller than a byte, and the value for a tree without arrays.
#define PYCOLLECTIVE_OTHER_DTYPES(X) \
  X(S1, "int1")                      \
  X(U1, "uint1")                     \
  X(S2, "int2")                      \
  X(U2, "uint2")                     \
  X(S4, "int4")                      \
  X(U4, "uint4")                     \
  X(F4E2M1FN, "float4_e2m1fn")       \
  X(TOKEN, "an empty tree")

Reductions ReductionsOf(ffi::DataType dtype) {
  switch (dtype) {
#define PYCOLLECTIVE_CASE(dtype, name, type, reductions) \
  case ffi::dtype: return reductions;
    PYCOLLECTIVE_DTYPES(PYCOLLECTIVE_CASE)
#undef PYCOLLECTIVE_CASE
    default: return kNone;
  }
}

}  // namespace

const char* DtypeName(int32_t dtype) {
  switch (static_cast<ffi::DataType>(dtype)) {
#define PYCOLLECTIVE_CASE(dtype, name, ...) \
  case ffi::dtype: return name;
    PYCOLLECTIVE_DTYPES(PYCOLLECTIVE_CASE)
    PYCOLLECTIVE_OTHER_DTYPES(PYCOLLECTIVE_CASE)
#undef PYCOLLECTIVE_CASE
    default: return dtype >= kKeyDtypes ? "key" : "an unknown dtype";
  }
}

int32_t DtypeNumber(const std::string& name) {
#define PYCOLLECTIVE_NUMBER(dtype, known, ...) \
  if (name == known) return static_cast<int32_t>(ffi::dtype);
  PYCOLLECTIVE_DTYPES(PYCOLLECTIVE_NUMBER)
  PYCOLLECTIVE_OTHER_DTYPES(PYCOLLECTIVE_NUMBER)
#undef PYCOLLECTIVE_NUMBER
  return -1;
}

bool MoveType(ffi::DataType dtype, Type* type) {
  switch (dtype) {
#define PYCOLLECTIVE_CASE(dtype, name, constant, reductions) \
  case ffi::dtype: *type = Type::constant; return true;
    PYCOLLECTIVE_DTYPES(PYCOLLECTIVE_CASE)
#undef PYCOLLECTIVE_CASE
    default: return false;
  }
}

bool ReduceType(ffi::DataType dtype, int64_t number, Type* type) {
  const Op op = static_cast<Op>(number);
  if (!MoveType(dtype, type)) return false;
  if (op == Op::kSumBfloat16) return dtype == ffi::F32;
  const Reductions needed = op == Op::kMin || op == Op::kMax ? kMinMax : IsBitwise(op) ? kBitwise : kSumProd;
  return (ReductionsOf(dtype) & needed) != 0;
}

}  // namespace pycollective
