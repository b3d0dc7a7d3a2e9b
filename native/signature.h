// What the ranks compare of a collective call.

#ifndef PYCOLLECTIVE_NATIVE_SIGNATURE_H_
#define PYCOLLECTIVE_NATIVE_SIGNATURE_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace pycollective {

// What must be the same on every rank in one collective call.
struct Signature {
  int32_t operation = 0;   // Operation (operations.h)
  int32_t dtype = 0;       // XLA's number
  int64_t count = 0;       // elements of the operand
  int32_t reduce_op = -1;  // Op; -1: no reduction
  int32_t root = -1;       // -1: no root
  int64_t pattern = 0;     // a hash: of ppermute's permutation, of the later arrays of an allreduce; 0: neither
  int64_t staging = 0;     // how arrays reach MPI: 0 in host memory, > 0 in pieces of so many bytes, < 0 on the device
  int32_t devices = 1;     // devices of each rank that make the call, each for itself
  int32_t team = 1;        // devices of each rank that make the call together

  bool operator==(const Signature& other) const {
    return operation == other.operation && dtype == other.dtype && count == other.count &&
           reduce_op == other.reduce_op && root == other.root && pattern == other.pattern &&
           staging == other.staging && devices == other.devices && team == other.team;
  }
};
static_assert(sizeof(Signature) == 48, "ranks send it as bytes, so it must have no padding");

struct SignatureHash {
  size_t operator()(const Signature& s) const {
    uint64_t h = static_cast<uint64_t>(s.count) * 0x9E3779B97F4A7C15u;
    h ^= static_cast<uint64_t>(s.pattern) + (h << 6) + (h >> 2);
    h ^= (static_cast<uint64_t>(static_cast<uint32_t>(s.operation)) << 32) ^
         (static_cast<uint64_t>(static_cast<uint32_t>(s.dtype)) << 16) ^
         (static_cast<uint64_t>(static_cast<uint32_t>(s.root)) << 8) ^ static_cast<uint32_t>(s.reduce_op);
    return static_cast<size_t>(h ^ (h >> 29));
  }
};

// The call as messages write it. `with_staging`: with the way that its arrays take to MPI.
std::string Describe(const Signature& signature, bool with_staging);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SIGNATURE_H_
