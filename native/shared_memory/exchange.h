// The memory through which ranks of one host exchange arrays.
//
// Each slot of the board (board.h) has a counter for each of its ranks, which only that rank writes. The ranks of a
// channel make the same collectives in the same order, so each knows the number to which another one's counter comes at
// each step.
//
// Where all ranks need all in a step, each of a few ranks reads the counters of all others. Many ranks wait in a tree: the first of each kFanIn
// ranks that follow each other waits for the counters of these, and posts in a second counter that all of them have come so far; the
// first of each kFanIn of those waits for their second counters, and so on. The second counter of the first rank stands for all ranks.
//
// The arrays themselves go through buffers. The ranks of a channel take theirs when they first need them, and keep them until
// the channel is freed. If none are left, MPI carries the arrays of that channel. Large arrays need no buffers where the kernel
// lets a rank read another one's memory, or where they lie in memory that all have mapped (shared_arrays.h): beside its counter a rank
// shows the others where its arrays are. For large allreduces the faster algorithm is autotuned.
//
// The states of a buffer of a rank R, for piece p; the steps are those of host_collectives.cc:
//
//   free --- R copies what others need of the piece, and posts ---> filled: others may read it
//   filled --- R has waited until all have filled theirs, reduces its share into its own buffer, and posts; only an allreduce
//              in two steps ---> reduced: others may read the share
//   filled or reduced --- each other rank takes what it needs, and posts ---> free
//
// R sees the last transition at piece p + 2, which lies in the same buffer: it waits until the others' counters have come to
// FreeAt(p + 2). Where the buffer has held the operand of comparison n, it is free when all have posted call n + 1 (board.h).
//
// The states of the arrays of a rank R in a call that reads them:
//
//   hidden --- ShowArrays, and Post ---> shown: others may read `send`
//   shown --- R reduces its share in `recv`, and posts; only an allreduce ---> reduced: others may read that share of `recv`, or
//             find null there after HideResult
//   shown or reduced --- each rank that reads them has posted that it has ---> hidden: R leaves the call
//   shown or reduced --- R must leave before that: GiveUp ---> given up: others discard what they have read
//
// The states of a pair of buffers:
//
//   free --- TakeBuffers: rank 0 of a channel, which tells the others by FirstOf ---> taken
//   taken --- End: rank 0, after MPI's barrier of all ranks of the channel ---> free
//   taken --- EndAll: one rank of the host, after a failure, when none uses a buffer any more ---> free
//
// A state is published by a store with release order, and seen by a load with acquire order. GiveUp has a fence besides
// (exchange.cc). tests/native/explore_test.cc explores these transitions.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_EXCHANGE_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_EXCHANGE_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>

#include "mpi/elements.h"
#include "mpi/wait.h"
#include "shared_memory/autotuner.h"
#include "shared_memory/board.h"

namespace pycollective {

class Exchange {
 public:
  static constexpr int kFanIn = 16;
  // A rank has two buffers of this size, which it uses in turns: it fills one while others may still read the other one.
  static constexpr int64_t kBufferBytes = 128 << 10;

  // The bytes of the shared memory of a host. It begins with zeros, and takes memory of the host where it is used:
  // at most so much for any number of communicators.
  // @param ranks: how many ranks the host has.
  static size_t BytesOf(int ranks);
  // Opens it.
  // @param memory: what the ranks of this host have in common, BytesOf(ranks) bytes. It begins at a line of the cache.
  // @param ranks: how many ranks the host has.
  static void OpenMemory(void* memory, int ranks);

  // When a channel has taken a slot of the board: each of its ranks does this, for the memory that it writes. No rank may use the slot
  // before all have.
  void Begin();
  // When no rank of the channel uses its slot any more, before that is given back: rank 0 gives the buffers back that it has taken.
  void End();
  // Gives all buffers back. No rank of this host may use one any more, nor call End for them.
  static void EndAll();

  // Whether the ranks may read each other's arrays. Each rank shows the others where to try; when all have, each tries. Then they
  // all set how many bytes the arrays of a call may have that they read.
  // @param rank: this rank's number on the host.
  static void ShowMemory(int rank);
  static bool ReadsAll();
  // @param nbytes: of the arrays of all ranks in a call; 0: they read none.
  static void SetReadBytes(int64_t nbytes);
  static int64_t ReadBytes();
  static bool MayRead() { return ReadBytes() > 0; }

