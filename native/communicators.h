// The communicators that compiled programs name by number, and the private MPI communicators on which they speak.
//
// A program carries a communicator's number and fingerprint, not its MPI handle. Numbers count up and are never used
// again, so a program that outlives its communicator gets an error instead of somebody else's messages; and a program
// from another process, where the number may be that of others, is known by the fingerprint.

#ifndef PYCOLLECTIVE_NATIVE_COMMUNICATORS_H_
#define PYCOLLECTIVE_NATIVE_COMMUNICATORS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "collectives.h"
#include "team.h"

namespace pycollective {

// What every rank must agree on for one collective call.
struct Signature {
  int32_t operation = 0;   // index in kOperations (names.h)
  int32_t dtype = 0;       // XLA's number
  int64_t count = 0;       // elements of the operand
  int32_t reduce_op = -1;  // Op, or -1
  int32_t root = -1;       // or -1
  int64_t pattern = 0;     // a hash of a permutation, or 0
  int64_t staging = 0;  // how arrays get to MPI: 0 they are in plain memory; else in pieces of so many bytes, < 0: directly
  int32_t devices = 1;  // of each rank that make the call, each for itself
  int32_t team = 1;     // of each rank that make it together, through shared memory

  bool operator==(const Signature& other) const {
    return operation == other.operation && dtype == other.dtype && count == other.count &&
           reduce_op == other.reduce_op && root == other.root && pattern == other.pattern &&
           staging == other.staging && devices == other.devices && team == other.team;
  }
};
static_assert(sizeof(Signature) == 48, "sent as bytes, so without padding");

struct SignatureHash {
  size_t operator()(const Signature& s) const {
    uint64_t h = static_cast<uint64_t>(s.count) * 0x9E3779B97F4A7C15u;
    h ^= static_cast<uint64_t>(s.pattern) + (h << 6) + (h >> 2);
    h ^= (static_cast<uint64_t>(static_cast<uint32_t>(s.operation)) << 32) ^
         (static_cast<uint64_t>(static_cast<uint32_t>(s.dtype)) << 16) ^
         (static_cast<uint64_t>(static_cast<uint32_t>(s.root)) << 8) ^ static_cast<uint32_t>(s.reduce_op);
    return static_cast<size_t>(h ^ (h >> 29));
  }
};

// A channel that is made when it is first used, and what its ranks know of each other there.
struct OwnChannel : Channel {
  // Written by the one thread that makes the channel; others read the channel behind it, or behind a meeting with it.
  std::atomic<bool> made{false};

  // Signatures on which the ranks have already agreed here. Guarded by `mutex`.
  std::mutex mutex;
  std::unordered_set<Signature, SignatureHash> agreed;
};

// The ranks of a communicator, or of a part of one, and their channels:
//
//   0                 programs in which one device of each rank makes the call, and device 0 of those of several
//   1 .. D - 1        device i of init's D, in programs on several
//   D .. 2 D - 1      device number i - D of a mesh, in programs on several
//
// The last two are apart since a mesh may have the devices in another order, on one rank alone even; in a program that
// names both a mesh's axes and a communicator two devices would else use one channel at once.
//
// Channel 0 of a whole communicator is made with it. Every other one is made by the first call on it, with
// MPI_Comm_create_group: by the very threads, one on each rank, that are about to make that call, and by nobody else. So
// it needs no order and no meeting that the call itself does not need. Several may be under way at once, for several
// devices: the channel's number is in the tag, and a device makes its calls one after another.
class Ranks {
 public:
  // Those of a communicator on `devices` devices of each rank. `calls`: for collectives, and messages under the program's
  // own tags; `rest`: for the making of channels, ppermute, and messages between devices. Both are the caller's.
  Ranks(int rank, int size, int devices, int64_t calls, int64_t rest);
  // `members` of a whole communicator, in that order, `rank` being this one's place among them.
  Ranks(const Ranks& whole, std::vector<int> members, int rank);
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  int rank() const { return channels_[0].rank; }
  int size() const { return channels_[0].size; }
  int devices() const { return devices_; }
  // Of a rank among these.
  int InWhole(int rank) const { return members_.empty() ? rank : members_[static_cast<size_t>(rank)]; }
  OwnChannel& channel(int number) { return channels_[static_cast<size_t>(number)]; }

