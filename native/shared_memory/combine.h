// What a rank gets from a collective when it can read what the others bring to it.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_COMBINE_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_COMBINE_H_

#include <cstdint>
#include <functional>

#include "base/operations.h"
#include "mpi/collectives.h"

namespace pycollective {

// What a rank brings: block b begins at element b * stride. If the operand is one array, there is only block 0.
struct Blocks {
  const void* data;
  int64_t stride;
};
using BlocksOfRank = std::function<Blocks(int rank)>;

// The ranks of a channel, and this one among them.
struct Member {
  int rank;
  int size;
};

// Whether this rank's result depends on what another rank brings.
bool Reads(Operation operation, const Arguments& a, Member member, int other);
// Whether another rank's result depends on what this rank brings, and whether any rank's does.
bool IsReadBy(Operation operation, const Arguments& a, Member member, int other);
bool Brings(Operation operation, const Arguments& a, Member member);

// Copies what lies in `from`, which a rank brings.
using CopyOfRank = std::function<Outcome(int rank, void* to, const void* from, size_t nbytes)>;
Outcome CopyInMemory(int rank, void* to, const void* from, size_t nbytes);

// Elements `first` to `first + count` of the result of a collective that is not kByMpi (operations.h), or of each block of it. The operands hold these elements alone.
// Reductions combine the ranks in their order, so that the result does not depend on how it is cut into pieces, nor on the
// rank. A rank that gets nothing gets zeros. What is not reduced comes by `copy` alone, which may take it from memory that this
// process has no part in.
Outcome Combine(Operation operation, const Arguments& a, Member member, int64_t first, int64_t count, const BlocksOfRank& of,
                const CopyOfRank& copy = CopyInMemory);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_COMBINE_H_
