// The kernel's queues of sleeping threads: a futex, of 32 bits in memory that processes may share.

#ifndef PYCOLLECTIVE_NATIVE_BASE_FUTEX_H_
#define PYCOLLECTIVE_NATIVE_BASE_FUTEX_H_

#include <cstdint>

namespace pycollective {

// Sleeps if the word has that value. The kernel compares and falls asleep in one atomic step with regard to WakeAll. Returns
// false if the time has run out; true: the word had another value, a thread has called WakeAll, or a signal has come.
// @param word: at a multiple of 4 bytes.
// @param value: the word's value.
// @param nanoseconds: the limit of the sleep.
bool SleepWhile(const void* word, uint32_t value, int64_t nanoseconds);

// Wakes all threads of all processes that sleep at this word.
// @param word: as in SleepWhile.
void WakeAll(const void* word);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_BASE_FUTEX_H_
