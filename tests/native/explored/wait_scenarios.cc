// Scenarios of a number that ranks wait for, asleep. Each thread is a rank.

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "explored.h"
#include "mpi/wait.h"
#include "waits.h"

namespace explore {
namespace {

using namespace pycollective;

struct alignas(64) Shared {
  PostedNumber number;
  alignas(64) int64_t data[3];  // what a rank writes before it posts 1 or 2
};
Shared shared[3];

bool GoesOn() { return !IsInterrupted(); }

void Post(int rank, uint64_t number) {
  shared[rank].data[number] = 7;
  shared[rank].number.Post(number, std::memory_order_release);
}

void WaitFor(int rank, uint64_t number) {
  EXPLORE_CHECK(WaitUntil(shared[rank].number, number, GoesOn));
  EXPLORE_CHECK(shared[rank].data[number] == 7);
}

Scenario Of(std::string name, int ranks, std::function<void(int rank)> run) {
  Scenario scenario;
  scenario.name = std::to_string(ranks) + " ranks: " + name;
  scenario.threads = ranks;
  scenario.begin = [] {
    for (Shared& one : shared) {
      one.number.Clear();
      std::memset(one.data, 0, sizeof(one.data));
    }
    Track(shared, sizeof(shared));
    YieldInWaits();
  };
  scenario.run = std::move(run);
  return Sleeping(scenario);
}

}  // namespace

std::vector<Scenario> SleepingWaitScenarios() {
  std::vector<Scenario> all;
  all.push_back(Of("two numbers are awaited", 2, [](int rank) {
    for (const uint64_t number : {1, 2}) rank == 0 ? Post(0, number) : WaitFor(0, number);
  }));
  all.push_back(Of("the second number is awaited", 2, [](int rank) {
    if (rank == 1) return WaitFor(0, 2);
    for (const uint64_t number : {1, 2}) Post(0, number);
  }));
  all.push_back(Of("each waits for the other one, twice", 2, [](int rank) {
    for (const uint64_t number : {1, 2}) {
      Post(rank, number);
      WaitFor(1 - rank, number);
    }
  }));
  all.push_back(Of("two wait for one number", 3, [](int rank) { rank == 0 ? Post(0, 1) : WaitFor(0, 1); }));
  all.push_back(Of("two wait for two numbers", 3, [](int rank) {
    if (rank > 0) return WaitFor(0, static_cast<uint64_t>(rank));
    for (const uint64_t number : {1, 2}) Post(0, number);
  }));
  all.push_back(Of("one waits for two", 3, [](int rank) {
    if (rank < 2) return Post(rank, 1);
    for (int other = 0; other < 2; ++other) WaitFor(other, 1);
  }));
  // The bit of a wait that ends stays behind.
  all.push_back(Of("a wait may end before the post, and another one begins", 3, [](int rank) {
    if (rank == 0) return Post(0, 1);
    if (rank == 2) {
      EXPLORE_CHECK(WaitUntil(shared[0].number, 1, [] { return true; }));  // the failure does not end this wait
      EXPLORE_CHECK(shared[0].data[1] == 7);
      return;
    }
    FailRank();
    const bool has_come = WaitUntil(shared[0].number, 1, GoesOn);
    EXPLORE_CHECK(has_come != IsInterrupted());
  }));
  all.back().has_failure = true;
  return all;
}

}  // namespace explore
