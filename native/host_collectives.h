// The collectives between ranks of one host, through memory that they share (exchange.h), without MPI.
//
// A long array goes in pieces. Of each piece, a rank copies into its buffer what the others need of it, waits until those whose
// data it needs have done so, and takes its part of the result from their buffers. An allreduce takes one step more: each rank
// reduces a share of the piece, and copies the others' shares. So each array is read once and written once in memory, and the rest
// happens in the caches. A rank fills its buffer with the next piece before it waits for the others' parts of this one.
//
// Reductions combine the ranks in their order: all ranks get the same bits, in each run.

#ifndef PYCOLLECTIVE_NATIVE_HOST_COLLECTIVES_H_
#define PYCOLLECTIVE_NATIVE_HOST_COLLECTIVES_H_

#include <cstdint>

#include "collectives.h"
#include "combine.h"
#include "exchange.h"
#include "operations.h"

namespace pycollective {

class HostCollective {
 public:
  // The channel's ranks must be on one host: `channel.exchange` is not null, and its arrays lie in host memory.
  HostCollective(const Library& mpi, const Channel& channel)
      : mpi_(mpi), channel_(channel), exchange_(*channel.exchange), member_{channel.rank, channel.size} {}

  // Whether the call can be made here, and is faster here than by MPI: the same on all ranks. MPI copies a large block straight from one process to another;
  // if nothing is reduced, two copies through a buffer take longer.
  static bool IsFaster(Operation operation, const Arguments&);

  // Whether the call can be made here. All ranks of the channel must ask; they get the same answer.
  Outcome HasBuffers(bool* has);

  // An operation of one array, or an allreduce.
  Outcome Run(Operation operation, const Arguments&);
  Outcome Barrier();

 private:
  Outcome Allreduce(const Arguments&);
  Outcome InOneStep(Operation operation, const Arguments&);

  // Waits until a rank's counter has come to a number.
  Outcome WaitFor(int rank, uint64_t number);
  Outcome WaitForAll(uint64_t number);

  const Library& mpi_;
  const Channel& channel_;
  Exchange& exchange_;
  const Member member_;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_HOST_COLLECTIVES_H_
