// A team: the devices of this process that make one collective together. Each has a thread that runs the program on it.

#ifndef PYCOLLECTIVE_NATIVE_DEVICES_TEAM_H_
#define PYCOLLECTIVE_NATIVE_DEVICES_TEAM_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "mpi/collectives.h"

namespace pycollective {

// The members share an address space, so they read each other's buffers instead of sending them. Meet() is their barrier.
//
// A member that cannot take part, because memory has run out, breaks the team: from then on Meet() throws Broken, for
// members that wait in it and for later calls. This is safe before the first meeting of a call, when no member reads
// another's buffers. After the first meeting a member must report failures as an Outcome only; CatchAsOutcome() converts
// exceptions.
class Team {
 public:
  struct Broken {};

  // The buffers of a member in a collective.
  struct Buffers {
    const void* in = nullptr;
    void* out = nullptr;
  };

  explicit Team(int size) : buffers_(static_cast<size_t>(size)) {}

  int size() const { return static_cast<int>(buffers_.size()); }

  // The outcome of work that one member did for all: written inside Meet(work), read after it.
  Outcome outcome;

  // Sets a member's buffers, before a meeting. Other members may read them after it, until the meeting after their last read.
  void SetBuffers(int member, Buffers buffers) { buffers_[static_cast<size_t>(member)] = buffers; }
  // Sets the buffers of a member without a number: it gets the next free number.
  void AddBuffers(Buffers buffers) {
    if (broken_) throw Broken();
    SetBuffers(added_.fetch_add(1, std::memory_order_acq_rel), buffers);
  }
  const Buffers& BuffersOf(int member) const { return buffers_[static_cast<size_t>(member)]; }

  // Returns when each member has called it. Earlier writes of all members are then visible to all.
  void Meet() {
    Meet([] {});
  }
  // Meets, and the last member to arrive runs `work` before any member returns. Use it for small work, which takes less time
  // than it takes to wake up another member.
  template <typename Work>
  void Meet(Work work) {
    if (broken_) throw Broken();  // so no later member can complete a meeting in which others have thrown
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
      work();
      added_.store(0, std::memory_order_relaxed);
      arrived_.store(0, std::memory_order_relaxed);
      Release(phase + 1);
    } else {
      WaitFor(phase + 1);
    }
  }

  void Break();

 private:
  void Release(uint32_t phase);
  void WaitFor(uint32_t phase);

  std::vector<Buffers> buffers_;
  std::atomic<int> added_{0};
  std::atomic<int> arrived_{0};
  std::atomic<uint32_t> phase_{0};  // the number of completed meetings
  std::atomic<bool> broken_{false};
  std::mutex mutex_;
  std::condition_variable met_;
};

// Returns the result of work(), or an outcome with the exception if work() throws.
template <typename Work>
Outcome CatchAsOutcome(Work work) {
  try {
    return work();
  } catch (const std::exception& error) {
    return OutcomeOfException(error);
  }
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_DEVICES_TEAM_H_
