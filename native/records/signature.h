// What the ranks compare of a collective call.

#ifndef PYCOLLECTIVE_NATIVE_RECORDS_SIGNATURE_H_
#define PYCOLLECTIVE_NATIVE_RECORDS_SIGNATURE_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/operations.h"

namespace pycollective {

// Numbers above those of operations stand for other waits (recorder.h).
inline constexpr int32_t kFirstWait = kOperationCount;

// The shape of an array.
struct Dimensions {
  static constexpr size_t kShown = 4;

  int64_t rank = 0;
  std::array<int64_t, kShown> first{};  // the first dimensions
  int64_t rest = 0;                     // a hash of the others

  Dimensions() = default;
  // `sizes`: a sequence of the dimensions.
  template <typename Sizes>
  explicit Dimensions(const Sizes& sizes) : rank(static_cast<int64_t>(sizes.size())) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      const int64_t size = static_cast<int64_t>(sizes[i]);
      if (i < kShown) {
        first[i] = size;
      } else {
        rest = static_cast<int64_t>(static_cast<uint64_t>(rest) * 1000003u + static_cast<uint64_t>(size) + 1);
      }
    }
  }

  bool operator==(const Dimensions& other) const {
    return rank == other.rank && first == other.first && rest == other.rest;
  }
  uint64_t Hash() const {
    uint64_t hash = static_cast<uint64_t>(rank) ^ static_cast<uint64_t>(rest);
    for (const int64_t size : first) hash = hash * 1000003u + static_cast<uint64_t>(size);
    return hash;
  }
};

// Adds a word to a hash, each bit of which depends on each bit of both then.
inline uint64_t Mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
  hash = (hash ^ (hash >> 32)) * 0xD6E8FEB86659FD93u;
  return hash ^ (hash >> 32);
}

// How the arrays of a call reach MPI.
enum class Staging : int16_t {
  kHostMemory,                   // they lie in host memory
  kHostMemoryBesideComputation,  // so they do, and MPI's nonblocking collectives carry them (backoff.h)
  kPieces,                       // they are copied from the device and to it, in pieces
  kDirect,                       // MPI reads and writes the memory of the device
};

// What must be the same on every rank in one collective call.
struct Signature {
  int32_t operation = 0;   // Operation (operations.h)
  int32_t dtype = 0;       // of the operand as the user passed it (dtypes.h)
  int64_t count = 0;       // elements of the operand
  int32_t reduce_op = -1;  // Op; -1: no reduction
  int32_t root = -1;       // -1: no root
  int64_t pattern = 0;     // a hash: of ppermute's permutation, of later arrays, of a root's tree; 0: none
  int64_t piece_bytes = 0;  // of arrays on a device
  int32_t devices = 1;     // devices of each rank that make the call, each for itself
  int16_t team = 1;        // devices of each rank that make the call together
  Staging staging = Staging::kHostMemory;
  Dimensions dimensions = {};  // of the operand, of the first one if there are several

  bool operator==(const Signature& other) const {
    return operation == other.operation && dtype == other.dtype && count == other.count &&
           reduce_op == other.reduce_op && root == other.root && pattern == other.pattern &&
           piece_bytes == other.piece_bytes && devices == other.devices && team == other.team &&
           staging == other.staging && dimensions == other.dimensions;
  }
  // The same on all ranks; of unequal signatures it is unequal, but for one pair in 2^64.
  uint64_t Digest() const;
};
static_assert(sizeof(Signature) == 96, "ranks send it as bytes, so it must have no padding");

struct SignatureHash {
  size_t operator()(const Signature& signature) const { return static_cast<size_t>(signature.Digest()); }
};

// An array as messages write it: "float32[2,3]".
std::string DescribeArray(const Dimensions& dimensions, int32_t dtype);

// The call as messages write it. `with_staging`: and how its arrays reach MPI.
std::string Describe(const Signature& signature, bool with_staging);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_RECORDS_SIGNATURE_H_
