// Waiting in a thread that must leave its core to others.
//
// MPI libraries poll while they wait, and so do the ranks of a host. That is the fastest way where the program can do nothing
// meanwhile. A thread that makes a call beside XLA's computation is *patient*: it sleeps between two looks.

#ifndef PYCOLLECTIVE_NATIVE_MPI_PATIENCE_H_
#define PYCOLLECTIVE_NATIVE_MPI_PATIENCE_H_

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/clock.h"
#include "mpi/elements.h"

namespace pycollective {

// Whether this thread is patient.
inline thread_local bool is_patient = false;

// A patient thread's longest sleep, in nanoseconds; 0: it does not sleep, but lets other threads run first.
inline constexpr int64_t kLongestNap = 200'000;
inline thread_local int64_t longest_nap = kLongestNap;

// Whether this thread makes collectives by MPI's nonblocking functions. A patient thread must, and in one call all ranks must do
// it or none: MPI's blocking and nonblocking collectives do not match. Messages do.
inline thread_local bool uses_nonblocking = false;

// Inside the scope of such an object this thread uses them.
class WithNonblocking {
 public:
  WithNonblocking() : before_(uses_nonblocking) { uses_nonblocking = true; }
  ~WithNonblocking() { uses_nonblocking = before_; }
  WithNonblocking(const WithNonblocking&) = delete;
  WithNonblocking& operator=(const WithNonblocking&) = delete;

 private:
  const bool before_;
};

// The sleeps of one wait. The first last some microseconds, each later one a sixteenth of the time waited so far: a wait ends
// by no more than that too late.
class Naps {
 public:
  void Take() {
    constexpr int64_t kShortest = 5'000;
    if (longest_nap == 0) {
      sched_yield();
      return;
    }
    const int64_t waited = NowNs() - begin_;
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::clamp(waited / 16, kShortest, longest_nap)));
  }

 private:
  const int64_t begin_ = NowNs();
};

// How fast the data of a channel's calls travel, and so how long a patient thread may sleep: MPI moves data while somebody looks
// after them, and a link must not run out of them meanwhile. To find it out, the first calls of each size are made without sleep:
// what a call takes that sleeps says nothing of the link.
class Pace {
 public:
  // Inside its scope a patient thread sleeps as the calls before allow.
  class Call {
   public:
    Call(Pace* pace, int64_t nbytes) : pace_(is_patient ? pace : nullptr), nbytes_(nbytes) {
      if (pace_ == nullptr) return;
      longest_nap = pace_->LongestNap(nbytes);
      begin_ = NowNs();
    }
    ~Call() {
      if (pace_ != nullptr) longest_nap = kLongestNap;
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // The call has succeeded, and the pace learns from it: one that fails may end before its data have travelled.
    void Succeed() {
      if (pace_ != nullptr) pace_->Learn(nbytes_, NowNs() - begin_);
    }

   private:
    Pace* const pace_;
    const int64_t nbytes_;
    int64_t begin_ = 0;
  };

  int64_t LongestNap(int64_t nbytes) const {
    constexpr int kFirstCalls = 3;
    constexpr int64_t kBytesPerNap = 24 << 10;  // a socket holds at least as many
    constexpr int64_t kShortestWorthwhile = 25'000;  // to fall asleep and to wake up costs some microseconds
    if (calls_[PowerOfTwo(nbytes)] < kFirstCalls) return 0;
    const int64_t longest = std::min<int64_t>(kLongestNap, kBytesPerNap * 1'000'000 / std::max<int64_t>(1, bytes_per_ms_));
    return longest < kShortestWorthwhile ? 0 : longest;
  }

  // A call with so many bytes has taken so long.
  void Learn(int64_t nbytes, int64_t nanoseconds) {
    std::atomic<int64_t>& calls = calls_[PowerOfTwo(nbytes)];
    calls = calls + 1;
    bytes_per_ms_ = std::max<int64_t>(bytes_per_ms_, nbytes * 1'000'000 / std::max<int64_t>(1, nanoseconds));
  }

 private:
  // The calls of a channel come one after another, but perhaps in different threads.
  std::atomic<int64_t> calls_[64] = {};
  std::atomic<int64_t> bytes_per_ms_{0};  // of the fastest
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_PATIENCE_H_
