// The board of a host: shared memory in which the ranks of the host post what they are about to call.
//
// Before a collective each rank posts its call. If no rank can end the call before all have come to it, as in a sum, it waits
// until all others have posted theirs: it would otherwise wait in the collective. If they differ, every rank gets an error,
// and none has called MPI. So it does in a call that is new to it. In other calls, such as a broadcast, a rank looks at the
// posts that are there: of two ranks whose calls differ the one that comes last gets the error, before it calls MPI.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_BOARD_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_BOARD_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "records/signature.h"
#include "shared_memory/carried.h"

namespace pycollective {

// What a rank posts for one call.
struct Post {
  Signature signature;
  int64_t site = 0;  // the line that made the call; 0: unknown
  int64_t seq = 0;   // the number of the call on its channel, where its place among the calls does not tell it
  // Of a line that makes several reductions in a program. The upper half is a hash of how the operands of this one come from
  // the arguments of the program, the lower half one of how those of all come. 0: it makes one, or they all come alike.
  int64_t order = 0;

  // Whether the other rank makes the same call as this one. That concerns the line too, where the data of all ranks has the
  // same part in the call: two sums of equal shapes in another order would mix, and so would a sum and a mean, which are one
  // call. A rank may make the call in a function that this rank does not run. What JAX makes of a call, such as its transpose, is
  // another collective, whoever makes it.
  bool Matches(const Post& other) const;

  // Whether the other rank makes the reductions of one line in another order.
  bool IsMoved(const Post& other) const;

  // A hash of all that Matches compares. Posts with unequal hashes may match all the same, by their lines.
  uint64_t Digest() const;
};

// A call of another rank that does not match.
struct Difference {
  int rank = -1;  // -1: all calls match
  Post theirs;
  std::string line;
  bool is_made = false;  // all match, and the comparison has made the collective
};

// A line as ranks tell each other; the end of a long one is cut off.
inline constexpr size_t kLineBytes = 128;
void CopyLine(const std::string& line, char (&to)[kLineBytes]);

// The posts of the ranks of one channel. All of them are on one host.
class BoardSlot {
 public:
  static constexpr int64_t kSlots = 256;

  // The bytes of the shared memory of `ranks` ranks. It begins with zeros.
  static size_t BytesOf(int ranks);

  // Opens the board of this host, in memory that its ranks share: `ranks` of them.
  static void OpenBoard(void* memory, int ranks);
  static bool HasBoard();

  // Takes a free slot and returns its number; -1: there is none. One rank of the channel does so, and tells the others.
  static int64_t Take();
  static void Release(int64_t number);

  BoardSlot() = default;
  // The slot of this rank, number `rank` of `size`.
  BoardSlot(int64_t number, int rank, int size) : number_(number), rank_(rank), size_(size) {}

  bool exists() const { return number_ >= 0; }
  int64_t number() const { return number_; }

  // What a rank may bring to a call in its cell, beside its post. More ranks may bring less, since each rank reads all.
  static constexpr int64_t kCarriedBytes = 1 << 10;
  static bool IsCarried(const Carried& carried, int ranks) {
    constexpr int64_t kOfAllRanks = 16 << 10;
    return carried.nbytes() <= std::min(kCarriedBytes, kOfAllRanks / ranks);
  }

  // Posts a call and compares it with those of the others. `waits`: it waits until all have posted theirs. Meanwhile
  // `progress` is called from time to time, with the rank that it waits for. If that returns false, the wait ends, and what
  // Compare returns has no meaning: that rank will not post, or the ranks have given the channel up. `carried`: a collective
  // that it also makes, if no call differs, when those have posted whose data it needs; null: none. `buffer_of`: where a rank
  // brings its data to that call, if not to its cell. Calls whose numbers are both even or both odd may have the same one. Then it
  // makes the collective only if all ranks have brought theirs to buffers, so a rank that has none passes null for `carried`;
  // `waits` must be true.
  using BufferOfRank = std::function<char*(int rank, uint64_t call)>;
  Difference Compare(const Post& post, bool waits, const std::function<bool(int)>& progress,
                     const Carried* carried = nullptr, const BufferOfRank* buffer_of = nullptr);
  // The number of the next call.
  uint64_t next_call() const { return calls_ + 1; }

  // Makes all slots free. No rank of this host may use one any more.
  static void ReleaseAll();

 private:
  struct Cell;
  Cell& CellOf(int rank, uint64_t call) const;

  int64_t number_ = -1;
  int rank_ = 0;
  int size_ = 0;
  uint64_t calls_ = 0;
  uint64_t last_in_buffer_ = 0;  // the last call to which this rank has brought data in a buffer; 0: none
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_BOARD_H_
