// The communicators that compiled programs name by number, and the private MPI communicators of their calls.
//
// A program holds a communicator's number and fingerprint, not its MPI handle. Numbers are never reused: a program that
// outlives its communicator gets an error instead of the messages of another one. The fingerprint detects a program of
// another process, in which the number meant other ranks.

#ifndef PYCOLLECTIVE_NATIVE_CALLS_COMMUNICATORS_H_
#define PYCOLLECTIVE_NATIVE_CALLS_COMMUNICATORS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "calls/comparison.h"
#include "devices/team.h"
#include "devices/team_collectives.h"
#include "mpi/backoff.h"
#include "mpi/collectives.h"
#include "records/recorder.h"
#include "records/signature.h"
#include "shared_memory/board.h"
#include "shared_memory/combining_tree.h"
#include "shared_memory/exchange.h"
#include "shared_memory/host_levels.h"

namespace pycollective {

// A channel whose MPI communicator is made by the first call on it, and the calls on which its ranks have agreed.
struct LazyChannel : Channel {
  // Set by the one thread that makes the channel. Other threads read the channel after they have read this flag, or after
  // a meeting with that thread.
  std::atomic<bool> made{false};
  // The communicator that MakeChannel has made, for OwnCommsOfAll. It is set before the ranks meet on it.
  std::atomic<int64_t> own{0};

  // If all ranks are on one host: their slot of its memory, or -1; the board on which they post their calls, or the tree in which they
  // compare them; and the memory by which they exchange arrays.
  int64_t slot = -1;
  BoardSlot board;
  CombiningTree tree_of_ranks;
  Exchange memory_of_ranks;
  // If the ranks are on several hosts. Any thread may read the pointer.
  std::unique_ptr<HostLevels> levels_of_ranks;
  std::atomic<const HostLevels*> known_levels{nullptr};

  // For calls that overlap with XLA's computation: the estimate of the time that their threads may sleep.
  BandwidthEstimate bandwidth;

  // The numbers of collectives and messages that the records of the channel have counted.
  std::atomic<int64_t> collectives{0};
  std::atomic<int64_t> messages_made{0};

  // If the ranks do not post their calls on a board. Guarded by `mutex`.
  Comparison comparison;

  // Calls that the ranks have compared here and found equal. Guarded by `mutex`.
  std::mutex mutex;
  std::unordered_set<Signature, SignatureHash> agreed;
  // Whether this rank has refused a call that another rank may have made (Post). Guarded by `mutex`.
  bool is_out_of_step = false;
};

// The ranks of a communicator, or of a part of one, and their channels. With D devices, those of pycollective.init:
//
//   channel         used by
//   0               programs in which one device of each rank makes the call, and device 0 in programs on several
//   1 .. D - 1      device i of init, in programs on several devices
//   D .. 2 D - 1    device i - D of a mesh, in programs on several devices
//
// A mesh has channels of its own, since it may have the devices in another order, even on one rank only. Otherwise two
// devices could use one channel at the same time, in a program that names both a mesh's axes and a communicator.
//
// Channel 0 of a whole communicator is made with the communicator. The first call on any other channel makes it, by
// MPI_Comm_create_group. Only the threads that are about to make this call take part, one on each rank. So making a
// channel needs no order and no meeting that the call itself does not need. Several devices may make channels at the
// same time: the tag contains the channel's number, and each device makes its calls one after another.
class RankGroup {
 public:
  // The ranks of a communicator, each with `devices` devices. `main` is for collectives and for messages with the
  // program's own tags. `auxiliary` is for making channels, for ppermute and for messages between devices. The caller
  // owns both. `identity` is the same on all ranks and differs from that of each other communicator of these ranks.
  // `world`: the rank of each of them in MPI_COMM_WORLD.
  RankGroup(int rank, int size, int devices, int64_t main, int64_t auxiliary, int64_t identity, std::vector<int> world);
  // The ranks `members` of a whole communicator, in this order. This process is number `rank` among them.
  RankGroup(const RankGroup& whole, std::vector<int> members, int rank);
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  int rank() const { return channels_[0].rank; }
  int size() const { return channels_[0].size; }
  int devices() const { return devices_; }
  int64_t identity() const { return identity_; }
  const std::vector<int>& world() const { return world_; }
  // The number of one of these ranks in the whole communicator.
  int RankInWhole(int rank) const { return members_.empty() ? rank : members_[static_cast<size_t>(rank)]; }
  // Whether the ranks are known to be on several hosts; the result is the same on all of them.
  bool SpanHosts() const;
  // Whether the ranks share a host, and are so few that each reads the posts of all. More of them compare their calls in a tree.
  bool PostOnBoard() const;
  LazyChannel& channel(int number) { return channels_[static_cast<size_t>(number)]; }

