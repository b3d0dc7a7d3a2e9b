// The result of a rank in a collective, from the operands of the others, where the rank can read them.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_COMBINE_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_COMBINE_H_

#include <cstdint>
#include <functional>

#include "base/operations.h"
#include "mpi/collectives.h"

namespace pycollective {

// The operand of a rank: block b begins at element b * stride. If the operand is one array, there is only block 0.
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

// Whether the result of this rank depends on the operand of another rank.
bool Reads(Operation operation, const Arguments& a, Member member, int other);
// Whether the result of another rank depends on the operand of this rank.
bool IsReadBy(Operation operation, const Arguments& a, Member member, int other);
// Whether the result of any rank depends on the operand of this rank.
bool IsRead(Operation operation, const Arguments& a, Member member);

// Copies from the operand of a rank.
using CopyOfRank = std::function<Outcome(int rank, void* to, const void* from, size_t nbytes)>;
Outcome CopyInMemory(int rank, void* to, const void* from, size_t nbytes);

// Computes elements `first` to `first + count` of the result, or of each block of it. An operation without a case in combine.cc is an
// error. The operands in `of` hold only these elements. Reductions combine the ranks in their order, so the result depends neither on
// the pieces nor on the rank. Where a rank has no result, it is zeros. `copy` copies what is not reduced: the operands of others
// may lie in the memory of another process.
Outcome Combine(Operation operation, const Arguments& a, Member member, int64_t first, int64_t count, const BlocksOfRank& of,
                const CopyOfRank& copy = CopyInMemory);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_COMBINE_H_
