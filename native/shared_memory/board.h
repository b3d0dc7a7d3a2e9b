// The board of a host: shared memory in which the ranks of the host post what they are about to call.
//
// Before a collective each rank posts its call. If no rank can end the call before all have come to it, as in a sum, it waits
// until all others have posted theirs: it would otherwise wait in the collective. If they differ, every rank gets an error,
// and none has called MPI. So it does in a call that is new to it. In other calls, such as a broadcast, a rank looks at the
// posts that are there: of two ranks whose calls differ the one that comes last gets the error, before it calls MPI. The other one
// may have made its call, so their numbers of calls differ in MPI and in the buffers. From then on the rank that has the error
// posts that it is out of step, and each further call on the channel is an error.
//
// The states of a slot, for one channel at a time:
//
//   free --- Take: one rank of the channel; MPI's broadcast tells the others ---> taken
//   taken --- Begin: each rank clears its own cells, so that they lie in memory near its core; then MPI's barrier ---> in use
//   in use --- Release: one rank, after MPI's barrier of all ranks of the channel ---> free
//   in use --- ReleaseAll: one rank of the host, after a failure, when none uses a slot any more ---> free
//
// The states of a cell of a rank R, which holds every eighth call of a channel; here it is call n:
//
//   free --- R writes the call, and an operand that is piggybacked there ---> filled
//   filled --- R stores `posted` = n ---> posted: each other rank may read the call and the operand
//   posted --- R has found a call that differs, writes its line, and stores `described` = n ---> described: others may read it
//   filled --- R is out of step, and stores `described` = n before `posted` = n ---> described
//   posted or described --- each other rank has posted call n + 1, so it reads no cell of call n any more ---> free
//
// R sees the last transition in call n + 8, which lies in the same cell: it waits until all others have posted call n + 1.
// `posted` and `described` stay; they are numbers of calls, so nobody takes those of call n for those of call n + 8.
//
// The states of a buffer of R in which it piggybacks an operand, of every second call:
//
//   free --- R copies the operand of call n ---> filled
//   filled --- R stores `posted` = n ---> posted: each other rank may read the operand
//   posted --- all others have posted call n + 1, for which R waits in its own call n + 1 ---> free
//
// A state is published by a store with release order, and seen by a load with acquire order. `posted` has memory_order_seq_cst:
// else each of two ranks might see that the other has not posted yet. tests/native/explore_test.cc explores these transitions.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_BOARD_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_BOARD_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "records/signature.h"
#include "shared_memory/piggyback.h"

namespace pycollective {

// What a rank posts for one call.
struct Post {
  Signature signature;
  int64_t site = 0;  // the line that made the call; 0: unknown
  int64_t seq = 0;   // the number of the call on its channel, where its place among the calls does not tell it
  // Of a line that makes several reductions in a program. The high 32 bits hash where the operands of this reduction come from,
  // among the arguments of the program. The low 32 bits hash the same over all these reductions, in any order. 0: the line
  // makes one reduction, or the hashes of all are equal.
  int64_t order = 0;

  // `seq` of a rank that has refused an earlier call, which another rank may have made. It matches no call of other ranks.
  static constexpr int64_t kOutOfStep = -1;

  // Whether the other rank makes the same call. In a symmetric call the lines are compared, too: else two sums of equal shapes in
  // another order would mix, and so would a sum and a mean, which are the same call. The lines may differ if this rank does not
  // run the other's function. What JAX derives from a call, such as its transpose, is another collective.
  // @param other: the post of the other rank for this call.
  bool Matches(const Post& other) const;

  // Whether the other rank makes the reductions of one line in another order, so that their operands are exchanged.
  // @param other: the post of the other rank for this call.
  bool HasReorderedOperands(const Post& other) const;

