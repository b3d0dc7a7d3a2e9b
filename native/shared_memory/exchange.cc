// Implementation of exchange.h.

#include "shared_memory/exchange.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "base/clock.h"
#include "shared_memory/process_memory.h"
#include "shared_memory/shared_arrays.h"

namespace pycollective {
namespace {

constexpr size_t kLine = 64;  // of the cache
constexpr size_t kPage = 4096;
constexpr int64_t kUnitBytes = 2 * Exchange::kBufferBytes;  // what one rank takes
constexpr int64_t kLeastUnits = 256;
constexpr int64_t kUnitsPerRank = 4;
constexpr int kMostRanks = 8192;  // a buffer has room for an element of each rank
static_assert(kMostRanks * 16 <= Exchange::kBufferBytes);
constexpr int kTries = 8;  // another channel may take the same ones at the same time

char* memory = nullptr;
int ranks_of_host = 0;

int64_t read_bytes = 0;

// Its rank alone writes it, but for the bit of a rank that sleeps until `number` is posted. The others read the arrays after
// the number.
struct alignas(kLine) Line {
  PostedNumber number;
  int64_t process;
  const void* shared;  // where its process has mapped the memory of shared_arrays.h
  const void* send;
  std::atomic<const void*> recv;  // others may read it while HideResult writes it
  std::atomic<uint64_t> has_given_up;
  std::atomic<uint64_t> algorithms;  // of a slot
  std::atomic<uint64_t> shown;       // of a rank, for MayRead
};
static_assert(sizeof(Line) == kLine);

constexpr size_t AtPage(size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

int64_t Units(int ranks) { return std::max(kLeastUnits, kUnitsPerRank * ranks); }

// In the memory: a line of each rank of the host, for MayRead; for each slot the number of its first unit, and the algorithms
// of its next large allreduces; the counters of each slot's ranks, and their second counters; a word for each unit, which is 1 when it
// is taken; the units.
size_t BytesOfShown(int ranks) { return static_cast<size_t>(ranks) * kLine; }
size_t BytesOfFirsts() { return BoardSlot::kSlots * kLine; }
size_t BytesOfCounters(int ranks) { return BoardSlot::kSlots * static_cast<size_t>(ranks) * 2 * kLine; }
size_t BytesOfTaken(int ranks) { return static_cast<size_t>(Units(ranks)) * sizeof(std::atomic<uint32_t>); }
size_t BytesBeforeUnits(int ranks) {
  return AtPage(BytesOfShown(ranks) + BytesOfFirsts() + BytesOfCounters(ranks) + BytesOfTaken(ranks));
}

Line* Firsts() { return reinterpret_cast<Line*>(memory + BytesOfShown(ranks_of_host)); }

Line& CounterLine(int64_t slot, int rank) {
  return (Firsts() + BoardSlot::kSlots)[slot * 2 * ranks_of_host + rank];
}
Line& BelowLine(int64_t slot, int rank) { return CounterLine(slot, ranks_of_host + rank); }

std::atomic<uint32_t>* Taken() {
  return reinterpret_cast<std::atomic<uint32_t>*>(&CounterLine(BoardSlot::kSlots, 0));
}

// What a rank shows for MayRead: a number, and where that lies in its own memory. Zero: not chosen yet.
uint64_t own_number = 0;
int64_t own_process = 0;
Line& Shown(int rank) { return reinterpret_cast<Line*>(memory)[rank]; }

}  // namespace

size_t Exchange::BytesOf(int ranks) {
  return BytesBeforeUnits(ranks) + static_cast<size_t>(Units(ranks)) * kUnitBytes;
}

void Exchange::OpenMemory(void* begin, int ranks) {
  memory = static_cast<char*>(begin);
  ranks_of_host = ranks;
}

PostedNumber& Exchange::FirstOf(int64_t slot) { return Firsts()[slot].number; }

std::atomic<uint64_t>& Exchange::AlgorithmsOf(int64_t slot) { return Firsts()[slot].algorithms; }

PostedNumber& Exchange::CounterOf(int rank) const { return CounterLine(slot_, rank).number; }

PostedNumber& Exchange::CounterBelow(int rank) const { return BelowLine(slot_, rank).number; }

char* Exchange::BufferOf(int rank, uint64_t piece) const {
  const uint64_t unit = first_ - kNone - 1 + static_cast<uint64_t>(rank);
  return memory + BytesBeforeUnits(ranks_of_host) + unit * kUnitBytes + piece % 2 * kBufferBytes;
}

uint64_t Exchange::TakeBuffers(int ranks) {
  std::atomic<uint32_t>* const taken = Taken();
  if (ranks > kMostRanks) return kNone;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    for (int64_t first = 0; first + ranks <= Units(ranks_of_host); ++first) {
      int64_t own = 0;  // taken here, one after another
      while (own < ranks && taken[first + own].exchange(1, std::memory_order_acquire) == 0) ++own;
      if (own == ranks) return static_cast<uint64_t>(first) + kNone + 1;
      // Release: who takes them next must see what this rank has seen of those who had them before.
      for (int64_t i = 0; i < own; ++i) taken[first + i].store(0, std::memory_order_release);
      first += own;  // the next one after that which somebody else has
    }
  }
  static const bool is_said = std::fputs(
      "pycollective: expected free buffers in the memory that the ranks of this host share, got none. MPI carries the arrays of further "
      "communicators, which takes longer. Free the communicators that you do not need any more (Communicator.free).\n", stderr) >= 0;
  static_cast<void>(is_said);
  return kNone;
}

void Exchange::Begin() {
  if (rank_ == 0) {
    FirstOf(slot_).Clear();
    AlgorithmsOf(slot_).store(0, std::memory_order_relaxed);
  }
  CounterLine(slot_, rank_).number.Clear();
  if (WaitsInTree() && rank_ % fan_in_ == 0) CounterBelow(rank_).Clear();
  CounterLine(slot_, rank_).has_given_up.store(0, std::memory_order_relaxed);
}

void Exchange::End() {
  for (int rank = 0; first_ > kNone && rank < size_; ++rank) {
    Taken()[first_ - kNone - 1 + static_cast<uint64_t>(rank)].store(0, std::memory_order_release);
  }
  first_ = 0;
}

void Exchange::EndAll() {
  for (int64_t unit = 0; unit < Units(ranks_of_host); ++unit) Taken()[unit].store(0, std::memory_order_release);
}

void Exchange::ShowMemory(int rank) {
  LetOthersRead(true);
  // A process of that number in another container has another one there, or nothing.
  own_process = getpid();
  if (own_number == 0) own_number = static_cast<uint64_t>(NowNs()) ^ static_cast<uint64_t>(own_process) << 40;
  Line& line = Shown(rank);
  line.process = own_process;
  line.send = &own_number;
  line.shown.store(own_number, std::memory_order_release);  // MPI orders it as well: all ranks meet before ReadsAll
}

bool Exchange::ReadsAll() {
  for (int rank = 0; rank < ranks_of_host; ++rank) {
    const uint64_t wanted = Shown(rank).shown.load(std::memory_order_acquire);
    uint64_t found = 0;
    if (CopyFromProcess(Shown(rank).process, &found, Shown(rank).send, sizeof(found)) != 0) return false;
    if (found != wanted) return false;
  }
  return true;
}

void Exchange::SetReadBytes(int64_t nbytes) {
  read_bytes = nbytes;
  if (nbytes == 0) LetOthersRead(false);
}
int64_t Exchange::ReadBytes() { return read_bytes; }

// Its memory may be used anew after GiveUp, by any thread of its process. A rank that asks after it has read does not miss that:
// if it has read what was written anew, the fence of GiveUp is before its own in the order of all fences with memory_order_seq_cst.
// Fences of release and acquire would order what the thread of GiveUp writes, and not what other threads write.
void Exchange::GiveUp() {
  CounterLine(slot_, rank_).has_given_up.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

bool Exchange::HasGivenUp(int rank) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return CounterLine(slot_, rank).has_given_up.load(std::memory_order_relaxed) != 0;
}

void Exchange::ShowArrays(const void* send, const void* recv) {
  Line& line = CounterLine(slot_, rank_);
  line.process = own_process;
  line.shared = SharedArrays::begin();
  line.send = send;
  line.recv.store(recv, std::memory_order_relaxed);
}

void Exchange::HideResult() { CounterLine(slot_, rank_).recv.store(nullptr, std::memory_order_relaxed); }

Exchange::Arrays Exchange::ArraysOf(int rank) const {
  const Line& line = CounterLine(slot_, rank);
  return {line.process, line.send, line.recv.load(std::memory_order_relaxed)};
}

const void* Exchange::Mapped(int rank, const void* data) const {
  return SharedArrays::Mapped(CounterLine(slot_, rank).shared, data);
}

}  // namespace pycollective
