// Implementation of signature.h.

#include "records/signature.h"

#include <cstring>

#include "mpi/dtypes.h"
#include "mpi/mpi.h"

namespace pycollective {
namespace {

const char* StagingName(Staging staging) {
  switch (staging) {
    case Staging::kHostMemory: return ", host memory";
    case Staging::kHostMemoryBesideComputation: return ", host memory, beside computation";
    case Staging::kPieces: return ", device memory";
    case Staging::kDirect: return ", device memory that MPI reads";
  }
  return "";
}

const char* OpName(int32_t op) { return op >= 0 && op < kOpCount ? kOpNames[op] : "?"; }

}  // namespace

uint64_t Signature::Digest() const {
  uint64_t words[sizeof(Signature) / sizeof(uint64_t)];
  std::memcpy(words, this, sizeof(Signature));
  uint64_t hash = 0;
  for (const uint64_t word : words) hash = Mix(hash, word);
  return hash;
}

std::string DescribeArray(const Dimensions& dimensions, int32_t dtype) {
  if (dtype == kEmptyTree) return DtypeName(dtype);
  std::string text = std::string(DtypeName(dtype)) + "[";
  const auto shown = std::min(static_cast<size_t>(dimensions.rank), Dimensions::kShown);
  for (size_t i = 0; i < shown; ++i) text += (i > 0 ? "," : "") + std::to_string(dimensions.first[i]);
  if (static_cast<size_t>(dimensions.rank) > shown) {
    text += ",... #" + std::to_string(static_cast<uint64_t>(dimensions.rest) % 100000);
  }
  return text + "]";
}

std::string Describe(const Signature& s, bool with_staging) {
  std::string text = kOperationNames[s.operation];
  const bool brings_nothing = TraitsOf(s.operation).dataflow == kNoData && s.dtype != kEmptyTree;
  if (brings_nothing) return s.devices > 1 ? text + "(on " + std::to_string(s.devices) + " devices)" : text;
  text += "(" + DescribeArray(s.dimensions, s.dtype);
  if (s.reduce_op >= 0) text += std::string(", op=") + OpName(s.reduce_op);
  if (s.root >= 0) text += ", root=" + std::to_string(s.root);
  if (s.operation == kAllreduce && s.pattern != 0) text += ", several arrays #" + std::to_string(s.pattern);
  if (s.operation == kPpermute) text += ", perm #" + std::to_string(s.pattern);
  if (s.operation == kRaggedAlltoall) text += ", operand, slices and tree #" + std::to_string(s.pattern);
  const bool has_root = s.operation != kAllreduce && s.operation != kPpermute && s.operation != kRaggedAlltoall;
  if (has_root && s.pattern != 0) text += ", leaf of tree #" + std::to_string(s.pattern);
  if (s.devices > 1) text += ", on " + std::to_string(s.devices) + " devices";
  if (s.team > 1) text += ", of which " + std::to_string(s.team) + " work together";
  if (with_staging) {
    text += StagingName(s.staging);
    if (s.piece_bytes > 0) text += ", pieces of " + std::to_string(s.piece_bytes) + " B";
  }
  return text + ")";
}

}  // namespace pycollective
