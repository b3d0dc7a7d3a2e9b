// Tests of waits for a number in shared memory, and of sleeping at a futex: native/mpi/wait.h, native/base/futex.h.

#include <dlfcn.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <fstream>
#include <functional>
#include <string>

#include "base/clock.h"
#include "base/futex.h"
#include "harness.h"
#include "mpi/wait.h"

namespace pc = pycollective;

namespace {

std::atomic<int> yields{0}, sleeps{0}, wake_ups{0};
std::atomic<int> long_yields{0};  // so many of the next yields last as long as with a neighbour

}  // namespace

extern "C" int sched_yield() noexcept {
  ++yields;
  if (long_yields > 0) {
    --long_yields;
    usleep(2000);
  }
  return 0;
}

extern "C" long syscall(long number, ...) noexcept {
  long arguments[6];
  va_list list;
  va_start(list, number);
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  if (number == SYS_futex) ++(arguments[1] == FUTEX_WAKE ? wake_ups : sleeps);
  static const auto next = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  return next(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}

namespace {

constexpr int64_t kSliceNs = 3'000'000;         // of a neighbour
constexpr int64_t kLimitNs = 20'000'000'000;  // of a sleep that a wake-up ends

// Numbers that this process shares with its children.
struct alignas(64) Shared {
  pc::PostedNumber numbers[2];
};
Shared* MakeShared() {
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  return static_cast<Shared*>(memory);
}

// A child that ends with status 0 if run() returns true.
pid_t Fork(const std::function<bool()>& run) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  _exit(run() ? 0 : 1);
}
bool EndsWell(pid_t pid) {
  int status = -1;
  CHECK(waitpid(pid, &status, 0) == pid);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Whether a child sleeps in the kernel.
bool Sleeps(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  return line.find(") S ") != std::string::npos;
}

void ForgetCounts() { yields = sleeps = wake_ups = 0; }

// One post wakes all processes that wait for it.
void TestAPostWakesOtherProcesses() {
  Shared* const shared = MakeShared();
  pid_t children[3];
  for (pid_t& child : children) {
    child = Fork([&] {
      while (shared->numbers[0].Load(std::memory_order_acquire) < 1) {
        if (!shared->numbers[0].SleepBelow(1, kLimitNs)) return false;
      }
      return true;
    });
  }
  for (const pid_t child : children) CHECK(BecomesTrue([&] { return Sleeps(child); }));
  shared->numbers[0].Post(1, std::memory_order_release);
  for (const pid_t child : children) CHECK(EndsWell(child));
}

// No wake-up is lost, on this kernel and processor: two processes wait for each other without a limit that would hide it.
void TestNoWakeUpIsLost() {
  constexpr uint64_t kRounds = 20'000;
  Shared* const shared = MakeShared();
  const auto play = [&](int rank) {
    for (uint64_t round = 1; round <= kRounds; ++round) {
      shared->numbers[rank].Post(round, std::memory_order_release);
      pc::PostedNumber& other = shared->numbers[1 - rank];
      while (other.Load(std::memory_order_acquire) < round) {
        if (!other.SleepBelow(round, kLimitNs)) return false;
      }
    }
    return true;
  };
  const pid_t child = Fork([&] { return play(1); });
  CHECK(play(0));
  CHECK(EndsWell(child));
  CHECK(sleeps > 0);
}

// A rank sets the bit, and the post clears it: only the next post after a sleep makes a system call.
void TestAPostWithoutSleepersMakesNoCall() {
  pc::PostedNumber number{};
  ForgetCounts();
  for (const uint64_t posted : {1, 2}) number.Post(posted, std::memory_order_release);
  CHECK(wake_ups == 0);
  CHECK(!number.SleepBelow(3, 1000));
  CHECK(number.Load(std::memory_order_relaxed) == 2);
  number.Post(3, std::memory_order_release);
  CHECK(wake_ups == 1 && number.Load(std::memory_order_relaxed) == 3);
  number.Post(4, std::memory_order_release);
  CHECK(wake_ups == 1);
  ForgetCounts();
  CHECK(number.SleepBelow(4, kLimitNs));  // it has come
  CHECK(sleeps == 0);
}

// The kernel compares the low bits of large numbers, too.
void TestNumbersOfAllSizes() {
  pc::PostedNumber number{};
  for (const uint64_t posted : {uint64_t{1} << 30, uint64_t{1} << 31, uint64_t{1} << 32, (uint64_t{1} << 63) - 1}) {
    number.Post(posted, std::memory_order_seq_cst);
    CHECK(number.Load(std::memory_order_relaxed) == posted);
    CHECK(pc::WaitUntil(number, posted, [] { return false; }));
    CHECK(!number.SleepBelow(posted + 1, 1000));  // it has fallen asleep: the time has run out
  }
  pc::is_patient = false;
  pc::neighbours.Learn(kSliceNs);
  CHECK(!pc::WaitUntil(number, UINT64_MAX, [] { return false; }));  // it never comes
}

// A wait that sleeps calls progress(), and ends when that says so, or at its limit.
void TestASleepingWaitMakesProgress() {
  pc::PostedNumber number{};
  pc::neighbours.Learn(kSliceNs);
  ForgetCounts();
  int calls = 0;
  CHECK(!pc::WaitUntil(number, 1, [&] { return ++calls < 3; }));
  CHECK(calls == 3 && sleeps == 3 && yields == 0);
  CHECK(pc::WaitUntil(number, 1, [] { return true; }, pc::NowNs() + 1));
  CHECK(number.Load(std::memory_order_relaxed) == 0);
}

// Without neighbours a wait yields, and makes no call of a futex.
void TestAWaitYieldsAtFirst() {
  pc::PostedNumber number{};
  ForgetCounts();
  int calls = 0;
  CHECK(!pc::WaitUntil(number, 1, [&] { return ++calls < 3; }));
  CHECK(sleeps == 0 && yields > 3);
}

// A long yield makes its wait sleep to the end, however long that is, and some waits that follow.
void TestALongYieldMakesAWaitSleep() {
  pc::PostedNumber number{};
  pc::neighbours = pc::Neighbours();
  ForgetCounts();
  long_yields = 1;
  int calls = 0;
  CHECK(!pc::WaitUntil(number, 1, [&] { return ++calls < 40; }));
  CHECK(yields == 1 && sleeps >= 39);
  int waits = 0;
  for (ForgetCounts(); yields == 0; ++waits) CHECK(!pc::WaitUntil(number, 1, [] { return false; }));
  CHECK(waits > 1 && sleeps == waits - 1);  // one sleep in each
}

int64_t WaitsInTurn(pc::Neighbours* neighbours) {
  int64_t count = 0;
  while (neighbours->CauseSleep()) ++count;
  return count;
}

// After a long yield some waits sleep. If long yields follow each other, these waits become more, up to a limit; if not, they are few again.
void TestLongYieldsCauseSleeps() {
  pc::spins_of_wait = pc::kSpinsOnSharedCore;
  constexpr int64_t kQuickNs = 1000;
  pc::Neighbours neighbours;
  for (int i = 0; i < 5000; ++i) neighbours.Learn(kQuickNs);
  CHECK(WaitsInTurn(&neighbours) == 0);
  neighbours.Learn(kSliceNs);
  const int64_t fewest = WaitsInTurn(&neighbours);
  CHECK(fewest > 0);
  int64_t most = fewest, repeated = 0;
  for (int i = 0; i < 14; ++i) {
    for (int yield = 0; yield < 10; ++yield) neighbours.Learn(kQuickNs);
    neighbours.Learn(kSliceNs);
    const int64_t count = WaitsInTurn(&neighbours);
    CHECK(count == 2 * most || (count == most && most > 8 * fewest));
    repeated += count == most;
    most = count;
  }
  CHECK(repeated > 0);
  for (int i = 0; i < 5000; ++i) neighbours.Learn(kQuickNs);
  CHECK(WaitsInTurn(&neighbours) == 0);
  neighbours.Learn(kSliceNs);
  CHECK(WaitsInTurn(&neighbours) == fewest);
  // On a core of its own a thread has no other rank that computes there.
  pc::spins_of_wait = pc::kSpinsOnOwnCore;
  pc::Neighbours of_own_core;
  of_own_core.Learn(kSliceNs);
  CHECK(WaitsInTurn(&of_own_core) > 4 * fewest);
}

const Tests kTests = {
    {"a_post_wakes_other_processes", TestAPostWakesOtherProcesses},
    {"no_wake_up_is_lost", TestNoWakeUpIsLost},
    {"a_post_without_sleepers_makes_no_call", TestAPostWithoutSleepersMakesNoCall},
    {"numbers_of_all_sizes", TestNumbersOfAllSizes},
    {"a_sleeping_wait_makes_progress", TestASleepingWaitMakesProgress},
    {"a_wait_yields_at_first", TestAWaitYieldsAtFirst},
    {"a_long_yield_makes_a_wait_sleep", TestALongYieldMakesAWaitSleep},
    {"long_yields_cause_sleeps", TestLongYieldsCauseSleeps},
};

}  // namespace

int main(int argc, char** argv) { return RunOne(kTests, argc, argv); }
