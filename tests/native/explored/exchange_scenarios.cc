// Scenarios of the exchange of arrays: each thread is a rank, and makes the collectives of HostCollective.

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "explored.h"
#include "waits.h"
#include "shared_memory/board.h"
#include "shared_memory/exchange.h"
#include "shared_memory/host_collectives.h"
#include "shared_memory/piggyback.h"
#include "shared_memory/process_memory.h"
#include "shared_memory/shared_arrays.h"

namespace explore {
namespace {

const void* unreadable = nullptr;  // an array that no rank can read
bool copies_nothing = false;       // the kernel is not to copy any array
bool copies_words = false;         // a rank may write the array while the kernel copies it, which is no race

}  // namespace
}  // namespace explore

// The kernel's part, and copies past the caches. In the scenarios ranks are threads of one process.
namespace pycollective {

void LetOthersRead(bool) {}

int CopyFromProcess(int64_t, void* to, const void* from, size_t nbytes) {
  if (from == explore::unreadable || explore::copies_nothing) return EFAULT;
  if (!explore::copies_words) {
    std::memcpy(to, from, nbytes);
    return 0;
  }
  for (size_t word = 0; word < nbytes / sizeof(int64_t); ++word) {
    static_cast<int64_t*>(to)[word] = __atomic_load_n(static_cast<const int64_t*>(from) + word, __ATOMIC_RELAXED);
  }
  return 0;
}

void CopyPastCaches(void* to, const void* from, size_t nbytes) { std::memcpy(to, from, nbytes); }
int64_t CacheBytesOfCore() { return 4 << 10; }
int64_t CacheBytesOfHost() { return 32 << 20; }

}  // namespace pycollective

namespace explore {
namespace {

using namespace pycollective;

constexpr int kMostRanks = 3;
constexpr int64_t kTwoSteps = 1025;  // elements: the fewest of an allreduce in two steps
constexpr int64_t kAllReduce = 4097;  // elements: more than one of two ranks reduces alone
constexpr int64_t kThreePieces = 2 * Exchange::kBufferBytes / 8 + 1;

// MPI: its calls are not explored, but a wait asks whether a rank has failed.
class NoMpi final : public Library {
 public:
  Outcome Allreduce(const Channel&, const Arguments&) const override { return Called(); }
#define EXPLORE_NAME(name, Name, ...) \
  Outcome Name(const Channel&, const Arguments&) const override { return Called(); }
#define EXPLORE_NOTHING(...)
  PYCOLLECTIVE_OPERATIONS(EXPLORE_NAME, EXPLORE_NOTHING)
#undef EXPLORE_NOTHING
#undef EXPLORE_NAME
  Outcome Barrier(const Channel&) const override { return Called(); }
  Outcome CheckTag(const Channel&, int) const override { return Called(); }
  Outcome Send(const Channel&, const Outgoing&) const override { return Called(); }
  Outcome Recv(const Channel&, const Incoming&) const override { return Called(); }
  Outcome RecvInPlaces(const Channel&, const Incoming&, const std::array<MemoryRange, 3>&) const override { return Called(); }
  Outcome Sendrecv(const Channel&, const Outgoing&, const Incoming&) const override { return Called(); }
  Outcome CheckReceived(const char*, const Incoming&) const override { return Called(); }
  Outcome SetReceived(const Incoming&) const override { return Called(); }
  Outcome Permute(const Channel&, const Outgoing&, const Incoming&, const Arguments*) const override { return Called(); }
  Outcome Isend(const Channel&, const Outgoing&, int64_t*) const override { return Called(); }
  Outcome Irecv(const Channel&, const Incoming&, int64_t*) const override { return Called(); }
  Outcome WaitAll(std::vector<int64_t>*) const override { return Called(); }
  Outcome Finish(MessageUnderWay*, bool) const override { return Called(); }
  Outcome Cancel(MessageUnderWay*) const override { return Called(); }
  Outcome CreateComm(int64_t, const std::vector<int>&, int, int64_t*) const override { return Called(); }
  Outcome FreeComm(int64_t) const override { return Called(); }
  bool IsOwn(Op, Type) const override { return false; }
  Outcome Progress(const Channel&, int) const override { return IsInterrupted() ? Outcome{"MPI_Iprobe", 1, {}} : Outcome{}; }
  void Abort(int) const override { Called(); }
  std::string ErrorString(int) const override { return ""; }
  int proc_null() const override { return -1; }

