// The collectives between ranks of one host, through memory that they share (exchange.h), without MPI.
//
// A long array goes in pieces. Of each piece, a rank copies into its buffer what the others need of it, waits until
// those whose data it needs have done so, and takes its part of the result from their buffers. An allreduce takes one
// step more: each rank reduces a share of the piece, and copies the others' shares. A rank fills its buffer with the next piece
// before it waits for the others' parts of this one.
//
// Large arrays that fit into the caches, or no element of which goes to two ranks, go without buffers, where the kernel lets a
// rank read another one's memory. So do all large arrays in memory that the ranks have mapped (shared_arrays.h). The ranks tell each
// other where their arrays are, and each takes its part of the result straight from there. A rank ends the call when no other reads
// its arrays. The algorithm of a large allreduce is autotuned (autotuner.h).
//
// The parts of hierarchical collectives (host_levels.h) are block-cyclic distributions over the ranks of the host (distribution.h): a
// reduce-scatter gives each rank the sum of its part, an allgather gives each rank the parts of all. A hierarchical allreduce is these
// two, and the step between hosts between them. Each is one call, however many blocks a part has.
//
// Reductions combine the ranks in their order: all ranks get the same bits, in each run.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_HOST_COLLECTIVES_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_HOST_COLLECTIVES_H_

#include <algorithm>
#include <cstdint>
#include <functional>

#include "base/operations.h"
#include "mpi/collectives.h"
#include "shared_memory/combine.h"
#include "shared_memory/distribution.h"
#include "shared_memory/exchange.h"

namespace pycollective {

class HostCollective {
 public:
  // The channel's ranks must be on one host: `channel.exchange` is not null, and its arrays lie in host memory.
  HostCollective(const Library& mpi, const Channel& channel)
      : mpi_(mpi), channel_(channel), exchange_(*channel.exchange), member_{channel.rank, channel.size} {}

  // The fastest algorithm for a call between so many ranks (docs/performance.md): the same on all of them, since they agree on
  // Exchange::ReadBytes, and all of them have their arrays in the memory of shared_arrays.h, or none. If it is kByReading for an
  // allreduce, FasterAlgorithm decides.
  enum class Algorithm { kByMpi, kThroughBuffers, kByReading };
  static Algorithm AlgorithmOf(Operation operation, const Arguments&, int ranks);

  // Whether one piece holds the operand of a call, so that it may be piggybacked on the comparison (board.h) in the buffers: the
  // ranks wait once for each other, not twice.
  static bool GoesWithComparison(Operation operation, const Arguments&, int ranks);
  // Waits until no rank reads a piece in this rank's buffer for the comparison of such a number. There is one if the channel has
  // found its buffers before.
  Outcome FreeBuffer(uint64_t comparison, bool* has);

  // For a large allreduce that AlgorithmOf would make by reading, and for which there are buffers: the one that is faster here. All
  // ranks must ask; they get the same answer.
  Algorithm FasterAlgorithm(const Arguments&);

  // Whether the channel has buffers. All its ranks must ask; they get the same answer.
  Outcome HasBuffers(bool* has);

  // An operation of one array, or an allreduce.
  Outcome ThroughBuffers(Operation operation, const Arguments&);
  Outcome ByReading(Operation operation, const Arguments&);
  Outcome Barrier();

  // Whether AllreduceScattered makes such an allreduce, if there are buffers: the same on all ranks.
  static bool TakesScattered(const Arguments&);
  Outcome AllreduceScattered(const Arguments& a, const ScatteredArray& array) { return AllreduceThroughBuffers(a, &array); }

  // A hierarchical allreduce: the first `lanes` ranks get a share each of the host's sum, inter_host_step(share, count) reduces it between
  // hosts, and all ranks take the shares. If that step fails, the other ranks wait, until the job ends or MPI says that a rank has failed.
  using InterHostStep = std::function<Outcome(void* share, int64_t count)>;
  Outcome Allreduce(const Arguments&, int lanes, const InterHostStep& inter_host_step);

  // Reduces the array `a.send`; `a.recv` gets this rank's part of the result. It may be the place of that part in `a.send`, if the part
  // has one block.
  Outcome ReduceScatter(const Arguments& a, const Distribution& parts);
  // Gathers the parts `a.send` of all ranks in the array `a.recv`. A part may lie at its place in there, if it has one block.
  Outcome Allgather(const Arguments& a, const Distribution& parts) { return Allgather(a, parts, {0, parts.count}); }
  // Some elements of an array.
  struct Range {
    int64_t begin, end;
    // Of `n` elements from `element` on: the first in the range, and how many are in the range.
    int64_t First(int64_t element) const { return std::max(begin, element); }
    int64_t CountOf(int64_t element, int64_t n) const { return std::max<int64_t>(0, std::min(end, element + n) - First(element)); }
  };
  // The same for a range that this rank needs; other ranks may need other ones. The rest of `a.recv` has no meaning afterwards.
  Outcome Allgather(const Arguments& a, const Distribution& parts, Range range);

 private:
  // `scattered`: what this rank brings and takes; null: one array.
  Outcome AllreduceThroughBuffers(const Arguments&, const ScatteredArray* scattered);
  Outcome AllreduceByReading(const Arguments&, int num_shares, const InterHostStep& inter_host_step);
  // How the ranks make ReduceScatter and Allgather: the same on all ranks of the host.
  Outcome AlgorithmOf(const Distribution& parts, Type type, Algorithm* algorithm);
  Outcome ReduceScatter(const Arguments&, const Distribution& parts, Algorithm algorithm);
  Outcome Allgather(const Arguments&, const Distribution& parts, Range range, Algorithm algorithm);
  Outcome ReduceScatterThroughBuffers(const Arguments&, const Distribution& parts);
  Outcome ReduceScatterByReading(const Arguments&, const Distribution& parts);
  Outcome AllgatherThroughBuffers(const Arguments&, const Distribution& parts, Range range);
  Outcome AllgatherByReading(const Arguments&, const Distribution& parts, Range range);
  Outcome InOneStep(Operation operation, const Arguments&);

  // A piece of a collective of one step: of each array, block or part.
  struct Piece {
    uint64_t number;
    int64_t first, count;
    uint64_t filled;  // the others' counters when their buffers have it
  };
  // Makes a collective of one step. fill(piece) writes what others need into this rank's buffer, take(piece) takes the result.
  template <typename Fill, typename Take>
  Outcome InOneStep(int64_t count, int64_t at_once, Fill fill, Take take);

  Outcome ReadAndReduce(const Arguments&, int64_t first, int64_t count, void* to);
  Outcome ReadBlocks(Operation operation, const Arguments&);
  // Copies from an array of a rank, which is at that address in its process: with plain loads if this rank has mapped it, else by the
  // kernel.
  Outcome Read(int rank, void* to, const void* from, size_t nbytes);

  // Waits until a rank's counter has come to a number.
  Outcome WaitFor(int rank, uint64_t number);
  // The same for all counters; WaitForAll in a step in which all ranks wait for all (exchange.h).
  Outcome WaitForEach(uint64_t number);
  Outcome WaitForAll(uint64_t number);
  // The same in a step in which some ranks need all, and others none: those wait as well if the ranks wait in a tree.
  Outcome WaitForAllIf(bool needs_all, uint64_t number);

  const Library& mpi_;
  const Channel& channel_;
  Exchange& exchange_;
  const Member member_;
  bool is_autotuned_ = false;  // FasterAlgorithm has chosen
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_HOST_COLLECTIVES_H_
