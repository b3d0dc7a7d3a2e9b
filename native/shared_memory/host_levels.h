// Hierarchical collectives of a channel with ranks on several hosts: the ranks of a host share memory, and MPI connects the hosts.
// Fewer bytes go between hosts than by MPI alone; or, in an all-to-all of small blocks, fewer messages: those that the ranks of a host
// send to the ranks of another host travel together.
//
// A rank's *lane* are the ranks with the same number on the other hosts. Lanes work at once, each on its share of
// the data, so no rank sends between hosts what another one of its host has sent already. A small array has few lanes, since each of them
// costs a message.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_HOST_LEVELS_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_HOST_LEVELS_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/operations.h"
#include "mpi/collectives.h"
#include "mpi/stop_after_failure.h"
#include "shared_memory/combining_tree.h"
#include "shared_memory/distribution.h"
#include "shared_memory/exchange.h"
#include "shared_memory/host_collectives.h"

namespace pycollective {

// Of the members of a communicator, those with these numbers; or another value of each of them.
std::vector<int> AtPlaces(const std::vector<int>& values, const std::vector<int>& places);

class HostLevels {
 public:
  // `hosts`: a number for the host of each rank of the channel; the same on all ranks. `from`, `members`, `tag`: as
  // Library::CreateComm takes them, to make communicators of some of these ranks. `members`: all of them.
  HostLevels(std::vector<int> hosts, int rank, int64_t from, std::vector<int> members, int tag);
  HostLevels(const HostLevels&) = delete;
  HostLevels& operator=(const HostLevels&) = delete;

  // Whether the call is made in levels: the same on all ranks.
  bool Has(Operation operation, const Arguments&) const;

  // Makes the levels at the first call. All ranks of the channel must ask; they get the same answer: false if the ranks
  // of some host share no memory.
  Outcome Make(const Library& mpi, const Channel& channel, bool* has);

  // Whether a host has several of the ranks.
  bool HasSharedHost() const { return largest_ > 1; }
  // After Make has answered true: the ranks of this host, with a tree if there are several.
  const Channel& of_host() const { return local_; }
  // After Make has answered true: the first ranks of all hosts, if this rank is one of them; else null. Nobody else sends
  // messages with the tag 0 there.
  const Channel* leaders() const { return local_.rank == 0 ? &lane_ : nullptr; }

  // The place of a rank of the channel among all, host by host: hosts in the order of their first ranks, ranks of a host in their order.
  int PlaceByHost(int rank) const { return places_[static_cast<size_t>(rank)]; }

  // A call that Has says is made in levels.
  Outcome Run(const Library& mpi, Operation operation, const Arguments&);

  // For RankGroup, which says when they may be called.
  void AddOwnComms(std::vector<int64_t>* comms) const;
  Outcome Free(const Library& mpi);

 private:
  Outcome RunByOperation(const Library& mpi, Operation operation, const Arguments&);
  Outcome Allreduce(const Library& mpi, const Arguments&);
  Outcome Reduce(const Library& mpi, const Arguments&);
  Outcome Bcast(const Library& mpi, const Arguments&);
  Outcome ReduceScatter(const Library& mpi, const Arguments&);
  Outcome Allgather(const Library& mpi, const Arguments&);
  Outcome Alltoall(const Library& mpi, const Arguments&);

  void GiveSlotBack();
  Outcome AlltoallInLane(const Library& mpi, const Arguments&);
  // A reduce-scatter in this rank's lane. The blocks `a.send` do not stay.
  Outcome AddUpBlocks(const Library& mpi, const Arguments& a);
  // An allreduce in place in this rank's lane, by recursive doubling.
  Outcome AddUpByDoubling(const Library& mpi, const Arguments&);
  // An allreduce within the host, in which inter_host_step(share, count) brings in what the other hosts of the lane have.
  Outcome AddUp(const Library& mpi, const Arguments&, const HostCollective::InterHostStep& inter_host_step);
  int HostOf(int rank) const { return hosts_[static_cast<size_t>(rank)]; }
  // How many lanes share an array: the same on all ranks.
  int LanesOf(const Arguments&) const;
  // How many lanes share the blocks of all ranks: the same on all ranks.
  // @param least_bytes: of the blocks of a host, for each lane.
  int LanesOfBlocks(const Arguments&, int64_t least_bytes) const;
  // The blocks of all ranks of the channel as parts of the lanes.
  Distribution PartsOf(const Arguments&, int lanes) const;
  // The number in this rank's lane of the rank on the root's host.
  int LaneRootOf(int root) const;

  const std::vector<int> hosts_;
  const int rank_;
  const int64_t from_;
  const std::vector<int> members_;
  const int tag_;
  std::vector<int> local_ranks_, lane_ranks_;  // of the channel
  std::vector<int> places_;                    // PlaceByHost of each rank
  int lanes_ = 0;                              // the least number of ranks on a host
  int largest_ = 0;                            // the largest
  // Each host has as many ranks, in the channel one after another; or one of each host in turns.
  bool in_blocks_ = false, in_turns_ = false;

  bool made_ = false, has_ = false;
  StopAfterFailure calls_;
  Channel local_, lane_;
  Exchange memory_of_local_;
  CombiningTree tree_of_local_;
  int64_t slot_ = -1;
  std::atomic<int64_t> comms_[2] = {};  // what MPI has made, for AddOwnComms
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_HOST_LEVELS_H_
