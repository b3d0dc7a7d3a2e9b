// State shared by the handlers and the interface that sets it up.

#ifndef PYCOLLECTIVE_NATIVE_HANDLERS_H_
#define PYCOLLECTIVE_NATIVE_HANDLERS_H_

#include <memory>

#include "collectives.h"

// A C symbol of the shared library; all others are hidden.
#define PYCOLLECTIVE_EXPORT extern "C" __attribute__((visibility("default")))

namespace pycollective {

// When ranks compare what they call: never, the first time a lane meets a call, or every time.
enum class Check : int { kNever, kFirst, kAlways };

// Both are set from Python before the first program runs, and not changed while one runs.
extern std::unique_ptr<Library> library;
extern Check check;

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_HANDLERS_H_
