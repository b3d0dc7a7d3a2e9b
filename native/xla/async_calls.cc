// Implementation of async_calls.h.

#include "xla/async_calls.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/exports.h"
#include "mpi/backoff.h"

namespace pycollective {
namespace {

struct Task {
  std::function<xla::ffi::Error()> make_call;
  xla::ffi::Promise promise;
};

void Run(Task* task) {
  const xla::ffi::Error error = [&] {
    const WithNonblocking as_other_ranks;
    is_patient = true;
    return task->make_call();
  }();
  is_patient = false;  // XLA continues in this thread, perhaps with another call
  task->make_call = nullptr;  // frees arguments that are not needed any more
  Fulfil(task->promise, error);
}

class Threads {
 public:
  // Gives the task to an idle thread or a new one. Returns false if no thread is idle and no thread can be made.
  bool Take(Task task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) {
      try {
        idle_.reserve(count_ + 1);  // a thread that becomes idle must find room there
        // XLA will continue in the new thread, which inherits the rounding mode and the handling of denormals from this thread of
        // XLA.
        std::thread([this, first = std::move(task)]() mutable { Work(std::move(first)); }).detach();
      } catch (const std::system_error&) {
        return false;
      }
      ++count_;
      return true;
    }
    Idle& thread = *idle_.back();  // the last one to become idle, since its data may still be in the caches
    idle_.pop_back();
    thread.task = std::move(task);
    thread.called.notify_one();
    return true;
  }

 private:
  struct Idle {
    std::optional<Task> task;
    std::condition_variable called;
  };

  void Work(Task&& first) {
    pthread_setname_np(pthread_self(), "pc-async-call");
    prctl(PR_SET_TIMERSLACK, 1'000);  // nanoseconds; Linux's default makes a short sleep up to 50 us longer
    Idle own;
    own.task = std::move(first);
    while (true) {
      Run(&*own.task);
      std::unique_lock<std::mutex> lock(mutex_);
      own.task.reset();
      idle_.push_back(&own);
      own.called.wait(lock, [&] { return own.task.has_value(); });
    }
  }

  std::mutex mutex_;
  std::vector<Idle*> idle_;
  size_t count_ = 0;  // the number of all threads
};

}  // namespace

bool StartInThread(std::function<xla::ffi::Error()> make_call, const xla::ffi::Promise& promise) {
  static auto& threads = *new Threads;  // never destroyed: its threads may outlive main
  return threads.Take({std::move(make_call), promise});
}

void Fulfil(xla::ffi::Promise promise, const xla::ffi::Error& error) {
  if (error.failure()) {
    promise.SetError(error);
  } else {
    promise.SetAvailable();
  }
}

namespace {

namespace ffi = xla::ffi;

ffi::Error Copy(ffi::RemainingArgs operands, ffi::RemainingRets results) {
  if (operands.size() != results.size()) {
    return ffi::Error(ffi::ErrorCode::kInternal, "pycollective.async_results: expected as many operands as results, got " +
                                                     std::to_string(operands.size()) + " and " +
                                                     std::to_string(results.size()) + ". Please report this.");
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const auto x = operands.get<ffi::AnyBuffer>(i);
    auto y = results.get<ffi::AnyBuffer>(i);
    if (x.has_error()) return x.error();
    if (y.has_error()) return y.error();
    void* const target = (*y)->untyped_data();
    if (target != x->untyped_data()) std::memcpy(target, x->untyped_data(), x->size_bytes());
  }
  return ffi::Error::Success();
}

// Passes the results of a call to their readers: see async_calls.h. If possible, XLA gives operands and results the same
// buffers.
ffi::Future HandOn(ffi::RemainingArgs operands, ffi::RemainingRets results) { return RunAsync(Copy, operands, results); }

}  // namespace

PYCOLLECTIVE_EXPORT XLA_FFI_Error* pycollective_async_results(XLA_FFI_CallFrame* call_frame) {
  static ffi::Ffi* const handler = ffi::Ffi::Bind().RemainingArgs().RemainingRets().To(HandOn).release();
  return handler->Call(call_frame);
}

}  // namespace pycollective
