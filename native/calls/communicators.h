// The communicators that compiled programs name by number, and the private MPI communicators on which they speak.
//
// A program carries a communicator's number and fingerprint, not its MPI handle. Numbers count up and are never used
// again: a program that outlives its communicator gets an error instead of somebody else's messages. The fingerprint
// shows that a program comes from another process, where its number stood for other ranks.

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

#include "devices/team.h"
#include "devices/team_collectives.h"
#include "mpi/backoff.h"
#include "mpi/collectives.h"
#include "records/recorder.h"
#include "records/signature.h"
#include "shared_memory/board.h"
#include "shared_memory/exchange.h"
#include "shared_memory/host_levels.h"

namespace pycollective {

// A channel whose MPI communicator is made when it is first used, and the calls on which its ranks have agreed.
struct LazyChannel : Channel {
  // Set by the one thread that makes the channel. Other threads read the channel after they have read this, or after a
  // meeting with that thread.
  std::atomic<bool> made{false};
  // What MakeChannel has made, for OwnCommsOfAll; it is set before the ranks meet on it.
  std::atomic<int64_t> own{0};

  // Where its ranks post their calls, and the memory through which they exchange arrays, if they are all on one host.
  BoardSlot board;
  Exchange memory_of_ranks;
  // If they are on several hosts. Any thread may read the pointer.
  std::unique_ptr<HostLevels> levels_of_ranks;
  std::atomic<const HostLevels*> known_levels{nullptr};

  // Of its calls that run beside XLA's computation: how long their threads may sleep.
  BandwidthEstimate bandwidth;

  // How many collectives and messages its records have counted.
  std::atomic<int64_t> collectives{0};
  std::atomic<int64_t> messages_made{0};

  // Calls that the ranks have compared here and found equal. Guarded by `mutex`.
  std::mutex mutex;
  std::unordered_set<Signature, SignatureHash> agreed;
};

// The ranks of a communicator, or of a part of one, and their channels. With D devices, those of pycollective.init:
//
//   channel         is for
//   0               programs in which one device of each rank makes the call, and device 0 in programs on several
//   1 .. D - 1      device i of init, in programs on several devices
//   D .. 2 D - 1    device i - D of a mesh, in programs on several devices
//
// A mesh has channels of its own since it may have the devices in another order, even on one rank alone: in a program
// that names both a mesh's axes and a communicator, two devices would otherwise use one channel at once.
//
// Channel 0 of a whole communicator is made with the communicator. The first call on any other channel makes it, with
// MPI_Comm_create_group: the threads that are about to make that call, one on each rank, and no others. So making a
// channel needs no order and no meeting that the call itself does not need. Several devices may make channels at once:
// the tag has the channel's number, and one device makes its calls one after another.
class RankGroup {
 public:
  // The ranks of a communicator with `devices` devices each. `main` is for collectives, and for messages under the
  // program's own tags; `auxiliary` for making channels, for ppermute, and for messages between devices. The caller
  // owns both. `identity` is the same on all ranks, and no other communicator of these ranks has it. `world`: the place
  // of each rank in MPI_COMM_WORLD.
  RankGroup(int rank, int size, int devices, int64_t main, int64_t auxiliary, int64_t identity, std::vector<int> world);
  // The ranks `members` of a whole communicator, in that order; this process is number `rank` among them.
  RankGroup(const RankGroup& whole, std::vector<int> members, int rank);
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  int rank() const { return channels_[0].rank; }
  int size() const { return channels_[0].size; }
  int devices() const { return devices_; }
  int64_t identity() const { return identity_; }
  const std::vector<int>& world() const { return world_; }
  // The rank that one of these ranks has in the whole communicator.
  int RankInWhole(int rank) const { return members_.empty() ? rank : members_[static_cast<size_t>(rank)]; }
  // Whether they are known to be on several hosts; the same on all of them.
  bool SpanHosts() const;
  LazyChannel& channel(int number) { return channels_[static_cast<size_t>(number)]; }

