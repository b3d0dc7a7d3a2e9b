// The table of communicators.h.

#include "communicators.h"

#include <array>
#include <chrono>

namespace pycollective {
namespace {

// A fixed table of pointers keeps lookups free of locks. MPI libraries run out of context ids (MPICH: 2048)
// long before it is full.
constexpr int64_t kCapacity = 1 << 16;
std::array<std::atomic<Communicator*>, kCapacity> table{};
std::atomic<int64_t> used{0};
std::mutex adding;

}  // namespace

int64_t AddCommunicator(std::unique_ptr<Communicator> communicator) {
  const std::lock_guard<std::mutex> lock(adding);
  const int64_t number = used.load(std::memory_order_relaxed);
  if (number == kCapacity) return -1;
  table[static_cast<size_t>(number)].store(communicator.release(), std::memory_order_release);
  used.store(number + 1, std::memory_order_release);
  return number;
}

Communicator* FindCommunicator(int64_t number) {
  if (number < 0 || number >= kCapacity) return nullptr;
  return table[static_cast<size_t>(number)].load(std::memory_order_acquire);
}

int64_t CommunicatorCount() { return used.load(std::memory_order_acquire); }

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace pycollective
