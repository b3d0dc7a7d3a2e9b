// Which of two ways of making a call is faster here, learned from the times of calls.
//
// What is faster depends on what cores share, and on a virtual machine that may change. So each way is tried again from time to
// time. A time can be too long for many reasons and too short for none, so a shorter one is believed at once.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_TRIAL_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_TRIAL_H_

#include <algorithm>
#include <cstdint>

namespace pycollective {

class Trial {
 public:
  // The number of the way for a call: 0 or 1. What the call has taken may be told later, after other calls.
  int Next() {
    const int rarer = calls_[1] < calls_[0] ? 1 : 0;
    if (calls_[rarer] < kFirstCalls) return rarer;
    if (++since_trial_ <= interval_) return Best();
    since_trial_ = 0;
    return 1 - Best();
  }

  // A call with so many bytes has taken so long.
  void Learn(int way, int64_t nbytes, int64_t nanoseconds) {
    const int before = Best();
    const double cost = static_cast<double>(nanoseconds) / static_cast<double>(std::max<int64_t>(1, nbytes));
    double& known = cost_[way];
    known = calls_[way] == 0 || cost < known ? cost : known + (cost - known) * kWeight;
    ++calls_[way];
    if (Best() != before) {
      interval_ = kShortestInterval;
    } else if (way != before && calls_[way] > kFirstCalls) {  // a trial has changed nothing
      interval_ = std::min(2 * interval_, kLongestInterval);
    }
  }

 private:
  static constexpr int64_t kFirstCalls = 3;
  static constexpr int64_t kShortestInterval = 64, kLongestInterval = 1024;  // calls between two trials of the slower way
  static constexpr double kWeight = 0.25;

  int Best() const { return cost_[1] < cost_[0] ? 1 : 0; }

  double cost_[2] = {};  // nanoseconds for a byte
  int64_t calls_[2] = {};
  int64_t since_trial_ = 0;
  int64_t interval_ = kShortestInterval;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_TRIAL_H_
