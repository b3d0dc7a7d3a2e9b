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

#ifndef PYCOLLECTIVE_NATIVE_XLA_ASYNC_CALLS_H_
#define PYCOLLECTIVE_NATIVE_XLA_ASYNC_CALLS_H_

#include <functional>
#include <memory>
#include <new>

#include "mpi/backoff.h"
#include "xla/ffi/api/ffi.h"
#include "xla/kept_arguments.h"

namespace pycollective {

// Runs make_call() in a patient thread (backoff.h) of the package's, and fulfils the promise with the error that it returns.
// Returns false if no thread can be had, and may throw std::bad_alloc: then the call has not begun.
bool StartInThread(std::function<xla::ffi::Error()> make_call, const xla::ffi::Promise& promise);

// Fulfils a promise with an error or a success.
void Fulfil(xla::ffi::Promise promise, const xla::ffi::Error& error);

// Returns a future, and fulfils it with the error that make_call(arguments...) returns. That runs in a patient thread, or here if
// there is no thread or no memory for it. A thread of XLA's calls it, with arguments of a handler.
template <typename Function, typename... T>
xla::ffi::Future RunAsync(Function make_call, T... arguments) {
  const xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  try {
    const auto kept = std::make_shared<KeptArguments<T...>>(arguments...);
    if (StartInThread([=] { return kept->Apply(make_call); }, promise)) return future;
  } catch (const std::bad_alloc&) {  // the call has not begun
  }
  const WithNonblocking as_other_ranks;  // they may have threads for the call
  Fulfil(promise, make_call(arguments...));
  return future;
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_XLA_ASYNC_CALLS_H_