  Exchange() = default;
  // The exchange of a channel, as one of its ranks uses it.
  // @param slot: the number of its slot of the board; -1: there is none.
  // @param rank: this rank's number in the channel.
  // @param size: how many ranks the channel has.
  // @param fan_in: for how many ranks one of them waits in a tree; `size`: each rank reads the counters of all others.
  Exchange(int64_t slot, int rank, int size, int fan_in) : slot_(slot), rank_(rank), size_(size), fan_in_(fan_in) {}
  Exchange(int64_t slot, int rank, int size) : Exchange(slot, rank, size, size > BoardSlot::kMostRanks ? kFanIn : size) {}

  bool exists() const { return slot_ >= 0; }

  // Finds this channel's buffers; rank 0 takes them. Returns false if the wait for rank 0 has no end. Then HasBuffers() says
  // whether there are any: the same on all ranks.
  // @param progress: as in WaitUntil, with the rank for which this one waits.
  template <typename Progress>
  bool FindBuffers(Progress progress) {
    if (first_ != 0) return true;
    PostedNumber& first = FirstOf(slot_);
    if (rank_ == 0) first.Post(TakeBuffers(size_), std::memory_order_release);
    if (!WaitUntil(first, 1, [&] { return progress(0); })) return false;
    first_ = first.Load(std::memory_order_relaxed);  // the wait has acquired it, or this rank has stored it
    return true;
  }
  bool HasBuffers() const { return first_ > kNone; }

  // The memory in which a rank has its part of a piece. Pieces count up, from 0. Operands that are piggybacked on a comparison
  // (board.h) lie in the buffers, too, by the number of the call.
  // @param rank: of the channel.
  // @param piece: the number of the piece, or of the call.
  char* BufferOf(int rank, uint64_t piece) const;

  // Where another rank finds a rank's arrays, in the memory of its process.
  struct Arrays {
    int64_t process;
    const void* send;
    const void* recv;
  };
  // Before this rank posts a step. The others may read it when they have waited for that step, until this rank shows others.
  // @param send: the operand, in the memory of this process.
  // @param recv: the result.
  void ShowArrays(const void* send, const void* recv);
  // Shows null for `recv` from this rank's next step on: it has no result. Others may still read `send`.
  void HideResult();
  // @param rank: of the channel.
  Arrays ArraysOf(int rank) const;
  // Where this rank reads an array of another rank, or an element of it, with plain loads: it lies in memory that both have mapped
  // (shared_arrays.h). Null if it does not: then the kernel copies it.
  // @param rank: of the channel.
  // @param data: as ArraysOf shows it, or behind it.
  const void* Mapped(int rank, const void* data) const;

  // A rank that must leave a call before the others have read its arrays marks them invalid. Readers discard what they copied.
  void GiveUp();
  // @param rank: of the channel, whose arrays this rank has read.
  bool HasGivenUp(int rank) const;

  // The algorithm (autotuner.h) of the channel's next large allreduce. Rank 0 autotunes: in each large allreduce
  // it publishes the algorithm of the next one. It does so when all ranks have begun the call, and so have read the algorithm of
  // this call. No rank ends the call before rank 0's next step, so all read the new algorithm in the next call.
  // @param nbytes: of the array.
  int NextAlgorithm(int64_t nbytes) const {
    return static_cast<int>(AlgorithmsOf(slot_).load(std::memory_order_relaxed) >> PowerOfTwo(nbytes) & 1);
  }
  // @param nbytes: of the array.
  void PublishNextAlgorithm(int64_t nbytes) {
    if (rank_ != 0) return;
    const int size = PowerOfTwo(nbytes);  // each size learns for itself
    const uint64_t others = AlgorithmsOf(slot_).load(std::memory_order_relaxed) & ~(uint64_t{1} << size);
    AlgorithmsOf(slot_).store(others | static_cast<uint64_t>(autotuners_[size].Next()) << size, std::memory_order_relaxed);
  }
  // A large allreduce has ended.
  // @param algorithm: by which it was made.
  // @param nbytes: of the array.
  // @param nanoseconds: what it has taken.
  void Learn(int algorithm, int64_t nbytes, int64_t nanoseconds) {
    if (rank_ == 0) autotuners_[PowerOfTwo(nbytes)].Learn(algorithm, nbytes, nanoseconds);
  }

