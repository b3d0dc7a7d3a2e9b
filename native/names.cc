// Implementation of names.h.

#include "names.h"

namespace ffi = xla::ffi;

namespace pycollective {
namespace {

const char* OpName(int32_t op) {
  constexpr const char* kNames[] = {"sum", "prod", "min", "max", "sum_bfloat16"};
  return op >= 0 && op <= int32_t(Op::kSumBfloat16) ? kNames[op] : "?";
}

}  // namespace

const char* DtypeName(int32_t dtype) {
  switch (static_cast<ffi::DataType>(dtype)) {
    case ffi::PRED: return "bool";
    case ffi::S8: return "int8";
    case ffi::S16: return "int16";
    case ffi::S32: return "int32";
    case ffi::S64: return "int64";
    case ffi::U8: return "uint8";
    case ffi::U16: return "uint16";
    case ffi::U32: return "uint32";
    case ffi::U64: return "uint64";
    case ffi::F16: return "float16";
    case ffi::BF16: return "bfloat16";
    case ffi::F32: return "float32";
    case ffi::F64: return "float64";
    case ffi::C64: return "complex64";
    case ffi::C128: return "complex128";
    default: return "an 8-bit float";
  }
}

bool MoveType(ffi::DataType dtype, Type* type) {
  switch (dtype) {
    case ffi::PRED:
    case ffi::U8:
    case ffi::F8E5M2:
    case ffi::F8E4M3:
    case ffi::F8E4M3FN:
    case ffi::F8E4M3B11FNUZ:
    case ffi::F8E5M2FNUZ:
    case ffi::F8E4M3FNUZ:
    case ffi::F8E3M4:
    case ffi::F8E8M0FNU: *type = Type::kUint8; return true;
    case ffi::S8: *type = Type::kInt8; return true;
    case ffi::S16: *type = Type::kInt16; return true;
    case ffi::S32: *type = Type::kInt32; return true;
    case ffi::S64: *type = Type::kInt64; return true;
    case ffi::U16:
    case ffi::F16:
    case ffi::BF16: *type = Type::kUint16; return true;
    case ffi::U32: *type = Type::kUint32; return true;
    case ffi::U64: *type = Type::kUint64; return true;
    case ffi::F32: *type = Type::kFloat32; return true;
    case ffi::F64: *type = Type::kFloat64; return true;
    case ffi::C64: *type = Type::kComplex64; return true;
    case ffi::C128: *type = Type::kComplex128; return true;
    default: return false;
  }
}

bool ReduceType(ffi::DataType dtype, int64_t op, Type* type) {
  if (op == int64_t(Op::kSumBfloat16)) return dtype == ffi::F32 && MoveType(dtype, type);
  if (dtype == ffi::PRED) {  // bytes 0 and 1: min is "and", max is "or"
    *type = Type::kUint8;
    return op == int64_t(Op::kMin) || op == int64_t(Op::kMax);
  }
  if (dtype == ffi::C64 || dtype == ffi::C128) {
    return MoveType(dtype, type) && (op == int64_t(Op::kSum) || op == int64_t(Op::kProd));
  }
  switch (dtype) {
    case ffi::S8: case ffi::S16: case ffi::S32: case ffi::S64:
    case ffi::U8: case ffi::U16: case ffi::U32: case ffi::U64:
    case ffi::F32: case ffi::F64: return MoveType(dtype, type);
    default: return false;
  }
}

std::string Describe(const Signature& s, bool staging) {
  std::string text = kOperations[s.operation];
  if (s.operation == kBarrier) return s.devices > 1 ? text + "(on " + std::to_string(s.devices) + " devices)" : text;
  text += std::string("(") + std::to_string(s.count) + " x " + DtypeName(s.dtype);
  if (s.reduce_op >= 0) text += std::string(", op=") + OpName(s.reduce_op);
  if (s.root >= 0) text += ", root=" + std::to_string(s.root);
  if (s.operation == kAllreduce && s.pattern != 0) text += ", several arrays #" + std::to_string(s.pattern);
  if (s.operation == kPpermute) text += ", perm #" + std::to_string(s.pattern);
  if (s.devices > 1) text += ", on " + std::to_string(s.devices) + " devices";
  if (s.team > 1) text += ", of which " + std::to_string(s.team) + " work together";
  if (staging) {
    const int64_t bytes = s.staging < 0 ? -s.staging : s.staging;
    text += s.staging == 0 ? ", host memory" : s.staging < 0 ? ", device memory that MPI reads" : ", device memory";
    if (bytes > 0) text += ", pieces of " + std::to_string(bytes) + " B";
  }
  return text + ")";
}

}  // namespace pycollective
