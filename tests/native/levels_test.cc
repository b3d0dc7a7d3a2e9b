// Tests of the hierarchical collectives of a channel with ranks on several hosts: threads in the place of the ranks of one
// host. The other hosts bring what this one brings, in an all-to-all a number of their own more. So the library makes a call between hosts
// alone; it counts them.

#include "shared_memory/host_levels.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "harness.h"
#include "mpi/reduction.h"

namespace pc = pycollective;

namespace {

int hosts_of_job = 3;
constexpr int64_t kLocal = 1, kLane = 2;  // communicators

// What the ranks of the host call between hosts.
struct Counts {
  std::atomic<int64_t> calls{0}, elements{0};
};

// Whether a message between hosts fails, and each wait for another rank of the host.
std::atomic<bool> is_broken{false};

// What another host adds to each block of an all-to-all.
float OfHost(int host) { return 1000.0f * static_cast<float>(host); }

// The library of one rank.
class OneHostOfMany final : public pc::Library {
 public:
  OneHostOfMany(int rank, std::atomic<int64_t>* slot, std::atomic<int>* arrived, Counts* counts)
      : rank_(rank), slot_(slot), arrived_(arrived), counts_(counts) {}

  pc::Outcome CreateComm(int64_t, const std::vector<int>&, int, int64_t* comm) const override {
    *comm = comms_++ == 0 ? kLocal : kLane;
    return {};
  }
  pc::Outcome FreeComm(int64_t) const override { return {}; }
  pc::Outcome Progress(const pc::Channel&, int) const override { return is_broken ? Broken() : pc::Outcome{}; }

  pc::Outcome Bcast(const pc::Channel& channel, const pc::Arguments& a) const override {
    if (channel.collective == kLane) return Between(a);
    if (channel.exchange == nullptr) {  // Make tells the number of the slot
      auto* const number = static_cast<int64_t*>(a.recv);
      if (rank_ == 0) *slot_ = *number;
      while (*slot_ < 0) std::this_thread::yield();
      *number = *slot_;
      return {};
    }
    return WithinHost(pc::kBcast, channel, a);
  }
  pc::Outcome Allreduce(const pc::Channel& channel, const pc::Arguments& a) const override {
    if (channel.collective == kLane) return Sum(a);
    // Make asks whether all share memory. No rank goes on before all have come.
    const int of_host = channel.size / hosts_of_job;
    for (*arrived_ += 1; *arrived_ < of_host;) std::this_thread::yield();
    std::memcpy(a.recv, a.send, pc::Bytes(a.count, a.type));
    return {};
  }
  pc::Outcome Reduce(const pc::Channel& channel, const pc::Arguments& a) const override {
    CHECK(channel.collective == kLane);
    return Sum(a);
  }
  pc::Outcome Allgather(const pc::Channel& channel, const pc::Arguments& a) const override {
    CHECK(channel.collective == kLane);
    for (int host = 0; host < hosts_of_job; ++host) std::memcpy(pc::At(a.recv, host * a.count, a.type), a.send, pc::Bytes(a.count, a.type));
    return Between(a);
  }
  // Each host gives this one, the first host, the block that it has for it.
  pc::Outcome Alltoall(const pc::Channel& channel, const pc::Arguments& a) const override {
    if (channel.collective == kLocal) return WithinHost(pc::kAlltoall, channel, a);
    for (int64_t i = 0; i < hosts_of_job * a.count; ++i) {
      static_cast<float*>(a.recv)[i] = static_cast<const float*>(a.send)[i % a.count] + OfHost(static_cast<int>(i / a.count));
    }
    return Between(a);
  }

  // A small sum of a lane: in a lane of three hosts the first one sends its sum to the second one, and gets that of all.
  pc::Outcome Send(const pc::Channel& channel, const pc::Outgoing& out) const override {
    CHECK(channel.messages == kLane);
    if (is_broken) return Broken();
    sent_.assign(static_cast<const float*>(out.data), static_cast<const float*>(out.data) + out.count / 4);
    counts_->calls += 1;
    counts_->elements += out.count / 4;
    return {};
  }
  pc::Outcome Recv(const pc::Channel& channel, const pc::Incoming& in) const override {
    CHECK(channel.messages == kLane && in.count == static_cast<int64_t>(4 * sent_.size()));
    for (size_t i = 0; i < sent_.size(); ++i) static_cast<float*>(in.data)[i] = hosts_of_job * sent_[i];
    return {};
  }

