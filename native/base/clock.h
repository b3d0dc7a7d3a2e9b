// The clock by which this library measures times and limits.

#ifndef PYCOLLECTIVE_NATIVE_BASE_CLOCK_H_
#define PYCOLLECTIVE_NATIVE_BASE_CLOCK_H_

#include <chrono>
#include <cstdint>

namespace pycollective {

// CLOCK_MONOTONIC in nanoseconds.
inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_BASE_CLOCK_H_