  // Makes a channel if it is not there yet. The devices on one lane of all ranks must make this call.
  Outcome MakeChannel(const Library& mpi, int number);
  // Lets the ranks of a channel that was just made take a slot of the board, or know their hosts. All of them must make
  // this call.
  Outcome JoinHosts(const Library& mpi, int number);
  // Adds the MPI communicators that MakeChannel and the levels have made. Any thread may call it.
  void AddOwnComms(std::vector<int64_t>* comms) const;
  // Frees the channels that MakeChannel has made. All ranks must make this call, and no other call may be under way.
  Outcome FreeChannels(const Library& mpi);

 private:
  const int devices_;
  const int64_t auxiliary_;         // of the whole communicator
  const std::vector<int> members_;  // ranks in the whole communicator; empty: all
  const int64_t identity_;
  const std::vector<int> world_;    // ranks in MPI_COMM_WORLD
  int first_tag_;                   // channel i is made under the tag first_tag_ + i
  std::vector<LazyChannel> channels_;
};

// The host of each rank of MPI_COMM_WORLD: a number, or -1 if nothing is known of that rank. `own`: of this process.
void SetHosts(std::vector<int> hosts, int own);
// Whether all of these ranks are on this host, and it has a board.
bool AreOnThisHost(const std::vector<int>& world_ranks);
// Their hosts.
std::vector<int> HostsOf(const std::vector<int>& world_ranks);

// One device of this process in a communicator. It makes its calls with the devices on the same lane of the other
// ranks.
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

  // This device in its team, if it is in one.
  TeamMember in_team() const { return {*team, member, channel, first->channel}; }
};

// What a program names: ranks, and the part that the devices of each rank have.
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
  std::atomic<bool> lost{false};  // freed since one of its ranks has failed
  bool is_mesh = false;  // lanes have the numbers that the devices have in a mesh, not in init
  Lane single_lane;      // for programs in which one device makes the call, whichever device it is
  Recorded entered;      // the call of another library that is under way (Call::Enter)
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<std::unique_ptr<Team>> teams;

  // In a part: the communicator that it is a part of.
  std::shared_ptr<Communicator> whole;
  // In a whole: the ranks of its parts, by their members. Guarded by the table's lock.
  std::map<std::vector<int>, std::shared_ptr<RankGroup>> parts;

  Lane* LaneOf(int64_t device_id) const {
    for (const auto& lane : lanes) {
      if (lane->device_id == device_id) return lane.get();
    }
    return nullptr;
  }
  // The team in which `size` replicas meet: devices that have the same data.
  Team& ReplicaTeam(int size);

 private:
  std::mutex mutex_;
  std::map<int, Team> replica_teams_;  // by their size; guarded by `mutex_`
};

// The table of communicators. Any thread may call these functions.

// Returns the communicator's number.
int64_t AddCommunicator(std::shared_ptr<Communicator> communicator);
// Returns null if the number was never used, or if its communicator was freed long ago. The caller shares the
// communicator as long as it needs it.
std::shared_ptr<Communicator> FindCommunicator(int64_t number);
// Returns whether the number was ever used.
bool WasCommunicator(int64_t number);
// Returns the ranks of a part of a communicator: the same object for the same members.
std::shared_ptr<RankGroup> PartOf(Communicator& whole, const std::vector<int>& members, int rank);
// Marks a communicator and its parts as freed, and frees the channels that calls have made. All ranks must make this
// call, and none of them may have a call under way.
Outcome FreeCommunicator(const Library& mpi, int64_t number);

// Whether anything but the table shares a communicator or one of its parts: a program of this process, or a call under way.
bool IsHeld(int64_t number);

// What ranks do after one of them has failed (pycollective/elastic). The MPI communicators that calls have made:
std::vector<int64_t> OwnCommsOfAll();
// Marks all communicators as freed, without a call of MPI: their ranks cannot meet any more.
void AbandonAll();

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_COMMUNICATORS_H_
