// Settings of the handlers, which binding.cc sets.

#ifndef PYCOLLECTIVE_NATIVE_CALLS_SETTINGS_H_
#define PYCOLLECTIVE_NATIVE_CALLS_SETTINGS_H_

#include <cstdint>

namespace pycollective {

// When ranks compare their calls.
//   kNever
//   kFirst   a call that is new on the channel
//   kEvery   each call, if the ranks share a board; else each synchronizing call, and other calls that are new
//   kAlways  each call
enum class Check : int { kNever, kFirst, kEvery, kAlways };

// Python sets these before the first program runs; they do not change while one runs.
extern Check check;
// Whether a call checks its operands for NaN and Inf.
extern bool check_numbers;

// A random number of this process. A program that holds addresses of this process also holds this number.
extern const int64_t this_process;

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_SETTINGS_H_