  // Tells the others that this rank has done a step. Returns the number to which each rank's counter comes by that step.
  uint64_t Post() {
    CounterOf(rank_).Post(++posted_, std::memory_order_release);
    return posted_;
  }
  // @param rank: of the channel.
  PostedNumber& counter(int rank) const { return CounterOf(rank); }

  // Waits until a rank's counter has come to a number. Returns false if the wait has no end.
  // @param rank: of the channel.
  // @param progress: as in WaitUntil, with the rank for which this one waits.
  template <typename Progress>
  bool WaitFor(int rank, uint64_t number, Progress progress) const {
    return WaitFor(CounterOf(rank), rank, number, progress);
  }
  // Waits until the counters of all ranks have come to a number, to which this rank has come. Returns false if a wait has no end.
  // It reads the counter of each rank, unless this rank has waited for all since.
  // @param progress: as in WaitUntil, with the rank for which this one waits.
  template <typename Progress>
  bool WaitForEach(uint64_t number, Progress progress) {
    if (number <= seen_of_all_) return true;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_ && !WaitFor(rank, number, progress)) return false;
    }
    seen_of_all_ = number;
    return true;
  }
  // The same in a step in which all ranks wait for all.
  template <typename Progress>
  bool WaitForAll(uint64_t number, Progress progress) {
    if (!WaitsInTree()) return WaitForEach(number, progress);
    for (int step = 1; step < size_ && rank_ % (step * fan_in_) == 0; step *= fan_in_) {
      const int end = std::min(size_, rank_ + step * fan_in_);
      for (int below = rank_ + step; below < end; below += step) {
        if (!WaitFor(step == 1 ? CounterOf(below) : CounterBelow(below), below, number, progress)) return false;
      }
    }
    if (rank_ % fan_in_ == 0 && CounterBelow(rank_).Load(std::memory_order_relaxed) < number) {
      CounterBelow(rank_).Post(number, std::memory_order_release);
    }
    if (rank_ != 0 && !WaitFor(CounterBelow(0), 0, number, progress)) return false;
    seen_of_all_ = std::max(seen_of_all_, number);
    return true;
  }
  // Whether WaitForAll waits in a tree: then all ranks must call it with the same numbers, in the same order.
  bool WaitsInTree() const { return fan_in_ < size_; }

  // A piece begins: returns its number.
  uint64_t BeginPiece() { return pieces_++; }
  // The number of the others' counters at which none of them reads a piece in this rank's buffer for `number`.
  // @param number: of a piece, or of a call.
  uint64_t FreeAt(uint64_t number) const { return free_at_[number % 2]; }
  // All steps of the piece are posted.
  // @param piece: its number.
  void EndPiece(uint64_t piece) { free_at_[piece % 2] = posted_; }

 private:
  static constexpr uint64_t kNone = 1;  // of first_: there are no buffers

  // In these, @param slot: the number of a slot; @param ranks: how many ranks a channel has; @param rank: of the channel.
  static PostedNumber& FirstOf(int64_t slot);
  static std::atomic<uint64_t>& AlgorithmsOf(int64_t slot);
  static uint64_t TakeBuffers(int ranks);
  PostedNumber& CounterOf(int rank) const;
  // The second counter of the first rank of a group: that of all ranks below it in the tree, and of its own.
  PostedNumber& CounterBelow(int rank) const;

  template <typename Progress>
  static bool WaitFor(PostedNumber& counter, int rank, uint64_t number, Progress progress) {
    return counter.Load(std::memory_order_acquire) >= number || WaitUntil(counter, number, [&] { return progress(rank); });
  }

  int64_t slot_ = -1;
  int rank_ = 0;
  int size_ = 0;
  int fan_in_ = 0;
  uint64_t first_ = 0;  // 0: not known yet; kNone; or the number of rank 0's buffers, and kNone + 1
  uint64_t posted_ = 0;
  uint64_t seen_of_all_ = 0;  // this rank has seen that all counters have come so far
  uint64_t pieces_ = 0;
  uint64_t free_at_[2] = {0, 0};
  std::map<int, TwoWayAutotuner> autotuners_;  // for each size, of rank 0
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_EXCHANGE_H_