  // A hash of all that Matches compares. Posts with unequal hashes may match all the same, by their lines.
  uint64_t Digest() const;
  // The same without the number of the call on its channel.
  uint64_t DigestWithoutNumber() const;
};

// A call of another rank that does not match.
struct Difference {
  int rank = -1;  // -1: all calls match
  Post theirs;
  std::string line;
  bool is_made = false;  // all match, and the comparison has made the piggybacked collective
  bool others_may_go_on = false;  // one differs, and another rank may make its call all the same
};

// A line as ranks tell each other; the end of a long one is cut off.
// @param line: the text.
// @param to: where it is written; zeros follow it.
inline constexpr size_t kLineBytes = 128;
void CopyLine(const std::string& line, char (&to)[kLineBytes]);

// The posts of the ranks of one channel. All of them are on one host.
class BoardSlot {
 public:
  static constexpr int64_t kSlots = 256;
  // More ranks compare their calls in a tree (combining_tree.h): on a board each reads the posts of all.
  static constexpr int kMostRanks = 32;

  // The bytes of the shared memory of a host. It begins with zeros.
  // @param ranks: how many ranks the host has.
  static size_t BytesOf(int ranks);

  // Opens the board of this host.
  // @param memory: what the ranks of the host share, BytesOf(ranks) bytes; null: closes the board.
  // @param ranks: how many ranks the host has.
  static void OpenBoard(void* memory, int ranks);
  static bool HasBoard();

  // Takes a free slot and returns its number; -1: there is none, of which the user is told once. One rank of the channel does so, and
  // tells the others.
  static int64_t Take();
  // Gives a slot back. One rank of the channel does so, when no rank of it posts or reads any more.
  // @param number: of the slot; -1: there is none.
  static void Release(int64_t number);

  BoardSlot() = default;
  // The slot of a channel, as one of its ranks uses it.
  // @param number: of the slot; -1: there is none.
  // @param rank: this rank's number in the channel.
  // @param size: how many ranks the channel has.
  BoardSlot(int64_t number, int rank, int size) : number_(number), rank_(rank), size_(size) {}

  // Clears this rank's cells. Each rank of the channel does so when the slot is taken. No rank may post or look at posts before all have.
  void Begin();
  bool exists() const { return number_ >= 0; }

  // The operands that may be piggybacked in a rank's cell, beside its post. With more ranks they are smaller, since each rank
  // reads those of all.
  static constexpr int64_t kPiggybackBytes = 1 << 10;
  // Whether an operand may be piggybacked there.
  // @param piggybacked: the collective.
  // @param ranks: how many ranks the channel has.
  static bool FitsCell(const PiggybackedCollective& piggybacked, int ranks) {
    constexpr int64_t kOfAllRanks = 16 << 10;
    return piggybacked.nbytes() <= std::min(kPiggybackBytes, kOfAllRanks / ranks);
  }

  // The memory of a rank's operand, for a call of that number.
  using BufferOfRank = std::function<char*(int rank, uint64_t call)>;
  // Posts a call and compares it with those of the others.
  // @param post: the call.
  // @param waits: whether to wait until all have posted theirs.
  // @param progress: called from time to time, with the rank that the wait is for. If it returns false, that rank will not post,
  //     or the channel is abandoned; the wait ends, and the result of Compare has no meaning.
  // @param piggybacked: a collective whose operands travel with the posts; null: none. If no call differs, Compare also
  //     completes it, as soon as the ranks have posted whose data it needs.
  // @param buffer_of: where operands lie; null: in the cells. Calls whose numbers are both even or both odd may have the same
  //     memory. `waits` must be true. The collective is completed only if every rank has passed `piggybacked`; a rank without a
  //     buffer passes null.
  Difference Compare(const Post& post, bool waits, const std::function<bool(int)>& progress,
                     const PiggybackedCollective* piggybacked = nullptr, const BufferOfRank* buffer_of = nullptr);
  // The number of the next call.
  uint64_t next_call() const { return calls_ + 1; }

  // Makes all slots free. No rank of this host may use one any more.
  static void ReleaseAll();

 private:
  struct Cell;
  // @param rank: of the channel.
  // @param call: the number of a call on the channel; calls begin at 1.
  Cell& CellOf(int rank, uint64_t call) const;

  int64_t number_ = -1;
  int rank_ = 0;
  int size_ = 0;
  uint64_t calls_ = 0;
  uint64_t last_in_buffer_ = 0;  // the last call whose operand this rank has piggybacked in a buffer; 0: none
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_BOARD_H_
