// Collectives of the local devices x ranks: the devices of one process form a team and work through shared memory.
// Between the ranks one of them calls MPI for the team, or each calls it on its own lane, all lanes at once (Traeff's
// multi-lane decomposition).
//
// Between ranks a reduction moves 2 (R - 1) / R of the array, however many devices a rank has. In a team of D devices,
// member d on rank r is device number r D + d; roots and blocks are counted in that order.

#ifndef PYCOLLECTIVE_NATIVE_DEVICES_TEAM_COLLECTIVES_H_
#define PYCOLLECTIVE_NATIVE_DEVICES_TEAM_COLLECTIVES_H_

#include <cstdint>

#include "devices/team.h"
#include "mpi/collectives.h"

namespace pycollective {

// A device of this process among those that make one collective together.
struct TeamMember {
  Team& team;
  int number;                    // in the team
  const Channel& channel;        // of this member's lane
  const Channel& first_channel;  // of member 0's lane, on which one member calls MPI for the team
};

// One device's part in a collective of its team. Every member makes the same call, and returns when no other member
// reads its buffers any more. Arguments are those of collectives.h, with `team size x channel size` blocks instead of
// `size`.
class TeamCollective {
 public:
  TeamCollective(const Library& mpi, const TeamMember& member)
      : mpi_(mpi),
        channel_(member.channel),
        first_channel_(member.first_channel),
        team_(member.team),
        member_(member.number),
        members_(member.team.size()),
        ranks_(member.channel.size) {}

  Outcome Allreduce(const Arguments&);
  Outcome Reduce(const Arguments&);
  Outcome ReduceScatter(const Arguments&);
  Outcome Allgather(const Arguments&);
  Outcome Alltoall(const Arguments&);
  Outcome Bcast(const Arguments&);

 private:
  // For small arrays: the last member to come runs work(), which does the whole collective for all members.
  template <typename Work>
  Outcome ByLastMember(Work work);
  // For large arrays: members share the work. local(first, count, to) makes a slice of what this rank brings; then
  // inter_rank_step(channel, slice, count) makes the collective between ranks, in place; last, each member with `wants_result`
  // copies the whole result.
  template <typename Local, typename InterRankStep>
  Outcome BySlices(const Arguments&, bool wants_result, Local local, InterRankStep inter_rank_step);
  // Of a communicator of one rank: each member makes its own slice.
  template <typename Local>
  Outcome WithinRank(const Arguments&, bool wants_result, Local local);
  // Member 0 sends piece by piece, while the others make the next piece and copy the last one.
  template <typename Local, typename InterRankStep>
  Outcome OnOneLane(const Arguments&, bool wants_result, Local local, InterRankStep inter_rank_step);

  const void* In(int member) const { return team_.BuffersOf(member).in; }
  void* Out(int member) const { return team_.BuffersOf(member).out; }
  // y[i] = op over members of x_member[first + i].
  void ReduceMembers(int64_t first, int64_t count, void* y, Type type, Op op) const;

  const Library& mpi_;
  const Channel& channel_;        // of this member's lane
  const Channel& first_channel_;  // of member 0's lane
  Team& team_;
  const int member_;
  const int64_t members_;
  const int64_t ranks_;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_DEVICES_TEAM_COLLECTIVES_H_
