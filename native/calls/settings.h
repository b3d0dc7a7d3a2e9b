// What binding.cc sets for the handlers.

#ifndef PYCOLLECTIVE_NATIVE_CALLS_SETTINGS_H_
#define PYCOLLECTIVE_NATIVE_CALLS_SETTINGS_H_

#include <cstdint>

namespace pycollective {

// When ranks compare what they call: never; when a channel first meets a call, all with all; each call, on the board or in a
// ring; each call, all with all.
enum class Check : int { kNever, kFirst, kEvery, kAlways };

// Python sets these before the first program runs; they do not change while one runs.
extern Check check;
// Whether a call looks for NaN and Inf in what the ranks bring to it.
extern bool check_numbers;

// A random number of this process. A program that holds addresses of this process carries it.
extern const int64_t this_process;

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_SETTINGS_H_
