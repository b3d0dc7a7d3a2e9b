// What code under exploration (explore.h) calls of the explorer, and the scenarios that it runs.

#ifndef PYCOLLECTIVE_TESTS_NATIVE_EXPLORED_EXPLORED_H_
#define PYCOLLECTIVE_TESTS_NATIVE_EXPLORED_EXPLORED_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace explore {

// A program of some threads, which stand for ranks.
struct Scenario {
  std::string name;
  int threads;
  // Before each execution: gives the memory its values. No thread runs, and nothing is explored.
  std::function<void()> begin;
  // What a thread does.
  std::function<void(int thread)> run;
  // After each whole execution: what came out, in words; null: that does not matter.
  std::function<std::string()> outcome = nullptr;
  // Whether all threads call EndPrelude(). What they do before is done in one way.
  bool has_prelude = false;
  // Whether a thread calls FailRank().
  bool has_failure = false;
  // Takes fences with memory_order_seq_cst for fences of release and acquire: these have no order in which they could be
  // executed, and allow all that the former allow.
  bool weakens_fences = false;
  // Whether waits sleep. Then a load that does not end a wait has consequences, and may read any value.
  bool sleeps = false;
  // The exploration ends after so many executions, and is *bounded* then.
  int64_t most_executions = 200'000;
};

// What an exploration has found.
struct Result {
  int64_t executions = 0;
  int64_t redundant = 0;  // executions that were left off, since they would have repeated another one
  bool is_complete = false;
  std::string violation;  // the first; "": there is none
  std::set<std::string> outcomes;
};

// Explores a scenario. It ends at the first violation: a race, a deadlock, or a call of Fail().
Result ExploreAll(const Scenario& scenario);

// Whether an access of another thread to this memory that does not happen before or after is a race.
void Track(const void* begin, size_t nbytes);

// In this memory the first atomic object of each 64 bytes is a number that only grows, and loads with memory_order_acquire only
// compare it with a limit, and load it again until it has reached that. Of two values that both reach it the older one is read: the
// newer one would let the thread see more, so it can do nothing that it cannot do after the older one. Other loads read any value.
void OnlyGrow(const void* begin, size_t nbytes);

// Ends the prelude of this thread. It goes on when all threads have called this, which orders nothing between them.
void EndPrelude();

// A barrier of MPI between the threads of a scenario: all that was before it happens before all that follows.
void Meet();

// This rank fails: from now on a wait of another rank may end, since MPI says so.
void FailRank();
// Whether that is so in the wait that this thread makes now.
bool IsInterrupted();

// The memory model does not allow what has happened.
[[noreturn]] void Fail(const std::string& what);

#define EXPLORE_CHECK(condition)                                                                     \
  do {                                                                                               \
    if (!(condition)) ::explore::Fail("failed: " #condition ", line " + std::to_string(__LINE__));   \
  } while (false)

// The scenarios of the library's own code, and small programs whose outcomes are known.
std::vector<Scenario> BoardScenarios();
std::vector<Scenario> ExchangeScenarios();
std::vector<Scenario> TreeScenarios();
// Waits for a number, each of which sleeps at once, as with busy neighbours; and some of the scenarios above, or small ones like
// them, with such waits.
std::vector<Scenario> SleepingWaitScenarios();
std::vector<Scenario> SleepingBoardScenarios();
std::vector<Scenario> SleepingExchangeScenarios();
std::vector<Scenario> SleepingTreeScenarios();

struct Litmus {
  Scenario scenario;
  std::set<std::string> outcomes;  // that the memory model allows
  std::string violation = "";  // how the text of the one begins that it has
};
std::vector<Litmus> LitmusTests();

}  // namespace explore

#endif  // PYCOLLECTIVE_TESTS_NATIVE_EXPLORED_EXPLORED_H_
