// Tests of what a call beside computation is made of: native/xla/async_calls.h, native/mpi/backoff.h, native/mpi/waiting_calls.h.

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "harness.h"
#include "mpi/backoff.h"
#include "mpi/wait.h"
#include "mpi/waiting_calls.h"
#include "xla/async_calls.h"

namespace pc = pycollective;
namespace ffi = xla::ffi;

namespace {

thread_local int memory_left = -1;  // so many more allocations of this thread succeed; negative: all
std::atomic<int> yields{0};

}  // namespace

extern "C" int sched_yield() noexcept {
  ++yields;
  return 0;
}

void* operator new(std::size_t nbytes) {
  if (memory_left == 0) throw std::bad_alloc();
  if (memory_left > 0) --memory_left;
  void* const data = std::malloc(nbytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }

namespace {

const std::vector<int64_t> kNumbers = {2, 3, 5, 7};

// What a call has seen.
struct Seen {
  std::atomic<int> calls{0}, ready{0};
  std::atomic<bool> right{true}, nonblocking{true}, patient{true}, failed{false};
  std::thread::id thread;
};

// A call with these arguments, which fails if `fails`. Returns when its future is fulfilled.
void MakeOne(Seen* seen, int allocations, bool fails) {
  const auto make_call = [seen, fails](ffi::Span<const int64_t> numbers, int64_t last) {
    memory_left = -1;  // only what comes before the call is tested
    ++seen->calls;
    seen->right = std::vector<int64_t>(numbers.begin(), numbers.end()) == kNumbers && last == 11;
    seen->nonblocking = pc::uses_nonblocking;
    seen->patient = pc::is_patient;
    seen->thread = std::this_thread::get_id();
    return fails ? ffi::Error(ffi::ErrorCode::kInternal, "as asked") : ffi::Error::Success();
  };
  std::optional<ffi::Future> future;
  {
    const std::vector<int64_t> numbers = kNumbers;  // XLA's are gone when the handler returns
    memory_left = allocations;
    future = pc::RunAsync(make_call, ffi::Span<const int64_t>(numbers.data(), numbers.size()), int64_t{11});
    memory_left = -1;
  }
  future->OnReady([&](const std::optional<ffi::Error>& error) {
    seen->failed = error.has_value();
    ++seen->ready;
  });
  CHECK(BecomesTrue([&] { return seen->ready == 1; }));
  CHECK(seen->calls == 1);
  CHECK(seen->right);
  CHECK(seen->nonblocking);
  CHECK(seen->failed == fails);
}

void TestCallsRunInPatientThreads() {
  for (const bool fails : {false, true}) {
    Seen seen;
    MakeOne(&seen, -1, fails);
    CHECK(seen.patient);
    CHECK(seen.thread != std::this_thread::get_id());
  }
  CHECK(!pc::is_patient);
  CHECK(!pc::uses_nonblocking);
}

// Whichever allocation is the first that fails, the call is made once, with its own arguments, and its future is fulfilled. The
// promise itself takes one allocation.
void TestACallIsMadeWithoutMemoryForAThread() {
  int here = 0, in_thread = 0;
  for (int allocations = 1; allocations < 30; ++allocations) {
    Seen seen;
    MakeOne(&seen, allocations, false);
    ++(seen.thread == std::this_thread::get_id() ? here : in_thread);
  }
  CHECK(here > 0);
  CHECK(in_thread > 0);
  CHECK(!pc::uses_nonblocking);
}

// MPI, as far as messages need it. A request is 1 while it is under way.
int cancelled = 0, tests_until_done = 0;
bool isend_fails = false;

int Receives(void*, int, int, int, int, int, int* request) {
  *request = 1;
  return 0;
}
int Sends(const void*, int, int, int, int, int, int* request) {
  *request = 1;
  return isend_fails ? 15 : 0;
}
int Cancels(int* request) {
  CHECK(*request == 1);
  ++cancelled;
  return 0;
}
int TestsRequest(int* request, int* done, void*) {
  *done = tests_until_done-- <= 0 ? 1 : 0;
  if (*done != 0) *request = 0;
  return 0;
}

int SendAndReceive() {
  pc::Functions<int> functions{};
  functions.Irecv = Receives;
  functions.Isend = Sends;
  functions.Cancel = Cancels;
  functions.Test = TestsRequest;
  pc::is_patient = true;
  int from = 0, to = 0;
  const int code = pc::WaitingCalls<int>(functions).Sendrecv(&from, 1, 0, 0, 0, &to, 1, 0, 0, 0, 0, nullptr);
  pc::is_patient = false;
  return code;
}

// If the send cannot begin, the receive ends before the memory that it writes to is given up.
void TestAReceiveEndsWithItsSend() {
  isend_fails = false;
  CHECK(SendAndReceive() == 0);
  CHECK(cancelled == 0);
  isend_fails = true;
  tests_until_done = 3;
  CHECK(SendAndReceive() == 15);
  CHECK(cancelled == 1);
  CHECK(tests_until_done < 0);  // it waited until MPI had done with the receive
}

// The rank for which this one waits may need the same core, and MPI's test does not give it away.
void TestAWaitGivesTheCoreAway() {
  pc::Functions<int> functions{};
  functions.Test = TestsRequest;
  const auto yields_in_a_wait = [&](int tests) {
    yields = 0;
    tests_until_done = tests;
    int request = 1;
    CHECK(pc::WaitingCalls<int>(functions).Complete(&request) == 0);
    return yields.load();
  };
  pc::spins_of_wait = pc::kSpinsOnSharedCore;
  CHECK(yields_in_a_wait(pc::kSpinsOnSharedCore) == 0);
  CHECK(yields_in_a_wait(pc::kSpinsOnSharedCore + 5) == 5);
  pc::spins_of_wait = pc::kSpinsOnOwnCore;
  CHECK(yields_in_a_wait(pc::kSpinsOnOwnCore) == 0);
  CHECK(yields_in_a_wait(pc::kSpinsOnOwnCore + 5) == 5);
}

// Three calls of a size tell how fast they travel. A call that fails tells nothing.
void TestTheEstimateLearnsFromSuccess() {
  constexpr int64_t kBytes = 1 << 20;
  pc::is_patient = true;
  pc::BandwidthEstimate estimate;
  for (int i = 0; i < 3; ++i) pc::BandwidthEstimate::Sample failed(&estimate, kBytes);
  CHECK(estimate.LongestSleep(kBytes) == 0);
  for (int i = 0; i < 3; ++i) {
    pc::BandwidthEstimate::Sample call(&estimate, kBytes);
    CHECK(pc::longest_sleep == 0);
    Sleep(20);
    call.Succeed();
  }
  CHECK(estimate.LongestSleep(kBytes) > 0);
  {
    pc::BandwidthEstimate::Sample call(&estimate, kBytes);
    CHECK(pc::longest_sleep == estimate.LongestSleep(kBytes));
  }
  CHECK(pc::longest_sleep == pc::kLongestSleep);
  pc::is_patient = false;
}

const Tests kTests = {
    {"a_call_is_made_without_memory_for_a_thread", TestACallIsMadeWithoutMemoryForAThread},
    {"a_receive_ends_with_its_send", TestAReceiveEndsWithItsSend},
    {"a_wait_gives_the_core_away", TestAWaitGivesTheCoreAway},
    {"calls_run_in_patient_threads", TestCallsRunInPatientThreads},
    {"the_estimate_learns_from_success", TestTheEstimateLearnsFromSuccess},
};

}  // namespace

int main(int argc, char** argv) { return RunOne(kTests, argc, argv); }
