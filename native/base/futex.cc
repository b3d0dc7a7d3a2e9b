// Implementation of futex.h. The calls have no FUTEX_PRIVATE_FLAG, since the sleeper may be in another process.

#include "base/futex.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace pycollective {

bool SleepWhile(const void* word, uint32_t value, int64_t nanoseconds) {
  constexpr int64_t kSecondNs = 1000000000;
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(nanoseconds / kSecondNs);
  limit.tv_nsec = static_cast<long>(nanoseconds % kSecondNs);
  return syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, nullptr, 0) == 0 || errno != ETIMEDOUT;
}

void WakeAll(const void* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace pycollective
