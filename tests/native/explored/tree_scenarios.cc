// Scenarios of the combining tree: each thread is a rank, and meets the others in the tree.

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "explored.h"
#include "shared_memory/combining_tree.h"
#include "waits.h"

namespace explore {
namespace {

using namespace pycollective;

constexpr int kMostRanks = 4;
constexpr int64_t kSlot = 1;

// The memory of the trees of all slots. Of a room the number and the first two words of the data are used.
char* const memory = static_cast<char*>(
    mmap(nullptr, CombiningTree::BytesOf(kMostRanks), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));

void Open(int ranks) {
  CombiningTree::OpenMemory(memory, ranks);
  for (int rank = 0; rank < ranks; ++rank) CombiningTree(kSlot, rank, ranks).Begin();
  Track(memory, CombiningTree::BytesOf(ranks));
  OnlyGrow(memory, CombiningTree::BytesOf(ranks));
  YieldInWaits();
}

bool GoesOn(int) { return !IsInterrupted(); }

// What all ranks bring stands in a number digit by digit, in their order: so each other order, and each rank that is left out, gives another
// number. The first rank adds the number of the meeting. Returns false if a wait has ended.
bool MeetIn(CombiningTree& tree, int rank, int ranks, int64_t meeting) {
  int64_t own[2] = {rank + 1, 1};  // the digits, and how many
  const auto add = [&](const void* next) {
    int64_t theirs[2];
    std::memcpy(theirs, next, sizeof(theirs));
    for (int64_t digit = 0; digit < theirs[1]; ++digit) own[0] *= 10;
    own[0] += theirs[0];
    own[1] += theirs[1];
  };
  const auto write = [&](void* room) { std::memcpy(room, own, sizeof(own)); };
  const auto read = [&](const void* room) { std::memcpy(own, room, sizeof(own)); };
  if (!tree.Combine(GoesOn, add, write)) return false;
  if (rank == 0) own[0] += 10000 * meeting;
  if (!tree.Share(GoesOn, write, read)) return false;
  int64_t expected = 0;
  for (int other = 1; other <= ranks; ++other) expected = 10 * expected + other;
  EXPLORE_CHECK(own[0] == expected + 10000 * meeting && own[1] == ranks);
  return true;
}

Scenario Of(const std::string& name, int ranks, int fan_in, const std::function<void(CombiningTree& tree, int rank)>& run) {
  Scenario scenario;
  scenario.name = std::to_string(ranks) + " ranks in a tree of fan-in " + std::to_string(fan_in) + ": " + name;
  scenario.threads = ranks;
  scenario.begin = [ranks] { Open(ranks); };
  scenario.run = [ranks, fan_in, run](int rank) {
    CombiningTree tree(kSlot, rank, ranks, fan_in);
    run(tree, rank);
  };
  return scenario;
}

}  // namespace

std::vector<Scenario> TreeScenarios() {
  std::vector<Scenario> all;
  const auto meetings = [](int ranks, int number) {
    return [=](CombiningTree& tree, int rank) {
      for (int64_t meeting = 1; meeting <= number; ++meeting) EXPLORE_CHECK(MeetIn(tree, rank, ranks, meeting));
    };
  };
  all.push_back(Of("three meetings", 2, 2, meetings(2, 3)));
  all.push_back(Of("two meetings", 3, 3, meetings(3, 2)));
  all.push_back(Of("two meetings", 3, 2, meetings(3, 2)));
  all.push_back(Of("two meetings", 4, 2, meetings(4, 2)));
  for (const int fan_in : {2, 3}) {
    all.push_back(Of("the last rank fails before the second meeting", 3, fan_in, [](CombiningTree& tree, int rank) {
      EXPLORE_CHECK(MeetIn(tree, rank, 3, 1));
      if (rank == 2) return FailRank();
      EXPLORE_CHECK(!MeetIn(tree, rank, 3, 2) && IsInterrupted());
    }));
    all.back().has_failure = true;
  }
  return all;
}

std::vector<Scenario> SleepingTreeScenarios() {
  std::vector<Scenario> some;
  for (Scenario& scenario : TreeScenarios()) {
    if (scenario.threads == 2) some.push_back(Sleeping(std::move(scenario)));
  }
  return some;
}

}  // namespace explore
