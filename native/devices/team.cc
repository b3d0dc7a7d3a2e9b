// Implementation of team.h. A waiting member first spins briefly, since members usually arrive at about the same time. Then
// it sleeps, since a team may have more members than there are cores.

#include "devices/team.h"

#include "base/relax.h"

namespace pycollective {
namespace {

constexpr int kSpins = 100;  // 1-5 us; with few cores, longer spins would keep cores from the members that are awaited

}  // namespace

void Team::Release(uint32_t phase) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    phase_.store(phase, std::memory_order_release);
  }
  met_.notify_all();
}

void Team::WaitFor(uint32_t phase) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (phase_.load(std::memory_order_acquire) == phase) return;
    Relax();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const auto complete = [&] { return phase_.load(std::memory_order_acquire) == phase; };
  met_.wait(lock, [&] { return broken_ || complete(); });
  if (!complete()) throw Broken();
}

void Team::Break() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    broken_ = true;
  }
  met_.notify_all();
}

}  // namespace pycollective
