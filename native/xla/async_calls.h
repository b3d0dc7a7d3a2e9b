// Calls that overlap with XLA's computation, in threads of this package.
//
// The handler of such a call returns a future, and XLA's CPU client continues with operations that do not need the call's
// results. The token makes the next call of the program wait for the future. So calls keep their order, and each device has one
// call in progress. When the call is done, its thread fulfils the future, and XLA runs the operations that waited for it *in
// this thread*. They may be a large part of the program, so the next call gets another thread. The number of threads grows to
// the number that is needed at the same time.
//
// XLA would run the readers of the results before the next call, and no data would be sent in the meantime. So another
// handler, pycollective_async_results, is between a call and the readers of its results. Another thread fulfils the future of
// this handler, so the first thread starts the next call immediately.

#ifndef PYCOLLECTIVE_NATIVE_XLA_ASYNC_CALLS_H_
#define PYCOLLECTIVE_NATIVE_XLA_ASYNC_CALLS_H_

#include <functional>
#include <memory>
#include <new>

#include "mpi/backoff.h"
#include "xla/ffi/api/ffi.h"
#include "xla/kept_arguments.h"

namespace pycollective {

// Runs make_call() in a patient thread (backoff.h) of this package, and fulfils the promise with the error that it returns.
// Returns false if there is no thread, and may throw std::bad_alloc: in both cases the call has not begun.
bool StartInThread(std::function<xla::ffi::Error()> make_call, const xla::ffi::Promise& promise);

// Fulfils a promise with an error or a success.
void Fulfil(xla::ffi::Promise promise, const xla::ffi::Error& error);

// Returns a future that gets the error that make_call(arguments...) returns. make_call runs in a patient thread, or in this
// thread if there is no other thread or no memory. A thread of XLA calls this function, with the arguments of a handler.
template <typename Function, typename... T>
xla::ffi::Future RunAsync(Function make_call, T... arguments) {
  const xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  try {
    const auto kept = std::make_shared<KeptArguments<T...>>(arguments...);
    if (StartInThread([=] { return kept->Apply(make_call); }, promise)) return future;
  } catch (const std::bad_alloc&) {  // the call has not begun
  }
  const WithNonblocking as_other_ranks;  // other ranks may make the call in a patient thread
  Fulfil(promise, make_call(arguments...));
  return future;
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_XLA_ASYNC_CALLS_H_
