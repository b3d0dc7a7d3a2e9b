// Implementation of board.h.
//
// Each rank has kCells cells in a slot, which it uses in turns. It posts call n when all others have posted call
// n - kCells + 1: then they are done with its post of call n - kCells, which lay in the same cell. So a rank may be some calls
// ahead of the others, where these calls let it. Of two ranks at least one sees the post of the other: posts and looks at
// `posted` have one order on all ranks.
//
// Where a rank piggybacks its operand in a buffer, the others read the buffer in that call. In the next call the rank waits until
// all others have posted. By then they have read the buffer, so the rank may write it again. The operand of the next call may
// be piggybacked in the other buffer before that wait.

#include "shared_memory/board.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "base/clock.h"
#include "mpi/wait.h"
#include "records/recorder.h"

namespace pycollective {
namespace {

constexpr uint64_t kCells = 8;
constexpr int64_t kSlots = BoardSlot::kSlots;
constexpr size_t kHeadBytes = 64;        // a bit for each slot; then cells begin at a line of the cache
static_assert(kHeadBytes * 8 >= kSlots);
constexpr int64_t kLineNs = 2000000000;  // how long a rank waits for the line of a call that does not match

char* board = nullptr;
int ranks_of_host = 0;

std::atomic<uint64_t>* Taken() { return reinterpret_cast<std::atomic<uint64_t>*>(board); }

}  // namespace

bool Post::Matches(const Post& other) const {
  if (!(signature == other.signature) || seq != other.seq || HasReorderedOperands(other)) return false;
  if (site == other.site || site == 0 || other.site == 0 || !IsSymmetric(signature.operation)) return true;
  const bool same_function = FunctionOf(site) == FunctionOf(other.site);
  const bool same_collective = CollectiveOf(site) == CollectiveOf(other.site);
  return same_collective && !same_function && SiteText(other.site).empty();
}

bool Post::HasReorderedOperands(const Post& other) const {
  return order != 0 && order != other.order && static_cast<uint32_t>(order) == static_cast<uint32_t>(other.order);
}

uint64_t Post::Digest() const {
  const int64_t line = IsSymmetric(signature.operation) ? site : 0;
  uint64_t hash = signature.Digest();
  for (const int64_t word : {seq, line, order}) hash = Mix(hash, static_cast<uint64_t>(word));
  return hash;
}

uint64_t Post::DigestWithoutNumber() const {
  Post unnumbered = *this;
  unnumbered.seq = 0;
  return unnumbered.Digest();
}

void CopyLine(const std::string& line, char (&to)[kLineBytes]) {
  const size_t size = std::min(line.size(), kLineBytes - 1);
  std::memset(to, 0, kLineBytes);
  std::memcpy(to, line.data(), size);
}

struct alignas(64) BoardSlot::Cell {
  PostedNumber posted;  // the number of the call; calls begin at 1
  int64_t site;
  int64_t order;
  PostedNumber described;  // the number of the call whose line stands below
  int64_t has_operand;  // whether the rank has piggybacked its operand
  int64_t waits_for_all;  // whether the rank goes on only when it has seen all posts
  int64_t seq;
  char padding[8];
  Signature signature;
  char line[kLineBytes];
  alignas(64) char piggybacked[kPiggybackBytes];
};

size_t BoardSlot::BytesOf(int ranks) {
  static_assert(kHeadBytes % alignof(Cell) == 0);
  return kHeadBytes + static_cast<size_t>(kSlots) * static_cast<size_t>(ranks) * kCells * sizeof(Cell);
}

void BoardSlot::OpenBoard(void* memory, int ranks) {
  board = static_cast<char*>(memory);
  ranks_of_host = ranks;
}

bool BoardSlot::HasBoard() { return board != nullptr; }

BoardSlot::Cell& BoardSlot::CellOf(int rank, uint64_t call) const {
  const size_t place = static_cast<size_t>(number_) * static_cast<size_t>(ranks_of_host) + static_cast<size_t>(rank);
  return reinterpret_cast<Cell*>(board + kHeadBytes)[place * kCells + call % kCells];
}

int64_t BoardSlot::Take() {
  if (board == nullptr) return -1;
  for (int64_t number = 0; number < kSlots; ++number) {
    std::atomic<uint64_t>& word = Taken()[number / 64];
    const uint64_t bit = uint64_t{1} << (number % 64);
    if ((word.fetch_or(bit, std::memory_order_acquire) & bit) == 0) return number;
  }
  static const bool is_said = std::fputs(
      "pycollective: expected a free slot of the memory that the ranks of this host share, got 256 communicators that have one. MPI makes the "
      "calls of further communicators, which takes longer. Free the communicators that you do not need any more (Communicator.free).\n", stderr) >= 0;
  static_cast<void>(is_said);
  return -1;
}

void BoardSlot::Begin() {
  for (uint64_t call = 0; call < kCells; ++call) {
    CellOf(rank_, call).posted.Clear();
    CellOf(rank_, call).described.Clear();
  }
}

void BoardSlot::Release(int64_t number) {
  if (board == nullptr || number < 0) return;
  Taken()[number / 64].fetch_and(~(uint64_t{1} << (number % 64)), std::memory_order_release);
}

void BoardSlot::ReleaseAll() {
  for (int64_t word = 0; board != nullptr && word < kSlots / 64; ++word) {
    Taken()[word].store(0, std::memory_order_release);
  }
}

Difference BoardSlot::Compare(const Post& post, bool waits, const std::function<bool(int)>& progress,
                              const PiggybackedCollective* piggybacked, const BufferOfRank* buffer_of) {
  const uint64_t call = ++calls_;
  const auto wait = [&](int rank, PostedNumber& number, uint64_t wanted, int64_t until_ns) {
    return WaitUntil(number, wanted, [&] { return progress(rank); }, until_ns);
  };
  // `posted` only grows, so `posted >= n` means that call n was posted.
  for (int rank = 0; rank < size_ && call >= kCells; ++rank) {
    if (rank != rank_ && !wait(rank, CellOf(rank, call + 1).posted, call + 1 - kCells, 0)) return {};
  }
  const bool in_buffer = piggybacked != nullptr && buffer_of != nullptr;
  const bool waits_for_all = waits || (call > 1 && last_in_buffer_ == call - 1);
  Cell& own = CellOf(rank_, call);
  own.site = post.site;
  own.order = post.order;
  own.signature = post.signature;
  own.has_operand = piggybacked != nullptr;
  own.waits_for_all = waits_for_all;
  own.seq = post.seq;
  if (piggybacked != nullptr) piggybacked->Pack({rank_, size_}, in_buffer ? (*buffer_of)(rank_, call) : own.piggybacked);
  if (in_buffer) last_in_buffer_ = call;
  const auto describe = [&] {
    CopyLine(SiteText(post.site), own.line);
    own.described.Post(call, std::memory_order_release);
  };
  if (post.seq == Post::kOutOfStep) describe();
  own.posted.Post(call, std::memory_order_seq_cst);

  Difference difference;
  bool all_have_operands = piggybacked != nullptr;
  bool others_may_go_on = false;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    Cell& cell = CellOf(rank, call);
    const bool must_wait = waits_for_all || (piggybacked != nullptr && piggybacked->Needs({rank_, size_}, rank));
    if (must_wait && !wait(rank, cell.posted, call, 0)) return {};
    // A rank that posts later sees this rank's post, too.
    if (cell.posted.Load(std::memory_order_seq_cst) < call) continue;
    // A piggybacked collective needs neither MPI nor the buffers.
    others_may_go_on = others_may_go_on || (cell.waits_for_all == 0 && cell.has_operand == 0);
    if (difference.rank >= 0) continue;
    const Post theirs{cell.signature, cell.site, cell.seq, cell.order};
    if (!post.Matches(theirs)) difference = {rank, theirs, ""};
    all_have_operands = all_have_operands && cell.has_operand != 0;
  }
  if (difference.rank < 0) {
    if (all_have_operands) {
      difference.is_made = piggybacked->Complete({rank_, size_}, [&](int rank) {
        return in_buffer ? (*buffer_of)(rank, call) : CellOf(rank, call).piggybacked;
      });
    }
    return difference;
  }
  difference.others_may_go_on = others_may_go_on;
  describe();
  Cell& theirs = CellOf(difference.rank, call);
  if (waits && !wait(difference.rank, theirs.described, call, NowNs() + kLineNs)) return difference;
  if (theirs.described.Load(std::memory_order_acquire) == call) difference.line = theirs.line;
  return difference;
}

}  // namespace pycollective
