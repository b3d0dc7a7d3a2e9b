// Waiting with a backoff, in a thread that must leave its core to others.
//
// MPI libraries poll while they wait, and so do the ranks of a host. Polling is fastest if the program has nothing to compute in
// the meantime. A thread whose call overlaps with XLA's computation is *patient*: it sleeps between two polls.

#ifndef PYCOLLECTIVE_NATIVE_MPI_BACKOFF_H_
#define PYCOLLECTIVE_NATIVE_MPI_BACKOFF_H_

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

// A patient thread's longest sleep, in nanoseconds; 0: it does not sleep but yields its core.
inline constexpr int64_t kLongestSleep = 200'000;
inline thread_local int64_t longest_sleep = kLongestSleep;

// Whether this thread makes collectives by MPI's nonblocking functions. A patient thread must do so. In one call either all ranks
// do so or none: MPI's blocking and nonblocking collectives do not match each other, but its messages do.
inline thread_local bool uses_nonblocking = false;

// In the scope of such an object this thread uses the nonblocking functions.
class WithNonblocking {
 public:
  WithNonblocking() : before_(uses_nonblocking) { uses_nonblocking = true; }
  ~WithNonblocking() { uses_nonblocking = before_; }
  WithNonblocking(const WithNonblocking&) = delete;
  WithNonblocking& operator=(const WithNonblocking&) = delete;

 private:
  const bool before_;
};

// The backoff of one wait. The first sleeps last some microseconds, each later one a sixteenth of the time waited so far. So a
// wait is at most a sixteenth longer than by polling.
class Backoff {
 public:
  void Sleep() {
    constexpr int64_t kShortest = 5'000;
    if (longest_sleep == 0) {
      sched_yield();
      return;
    }
    const int64_t waited = NowNs() - begin_;
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::clamp(waited / 16, kShortest, longest_sleep)));
  }

 private:
  const int64_t begin_ = NowNs();
};

// An estimate of a channel's bandwidth, which limits the sleep of a patient thread: MPI moves data only while it is called, and
// the link must not be idle during a sleep. The first calls of each size are samples and are made without sleep, since sleeps
// would be part of the measured time.
class BandwidthEstimate {
 public:
  // In its scope a patient thread sleeps for at most the time that the estimate allows.
  class Sample {
   public:
    Sample(BandwidthEstimate* estimate, int64_t nbytes) : estimate_(is_patient ? estimate : nullptr), nbytes_(nbytes) {
      if (estimate_ == nullptr) return;
      longest_sleep = estimate_->LongestSleep(nbytes);
      begin_ = NowNs();
    }
    ~Sample() {
      if (estimate_ != nullptr) longest_sleep = kLongestSleep;
    }
    Sample(const Sample&) = delete;
    Sample& operator=(const Sample&) = delete;

    // Says that the call has succeeded, so that its time counts: a failed call may end before its data were sent.
    void Succeed() {
      if (estimate_ != nullptr) estimate_->Learn(nbytes_, NowNs() - begin_);
    }

   private:
    BandwidthEstimate* const estimate_;
    const int64_t nbytes_;
    int64_t begin_ = 0;
  };

  int64_t LongestSleep(int64_t nbytes) const {
    constexpr int kFirstCalls = 3;
    constexpr int64_t kBytesPerSleep = 24 << 10;  // the buffer of a socket has at least this size
    constexpr int64_t kShortestWorthwhile = 25'000;  // nanoseconds; a sleep and a wake-up cost some microseconds
    if (calls_[PowerOfTwo(nbytes)] < kFirstCalls) return 0;
    const int64_t longest = std::min<int64_t>(kLongestSleep, kBytesPerSleep * 1'000'000 / std::max<int64_t>(1, bytes_per_ms_));
    return longest < kShortestWorthwhile ? 0 : longest;
  }

  // Adds a sample: the bytes and the time of a call.
  void Learn(int64_t nbytes, int64_t nanoseconds) {
    std::atomic<int64_t>& calls = calls_[PowerOfTwo(nbytes)];
    calls = calls + 1;
    bytes_per_ms_ = std::max<int64_t>(bytes_per_ms_, nbytes * 1'000'000 / std::max<int64_t>(1, nanoseconds));
  }

 private:
  // The calls of a channel come one after another, but may be in different threads.
  std::atomic<int64_t> calls_[64] = {};
  std::atomic<int64_t> bytes_per_ms_{0};  // of the fastest sample
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_BACKOFF_H_
