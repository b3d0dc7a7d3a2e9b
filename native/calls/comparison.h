// The comparison of a call between ranks that do not post their calls on a board: ranks of several hosts, or many ranks of one.
//
// Before the call each rank makes a block: sums of hashes, and the operand of a small collective. The blocks of all ranks are combined,
// so that the costs grow with the logarithm of the number of ranks: within a host in a tree in shared memory, and between the first ranks
// of the hosts by messages. By the sums each rank sees whether all ranks make the same call; all
// ranks come to the same verdict. Only if they do not, their descriptions travel. So the
// data of a small collective arrive with the verdict, in the same messages: the reduction of all operands, or all operands.
//
// A program makes most of its calls in the same order at each run. Such calls are a *section*: those of a program between two
// places where its control flow depends on data. The ranks compare each call of a section in its first run. Each rank keeps a
// hash of what they have compared, the *history* of the section, which is the same on all ranks. In a later run they compare
// their histories with the first call. If these are equal, the calls of the section need no comparison in that run.

#ifndef PYCOLLECTIVE_NATIVE_CALLS_COMPARISON_H_
#define PYCOLLECTIVE_NATIVE_CALLS_COMPARISON_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "mpi/collectives.h"
#include "mpi/stop_after_failure.h"
#include "shared_memory/board.h"
#include "shared_memory/host_levels.h"
#include "shared_memory/piggyback.h"

namespace pycollective {

// The description of a call, for ranks that do not share memory.
struct CallDescription {
  Post post;
  char line[kLineBytes] = {};

  CallDescription() = default;
  explicit CallDescription(const Post& post);
};

// The section of a call, as its program says.
struct Section {
  // A hash of all calls of the section, as this rank makes them; 0: the call is in no section.
  int64_t id = 0;
  // Whether the call is the first one after a place where the control flow depends on data.
  bool begins = false;
  // The number of the run of the program in this process.
  int64_t run = 0;
};

// The sections of one channel, as this rank knows them.
class Sections {
 public:
  enum class Coverage {
    kNone,     // the ranks must compare the call
    kCovered,  // the ranks have compared their histories in this run, and need not compare the call
    kDiffers,  // it is covered, but this rank has made another call there before
  };
  // Takes the next call of the channel. `call`: a hash of it, as this rank makes it.
  Coverage Enter(const Section& section, uint64_t call);
  // For a call that is compared: the history of its section. Nothing if there is none, if it has another call of this rank here, or
  // if this run has offered it.
  std::optional<uint64_t> Offer();
  // The call was compared. `call`: a hash of the calls of all ranks, the same on all of them. `all_offer`: whether all ranks have
  // offered the same history.
  void Compared(uint64_t call, bool all_offer);
  // The call was not compared, since the ranks have agreed on such a call before. `call`: its hash.
  void Known(uint64_t call);

 private:
  struct History {
    uint64_t hash = 0;          // of what all ranks have compared
    std::vector<uint64_t> own;  // hashes of the calls of this rank
  };
  struct Past {
    History history;  // of the last run that was compared
    int64_t run = -1;  // the last one
  };
  void Add(uint64_t call);

  Section own_;              // of the last call
  uint64_t call_ = 0;        // a hash of the last call
  bool is_covered_ = false;  // the last call
  bool has_history_ = false; // whether this run counts: it is in a section, and has entered it once, or where the section begins
  bool has_offered_ = false;
  size_t made_ = 0;     // the number of calls of this run
  size_t covered_ = 0;  // how many of them need no comparison, from the first on; 0: none
  History now_;         // of this run, as long as its calls are compared
  std::unordered_map<int64_t, Past> known_;
};

// The comparisons of one channel.
class Comparison {
 public:
  Comparison() = default;
  // `in_levels`: whether ranks of one host meet in their memory, if they can.
  explicit Comparison(bool in_levels) : in_levels_(in_levels) {}

  // Whether a comparison can carry the data of a collective: the same on all ranks that make this call.
  bool Carries(const Channel& channel, const PiggybackedCollective& piggybacked) const;

  // Compares the call of this rank with the calls of all ranks of the channel, which must all make this call. Sets `found` to a
  // call that does not match, on all ranks or on none. If all match and bring data of one kind and length, it also makes the
  // collective `piggybacked`, which it must be able to carry, and says so in `found->is_made`, on all ranks or on none; null: no data.
  Outcome Compare(const Library& mpi, const Channel& channel, const Post& own, const PiggybackedCollective* piggybacked,
                  Difference* found);

  // How many comparisons this process has made, on all channels.
  static int64_t made();

  Sections sections;

 private:
  struct Block;

  // The room for data in a block, in bytes.
  static constexpr int64_t kMostBytes = 32 << 10;

  // Combines the blocks of all ranks of the channel. Sets `by_host` if their data stand host by host, not rank by rank.
  Outcome CombineAll(const Library& mpi, const Channel& channel, Block* block, bool* by_host);
  // Combines the blocks of the ranks of a channel by messages.
  static Outcome CombineByMessages(const Library& mpi, const Channel& channel, int tag, Block* combined);
  // The same for ranks of one host, in their tree, and for all hosts by messages of their first ranks. `leaders`: those, on one of them;
  // else null.
  static Outcome CombineInTree(const Library& mpi, const Channel& of_host, const Channel* leaders, Block* combined);

  bool in_levels_ = false;
  StopAfterFailure meetings_;
  // Hashes of calls that differ between ranks, and match all the same.
  std::unordered_set<uint64_t> matching_;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_COMPARISON_H_
