// Autotunes the choice between two algorithms for a call, from the times of calls.
//
// Which algorithm is faster depends on what cores share, and on a virtual machine that may change. So the slower one is probed
// from time to time. Noise only adds time, so a shorter sample is believed at once; a longer one is averaged.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_AUTOTUNER_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_AUTOTUNER_H_

#include <algorithm>
#include <cstdint>

namespace pycollective {

class TwoWayAutotuner {
 public:
  // The algorithm for a call: 0 or 1. Learn may follow later, after other calls.
  int Next() {
    const int rarer = calls_[1] < calls_[0] ? 1 : 0;
    if (calls_[rarer] < kFirstCalls) return rarer;
    if (++since_probe_ <= interval_) return Best();
    since_probe_ = 0;
    return 1 - Best();
  }

  // A call of `nbytes` by `algorithm` has taken `nanoseconds`.
  void Learn(int algorithm, int64_t nbytes, int64_t nanoseconds) {
    const int before = Best();
    const double cost = static_cast<double>(nanoseconds) / static_cast<double>(std::max<int64_t>(1, nbytes));
    double& known = cost_[algorithm];
    known = calls_[algorithm] == 0 || cost < known ? cost : known + (cost - known) * kWeight;
    ++calls_[algorithm];
    if (Best() != before) {
      interval_ = kShortestInterval;
    } else if (algorithm != before && calls_[algorithm] > kFirstCalls) {  // a probe has changed nothing
      interval_ = std::min(2 * interval_, kLongestInterval);
    }
  }

 private:
  static constexpr int64_t kFirstCalls = 3;
  static constexpr int64_t kShortestInterval = 64, kLongestInterval = 1024;  // calls between two probes of the slower algorithm
  static constexpr double kWeight = 0.25;

  int Best() const { return cost_[1] < cost_[0] ? 1 : 0; }

  double cost_[2] = {};  // nanoseconds for a byte
  int64_t calls_[2] = {};
  int64_t since_probe_ = 0;
  int64_t interval_ = kShortestInterval;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_AUTOTUNER_H_
