// Implementation of signature.h.

#include "signature.h"

#include "dtypes.h"
#include "mpi.h"
#include "operations.h"

namespace pycollective {
namespace {

const char* OpName(int32_t op) { return op >= 0 && op < kOpCount ? kOpNames[op] : "?"; }

}  // namespace

std::string Describe(const Signature& s, bool with_staging) {
  std::string text = kOperationNames[s.operation];
  if (s.operation == kBarrier) return s.devices > 1 ? text + "(on " + std::to_string(s.devices) + " devices)" : text;
  text += std::string("(") + std::to_string(s.count) + " x " + DtypeName(s.dtype);
  if (s.reduce_op >= 0) text += std::string(", op=") + OpName(s.reduce_op);
  if (s.root >= 0) text += ", root=" + std::to_string(s.root);
  if (s.operation == kAllreduce && s.pattern != 0) text += ", several arrays #" + std::to_string(s.pattern);
  if (s.operation == kPpermute) text += ", perm #" + std::to_string(s.pattern);
  if (s.devices > 1) text += ", on " + std::to_string(s.devices) + " devices";
  if (s.team > 1) text += ", of which " + std::to_string(s.team) + " work together";
  if (with_staging) {
    const int64_t bytes = s.staging < 0 ? -s.staging : s.staging;
    text += s.staging == 0 ? ", host memory" : s.staging < 0 ? ", device memory that MPI reads" : ", device memory";
    if (bytes > 0) text += ", pieces of " + std::to_string(bytes) + " B";
  }
  return text + ")";
}

}  // namespace pycollective