 private:
  static Outcome Called() { Fail("MPI was called"); }
};
const NoMpi& mpi = *new NoMpi;

char* const board_memory =
    static_cast<char*>(mmap(nullptr, BoardSlot::BytesOf(kMostRanks), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
char* const memory = static_cast<char*>(
    mmap(nullptr, Exchange::BytesOf(kMostRanks), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
int64_t slot_number;

// The arrays of each rank.
struct Arrays {
  alignas(64) int64_t send[kThreePieces], recv[kThreePieces], part[4096];
};
std::array<Arrays, kMostRanks> arrays;
std::atomic<int64_t> is_free;  // whether a root has left its array: 1, and not all have read it; 2, and all have
Exchange taken;  // a channel of one rank, whose buffers were taken before an execution

void Begin(int64_t slot, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    BoardSlot(slot, rank, ranks).Begin();
    Exchange(slot, rank, ranks, 2).Begin();  // and for scenarios with a tree
  }
}

void Open(int ranks) {
  BoardSlot::OpenBoard(board_memory, ranks);
  BoardSlot::ReleaseAll();
  slot_number = BoardSlot::Take();
  Exchange::OpenMemory(memory, ranks);
  Exchange::EndAll();
  Begin(slot_number, ranks);
  Track(board_memory, BoardSlot::BytesOf(ranks));
  Track(memory, Exchange::BytesOf(ranks));
  Track(arrays.data(), sizeof(arrays));
  const Exchange exchange(slot_number, 0, ranks);
  OnlyGrow(&exchange.counter(0), static_cast<size_t>(2 * ranks) * 64);  // the counters, and the second ones
  OnlyGrow(board_memory + 64, BoardSlot::BytesOf(ranks) - 64);  // the numbers of posted calls; the slots come first
  Exchange::SetReadBytes(0);
  SharedArrays::Open(nullptr, 0, nullptr, 0);
  unreadable = nullptr;
  copies_nothing = false;
  copies_words = false;
  is_free = 0;
  YieldInWaits();
}

// A channel of ranks, as one of them sees it.
struct Rank {
  // `fan_in`: of the tree in which ranks wait for all.
  Rank(int64_t slot, int rank, int size, int fan_in)
      : rank(rank), size(size), board(slot, rank, size), exchange(slot, rank, size, fan_in) {
    channel.rank = rank;
    channel.size = size;
    channel.exchange = &exchange;
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  int64_t* send() { return arrays[static_cast<size_t>(rank)].send; }
  int64_t* recv() { return arrays[static_cast<size_t>(rank)].recv; }
  // The call's number and the rank are in each element.
  Arguments Bring(int64_t call, int64_t count) {
    for (int64_t i = 0; i < count; ++i) send()[i] = 100 * call + rank + 7 * i;
    Arguments a{send(), recv(), count, Type::kInt64};
    return a;
  }
  void CheckSum(int64_t call, int64_t count) {
    for (int64_t i = 0; i < count; i += std::max<int64_t>(1, count / 8)) {
      EXPLORE_CHECK(recv()[i] == size * (100 * call + 7 * i) + size * (size - 1) / 2);
    }
  }
  void FindBuffers() {
    bool has_buffers = false;
    EXPLORE_CHECK(HostCollective(mpi, channel).HasBuffers(&has_buffers).ok());
    EXPLORE_CHECK(has_buffers);
  }
  HostCollective collective() { return HostCollective(mpi, channel); }

  void Allreduce(int64_t call, int64_t count, bool by_reading) {
    const Arguments a = Bring(call, count);
    EXPLORE_CHECK((by_reading ? collective().ByReading(kAllreduce, a) : collective().ThroughBuffers(kAllreduce, a)).ok());
    CheckSum(call, count);
  }
  void Broadcast(int64_t call, bool by_reading, int root = 0) {
    Arguments a = Bring(call, 1);
    a.root = root;
    EXPLORE_CHECK((by_reading ? collective().ByReading(kBcast, a) : collective().ThroughBuffers(kBcast, a)).ok());
    EXPLORE_CHECK(recv()[0] == 100 * call + root);
  }
  void Alltoall(int64_t call, bool by_reading) {
    const Arguments whole = Bring(call, size);
    const Arguments a = whole.On(send(), recv(), 1);
    EXPLORE_CHECK((by_reading ? collective().ByReading(kAlltoall, a) : collective().ThroughBuffers(kAlltoall, a)).ok());
    for (int other = 0; other < size; ++other) EXPLORE_CHECK(recv()[other] == 100 * call + other + 7 * rank);
  }
  // A sum that is piggybacked on the comparison, in the buffers.
  void ComparedSum(int64_t call) {
    const Arguments a = Bring(call, 1);
    const PiggybackedArrayCollective sum(kAllreduce, a, 1);
    bool has_buffer = false;
    EXPLORE_CHECK(collective().FreeBuffer(board.next_call(), &has_buffer).ok());
    EXPLORE_CHECK(has_buffer);
    const BoardSlot::BufferOfRank buffer_of = [&](int of, uint64_t number) { return exchange.BufferOf(of, number); };
    Post post;
    post.signature.operation = kAllreduce;
    EXPLORE_CHECK(board.Compare(post, true, [](int) { return !IsInterrupted(); }, &sum, &buffer_of).is_made);
    CheckSum(call, 1);
  }
  // The step between hosts adds 1.
  void HierarchicalSum(int64_t call, int64_t count, int lanes) {
    const Arguments a = Bring(call, count);
    const auto add = [](void* share, int64_t n) -> Outcome {
      for (int64_t i = 0; i < n; ++i) static_cast<int64_t*>(share)[i] += 1;
      return {};
    };
    EXPLORE_CHECK(collective().Allreduce(a, lanes, add).ok());
    for (int64_t i = 0; i < count; i += std::max<int64_t>(1, count / 8)) recv()[i] -= 1;
    CheckSum(call, count);
  }
  // Each rank gets the sums of its blocks, and then the blocks of all.
  void DistributedSum(int64_t call, const Distribution& parts, int64_t* part) {
    const Arguments a = Bring(call, parts.count);
    EXPLORE_CHECK(collective().ReduceScatter(a.On(a.send, part, parts.count), parts).ok());
    EXPLORE_CHECK(collective().Allgather(a.On(part, a.recv, parts.count), parts).ok());
    CheckSum(call, parts.count);
    part[0] = -1;  // no other rank reads it any more
  }
  void ComparedBroadcast(int64_t call) {
    Post post;
    post.signature.operation = kBcast;
    EXPLORE_CHECK(board.Compare(post, false, [](int) { return !IsInterrupted(); }).rank < 0);
    Broadcast(call, false);
  }

  const int rank, size;
  BoardSlot board;
  Exchange exchange;
  Channel channel;
};

// `fan_in`: 0: the ranks do not wait in a tree.
Scenario Of(std::string name, int ranks, std::function<void(Rank& own)> run, int fan_in = 0) {
  Scenario scenario;
  scenario.name = std::to_string(ranks) + " ranks: " + name;
  scenario.threads = ranks;
  if (fan_in > 0) scenario.name += ", in a tree of fan-in " + std::to_string(fan_in);
  scenario.begin = [ranks] { Open(ranks); };
  scenario.run = [ranks, run, fan_in](int rank) {
    Rank own(slot_number, rank, ranks, fan_in == 0 ? ranks : fan_in);
    run(own);
  };
  return scenario;
}

// What a thread does that is no rank of the channel `slot_number`.
Scenario OfThreads(std::string name, int threads, std::function<void(int thread)> run) {
  Scenario scenario = Of(std::move(name), threads, nullptr);
  scenario.run = std::move(run);
  return scenario;
}

bool GoesOn(int) { return true; }

// What each rank has written before a barrier, all others may read until the next one.
void Barriers(Rank& own) {
  for (int call = 0; call < 2; ++call) {
    own.send()[0] = call;
    EXPLORE_CHECK(own.collective().Barrier().ok());
    for (int other = 0; other < own.size; ++other) EXPLORE_CHECK(arrays[static_cast<size_t>(other)].send[0] == call);
    EXPLORE_CHECK(own.collective().Barrier().ok());
  }
}

}  // namespace

std::vector<Scenario> ExchangeScenarios() {
  std::vector<Scenario> all;
  for (const int ranks : {2, 3}) {
    all.push_back(Of("broadcasts through buffers, four calls", ranks, [](Rank& own) {
      own.FindBuffers();
      for (int call = 0; call < 4; ++call) own.Broadcast(call, false);
    }));
    all.push_back(Of("sums through buffers in one step, three calls", ranks, [](Rank& own) {
      own.FindBuffers();
      for (int call = 0; call < 3; ++call) own.Allreduce(call, 1, false);
    }));
    all.push_back(Of("an alltoall through buffers, and by reading", ranks, [](Rank& own) {
      own.FindBuffers();
      own.Alltoall(0, false);
      own.Alltoall(1, true);
    }));
    all.back().weakens_fences = ranks > 2;
    all.push_back(Of("a permutation, a gather, a scan and a reduction through buffers", ranks, [](Rank& own) {
      own.FindBuffers();
      Arguments a = own.Bring(0, 1);
      a.to = (own.rank + 1) % own.size;
      a.from = (own.rank + own.size - 1) % own.size;
      EXPLORE_CHECK(own.collective().ThroughBuffers(kPpermute, a).ok());
      EXPLORE_CHECK(own.recv()[0] == a.from);
      a = own.Bring(1, 1);
      a.root = 1;
      EXPLORE_CHECK(own.collective().ThroughBuffers(kGather, a).ok());
      for (int other = 0; other < own.size; ++other) EXPLORE_CHECK(own.recv()[other] == (own.rank == 1 ? 100 + other : 0));
      EXPLORE_CHECK(own.collective().ThroughBuffers(kScan, own.Bring(2, 1)).ok());
      EXPLORE_CHECK(own.recv()[0] == 200 * (own.rank + 1) + own.rank * (own.rank + 1) / 2);
      a = own.Bring(3, 1);
      EXPLORE_CHECK(own.collective().ThroughBuffers(kReduce, a).ok());
      if (own.rank == 0) own.CheckSum(3, 1);
    }));
    all.push_back(Of("sums through buffers in two steps, three calls", ranks, [](Rank& own) {
      own.FindBuffers();
      for (int call = 0; call < 3; ++call) own.Allreduce(call, kTwoSteps, false);
    }));
    // A rank fills its buffer with the next piece before it takes this one.
    all.push_back(Of("a sum of three pieces", ranks, [](Rank& own) {
      own.FindBuffers();
      own.Allreduce(0, kThreePieces, false);
    }));
    // The root is two broadcasts ahead when it fills its buffer for the sum. It is the last rank: the first one fills the place of
    // the broadcast later, with its share.
    all.push_back(Of("two broadcasts and a sum in two steps", ranks, [](Rank& own) {
      own.FindBuffers();
      own.Broadcast(0, false, own.size - 1);
      own.Broadcast(1, false, own.size - 1);
      own.Allreduce(2, kTwoSteps, false);
    }));
    all.push_back(Of("broadcasts by reading, two calls", ranks, [](Rank& own) {
      for (int call = 0; call < 2; ++call) own.Broadcast(call, true, call);
    }));
    all.push_back(Of("sums by reading, two calls", ranks, [](Rank& own) {
      for (int call = 0; call < 2; ++call) own.Allreduce(call, 24, true);
    }));
    all.back().weakens_fences = ranks > 2;
    // All ranks have mapped the arrays, so the kernel copies none.
    all.push_back(Of("sums and broadcasts of shared arrays by reading, two calls", ranks, [](Rank& own) {
      own.Allreduce(0, 24, true);
      own.Broadcast(1, true, 1);
    }));
    all.back().begin = [ranks] {
      Open(ranks);
      auto* const memory = reinterpret_cast<char*>(arrays.data());
      SharedArrays::Open(memory, sizeof(arrays), memory, sizeof(arrays));
      copies_nothing = true;
    };
    all.back().weakens_fences = ranks > 2;
    // One lane: the first rank reduces alone, and a larger array all ranks.
    for (const int64_t count : {int64_t{24}, kAllReduce}) {
      const std::string name = count > 24 ? "hierarchical sums that all ranks reduce, two calls" : "hierarchical sums, two calls";
      all.push_back(Of(name, ranks, [count](Rank& own) {
        own.FindBuffers();
        for (int call = 0; call < 2; ++call) own.HierarchicalSum(call, count, 1);
      }));
    }
    all.push_back(Of("a hierarchical sum between broadcasts, in two lanes", ranks, [](Rank& own) {
      own.FindBuffers();
      own.Broadcast(0, false, own.size - 1);
      own.HierarchicalSum(1, 24, 2);
      own.Broadcast(2, false, own.size - 1);
    }));
    for (const bool by_reading : {false, true}) {
      const std::string name = by_reading ? "sums of blocks by reading" : "sums of blocks through buffers, two calls";
      all.push_back(Of(name, ranks, [by_reading](Rank& own) {
        own.FindBuffers();
        const int64_t block = by_reading ? 1024 : 2;
        for (int call = 0; call < (by_reading ? 1 : 2); ++call) {
          own.DistributedSum(call, {2 * block * own.size, block, own.size}, arrays[static_cast<size_t>(own.rank)].part);
        }
      }));
      if (by_reading) all.back().begin = [ranks] {
        Open(ranks);
        Exchange::SetReadBytes(1 << 20);
      };
      all.back().weakens_fences = by_reading && ranks > 2;
    }
    // Ranks without a part, or with the only one, are up to two calls ahead.
    all.push_back(Of("sums of which one rank has all, and that part for all, three calls each", ranks, [](Rank& own) {
      own.FindBuffers();
      int64_t* const part = arrays[static_cast<size_t>(own.rank)].part;
      for (int call = 0; call < 3; ++call) {
        const Arguments a = own.Bring(call, 2);
        EXPLORE_CHECK(own.collective().ReduceScatter(a.On(a.send, part, 2), {2, 2, 1}).ok());
        EXPLORE_CHECK(own.rank > 0 || part[1] == own.size * (100 * call + 7) + own.size * (own.size - 1) / 2);
      }
      for (int call = 0; call < 3; ++call) {
        part[1] = call;
        EXPLORE_CHECK(own.collective().Allgather({part, own.recv(), 2, Type::kInt64}, {2, 2, 1}).ok());
        EXPLORE_CHECK(own.recv()[1] == call);
      }
    }));
    all.push_back(Of("barriers", ranks, Barriers));
    all.push_back(Of("large sums whose algorithm changes", ranks, [](Rank& own) {
      own.FindBuffers();
      const auto nbytes = kTwoSteps * static_cast<int64_t>(sizeof(int64_t));
      own.exchange.Learn(0, nbytes, 1000);  // so the other one is tried in the second call, and this one in the third
      int64_t algorithms = 0;
      for (int call = 0; call < 3; ++call) {
        HostCollective collective = own.collective();
        const Arguments a = own.Bring(call, kTwoSteps);
        const bool by_reading = collective.FasterAlgorithm(a) == HostCollective::Algorithm::kByReading;
        algorithms = 2 * algorithms + by_reading;
        EXPLORE_CHECK((by_reading ? collective.ByReading(kAllreduce, a) : collective.ThroughBuffers(kAllreduce, a)).ok());
        own.CheckSum(call, kTwoSteps);
        for (int time = 0; time < 3; ++time) own.exchange.Learn(1, nbytes, 1000);
      }
      EXPLORE_CHECK(algorithms == 5);
    }));
    all.back().weakens_fences = ranks > 2;
    // Rank 0 cannot read: all get an error, and the next call is a good one.
    all.push_back(Of("a sum by reading that fails on rank 0", ranks, [](Rank& own) {
      unreadable = arrays[1].send;
      EXPLORE_CHECK(!own.collective().ByReading(kAllreduce, own.Bring(0, 24)).ok());
      own.Broadcast(1, true);
    }));
    all.back().weakens_fences = ranks > 2;
    // The root leaves the call, since the last rank has failed. Its array may be anything then.
    all.push_back(Of("the root of a broadcast gives up", ranks, [](Rank& own) {
      copies_words = true;
      if (own.size == 3 && own.rank == 2) return FailRank();
      if (own.size == 2) FailRank();
      Arguments a{own.send(), own.recv(), 1, Type::kInt64};
      if (own.rank == 0) __atomic_store_n(own.send(), 5, __ATOMIC_RELAXED);
      const bool is_ok = own.collective().ByReading(kBcast, a).ok();
      if (own.rank == 0 && !is_ok) __atomic_store_n(own.send(), -1, __ATOMIC_RELAXED);
      EXPLORE_CHECK(own.rank == 0 || !is_ok || own.recv()[0] == 5);
    }));
    all.back().has_failure = true;
  }
  // The same, and another thread of the root's process then gets the memory of the array.
  all.push_back(OfThreads("the root of a broadcast gives up, and its memory is used anew", 3, [](int thread) {
    copies_words = true;
    if (thread == 2) {
      while (is_free.load(std::memory_order_acquire) == 0) sched_yield();
      if (is_free.load(std::memory_order_relaxed) == 1) __atomic_store_n(arrays[0].send, -1, __ATOMIC_RELAXED);
      return;
    }
    FailRank();
    Rank own(slot_number, thread, 2, 2);
    Arguments a{own.send(), own.recv(), 1, Type::kInt64};
    if (own.rank == 0) __atomic_store_n(own.send(), 5, __ATOMIC_RELAXED);
    const bool is_ok = own.collective().ByReading(kBcast, a).ok();
    if (own.rank == 0) is_free.store(is_ok ? 2 : 1, std::memory_order_release);
    EXPLORE_CHECK(own.rank == 0 || !is_ok || own.recv()[0] == 5);
  }));
  all.back().has_failure = true;
  all.push_back(Of("sums with comparisons, and broadcasts in the same buffers", 2, [](Rank& own) {
    own.FindBuffers();
    own.ComparedSum(1);
    own.ComparedBroadcast(2);
    own.ComparedBroadcast(3);
    own.ComparedSum(4);
    own.ComparedSum(5);
    own.Broadcast(6, false);
  }));
  all.push_back(Of("sums with comparisons, and broadcasts in the same buffers", 3, [](Rank& own) {
    own.FindBuffers();
    own.ComparedSum(1);
    own.ComparedBroadcast(2);
    own.ComparedSum(3);
  }));
  // A channel gives its buffers back, and another one takes them: thread 0 is both ranks of the first, each other thread a rank of
  // the second.
  all.push_back(OfThreads("buffers are given back, and taken", 3, [](int thread) {
    if (thread == 0) {
      for (const int rank : {0, 1}) std::memset(taken.BufferOf(rank, 0), 1, 8);
      taken.End();
      return;
    }
    Exchange own(slot_number + 1, thread - 1, 2);
    EXPLORE_CHECK(own.FindBuffers(GoesOn));
    std::memset(own.BufferOf(thread - 1, 0), 2, 8);
  }));
  all.back().begin = [] {
    Open(3);
    Begin(slot_number + 1, 2);
    taken = Exchange(slot_number, 0, 2);
    EXPLORE_CHECK(taken.FindBuffers(GoesOn));
  };
  // Between two channels a third one, of two ranks, takes a buffer, and gives it back, since the next one is taken.
  all.push_back(OfThreads("a buffer is taken in vain between", 3, [](int thread) {
    if (thread == 0) {
      std::memset(taken.BufferOf(0, 0), 1, 8);
      taken.End();
      return;
    }
    Exchange own(slot_number + thread, 0, thread == 1 ? 2 : 1);
    EXPLORE_CHECK(own.FindBuffers(GoesOn));
    std::memset(own.BufferOf(0, 0), 2, 8);
  }));
  all.back().begin = [] {
    Open(3);
    taken = Exchange(slot_number, 0, 1);
    EXPLORE_CHECK(taken.FindBuffers(GoesOn));
    EXPLORE_CHECK(Exchange(slot_number + 3, 0, 1).FindBuffers(GoesOn));
  };
  // All buffers are given back, as by a rank that has lost the others.
  all.push_back(OfThreads("all buffers are given back, and some are taken", 2, [](int thread) {
    if (thread == 1) {
      Exchange own(slot_number + 1, 0, 1);
      EXPLORE_CHECK(own.FindBuffers(GoesOn));
      std::memset(own.BufferOf(0, 0), 2, 8);
      return;
    }
    Exchange own(slot_number, 0, 1);
    EXPLORE_CHECK(own.FindBuffers(GoesOn));
    std::memset(own.BufferOf(0, 0), 1, 8);
    Exchange::EndAll();
  }));
  // Ranks that wait for all in a tree. Rank 1 posts to rank 0, and rank 2 is the first of a group of its own.
  all.push_back(Of("barriers", 3, Barriers, 2));
  all.push_back(Of("two broadcasts and a sum in two steps", 3, [](Rank& own) {
    own.FindBuffers();
    own.Broadcast(0, false, 1);
    own.Broadcast(1, false, 1);
    own.Allreduce(2, kTwoSteps, false);
  }, 2));
  all.push_back(Of("a sum in two steps, and one in one step", 3, [](Rank& own) {
    own.FindBuffers();
    own.Allreduce(0, kTwoSteps, false);
    own.Allreduce(1, 1, false);
  }, 2));
  all.push_back(Of("a sum of three pieces", 3, [](Rank& own) {
    own.FindBuffers();
    own.Allreduce(0, kThreePieces, false);
  }, 2));
  all.push_back(Of("a sum by reading", 3, [](Rank& own) { own.Allreduce(0, 24, true); }, 2));
  all.back().weakens_fences = true;
  all.push_back(Of("the last rank fails before a barrier", 3, [](Rank& own) {
    EXPLORE_CHECK(own.collective().Barrier().ok());
    if (own.rank == 2) return FailRank();
    EXPLORE_CHECK(!own.collective().Barrier().ok() && IsInterrupted());
  }, 2));
  all.back().has_failure = true;
  all.push_back(OfThreads("ranks show their memory", 2, [](int thread) {
    Exchange::ShowMemory(thread);
    Meet();
    EXPLORE_CHECK(Exchange::ReadsAll());
  }));
  return all;
}

// One call each: a wait has many more executions where it may sleep.
std::vector<Scenario> SleepingExchangeScenarios() {
  std::vector<Scenario> all;
  all.push_back(Of("a broadcast through buffers", 2, [](Rank& own) {
    own.FindBuffers();
    own.Broadcast(0, false);
  }));
  all.push_back(Of("a sum in one step", 2, [](Rank& own) {
    own.FindBuffers();
    own.Allreduce(0, 24, false);
  }));
  all.push_back(Of("a broadcast by reading", 2, [](Rank& own) { own.Broadcast(0, true); }));
  all.push_back(Of("two barriers", 2, [](Rank& own) {
    for (int time = 0; time < 2; ++time) EXPLORE_CHECK(own.collective().Barrier().ok());
  }));
  all.push_back(Of("a root that gives up", 2, [](Rank& own) {
    FailRank();
    Arguments a{own.send(), own.recv(), 1, Type::kInt64};
    if (own.rank == 0) own.send()[0] = 5;
    const bool is_ok = own.collective().ByReading(kBcast, a).ok();
    EXPLORE_CHECK(own.rank == 0 || !is_ok || own.recv()[0] == 5);
  }));
  all.back().has_failure = true;
  for (Scenario& scenario : all) scenario = Sleeping(std::move(scenario));
  return all;
}

}  // namespace explore