  // Makes a channel if it does not exist. The devices of all ranks on the lane must make this call.
  Outcome MakeChannel(const Library& mpi, int number);
  // Gives the ranks of a new channel a slot of the board, or their levels of hosts. All of them must make this call.
  Outcome JoinHosts(const Library& mpi, int number);
  // Adds the MPI communicators that MakeChannel and the levels have made. Any thread may call it.
  void AddOwnComms(std::vector<int64_t>* comms) const;
  // Frees the channels that MakeChannel has made. All ranks must make this call, and no other call may be in progress.
  Outcome FreeChannels(const Library& mpi);

 private:
  // The comparison of a channel's calls.
  Comparison ComparisonOf(int number) const;

  const int devices_;
  const int64_t auxiliary_;         // of the whole communicator
  const std::vector<int> members_;  // ranks in the whole communicator; empty: all
  const int64_t identity_;
  const std::vector<int> world_;    // ranks in MPI_COMM_WORLD
  int first_tag_;                   // channel i is made under the tag first_tag_ + i
  std::vector<LazyChannel> channels_;
};

// Sets the host of each rank of MPI_COMM_WORLD: a number, or -1 if it is unknown. `own`: the host of this process.
void SetHosts(std::vector<int> hosts, int own);
// Whether all of these ranks are on this host, and the host has a board.
bool AreOnThisHost(const std::vector<int>& world_ranks);
// The hosts of these ranks.
std::vector<int> HostsOf(const std::vector<int>& world_ranks);

// One device of this process in a communicator. It communicates with the devices of the other ranks on the same lane.
struct Lane {
  Lane(int64_t device_id, int index, LazyChannel& channel, int channel_number)
      : device_id(device_id), channel(channel), channel_number(channel_number), index(index) {}

  const int64_t device_id;
  LazyChannel& channel;
  const int channel_number;     // in RankGroup
  const int index;              // in Communicator::lanes
  Team* team = nullptr;         // the local devices that make one collective together; null: this device alone
  int member = 0;               // number in the team
  const Lane* first = nullptr;  // member 0's lane, on which one member calls MPI for the team

  // This device as a member of its team. It must have a team.
  TeamMember in_team() const { return {*team, member, channel, first->channel}; }
};

// The communicator of a program: the ranks, and the lanes of this rank's devices.
struct Communicator {
  Communicator(std::string name, int64_t fingerprint, std::shared_ptr<RankGroup> ranks)
      : name(std::move(name)),
        fingerprint(fingerprint),
        ranks(std::move(ranks)),
        single_lane(0, 0, this->ranks->channel(0), 0) {}

  const std::string name;
  const int64_t fingerprint;
  const std::shared_ptr<RankGroup> ranks;
  std::atomic<bool> freed{false};
  std::atomic<bool> lost{false};  // freed because one of its ranks has failed
  bool is_mesh = false;  // lanes are numbered as the devices of a mesh, not as those of init
  Lane single_lane;      // for programs in which one device makes the call; any device may do so
  Recorded entered;      // the call of another library that is in progress (Call::Enter)
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<std::unique_ptr<Team>> teams;

  // For a part of a communicator: the whole communicator. Else null.
  std::shared_ptr<Communicator> whole;
  // For a whole communicator: the ranks of its parts, by their members. Guarded by the table's lock.
  std::map<std::vector<int>, std::shared_ptr<RankGroup>> parts;

  Lane* LaneOf(int64_t device_id) const {
    for (const auto& lane : lanes) {
      if (lane->device_id == device_id) return lane.get();
    }
    return nullptr;
  }
  // The team of `size` replicas, devices with the same data.
  Team& ReplicaTeam(int size);

 private:
  std::mutex mutex_;
  std::map<int, Team> replica_teams_;  // by their size; guarded by `mutex_`
};

// The table of communicators. Any thread may call these functions.

// Adds a communicator and returns its number.
int64_t AddCommunicator(std::shared_ptr<Communicator> communicator);
// Returns the communicator of a number; null if the number was never used, or if its communicator was freed long ago. The
// caller shares the communicator as long as the caller needs it.
std::shared_ptr<Communicator> FindCommunicator(int64_t number);
// Returns whether the number was ever used.
bool WasCommunicator(int64_t number);
// Returns the ranks of a part of a communicator: the same object for the same members.
std::shared_ptr<RankGroup> PartOf(Communicator& whole, const std::vector<int>& members, int rank);
// Marks a communicator and its parts as freed, and frees the channels that calls have made. All ranks must make this
// call, and none of them may have another call in progress.
Outcome FreeCommunicator(const Library& mpi, int64_t number);

// Whether a program or a call of this process shares a communicator or one of its parts with the table.
bool IsHeld(int64_t number);

// After a rank has failed (pycollective/elastic):
// returns the MPI communicators that calls have made.
std::vector<int64_t> OwnCommsOfAll();
// Marks all communicators as freed, without a call of MPI, since their ranks cannot meet any more.
void AbandonAll();

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_COMMUNICATORS_H_
