// Collectives over local devices x ranks: the devices of one process work through shared memory, and each drives a
// lane of its own between processes, all lanes at once (Traeff's multi-lane decomposition).
//
// Between processes a reduction moves 2 (R - 1) / R of the array, whatever the number of local devices is. Device
// `member` of a team of D on rank r has number r D + member; blocks lie in that order.

#ifndef PYCOLLECTIVE_NATIVE_HIERARCHY_H_
#define PYCOLLECTIVE_NATIVE_HIERARCHY_H_

#include <cstdint>

#include "collectives.h"
#include "communicators.h"

namespace pycollective {

// One device's part of a collective on a lane that has a team. Every member makes the same calls; each of them
// returns when no other member reads its buffers any more. Counts are those of collectives.h, with
// `team size x channel size` in the place of `size`.
class Hierarchy {
 public:
  Hierarchy(const Library& mpi, const Lane& lane)
      : mpi_(mpi), channel_(lane.channel), team_(*lane.team), member_(lane.member) {}

  Outcome Allreduce(const void* x, void* y, int64_t count, Type type, Op op);
  Outcome Reduce(const void* x, void* y, int64_t count, Type type, Op op, int root);
  Outcome ReduceScatter(const void* x, void* y, int64_t count, Type type, Op op);
  Outcome Allgather(const void* x, void* y, int64_t count, Type type);
  Outcome Alltoall(const void* x, void* y, int64_t count, Type type);
  Outcome Bcast(const void* x, void* y, int64_t count, Type type, int root);

 private:
  struct Slice {
    int64_t first;
    int64_t count;
  };
  Slice SliceOf(int member, int64_t count) const;
  // What this member reduces or moves between ranks: its slice, or for a small array all of it or nothing.
  Slice ShareOf(int64_t count, Type type) const;
  // Copies the other members' shares of their results into this one's.
  void CollectShares(void* y, int64_t count, Type type) const;
  // y[i] = op over members of x_member[first + i].
  void Combine(int64_t first, int64_t count, void* y, Type type, Op op) const;

  const Library& mpi_;
  const Channel& channel_;
  Team& team_;
  const int member_;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_HIERARCHY_H_
