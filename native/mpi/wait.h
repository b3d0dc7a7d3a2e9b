// Waiting for another rank of this host, by a number in shared memory.

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

// The number of polls before a wait yields its core: some microseconds. If ranks share cores, the awaited rank may need this
// core, and all waits are shorter if the core is yielded at once. Set before the first wait.
inline constexpr int kSpinsOnOwnCore = 200, kSpinsOnSharedCore = 10;
inline int spins_of_wait = kSpinsOnOwnCore;

// Waits until the number is at least `wanted`, or until the time `until_ns` if it is not 0. It spins at first. Then it yields
// its core after each poll, since the other rank may need it, and calls progress() from time to time. A false result of
// progress() means that the awaited value will never come: then this function returns false. A patient thread sleeps after the
// spins instead of yielding.
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
