// Waiting for another rank of this host, by a number in shared memory.

#ifndef PYCOLLECTIVE_NATIVE_MPI_WAIT_H_
#define PYCOLLECTIVE_NATIVE_MPI_WAIT_H_

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

#include "base/clock.h"
#include "base/futex.h"
#include "base/relax.h"
#include "mpi/backoff.h"

namespace pycollective {

// A number in shared memory, which only grows while ranks wait for it. One rank posts it; others may sleep until it is posted.
// It begins as zeros.
//
// Its word holds the number and a bit that says whether a rank may sleep. A rank sets the bit before it sleeps, and the kernel lets
// it sleep only if the word still has the value with that bit. Post clears the bit in the same atomic step in which it stores the
// number. So of the two steps one comes first: either Post finds the bit and wakes all, or the rank finds the new number. A bit that a
// rank leaves behind costs one needless wake-up.
class PostedNumber {
 public:
  uint64_t Load(std::memory_order order) const { return word_.load(order) >> 1; }

  // @param number: from 0 to 2^63 - 1.
  // @param order: release or seq_cst, of this store.
  void Post(uint64_t number, std::memory_order order) {
    if ((word_.exchange(number << 1, order) & kMaySleep) != 0) WakeAll(&word_);
  }

  // Makes it 0. No rank may wait for it.
  void Clear() { word_.store(0, std::memory_order_relaxed); }

  // Sleeps if the number is less than `wanted`, until it is posted. Returns false if the time has run out.
  // @param nanoseconds: the limit of the sleep. It also ends the sleep if the process of the posting rank ends before its wake-up.
  bool SleepBelow(uint64_t wanted, int64_t nanoseconds) {
    const uint64_t word = word_.fetch_or(kMaySleep, std::memory_order_relaxed) | kMaySleep;
    return word >> 1 >= wanted || SleepWhile(&word_, static_cast<uint32_t>(word), nanoseconds);
  }

 private:
  static constexpr uint64_t kMaySleep = 1;
  // The kernel compares 32 bits, where the word begins. These must be the low ones, in which each post differs from the last.
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a processor with another order of bytes is not supported");

  std::atomic<uint64_t> word_;
};
static_assert(sizeof(PostedNumber) == sizeof(uint64_t) && std::atomic<uint64_t>::is_always_lock_free);

// The number of polls before a wait gives its core away: some microseconds. If ranks share cores, the awaited rank may need this
// core, and all waits are shorter if the core is given away at once. Set before the first wait.
inline constexpr int kSpinsOnOwnCore = 200, kSpinsOnSharedCore = 10;
inline int spins_of_wait = kSpinsOnOwnCore;

// How a thread gives its core away in a wait. To yield is fastest if no other process wants the core. If one does, it keeps the
// core for its whole time slice, some milliseconds. A thread that sleeps gets the core back when it is woken. So a thread for
// which a yield has lasted long sleeps until the wait has ended, and in some further waits. Then it yields again. If one of the next yields
// lasts long, it sleeps in twice as many waits.
//
// Where ranks share cores, a yield also lasts long while the awaited rank computes for long, as when it compiles. All that a thread waits for
// such a rank is one wait. So there it sleeps in few waits afterwards.
class Neighbours {
 public:
  // A wait begins to give its core away. Returns whether to sleep in it, rather than to yield.
  bool CauseSleep() { return waits_left_ > 0 && waits_left_-- > 0; }

  // Returns whether to sleep until the wait has ended.
  bool Yield() {
    const int64_t begin_ns = NowNs();
    sched_yield();
    return Learn(NowNs() - begin_ns);
  }

  // A yield has lasted so many nanoseconds. Returns whether that was long.
  bool Learn(int64_t nanoseconds) {
    ++yields_;
    if (nanoseconds <= kLongYieldNs) return false;
    const int64_t fewest = spins_of_wait == kSpinsOnSharedCore ? kFewestOnSharedCore : kFewestOnOwnCore;
    waits_ = yields_ <= kFewYields ? std::clamp(2 * waits_, fewest, kMostWaits) : fewest;
    waits_left_ = waits_;
    yields_ = 0;
    return true;
  }

 private:
  static constexpr int64_t kLongYieldNs = 500'000;  // two ranks on one core: up to 0.3 ms; a neighbour: 1 to 4 ms
  static constexpr int64_t kFewestOnOwnCore = 256, kFewestOnSharedCore = 16, kMostWaits = 8192;
  static constexpr int64_t kFewYields = 100;

  int64_t waits_left_ = 0;
  int64_t waits_ = 0;   // in how many to sleep after the last long yield
  int64_t yields_ = 0;  // since then
};
inline thread_local Neighbours neighbours;

// Waits until the number is at least `wanted`, or until the time `until_ns` if it is not 0. It spins at first. Then it gives its core
// away after each poll, since the other rank may need it, and calls progress() from time to time. A false result of
// progress() means that the awaited value will never come: then this function returns false. A patient thread sleeps by its backoff,
// whatever its neighbours do.
template <typename Progress>
bool WaitUntil(PostedNumber& number, uint64_t wanted, Progress progress, int64_t until_ns = 0) {
  constexpr int kYieldsPerProgress = 16;
  constexpr int64_t kLongestSleepNs = 500'000;  // then MPI makes progress
  const bool patient = is_patient;
  std::optional<Backoff> backoff;
  std::optional<bool> sleeps;
  for (int64_t spins = 0; number.Load(std::memory_order_acquire) < wanted; ++spins) {
    if (spins < spins_of_wait) {
      Relax();
      continue;
    }
    bool calls_progress = spins % kYieldsPerProgress == 0;
    if (patient) {
      if (!backoff.has_value()) backoff.emplace();
      backoff->Sleep();
      calls_progress = true;
    } else if (sleeps.has_value() ? *sleeps : *(sleeps = neighbours.CauseSleep())) {
      if (!number.SleepBelow(wanted, kLongestSleepNs)) calls_progress = true;
    } else {
      sleeps = neighbours.Yield();
    }
    if (calls_progress && !progress()) return false;
    if (until_ns != 0 && NowNs() > until_ns) break;
  }
  return true;
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_WAIT_H_
