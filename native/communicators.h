// The communicators that compiled programs name by number, with one lane per local device.
//
// A program carries a communicator's number, not its MPI handle: numbers are never used again, so a program
// that outlives its communicator gets an error instead of somebody else's messages.

#ifndef PYCOLLECTIVE_NATIVE_COMMUNICATORS_H_
#define PYCOLLECTIVE_NATIVE_COMMUNICATORS_H_

#include <atomic>
#include <cstdint>
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
  int32_t operation;  // index in kOperations (names.h)
  int32_t dtype;      // XLA's number
  int64_t count;      // elements of the operand
  int32_t reduce_op;  // Op, or -1
  int32_t root;       // or -1
  int64_t pattern;    // a hash of a permutation, or 0
  int64_t staging;    // how arrays get to MPI: 0 they are in plain memory; else in pieces of so many bytes, < 0: directly

  bool operator==(const Signature& other) const {
    return operation == other.operation && dtype == other.dtype && count == other.count &&
           reduce_op == other.reduce_op && root == other.root && pattern == other.pattern && staging == other.staging;
  }
};
static_assert(sizeof(Signature) == 40, "sent as bytes, so without padding");

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

// The private duplicates on which one local device calls.
struct Lane {
  int64_t device_id = 0;
  Channel channel{};
  int index = 0;         // in the communicator
  Team* team = nullptr;  // the local devices that take part in one collective with this one; null for it alone
  int member = 0;        // in the team
  const Lane* first = nullptr;  // member 0's lane, on which one member speaks for all

  // Signatures on which the ranks have already agreed here. Guarded by `mutex`.
  std::mutex mutex;
  std::unordered_set<Signature, SignatureHash> agreed;

  // The call under way, for the watchdog: written by the calling thread, read by any.
  std::atomic<const char*> operation{nullptr};
  std::atomic<int64_t> started_ns{0};  // CLOCK_MONOTONIC
  std::atomic<int64_t> nbytes{0};
};

struct Communicator {
  std::string name;
  std::atomic<bool> freed{false};
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<std::unique_ptr<Team>> teams;
  const Communicator* base = nullptr;  // whose channels a group of local devices x ranks uses

  bool IsFreed() const {
    return freed.load(std::memory_order_acquire) || (base != nullptr && base->IsFreed());
  }
  Lane* LaneOf(int64_t device_id) const {
    for (const auto& lane : lanes) {
      if (lane->device_id == device_id) return lane.get();
    }
    return nullptr;
  }
};

// Numbers count up from 0. Entries stay until the process ends, freed ones too: a program may still name
// them. Returns -1 when the table is full.
int64_t AddCommunicator(std::unique_ptr<Communicator> communicator);
// Null if there never was one of that number. Safe from any thread, without a lock.
Communicator* FindCommunicator(int64_t number);
int64_t CommunicatorCount();

// CLOCK_MONOTONIC in nanoseconds.
int64_t NowNs();

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_COMMUNICATORS_H_