  // Returns when the channel is there. All ranks' like devices must make this call.
  Outcome Make(const Library& mpi, int number);
  // Gives back what Make has made. All ranks must make this call, no other may be under way.
  Outcome Free(const Library& mpi);

 private:
  const int devices_;
  const int64_t rest_;              // of the whole communicator
  const std::vector<int> members_;  // in the whole communicator; empty: all
  int first_tag_;
  std::vector<OwnChannel> channels_;
};

// One device of this process in a communicator.
struct Lane {
  Lane(int64_t device_id, int index, OwnChannel& channel, int number)
      : device_id(device_id), channel(channel), number(number), index(index) {}

  const int64_t device_id;
  OwnChannel& channel;
  const int number;      // of the channel
  const int index;       // in the communicator
  Team* team = nullptr;  // the local devices that take part in one collective with this one; null for it alone
  int member = 0;        // in the team
  const Lane* first = nullptr;  // member 0's lane, on which one member speaks for all

  // The call under way, for the watchdog: written by the calling thread, read by any.
  std::atomic<const char*> operation{nullptr};
  std::atomic<int64_t> started_ns{0};  // CLOCK_MONOTONIC
  std::atomic<int64_t> nbytes{0};
};

// What a program names: ranks, and how the devices of each take part.
struct Communicator {
  Communicator(std::string name, int64_t fingerprint, std::shared_ptr<Ranks> ranks)
      : name(std::move(name)), fingerprint(fingerprint), ranks(std::move(ranks)), alone(0, 0, this->ranks->channel(0), 0) {}

  const std::string name;
  const int64_t fingerprint;
  const std::shared_ptr<Ranks> ranks;
  std::atomic<bool> freed{false};
  bool by_position = false;  // lanes are numbered as a mesh numbers its devices
  Lane alone;                // of the device, whichever it is, that makes a rank's only call
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<std::unique_ptr<Team>> teams;

  // Of a part: what it is a part of. Of a whole: the ranks of its parts, by their members; guarded by the table's lock.
  std::shared_ptr<Communicator> whole;
  std::map<std::vector<int>, std::shared_ptr<Ranks>> parts;

  Lane* LaneOf(int64_t device_id) const {
    for (const auto& lane : lanes) {
      if (lane->device_id == device_id) return lane.get();
    }
    return nullptr;
  }
  // Where `size` devices meet that have copies of the same data.
  Team& CopiesOf(int size);

 private:
  std::mutex mutex_;
  std::map<int, Team> copies_;  // by their number; guarded by `mutex_`
};

// The table. All of it may be called from any thread.

// Returns the number.
int64_t AddCommunicator(std::shared_ptr<Communicator> communicator);
// Null if there never was one of that number, or if it was freed long ago. The caller shares it for as long as it needs.
std::shared_ptr<Communicator> FindCommunicator(int64_t number);
// Whether there has been one of that number.
bool WasCommunicator(int64_t number);
// The ranks of a part of a communicator, the same object for the same members.
std::shared_ptr<Ranks> PartOf(Communicator& whole, const std::vector<int>& members, int rank);
// Marks a communicator and its parts as freed, and gives back the channels that calls have made. All ranks must make
// this call, and none of them has a call under way.
Outcome FreeCommunicator(const Library& mpi, int64_t number);
// Those that are not freed.
std::vector<std::shared_ptr<Communicator>> LiveCommunicators();

// CLOCK_MONOTONIC in nanoseconds.
int64_t NowNs();

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_COMMUNICATORS_H_
