// Implementation of comparison.h.

#include "calls/comparison.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <random>

#include "mpi/backoff.h"
#include "mpi/doubling.h"
#include "mpi/reduction.h"
#include "records/recorder.h"
#include "shared_memory/combining_tree.h"

namespace pycollective {

CallDescription::CallDescription(const Post& post) : post(post) { CopyLine(SiteText(post.site), line); }

// Sections -------------------------------------------------------------------------------------------------------

Sections::Coverage Sections::Enter(const Section& section, uint64_t call) {
  const bool continues = section.id != 0 && !section.begins && section.id == own_.id && section.run == own_.run;
  call_ = call;
  is_covered_ = continues && made_ < covered_;
  if (is_covered_) return known_[own_.id].history.own[made_++] == call ? Coverage::kCovered : Coverage::kDiffers;
  if (continues) return Coverage::kNone;
  // A run that was covered, or that has ended early by an error, tells no more than the history.
  if (has_history_ && made_ > covered_) known_[own_.id].history = std::move(now_);
  own_ = section;
  now_ = {};
  made_ = covered_ = 0;
  has_offered_ = has_history_ = false;
  constexpr size_t kMost = 1 << 14;
  if (section.id == 0 || (known_.size() >= kMost && known_.count(section.id) == 0)) return Coverage::kNone;
  // Other calls may have come between two parts of a section. Then the second part is no run of it.
  Past& past = known_[section.id];
  has_history_ = section.begins || past.run != section.run;
  past.run = section.run;
  return Coverage::kNone;
}

std::optional<uint64_t> Sections::Offer() {
  if (!has_history_ || is_covered_ || has_offered_) return {};
  const History& history = known_[own_.id].history;
  if (history.own.size() <= made_ || history.own[made_] != call_) return {};
  has_offered_ = true;
  uint64_t offer = 0;
  for (const uint64_t word : {history.hash, uint64_t{history.own.size()}, now_.hash, uint64_t{made_}}) offer = Mix(offer, word);
  return offer;
}

void Sections::Add(uint64_t call) {
  constexpr size_t kMost = 1 << 16;  // those that follow are compared in each run
  if (!has_history_ || is_covered_ || made_ >= kMost) return;
  if (now_.own.size() < made_) now_ = known_[own_.id].history;  // this run was covered up to here
  now_.hash = Mix(now_.hash, call);
  now_.own.push_back(call_);
  ++made_;
}

void Sections::Compared(uint64_t call, bool all_offer) {
  Add(call);
  if (all_offer) covered_ = known_[own_.id].history.own.size();
}

void Sections::Known(uint64_t call) { Add(Mix(1, call)); }

// Blocks ---------------------------------------------------------------------------------------------------------

// What the ranks combine. The sums are of hashes: they are what they must be if all ranks have the same, and else but once in
// 2^50 comparisons that differ.
struct Comparison::Block {
  uint64_t calls;     // of the calls
  uint64_t by_rank;   // of the calls with the numbers of their ranks
  uint64_t numbers;   // of the numbers of the calls on the channel, and of what data the ranks bring
  uint64_t offers;    // of the histories of sections
  int32_t type, op;   // of the operands of a reduction; kGathered: the operands stand one after another
  int32_t nbytes;     // of the data
  int32_t total;      // of the data when those of all ranks are in: a rank brings its share of it, or as much
  alignas(16) char data[kMostBytes];

  static constexpr int64_t kHeadBytes = 48;  // what stands before the data
  static constexpr int32_t kGathered = -1;

  // Messages and rooms of a tree hold no more of a block than this.
  int64_t size() const { return kHeadBytes + nbytes; }
  void CopyTo(void* to) const { std::memcpy(to, this, static_cast<size_t>(size())); }
  void CopyFrom(const void* from) {
    std::memcpy(static_cast<void*>(this), from, kHeadBytes);
    std::memcpy(data, static_cast<const char*>(from) + kHeadBytes, static_cast<size_t>(nbytes));
  }

