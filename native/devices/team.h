// A team: the devices of this process that make one collective together, and the threads that run the program on them.

#ifndef PYCOLLECTIVE_NATIVE_DEVICES_TEAM_H_
#define PYCOLLECTIVE_NATIVE_DEVICES_TEAM_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "mpi/collectives.h"

namespace pycollective {

// Members share an address space, so they read each other's buffers instead of sending them. They meet: Meet() is their
// barrier.
//
// A member that cannot come, since memory has run out, breaks the team: each member that waits for it, or comes later,
// gets the exception Broken out of Meet(), from then on. That is safe before the first meeting of a call, when no
// member reads another's buffers. After it a member must not fail but in an Outcome; CatchAsOutcome() makes one of an
// exception.
class Team {
 public:
  struct Broken {};

  // The buffers that a member brings to a collective.
  struct Buffers {
    const void* in = nullptr;
    void* out = nullptr;
  };

  explicit Team(int size) : buffers_(static_cast<size_t>(size)) {}

  int size() const { return static_cast<int>(buffers_.size()); }

  // The outcome of what one member did for all: written in Meet(work), read after it.
  Outcome outcome;

  // A member sets its buffers before a meeting. Others may read them from then to the meeting after their last read.
  void SetBuffers(int member, Buffers buffers) { buffers_[static_cast<size_t>(member)] = buffers; }
  // The same for a member without a number of its own: takes the next free one.
  void AddBuffers(Buffers buffers) {
    if (broken_) throw Broken();
    SetBuffers(added_.fetch_add(1, std::memory_order_acq_rel), buffers);
  }
  const Buffers& BuffersOf(int member) const { return buffers_[static_cast<size_t>(member)]; }

  // Returns when every member has called it. What members wrote before is then visible to all.
  void Meet() {
    Meet([] {});
  }
  // The same; the last member to come runs `work` before any member returns. For small work, which ends before another
  // member would have woken up.
  template <typename Work>
  void Meet(Work work) {
    if (broken_) throw Broken();  // so the last of those who came before never completes the meeting
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

// Returns what work() returns. If work() ends in an exception, returns an outcome that says so.
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
