// A combining tree of the ranks of a host: the first rank gets what all ranks bring, combined in their order, and all get a result from it.
//
// Each rank has a room in the memory that the ranks share: a number, which only that rank writes, and data. The first of each kFanIn ranks
// that follow each other combines what these bring; the first of each kFanIn of those combines what they have combined; and so on. So in
// a meeting a rank waits for at most kFanIn - 1 others for each level of the tree, and then for the first rank.
//
// The states of the room of a rank R other than the first, in meeting n:
//
//   free --- R has combined what the ranks below it bring, writes that, and posts n ---> filled: the rank above it may read it
//   filled --- R sees that the first rank has posted n, which it does when it has combined what all bring ---> free
//
// The states of the room of the first rank:
//
//   free --- it writes the result, and posts n ---> filled: all others may read it
//   filled --- each rank below it, which waits for those below itself, posts meeting n + 1 ---> free
//
// A rank posts meeting n + 1 when it has read the result of meeting n. A number is posted by a store with release order, and seen by a load
// with acquire order. tests/native/explore_test.cc explores these transitions.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_COMBINING_TREE_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_COMBINING_TREE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "mpi/wait.h"

namespace pycollective {

class CombiningTree {
 public:
  static constexpr int kFanIn = 16;
  // What a rank brings, and a result, have at most so many bytes.
  static constexpr size_t kRoomBytes = (36 << 10) - 64;

  // The bytes of the memory that the ranks of a host share. It takes memory of the host where it is used.
  // @param ranks: how many ranks the host has.
  static size_t BytesOf(int ranks);
  // Opens it.
  // @param memory: what the ranks of this host have in common, BytesOf(ranks) bytes. It begins at a page.
  // @param ranks: how many ranks the host has.
  static void OpenMemory(void* memory, int ranks);

  CombiningTree() = default;
  // The tree of a channel, as one of its ranks uses it.
  // @param slot: the number of the channel's slot of the board (board.h).
  // @param rank: this rank's number in the channel.
  // @param size: how many ranks the channel has. All of them are on this host.
  // @param fan_in: how many ranks one of them combines.
  CombiningTree(int64_t slot, int rank, int size, int fan_in = kFanIn) : slot_(slot), rank_(rank), size_(size), fan_in_(fan_in) {}

  // When the channel has taken its slot: each of its ranks does this, for the memory that it writes. No rank may use the tree before
  // all have.
  void Begin();

  // Combines what this rank and the ranks below it bring, and hands that to the rank above it. Returns false if a wait has no end.
  // @param progress: as in WaitUntil, with the rank for which this one waits.
  // @param add: add(data) adds what lies there, of the ranks that follow those of which this rank has all.
  // @param write: write(data) writes all that this rank has, if it is not the first.
  template <typename Progress, typename Add, typename Write>
  bool Combine(Progress progress, Add add, Write write) {
    const uint64_t meeting = ++meetings_;
    for (int step = 1; step < size_; step *= fan_in_) {
      if (rank_ % (step * fan_in_) != 0) {
        write(static_cast<void*>(RoomOf(rank_).data));
        RoomOf(rank_).posted.Post(meeting, std::memory_order_release);
        return true;
      }
      const int end = std::min(size_, rank_ + step * fan_in_);
      for (int below = rank_ + step; below < end; below += step) {
        if (!WaitUntil(RoomOf(below).posted, meeting, [&] { return progress(below); })) return false;
        add(static_cast<const void*>(RoomOf(below).data));
      }
    }
    return true;
  }

  // Hands the first rank's result to all, after Combine. Returns false if a wait has no end.
  // @param progress: as in WaitUntil, with the rank for which this one waits.
  // @param write: write(data) writes the result, on the first rank.
  // @param read: read(data) reads it, on the others.
  template <typename Progress, typename Write, typename Read>
  bool Share(Progress progress, Write write, Read read) {
    Room& first = RoomOf(0);
    if (rank_ == 0) {
      write(static_cast<void*>(first.data));
      first.posted.Post(meetings_, std::memory_order_release);
      return true;
    }
    if (!WaitUntil(first.posted, meetings_, [&] { return progress(0); })) return false;
    read(static_cast<const void*>(first.data));
    return true;
  }

 private:
  struct Room {
    PostedNumber posted;
    char padding[64 - sizeof(PostedNumber)];
    char data[kRoomBytes];
  };
  // @param rank: of the channel.
  Room& RoomOf(int rank) const;

  int64_t slot_ = 0;
  int rank_ = 0;
  int size_ = 0;
  int fan_in_ = kFanIn;
  uint64_t meetings_ = 0;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_COMBINING_TREE_H_
