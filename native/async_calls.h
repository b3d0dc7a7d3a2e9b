// Calls that run beside XLA's computation, in threads of ours.
//
// The handler of such a call returns a future, and XLA's CPU client goes on with what does not need the call's results. The
// token makes the next call of the program wait for the future, so calls keep their order, and each device has one call under
// way. When the call is done, its thread fulfils the future, and XLA goes on *in that thread* with what waited for it. That may
// be much of the program. So the next call gets another thread, and there are as many threads as are needed at once.
//
// XLA would go on with what reads the results before it comes to the next call, and nothing would travel meanwhile. So
// another handler, pycollective_async_results, stands between a call and those that read its results. Its future is
// fulfilled by yet another thread, so that the first comes to the next call at once.

#ifndef PYCOLLECTIVE_NATIVE_ASYNC_CALLS_H_
#define PYCOLLECTIVE_NATIVE_ASYNC_CALLS_H_

#include <functional>

#include "xla/ffi/api/ffi.h"

namespace pycollective {

// Runs make_call() in a patient thread (patience.h) of the package's, and fulfils the future with the error that it returns. If no
// thread can be had, it runs here. A thread of XLA's calls it.
xla::ffi::Future RunAsync(std::function<xla::ffi::Error()> make_call);

// A future that is fulfilled already.
xla::ffi::Future Failed(const xla::ffi::Error& error);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_ASYNC_CALLS_H_
