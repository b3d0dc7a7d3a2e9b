// How the ranks compare a call where they share no memory, as between hosts.
//
// Before the call each rank gathers a block from all: a hash of the call, its line and its number on the channel. If they
// differ, all ranks see it, and gather the calls themselves. A reduction of small arrays needs no call of its own then: its
// operands travel in the blocks, and each rank combines them in the order of the ranks, so that all get the same bits.

#ifndef PYCOLLECTIVE_NATIVE_COMPARISON_H_
#define PYCOLLECTIVE_NATIVE_COMPARISON_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "board.h"
#include "collectives.h"
#include "packing.h"

namespace pycollective {

// What the block of a rank has room for, beside the hash.
inline constexpr int64_t kCarriedBytes = 120;

// An allreduce of arrays in host memory.
struct Reduction {
  const std::vector<ArrayPair>* arrays = nullptr;
  Op op = Op::kSum;

  // Whether it may travel in the blocks. The shapes and dtypes alone decide, so ranks whose calls match agree on it.
  bool IsCarried() const;
};

// Compares the call of this rank with those of all ranks of the channel, which must all make this call. Sets `found` to the
// first one that does not match. Else, if `carried` is not null, it also makes that reduction.
Outcome CompareWithAll(const Library& mpi, const Channel& channel, const Post& own, const Reduction* carried,
                       Difference* found);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_COMPARISON_H_