  // Of two hosts the other one gives this one the block that it has for it.
  pc::Outcome Sendrecv(const pc::Channel& channel, const pc::Outgoing& out, const pc::Incoming& in) const override {
    CHECK(channel.messages == kLane && hosts_of_job == 2 && out.dest == 1 && in.source == 1 && out.count == in.count && out.tag == in.tag);
    const float* const own = static_cast<const float*>(out.data) - out.count;  // it stands before that for the other one
    for (int64_t i = 0; i < in.count; ++i) static_cast<float*>(in.data)[i] = own[i] + OfHost(1);
    counts_->calls += 1;
    counts_->elements += out.count;
    return {};
  }

#define NOT_CALLED(Name, ...) \
  pc::Outcome Name(__VA_ARGS__) const override { return IsCalled(); }
  NOT_CALLED(ReduceScatter, const pc::Channel&, const pc::Arguments&)
  NOT_CALLED(Gather, const pc::Channel&, const pc::Arguments&)
  NOT_CALLED(Scatter, const pc::Channel&, const pc::Arguments&)
  NOT_CALLED(Scan, const pc::Channel&, const pc::Arguments&)
  NOT_CALLED(Exscan, const pc::Channel&, const pc::Arguments&)
  NOT_CALLED(Barrier, const pc::Channel&)
  NOT_CALLED(CheckTag, const pc::Channel&, int)
  using Places = std::array<pc::MemoryRange, 3>;
  NOT_CALLED(RecvInPlaces, const pc::Channel&, const pc::Incoming&, const Places&)
  NOT_CALLED(CheckReceived, const char*, const pc::Incoming&)
  NOT_CALLED(SetReceived, const pc::Incoming&)
  NOT_CALLED(Permute, const pc::Channel&, const pc::Outgoing&, const pc::Incoming&, const pc::Arguments*)
  NOT_CALLED(Isend, const pc::Channel&, const pc::Outgoing&, int64_t*)
  NOT_CALLED(Irecv, const pc::Channel&, const pc::Incoming&, int64_t*)
  NOT_CALLED(WaitAll, std::vector<int64_t>*)
  NOT_CALLED(Finish, pc::MessageUnderWay*, bool)
  NOT_CALLED(Cancel, pc::MessageUnderWay*)
#undef NOT_CALLED
  bool IsOwn(pc::Op, pc::Type) const override { return false; }
  void Abort(int) const override { IsCalled(); }
  std::string ErrorString(int) const override { return ""; }
  int proc_null() const override { return -1; }

 private:
  static pc::Outcome Broken() { return {"MPI_Send", 1, {}}; }
  static pc::Outcome IsCalled() {
    std::fprintf(stderr, "a function of MPI was called that levels do not need\n");
    std::_Exit(1);
  }
  pc::Outcome Between(const pc::Arguments& a) const {
    counts_->calls += 1;
    counts_->elements += a.count;
    return {};
  }
  pc::Outcome Sum(const pc::Arguments& a) const {
    CHECK(a.send == a.recv);
    for (int64_t i = 0; i < a.count; ++i) static_cast<float*>(a.recv)[i] *= hosts_of_job;
    return Between(a);
  }
  pc::Outcome WithinHost(pc::Operation operation, const pc::Channel& channel, const pc::Arguments& a) const {
    pc::HostCollective collective(*this, channel);
    bool has_buffers = false;
    PYCOLLECTIVE_RETURN_IF_FAILED(collective.HasBuffers(&has_buffers));
    CHECK(has_buffers);
    return collective.ThroughBuffers(operation, a);
  }

