// The comparison of a call between ranks that do not share memory, for example on several hosts.
//
// Before the call each rank gathers a block from all ranks: a hash of the call, its line and its number on the channel. If the
// hashes differ, all ranks see this, and gather the descriptions of the calls. A small collective needs no call of its own: its
// operands are sent in the blocks (piggyback.h).

#ifndef PYCOLLECTIVE_NATIVE_CALLS_COMPARISON_H_
#define PYCOLLECTIVE_NATIVE_CALLS_COMPARISON_H_

#include <cstddef>
#include <cstdint>

#include "mpi/collectives.h"
#include "shared_memory/board.h"
#include "shared_memory/piggyback.h"

namespace pycollective {

// The room for operands in the block of a rank, in bytes.
inline constexpr int64_t kPiggybackBytes = 120;

// Compares the call of this rank with the calls of all ranks of the channel, which must all make this call. Sets `found` to the
// first call that does not match. If all match and `piggybacked` is not null, it also makes this collective, which must fit.
Outcome CompareWithAll(const Library& mpi, const Channel& channel, const Post& own, const PiggybackedCollective* piggybacked,
                       Difference* found);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_COMPARISON_H_
