// Waiting for another rank of this host, by a number in memory that both share.

#ifndef PYCOLLECTIVE_NATIVE_WAIT_H_
#define PYCOLLECTIVE_NATIVE_WAIT_H_

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <optional>

#include "patience.h"
#include "recorder.h"
#include "relax.h"

namespace pycollective {

// Waits until the number is at least `wanted`, or until the time `until_ns` if that is not 0. It spins for a few microseconds.
// Then it gives the core away in each round, since the other rank may need it, and calls progress() from time to time: if that
// returns false, the wait has no end, and so does this function. A patient thread sleeps instead.
template <typename Progress>
bool WaitUntil(const std::atomic<uint64_t>& number, uint64_t wanted, Progress progress, int64_t until_ns = 0) {
  constexpr int kSpins = 200;
  constexpr int kYieldsPerProgress = 16;
  const bool patient = is_patient;
  std::optional<Naps> naps;
  for (int64_t spins = 0; number.load(std::memory_order_acquire) < wanted; ++spins) {
    if (spins < kSpins) {
      Relax();
      continue;
    }
    if (patient) {
      if (!naps.has_value()) naps.emplace();
      naps->Take();
    } else {
      sched_yield();
    }
    if ((patient || spins % kYieldsPerProgress == 0) && !progress()) return false;
    if (until_ns != 0 && NowNs() > until_ns) break;
  }
  return true;
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_WAIT_H_
