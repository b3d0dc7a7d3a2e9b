// Implementation of async_calls.h.

#include "async_calls.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "kept_arguments.h"
#include "patience.h"
#include "settings.h"

namespace pycollective {
namespace {

struct Task {
  std::function<xla::ffi::Error()> make_call;
  xla::ffi::Promise promise;
};

void Run(Task* task, bool patiently) {
  const xla::ffi::Error error = [&] {
    const WithNonblocking on_all_ranks;  // a rank may have no thread for the call
    is_patient = patiently;
    return task->make_call();
  }();
  is_patient = false;  // XLA goes on in this thread, perhaps with another call
  task->make_call = nullptr;  // it holds arguments that nobody needs any more
  if (error.failure()) {
    task->promise.SetError(error);
  } else {
    task->promise.SetAvailable();
  }
}

class Threads {
 public:
  // Hands the task to a thread that has nothing to do, or to a new one. Returns false if there is none and none can be made.
  bool Take(Task* task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) {
      try {
        // XLA will go on in the new thread, which inherits from this one, XLA's, how to round and to take denormal numbers for zero.
        std::thread([this, first = *task]() mutable { Work(std::move(first)); }).detach();
      } catch (const std::system_error&) {
        return false;
      }
      return true;
    }
    Idle& thread = *idle_.back();  // the last to come: the caches know it
    idle_.pop_back();
    thread.task = std::move(*task);
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
    prctl(PR_SET_TIMERSLACK, 1'000);  // nanoseconds; Linux would let a short sleep last 50 us longer
    Idle own;
    own.task = std::move(first);
    while (true) {
      Run(&*own.task, true);
      std::unique_lock<std::mutex> lock(mutex_);
      own.task.reset();
      idle_.push_back(&own);
      own.called.wait(lock, [&] { return own.task.has_value(); });
    }
  }

  std::mutex mutex_;
  std::vector<Idle*> idle_;
};

}  // namespace

xla::ffi::Future RunAsync(std::function<xla::ffi::Error()> make_call) {
  static auto& threads = *new Threads;  // never destroyed: its threads may outlive main
  Task task{std::move(make_call), {}};
  xla::ffi::Future future(task.promise);
  if (!threads.Take(&task)) Run(&task, false);
  return future;
}

xla::ffi::Future Failed(const xla::ffi::Error& error) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  promise.SetError(error);
  return future;
}

namespace {

namespace ffi = xla::ffi;

// Hands the results of a call on to what reads them: see async_calls.h. XLA gives operands and results the same buffers, where
// it can.
ffi::Future HandOn(ffi::RemainingArgs operands, ffi::RemainingRets results) {
  using Arguments = KeptArguments<ffi::RemainingArgs, ffi::RemainingRets>;
  const auto kept = std::make_shared<Arguments>(operands, results);
  return RunAsync([=] {
    return kept->Apply([](ffi::RemainingArgs from, ffi::RemainingRets to) {
      for (size_t i = 0; i < to.size(); ++i) {
        const auto x = from.get<ffi::AnyBuffer>(i);
        auto y = to.get<ffi::AnyBuffer>(i);
        if (x.has_error()) return x.error();
        if (y.has_error()) return y.error();
        void* const target = (*y)->untyped_data();
        if (target != x->untyped_data()) std::memcpy(target, x->untyped_data(), x->size_bytes());
      }
      return ffi::Error::Success();
    });
  });
}

}  // namespace

PYCOLLECTIVE_EXPORT XLA_FFI_Error* pycollective_async_results(XLA_FFI_CallFrame* call_frame) {
  static ffi::Ffi* const handler = ffi::Ffi::Bind().RemainingArgs().RemainingRets().To(HandOn).release();
  return handler->Call(call_frame);
}

}  // namespace pycollective