  const int rank_;
  std::atomic<int64_t>* const slot_;
  std::atomic<int>* const arrived_;
  Counts* const counts_;
  mutable int comms_ = 0;
  mutable std::vector<float> sent_;
};

float Value(int rank, int64_t i) { return static_cast<float>(rank + 1) + static_cast<float>(i % 977) / 8; }

// The number in the channel of a rank of a host. A channel has the ranks of each host one after another, or one of each host in turns.
int RankOf(int host, int rank, int ranks, bool in_turns) { return in_turns ? rank * hosts_of_job + host : host * ranks + rank; }

// Calls run(make, rank) in a thread for each rank of the first host. make(operation, arguments) makes a call in levels.
using Make = std::function<pc::Outcome(pc::Operation, const pc::Arguments&)>;
void OnHost(int ranks, bool in_turns, Counts* counts, const std::function<void(const Make& make, int rank)>& run) {
  const size_t trees = pc::CombiningTree::BytesOf(ranks), board = pc::BoardSlot::BytesOf(ranks);
  const size_t nbytes = trees + board + pc::Exchange::BytesOf(ranks);
  void* const memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(memory != MAP_FAILED);
  pc::CombiningTree::OpenMemory(memory, ranks);
  pc::BoardSlot::OpenBoard(static_cast<char*>(memory) + trees, ranks);
  pc::Exchange::OpenMemory(static_cast<char*>(memory) + trees + board, ranks);
  std::vector<int> hosts, members;
  for (int rank = 0; rank < hosts_of_job * ranks; ++rank) {
    hosts.push_back(in_turns ? rank % hosts_of_job : rank / ranks);
    members.push_back(rank);
  }
  std::atomic<int64_t> slot{-1};
  std::atomic<int> arrived{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const OneHostOfMany library(rank, &slot, &arrived, counts);
      pc::Channel channel;
      channel.rank = RankOf(0, rank, ranks, in_turns);
      pc::HostLevels levels(hosts, channel.rank, 0, members, 0);
      channel.size = hosts_of_job * ranks;
      run([&](pc::Operation operation, const pc::Arguments& a) {
        bool has = false;
        CHECK(levels.Has(operation, a) && levels.Make(library, channel, &has).ok() && has);
        return levels.Run(library, operation, a);
      }, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  munmap(memory, nbytes);
}

// The calls between hosts of one collective of `count` elements or blocks of them, and the elements in these calls.
void Check(int ranks, pc::Operation operation, int64_t count, int64_t calls, int64_t elements, int root = 0, bool in_turns = false) {
  Counts counts;
  OnHost(ranks, in_turns, &counts, [&](const Make& make, int rank) {
    const int size = hosts_of_job * ranks;
    const int64_t brought = count * (pc::TraitsOf(operation).operand == pc::kBlocks ? size : 1);
    const int64_t got = count * (pc::TraitsOf(operation).result == pc::kBlocks ? size : 1);
    std::vector<float> x(static_cast<size_t>(brought)), y(static_cast<size_t>(got), -7.0f);
    for (int64_t i = 0; i < brought; ++i) x[static_cast<size_t>(i)] = Value(rank, i);
    pc::Arguments a{x.data(), y.data(), count, pc::Type::kFloat32};
    a.root = root;
    if (operation == pc::kBcast && root >= ranks) {  // the call between hosts brings each lane its share
      const pc::Shares shares(count, static_cast<int>(calls), a.type);
      for (int64_t i = shares.Begin(rank); i < shares.Begin(rank + 1); ++i) y[static_cast<size_t>(i)] = Value(root, i);
    }
    CHECK(make(operation, a).ok());
    const auto sum = [&](int64_t i) {
      float of_host = 0;
      for (int other = 0; other < ranks; ++other) of_host += Value(other, i);
      return hosts_of_job * of_host;
    };
    const int own = RankOf(0, rank, ranks, in_turns);
    const auto local_of = [&](int64_t other) { return static_cast<int>(in_turns ? other / hosts_of_job : other % ranks); };
    const auto host_of = [&](int64_t other) { return static_cast<int>(in_turns ? other % hosts_of_job : other / ranks); };
    for (int64_t i = 0; i < got; ++i) {
      float expected = 0;
      switch (operation) {
        case pc::kAllreduce: expected = sum(i); break;
        case pc::kReduce: expected = rank == a.root ? sum(i) : 0; break;
        case pc::kBcast: expected = Value(a.root, i); break;
        case pc::kReduceScatter:
          expected = sum(own * count + i);
          for (int host = 1; host < hosts_of_job; ++host) expected += OfHost(host);
          break;
        case pc::kAlltoall: expected = Value(local_of(i / count), own * count + i % count) + OfHost(host_of(i / count)); break;
        default: expected = Value(local_of(i / count), i % count);
      }
      CHECK(y[static_cast<size_t>(i)] == expected);
    }
  });
  CHECK(counts.calls == calls && counts.elements == elements);
}

// A lane has 8 KiB or more, unless it is the only one.
void TestSmallArraysHaveFewLanes() {
  for (const int ranks : {8, 64}) {
    for (const int64_t count : {256, 2048, 4095, 4096, 10000, 1 << 14, 1 << 16}) {
      const int64_t lanes = std::clamp<int64_t>(count * static_cast<int64_t>(sizeof(float)) / (8 << 10), 1, ranks);
      Check(ranks, pc::kAllreduce, count, lanes, count);
      Check(ranks, pc::kReduce, count, lanes, count, ranks - 1);
      if (count < 1 << 14) continue;  // a broadcast goes by MPI alone
      for (const int root : {0, ranks - 1, 2 * ranks + 1}) Check(ranks, pc::kBcast, count, lanes, count, root);
    }
  }
}

// The blocks of a host go to another one once. A lane has 32 KiB of an allgather or more, or 4 KiB of a reduce-scatter, unless it is the only one.
// In turns there are one lane or all.
void TestBlocksGoOnce(int hosts) {
  hosts_of_job = hosts;
  for (const int ranks : {2, 7, 8, 64}) {
    for (const int64_t count : {1, 20, 256, 300, 1021, 1024, 3000}) {
      for (const bool in_turns : {false, true}) {
        const auto lanes_of = [&](int64_t least_bytes) {
          int64_t lanes = std::clamp<int64_t>(ranks * count * static_cast<int64_t>(sizeof(float)) / least_bytes, 1, ranks);
          if (in_turns && lanes > 1) lanes = ranks;
          const int64_t most = lanes;
          while (ranks * count % lanes != 0) --lanes;
          return 2 * lanes < most ? int64_t{ranks} : lanes;
        };
        Check(ranks, pc::kAllgather, count, lanes_of(32 << 10), ranks * count, 0, in_turns);
        Check(ranks, pc::kReduceScatter, count, lanes_of(4 << 10), ranks * count, 0, in_turns);
      }
    }
  }
}
void TestBlocksOfTwoHosts() { TestBlocksGoOnce(2); }
void TestBlocksOfThreeHosts() { TestBlocksGoOnce(3); }

// Each rank sends another host the blocks of all ranks of its own in one call.
void TestBlocksOfAnAllToAllTravelTogether() {
  for (const int ranks : {2, 8, 64}) {
    for (const int64_t count : {1, 100, 1024}) {
      for (const bool in_turns : {false, true}) Check(ranks, pc::kAlltoall, count, ranks, ranks * ranks * count, 0, in_turns);
    }
  }
  const pc::HostLevels levels({0, 0, 1, 1}, 0, 0, {0, 1, 2, 3}, 0);
  for (const int64_t count : {0, 1025}) CHECK(!levels.Has(pc::kAlltoall, {nullptr, nullptr, count, pc::Type::kFloat32}));
}

// The result of an all-to-all may overwrite its operand.
void TestAnAllToAllInPlace() {
  for (const bool in_turns : {false, true}) {
    Counts counts;
    OnHost(2, in_turns, &counts, [&](const Make& make, int rank) {
      std::vector<float> x(static_cast<size_t>(hosts_of_job) * 2);
      for (size_t i = 0; i < x.size(); ++i) x[i] = Value(rank, static_cast<int64_t>(i));
      CHECK(make(pc::kAlltoall, {x.data(), x.data(), 1, pc::Type::kFloat32}).ok());
      const int own = RankOf(0, rank, 2, in_turns);
      for (int host = 0; host < hosts_of_job; ++host) {
        for (int other = 0; other < 2; ++other) {
          CHECK(x[static_cast<size_t>(RankOf(host, other, 2, in_turns))] == Value(other, own) + OfHost(host));
        }
      }
    });
  }
}

// After a call that has failed, the other ranks of the host may wait for its next step. No further call makes one.
void TestNoCallFollowsAFailedOne() {
  Counts counts;
  std::atomic<int> left{0};
  is_broken = true;
  OnHost(2, false, &counts, [&](const Make& make, int) {
    std::vector<float> x(512, 1.0f), y(512);
    const pc::Arguments a{x.data(), y.data(), 512, pc::Type::kFloat32};
    CHECK(!make(pc::kAllreduce, a).ok());
    for (left += 1; left < 2;) std::this_thread::yield();
    is_broken = false;
    CHECK(std::string(make(pc::kAllreduce, a).call) == "MPI_Send");
  });
  CHECK(counts.calls == 0);
}

const Tests kTests = {
    {"small_arrays_have_few_lanes", TestSmallArraysHaveFewLanes},
    {"blocks_of_two_hosts_go_once", TestBlocksOfTwoHosts},
    {"blocks_of_three_hosts_go_once", TestBlocksOfThreeHosts},
    {"blocks_of_an_all_to_all_travel_together", TestBlocksOfAnAllToAllTravelTogether},
    {"an_all_to_all_in_place", TestAnAllToAllInPlace},
    {"no_call_follows_a_failed_one", TestNoCallFollowsAFailedOne},
};

}  // namespace

int main(int argc, char** argv) { return RunOne(kTests, argc, argv); }
