// How the ranks compare a call where they share no memory, as between hosts.
//
// Before the call each rank gathers a block from all: a hash of the call, its line and its number on the channel. If they
// differ, all ranks see it, and gather the calls themselves. A small collective needs no call of its own then: its operands travel
// in the blocks (piggyback.h).

#ifndef PYCOLLECTIVE_NATIVE_CALLS_COMPARISON_H_
#define PYCOLLECTIVE_NATIVE_CALLS_COMPARISON_H_

#include <cstddef>
#include <cstdint>

#include "mpi/collectives.h"
#include "shared_memory/board.h"
#include "shared_memory/piggyback.h"

namespace pycollective {

// What the block of a rank has room for, beside the hash.
inline constexpr int64_t kPiggybackBytes = 120;

// Compares the call of this rank with those of all ranks of the channel, which must all make this call. Sets `found` to the
// first one that does not match. Else, if `piggybacked` is not null, it also makes that collective: it must fit.
Outcome CompareWithAll(const Library& mpi, const Channel& channel, const Post& own, const PiggybackedCollective* piggybacked,
                       Difference* found);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_COMPARISON_H_
