// Collectives over local devices x ranks: the devices of one process work through shared memory, and one of them calls
// MPI for all, or each drives a lane of its own between processes, all lanes at once (Traeff's multi-lane
// decomposition).
//
// Between processes a reduction moves 2 (R - 1) / R of the array, whatever the number of local devices is. Device
// `member` of a team of D on rank r has number r D + member; blocks lie in that order.

#ifndef PYCOLLECTIVE_NATIVE_HIERARCHY_H_
#define PYCOLLECTIVE_NATIVE_HIERARCHY_H_

#include <cstdint>

#include "collectives.h"
#include "communicators.h"

namespace pycollective {

// Whether reductions and broadcasts of large arrays use all lanes at once. Set before the first program runs.
extern bool all_lanes;

// One device's part of a collective on a lane that has a team. Every member makes the same calls; each of them
// returns when no other member reads its buffers any more. Counts are those of collectives.h, with
// `team size x channel size` in the place of `size`.
class Hierarchy {
 public:
  Hierarchy(const Library& mpi, const Lane& lane)
      : mpi_(mpi),
        lane_(lane.channel),
        first_lane_(lane.first->channel),
        team_(*lane.team),
        member_(lane.member),
        members_(lane.team->size()),
        ranks_(lane.channel.size) {}

  Outcome Allreduce(const void* x, void* y, int64_t count, Type type, Op op);
  Outcome Reduce(const void* x, void* y, int64_t count, Type type, Op op, int root);
  Outcome ReduceScatter(const void* x, void* y, int64_t count, Type type, Op op);
  Outcome Allgather(const void* x, void* y, int64_t count, Type type);
  Outcome Alltoall(const void* x, void* y, int64_t count, Type type);
  Outcome Bcast(const void* x, void* y, int64_t count, Type type, int root);

 private:
  // A small array: the last member to come runs work(), which serves all of them.
  template <typename Work>
  Outcome Alone(Work work);
  // A large one: local(first, count, to) on each slice, between(lane, part, count) in place between ranks; then members
  // for which `wants` holds collect the whole. On all lanes each member sends its slice; on one, member 0 sends piece
  // by piece, while the others work on the next and the last piece.
  template <typename Local, typename Between>
  Outcome InSlices(void* y, int64_t count, Type type, bool wants, Local local, Between between);
  template <typename Local, typename Between>
  Outcome OnAllLanes(void* y, int64_t count, Type type, bool wants, Local local, Between between);
  template <typename Local, typename Between>
  Outcome OnOneLane(void* y, int64_t count, Type type, bool wants, Local local, Between between);

  const void* In(int member) const { return team_.PostOf(member).in; }
  void* Out(int member) const { return team_.PostOf(member).out; }
  // y[i] = op over members of x_member[first + i].
  void Combine(int64_t first, int64_t count, void* y, Type type, Op op) const;

  const Library& mpi_;
  const Channel& lane_;
  const Channel& first_lane_;
  Team& team_;
  const int member_;
  const int64_t members_;
  const int64_t ranks_;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_HIERARCHY_H_
