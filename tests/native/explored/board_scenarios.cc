// Scenarios of the board: each thread is a rank, and calls what a rank calls.

#include "shared_memory/board.h"

#include <sys/mman.h>

#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "explored.h"
#include "waits.h"
#include "records/recorder.h"
#include "shared_memory/piggyback.h"

namespace explore {
namespace {

using namespace pycollective;

constexpr int kMostRanks = 3;
constexpr int64_t kSite = int64_t{1} << 40, kOtherSite = int64_t{2} << 40;  // lines of two functions

// The memory of the board, and of two buffers of each rank.
char* const memory =
    static_cast<char*>(mmap(nullptr, BoardSlot::BytesOf(kMostRanks), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
alignas(64) char buffers[kMostRanks][2][64];
int64_t slot_number;
std::array<Difference, kMostRanks> found;

void Open(int ranks) {
  BoardSlot::OpenBoard(memory, ranks);
  BoardSlot::ReleaseAll();
  slot_number = BoardSlot::Take();
  for (int rank = 0; rank < ranks; ++rank) BoardSlot(slot_number, rank, ranks).Begin();
  Track(memory, BoardSlot::BytesOf(ranks));
  Track(buffers, sizeof(buffers));
  OnlyGrow(memory + 64, BoardSlot::BytesOf(ranks) - 64);  // the numbers of posted calls; the slots come first
  AddSite(kSite, "a line");
  AddSite(kOtherSite, "another line");
  found = {};
  YieldInWaits();
}

Scenario Of(std::string name, int ranks, std::function<void(int rank, BoardSlot& slot)> run) {
  Scenario scenario;
  scenario.name = std::to_string(ranks) + " ranks: " + name;
  scenario.threads = ranks;
  scenario.begin = [ranks] { Open(ranks); };
  scenario.run = [ranks, run](int rank) {
    BoardSlot slot(slot_number, rank, ranks);
    run(rank, slot);
  };
  return scenario;
}

Post PostOf(Operation operation, int64_t count, int64_t site = 0) {
  Post post;
  post.signature.operation = operation;
  post.signature.count = count;
  post.site = site;
  return post;
}

bool GoesOn(int) { return !IsInterrupted(); }

// Sums of two numbers that are piggybacked, where `brings`. The number of a call is in the numbers.
void Sum(BoardSlot& slot, int rank, int ranks, int64_t call, const BoardSlot::BufferOfRank* buffer_of, bool brings = true,
         bool all_bring = true) {
  const int64_t x[2] = {call, 10 * rank};
  int64_t y[2] = {-1, -1};
  const std::vector<ArrayPair> arrays = {{x, y, 2, Type::kInt64}};
  const PiggybackedAllreduce sum(arrays, Op::kSum);
  const Difference difference =
      slot.Compare(PostOf(kAllreduce, 2), true, GoesOn, brings ? &sum : nullptr, brings ? buffer_of : nullptr);
  EXPLORE_CHECK(difference.rank < 0);
  EXPLORE_CHECK(difference.is_made == (brings && all_bring));
  EXPLORE_CHECK(!difference.is_made || y[0] == ranks * call);
  EXPLORE_CHECK(!difference.is_made || y[1] == 5 * ranks * (ranks - 1));
}

// A broadcast of one number from rank 0.
void Broadcast(BoardSlot& slot, int rank, int ranks, int64_t call) {
  const int64_t x = rank == 0 ? call : -1;
  int64_t y = -1;
  const Arguments a{&x, &y, 1, Type::kInt64};
  const PiggybackedArrayCollective broadcast(kBcast, a, 1);
  static_cast<void>(ranks);
  const Difference difference = slot.Compare(PostOf(kBcast, 1), false, GoesOn, &broadcast);
  EXPLORE_CHECK(difference.rank < 0);
  EXPLORE_CHECK(!difference.is_made || y == call);
  EXPLORE_CHECK(difference.is_made || rank == 0);
}

const BoardSlot::BufferOfRank kBufferOf = [](int rank, uint64_t call) { return buffers[rank][call % 2]; };

Scenario WithFailure(Scenario scenario) {
  scenario.has_failure = true;
  return scenario;
}

Scenario WithPrelude(Scenario scenario) {
  scenario.has_prelude = true;
  return scenario;
}

}  // namespace

std::vector<Scenario> BoardScenarios() {
  std::vector<Scenario> all;
  for (const int ranks : {2, 3}) {
    all.push_back(Of("equal sums are compared, two calls", ranks, [](int, BoardSlot& slot) {
      for (int call = 1; call <= 2; ++call) EXPLORE_CHECK(slot.Compare(PostOf(kAllreduce, call), true, GoesOn).rank < 0);
    }));
    all.push_back(Of("small sums in cells, two calls", ranks, [ranks](int rank, BoardSlot& slot) {
      for (int call = 1; call <= 2; ++call) Sum(slot, rank, ranks, call, nullptr);
    }));
    all.push_back(Of("sums in buffers, three calls", ranks, [ranks](int rank, BoardSlot& slot) {
      for (int call = 1; call <= 3; ++call) Sum(slot, rank, ranks, call, &kBufferOf);
    }));
    all.push_back(Of("a sum in buffers, a broadcast, a sum in buffers", ranks, [ranks](int rank, BoardSlot& slot) {
      Sum(slot, rank, ranks, 1, &kBufferOf);
      EXPLORE_CHECK(slot.Compare(PostOf(kBcast, 1), false, GoesOn).rank < 0);
      Sum(slot, rank, ranks, 3, &kBufferOf);
    }));
    all.push_back(Of("a sum to which rank 0 brings nothing", ranks, [ranks](int rank, BoardSlot& slot) {
      Sum(slot, rank, ranks, 1, &kBufferOf, rank > 0, false);
      Sum(slot, rank, ranks, 2, &kBufferOf);
    }));
    // All see the rank that differs. Its line reaches them, unless it has not come after an hour.
    all.push_back(Of("a sum that differs on the last rank", ranks, [ranks](int rank, BoardSlot& slot) {
      const bool is_last = rank == ranks - 1;
      const Difference difference = slot.Compare(PostOf(kAllreduce, is_last ? 2 : 1, is_last ? kOtherSite : kSite), true, GoesOn);
      const int other = is_last ? 0 : ranks - 1;
      EXPLORE_CHECK(difference.rank == other);
      EXPLORE_CHECK(difference.theirs.signature.count == (is_last ? 1 : 2));
      EXPLORE_CHECK(difference.line == (is_last ? "a line" : "another line"));
    }));
    // None waits for the others. Of two ranks at least one sees the other.
    all.push_back(Of("broadcasts that differ", ranks, [ranks](int rank, BoardSlot& slot) {
      found[static_cast<size_t>(rank)] = slot.Compare(PostOf(kBcast, rank, rank == 0 ? kOtherSite : kSite), false, GoesOn);
      Meet();
      int none = 0;
      for (int one = 0; one < ranks; ++one) {
        const Difference& difference = found[static_cast<size_t>(one)];
        none += difference.rank < 0;
        EXPLORE_CHECK(difference.rank < 0 || difference.theirs.signature.count == difference.rank);
        EXPLORE_CHECK(difference.line.empty() || difference.line == (difference.rank == 0 ? "another line" : "a line"));
      }
      EXPLORE_CHECK(none <= 1);
    }));
    all.push_back(Of("broadcasts in cells, two calls", ranks, [ranks](int rank, BoardSlot& slot) {
      for (int call = 1; call <= 2; ++call) Broadcast(slot, rank, ranks, call);
    }));
    all.push_back(WithFailure(Of("the last rank fails before its second call", ranks, [ranks](int rank, BoardSlot& slot) {
      EXPLORE_CHECK(slot.Compare(PostOf(kAllreduce, 1), true, GoesOn).rank < 0);
      if (rank == ranks - 1) return FailRank();
      const Difference difference = slot.Compare(PostOf(kAllreduce, 2), true, GoesOn);
      EXPLORE_CHECK(IsInterrupted() && difference.rank < 0 && !difference.is_made);
    })));
  }
  // The cells of a rank are used again. Calls 1 to 7 lie in the first seven, and their order does not matter.
  all.push_back(WithPrelude(Of("broadcasts 8 to 11, in the cells of 1 to 3", 2, [](int rank, BoardSlot& slot) {
    for (int call = 1; call <= 7; ++call) Broadcast(slot, rank, 2, call);
    EndPrelude();
    for (int call = 8; call <= 11; ++call) Broadcast(slot, rank, 2, call);
  })));
  all.push_back(WithPrelude(Of("broadcasts 8 and 9, the latter in the cells of 1", 3, [](int rank, BoardSlot& slot) {
    for (int call = 1; call <= 7; ++call) Broadcast(slot, rank, 3, call);
    EndPrelude();
    for (int call = 8; call <= 9; ++call) Broadcast(slot, rank, 3, call);
  })));
  // A slot is given back, and another channel takes it. Each thread is both ranks of its channel.
  for (const bool by_all : {false, true}) {
    Scenario scenario = Of(by_all ? "all slots are given back, and one is taken" : "a slot is given back, and taken", 2, nullptr);
    scenario.run = [by_all](int thread) {
      const int64_t number = thread == 0 ? slot_number : BoardSlot::Take();
      EXPLORE_CHECK(number == slot_number || number == slot_number + 1);
      BoardSlot first(number, 0, 2), second(number, 1, 2);
      if (thread == 1) first.Begin();
      if (thread == 1) second.Begin();
      EXPLORE_CHECK(first.Compare(PostOf(kBcast, thread), false, GoesOn).rank < 0);
      EXPLORE_CHECK(second.Compare(PostOf(kBcast, thread), false, GoesOn).rank < 0);
      if (thread == 1) return;
      if (by_all) return BoardSlot::ReleaseAll();
      BoardSlot::Release(number);
    };
    all.push_back(scenario);
  }
  all.push_back(Of("two channels take slots", 2, nullptr));
  all.back().run = [](int thread) {
    found[static_cast<size_t>(thread)].rank = static_cast<int>(BoardSlot::Take());
    Meet();
    EXPLORE_CHECK(found[0].rank != found[1].rank);
  };
  return all;
}

std::vector<Scenario> SleepingBoardScenarios() {
  std::vector<Scenario> some;
  for (Scenario& scenario : BoardScenarios()) {
    const bool is_small = scenario.threads == 2 && !scenario.has_prelude;  // the others have too many executions
    if (is_small) some.push_back(Sleeping(std::move(scenario)));
  }
  return some;
}

}  // namespace explore
