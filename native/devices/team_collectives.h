// Collectives of local devices x ranks. The devices of one process form a team and work through shared memory. Between
// ranks either one member calls MPI for the team, or each member calls MPI on its own lane, all lanes at the same time
// (Traeff's multi-lane decomposition).
//
// Between R ranks an allreduce moves 2 (R - 1) / R of the array, independently of the number of devices of a rank. In a
// team of D devices, member d on rank r is device number r D + d. Roots and blocks are numbered in this order.

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
  const Channel& first_channel;  // of member 0's lane: on it one member calls MPI for the team
};

// The error of a collective that no function of TeamCollective makes.
Outcome NotOnTeams();

// One device's part of a collective of its team. Each member makes the same call, and returns when no other member reads
// its buffers any more. The arguments are those of collectives.h, with `team size x channel size` blocks instead of `size`.
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
  // For small arrays: the last member to arrive runs work(), which makes the whole collective for all members.
  template <typename Work>
  Outcome ByLastMember(Work work);
  // For large arrays: the members share the work. local(first, count, to) computes a slice of this rank's operand. Then
  // inter_rank_step(channel, slice, count) makes the collective between ranks, in place. Last, each member with
  // `wants_result` copies the whole result.
  template <typename Local, typename InterRankStep>
  Outcome BySlices(const Arguments&, bool wants_result, Local local, InterRankStep inter_rank_step);
  // For a communicator of one rank: each member computes its own slice.
  template <typename Local>
  Outcome WithinRank(const Arguments&, bool wants_result, Local local);
  // Member 0 sends one piece after another. Meanwhile the others compute the next piece and copy the previous one.
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
