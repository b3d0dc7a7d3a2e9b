// Collectives over local devices x ranks: the devices of one process work through shared memory, and for large arrays
// each drives a lane of its own between processes, all lanes at once (Traeff's multi-lane decomposition).
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
  // A large one: work(first, count) on each member's slice, the result of which it leaves in its own y; then members
  // for which `wants` holds collect all slices.
  template <typename Work>
  Outcome InSlices(void* y, int64_t count, Type type, bool wants, Work work);

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