  // Adds the block of the ranks that come next. The order of the additions decides the bits of a sum.
  void Add(const Block& next) {
    calls += next.calls;
    by_rank += next.by_rank;
    numbers += next.numbers;
    offers += next.offers;
    if (total == 0 || total != next.total || type != next.type || op != next.op) return;  // no data, or the calls differ
    if (type == kGathered) {
      std::memcpy(data + nbytes, next.data, static_cast<size_t>(next.nbytes));
      nbytes += next.nbytes;
      return;
    }
    ReduceInPlace(data, next.data, nbytes / kTypeBytes[type], static_cast<Type>(type), static_cast<Op>(op));
  }
};

// Each block stands for ranks that follow each other, and the lower ones come first.
Outcome Comparison::CombineByMessages(const Library& mpi, const Channel& channel, int tag, Block* combined) {
  Block memory;
  const auto nbytes = [](const void* block) { return static_cast<const Block*>(block)->size(); };
  const auto add = [](void* block, const void* next) { static_cast<Block*>(block)->Add(*static_cast<const Block*>(next)); };
  return CombineByDoubling(mpi, channel, tag, combined, &memory, sizeof(Block), nbytes, true, add);
}

Outcome Comparison::CombineInTree(const Library& mpi, const Channel& of_host, const Channel* leaders, Block* combined) {
  static_assert(sizeof(Block) <= CombiningTree::kRoomBytes);
  Outcome progress;
  const auto make_progress = [&](int rank) {
    progress = mpi.Progress(of_host, rank);
    return progress.ok();
  };
  const auto add = [&](const void* next) { combined->Add(*static_cast<const Block*>(next)); };
  const auto write = [&](void* room) { combined->CopyTo(room); };
  const auto read = [&](const void* room) { combined->CopyFrom(room); };
  if (of_host.tree != nullptr && !of_host.tree->Combine(make_progress, add, write)) return progress;
  if (leaders != nullptr) PYCOLLECTIVE_RETURN_IF_FAILED(CombineByMessages(mpi, *leaders, 0, combined));
  if (of_host.tree != nullptr && !of_host.tree->Share(make_progress, write, read)) return progress;
  return {};
}

Outcome Comparison::CombineAll(const Library& mpi, const Channel& channel, Block* block, bool* by_host) {
  *by_host = false;
  if (channel.tree != nullptr) return CombineInTree(mpi, channel, nullptr, block);
  const bool in_levels = in_levels_ && channel.levels != nullptr && channel.levels->HasSharedHost();
  if (in_levels) PYCOLLECTIVE_RETURN_IF_FAILED(channel.levels->Make(mpi, channel, by_host));
  if (*by_host) return CombineInTree(mpi, channel.levels->of_host(), channel.levels->leaders(), block);
  return CombineByMessages(mpi, ChannelOfOwnMessages(channel), channel.own_tag, block);
}

// Comparisons ----------------------------------------------------------------------------------------------------

namespace {

// A number that no other call has, for a rank that has no history to offer.
uint64_t NoOffer() {
  static auto& numbers = *new std::mt19937_64(std::random_device{}());
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  return numbers();
}

std::atomic<int64_t> comparisons{0};

// Finds the same difference on all ranks, if there is one. Each rank compares its call with a reference: first rank 0's call, then
// calls that match the references before, but are equal to none of them. So each pair of unequal calls is compared on both sides: a
// rank alone knows whether it has the other's line in a program of its own.
Outcome FindDifference(const Library& mpi, const Channel& channel, const Post& own, Difference* found) {
  Channel flat = channel;  // not in levels, since a rank may come from another call
  flat.levels = nullptr;
  flat.exchange = nullptr;
  const CallDescription own_call(own);
  const auto of_rank = [&](int64_t rank, CallDescription* call) {
    *call = own_call;
    Arguments a{call, call, sizeof(CallDescription), Type::kUint8};
    a.root = static_cast<int>(rank);
    return mpi.Bcast(flat, a);
  };
  // The first rank for which a condition is true; the number of ranks if there is none.
  const auto first = [&](bool is_true, int64_t* rank) {
    const int64_t mine = is_true ? channel.rank : channel.size;
    return mpi.Allreduce(flat, {&mine, rank, 1, Type::kInt64, Op::kMin});
  };
  bool is_reference = false;  // the call of this rank is equal to a reference
  for (int64_t reference = 0; reference < channel.size;) {
    CallDescription theirs;
    PYCOLLECTIVE_RETURN_IF_FAILED(of_rank(reference, &theirs));
    const bool matches = own.Matches(theirs.post);
    int64_t other = 0;
    PYCOLLECTIVE_RETURN_IF_FAILED(first(!matches, &other));
    if (other < channel.size) {
      CallDescription others;
      PYCOLLECTIVE_RETURN_IF_FAILED(of_rank(other, &others));
      const CallDescription& shown = matches ? others : theirs;
      *found = {static_cast<int>(matches ? other : reference), shown.post, shown.line};
      return {};
    }
    is_reference = is_reference || own.Digest() == theirs.post.Digest();
    PYCOLLECTIVE_RETURN_IF_FAILED(first(!is_reference, &reference));
  }
  return {};
}

}  // namespace

bool Comparison::Carries(const Channel& channel, const PiggybackedCollective& piggybacked) const {
  static_assert(offsetof(Block, data) == Block::kHeadBytes);
  const int64_t nbytes = piggybacked.nbytes();
  if (nbytes > kMostBytes) return false;
  if (!piggybacked.reduction().has_value()) return nbytes * channel.size <= kMostBytes;
  return SentByDoubling(nbytes, channel.size) <= kMostByDoubling;
}

int64_t Comparison::made() { return comparisons.load(std::memory_order_relaxed); }

Outcome Comparison::Compare(const Library& mpi, const Channel& channel, const Post& own, const PiggybackedCollective* piggybacked,
                            Difference* found) {
  const WithNonblocking on_all_ranks;  // nonblocking on all ranks, since the ranks may come from different calls
  comparisons.fetch_add(1, std::memory_order_relaxed);
  const uint64_t call = Mix(0, own.DigestWithoutNumber());
  const std::optional<uint64_t> history = sections.Offer();
  const uint64_t offer = history.has_value() ? Mix(2, *history) : NoOffer();
  const Member member{channel.rank, channel.size};
  Block block;  // its data are not set
  block.calls = call;
  block.by_rank = Mix(call, static_cast<uint64_t>(channel.rank));
  block.offers = offer;
  block.type = Block::kGathered;
  block.op = block.nbytes = block.total = 0;
  const auto own_bytes = static_cast<int32_t>(piggybacked != nullptr ? piggybacked->nbytes() : 0);
  uint64_t number = Mix(1, static_cast<uint64_t>(own.seq));
  if (piggybacked != nullptr) {
    block.nbytes = own_bytes;
    if (const auto reduction = piggybacked->reduction()) {
      block.type = static_cast<int32_t>(reduction->type);
      block.op = static_cast<int32_t>(reduction->op);
      block.total = own_bytes;
    } else {
      block.total = own_bytes * channel.size;
    }
    piggybacked->Pack(member, block.data);
    for (const int32_t word : {block.type, block.op, block.total}) number = Mix(number, static_cast<uint64_t>(word));
  }
  block.numbers = number;
  bool by_host = false;
  PYCOLLECTIVE_RETURN_IF_FAILED(meetings_.Run([&] { return CombineAll(mpi, channel, &block, &by_host); }));
  const auto all_have = [&](uint64_t sum, uint64_t of_this_rank) {
    return sum == of_this_rank * static_cast<uint64_t>(channel.size);
  };
  const bool are_known = all_have(block.calls, call) || matching_.count(block.by_rank) != 0;
  const bool bring_alike = all_have(block.numbers, number);
  if (!are_known || !bring_alike) {
    PYCOLLECTIVE_RETURN_IF_FAILED(FindDifference(mpi, channel, own, found));
    if (found->rank >= 0) return {};
    constexpr size_t kMost = 1 << 14;
    if (matching_.size() >= kMost) matching_.clear();  // on all ranks at the same call
    matching_.insert(block.by_rank);
  }
  sections.Compared(block.by_rank, history.has_value() && all_have(block.offers, offer));
  found->is_made = piggybacked != nullptr && bring_alike;
  if (!found->is_made) return {};
  if (piggybacked->reduction().has_value()) {
    piggybacked->CompleteReduced(member, block.data);
  } else {
    found->is_made = piggybacked->Complete(member, [&](int rank) {
      return block.data + int64_t{by_host ? channel.levels->PlaceByHost(rank) : rank} * own_bytes;
    });
  }
  return {};
}

}  // namespace pycollective
