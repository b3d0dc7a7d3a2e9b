// Waiting for another rank of this host, by a number in memory that both share.

#ifndef PYCOLLECTIVE_NATIVE_MPI_WAIT_H_
#define PYCOLLECTIVE_NATIVE_MPI_WAIT_H_

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <optional>

#include "base/clock.h"
#include "base/relax.h"
#include "mpi/backoff.h"

namespace pycollective {

// How often a wait looks before it gives the core away: for a few microseconds. Where ranks share cores the one that it waits for
// may need this core, and all waits are shorter if it gets it at once. Set before the first wait.
inline constexpr int kSpinsOnOwnCore = 200, kSpinsOnSharedCore = 10;
inline int spins_of_wait = kSpinsOnOwnCore;

// Waits until the number is at least `wanted`, or until the time `until_ns` if that is not 0. It spins at first.
// Then it gives the core away in each round, since the other rank may need it, and calls progress() from time to time: if that
// returns false, the wait has no end, and so does this function. A patient thread sleeps instead.
template <typename Progress>
bool WaitUntil(const std::atomic<uint64_t>& number, uint64_t wanted, Progress progress, int64_t until_ns = 0) {
  constexpr int kYieldsPerProgress = 16;
  const bool patient = is_patient;
  std::optional<Backoff> backoff;
  for (int64_t spins = 0; number.load(std::memory_order_acquire) < wanted; ++spins) {
    if (spins < spins_of_wait) {
      Relax();
      continue;
    }
    if (patient) {
      if (!backoff.has_value()) backoff.emplace();
      backoff->Sleep();
    } else {
      sched_yield();
    }
    if ((patient || spins % kYieldsPerProgress == 0) && !progress()) return false;
    if (until_ns != 0 && NowNs() > until_ns) break;
  }
  return true;
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_WAIT_H_
