// Tests of the board and of the flight recorder: threads in the place of ranks.

#include "shared_memory/board.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "harness.h"
#include "records/recorder.h"

namespace pc = pycollective;

namespace {

constexpr int kRanks = 3;
constexpr int kCalls = 2000;

pc::Post PostOf(int32_t operation, int64_t count) {
  pc::Post post;
  post.signature.operation = operation;
  post.signature.count = count;
  return post;
}

// What a rank does while it waits for another one: nothing, and it waits on.
bool Polls(int) { return true; }

// Calls run(rank, slot) in a thread for each rank.
template <typename Run>
void OnRanks(Run run) {
  std::vector<char> memory(pc::BoardSlot::BytesOf(kRanks) + 64);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  pc::BoardSlot::OpenBoard(reinterpret_cast<void*>((address + 63) / 64 * 64), kRanks);
  const int64_t number = pc::BoardSlot::Take();
  CHECK(number >= 0);
  for (int rank = 0; rank < kRanks; ++rank) pc::BoardSlot(number, rank, kRanks).Begin();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] { run(rank, pc::BoardSlot(number, rank, kRanks)); });
  }
  for (std::thread& thread : threads) thread.join();
  pc::BoardSlot::Release(number);
  pc::BoardSlot::OpenBoard(nullptr, 0);
}

// The kernel gives memory near the core that touches it first. So a rank writes no other one's cells when a channel begins.
void TestARankBeginsItsOwnCells() {
  constexpr int kSlots = static_cast<int>(pc::BoardSlot::kSlots);
  alignas(64) static char memory[(1 << 20) * 16];
  CHECK(pc::BoardSlot::BytesOf(kRanks) <= sizeof(memory));
  const size_t head = 2 * pc::BoardSlot::BytesOf(1) - pc::BoardSlot::BytesOf(2);
  const size_t of_rank = (pc::BoardSlot::BytesOf(1) - head) / kSlots;
  char* const cells = memory + head;
  char* const end = memory + sizeof(memory);
  std::fill(cells, end, 1);
  pc::BoardSlot::OpenBoard(memory, kRanks);
  CHECK(pc::BoardSlot::Take() == 0 && pc::BoardSlot::Take() == 1);
  CHECK(std::find(cells, end, 0) == end);
  pc::BoardSlot(1, 1, kRanks).Begin();
  char* const own = cells + (kRanks + 1) * of_rank;
  CHECK(std::find(cells, own, 0) == own);
  CHECK(std::find(own, own + of_rank, 0) != own + of_rank);
  CHECK(std::find(own + of_rank, end, 0) == end);
  pc::BoardSlot::OpenBoard(nullptr, 0);
}

void TestEqualCallsMatch() {
  OnRanks([](int, pc::BoardSlot slot) {
    for (int call = 0; call < kCalls; ++call) {
      CHECK(slot.Compare(PostOf(pc::kAllreduce, call), true, Polls).rank < 0);
    }
  });
}

// The others may be ahead, or behind.
void TestKnownBroadcastsMatch() {
  OnRanks([](int, pc::BoardSlot slot) {
    for (int call = 0; call < kCalls; ++call) {
      CHECK(slot.Compare(PostOf(pc::kBcast, call), false, Polls).rank < 0);
    }
  });
}

void TestAllSeeTheOneThatDiffers() {
  OnRanks([](int rank, pc::BoardSlot slot) {
    for (int call = 0; call < kCalls / 10; ++call) {
      const bool differs = call % 7 == 0;
      const auto found = slot.Compare(PostOf(pc::kAllreduce, differs && rank == 1 ? -1 : call), true, Polls);
      CHECK(found.rank == (!differs ? -1 : rank == 1 ? 0 : 1));
    }
  });
}

// It tells so with each call, and waits for nobody. Where others may have made the call that a rank refuses, Compare says so.
void TestOneThatIsOutOfStepMatchesNobody() {
  std::atomic<bool> is_posted{false};
  OnRanks([&](int rank, pc::BoardSlot slot) {
    if (rank != 0) {
      while (!is_posted) std::this_thread::yield();
    }
    const auto refused = slot.Compare(PostOf(pc::kBcast, rank == 0 ? 1 : 2), false, Polls);
    is_posted = true;
    CHECK(refused.rank == (rank == 0 ? -1 : 0));
    CHECK(refused.others_may_go_on == (rank != 0));
    for (int call = 0; call < 20; ++call) {
      pc::Post post = PostOf(call % 2 == 0 ? pc::kAllreduce : pc::kBcast, call);
      if (rank != 0) post.seq = pc::Post::kOutOfStep;
      const auto found = slot.Compare(post, rank == 0, Polls);
      CHECK(rank != 0 || (found.rank == 1 && found.theirs.seq == pc::Post::kOutOfStep));
    }
  });
  // Where all wait for all posts, none goes on.
  OnRanks([](int rank, pc::BoardSlot slot) {
    const auto found = slot.Compare(PostOf(pc::kAllreduce, rank), true, Polls);
    CHECK(found.rank >= 0 && !found.others_may_go_on);
  });
}

// Threads write records while others read them.
void TestRecordsAreReadWhileTheyAreWritten() {
  std::atomic<bool> ends{false};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      for (int call = 0; call < 10 * kCalls; ++call) {
        pc::Record record;
        record.operation = pc::kAllreduce;
        record.group = rank;
        record.count = record.nbytes = call;
        record.state = pc::kStarted;
        pc::Recorded recorded(record);
        recorded.Finish(pc::kCompleted);
      }
    });
  }
  std::thread reader([&] {
    while (!ends) {
      for (const pc::Record& record : pc::Records()) CHECK(record.count == record.nbytes);
      for (const pc::Record& record : pc::RecordsUnderWay()) CHECK(record.is_under_way());
    }
  });
  for (std::thread& thread : threads) thread.join();
  ends = true;
  reader.join();
}

const Tests kTests = {
    {"a_rank_begins_its_own_cells", TestARankBeginsItsOwnCells},
    {"equal_calls_match", TestEqualCallsMatch},
    {"known_broadcasts_match", TestKnownBroadcastsMatch},
    {"all_see_the_one_that_differs", TestAllSeeTheOneThatDiffers},
    {"one_that_is_out_of_step_matches_nobody", TestOneThatIsOutOfStepMatchesNobody},
    {"records_are_read_while_they_are_written", TestRecordsAreReadWhileTheyAreWritten},
};

}  // namespace

int main(int argc, char** argv) { return RunOne(kTests, argc, argv); }
