// Tests of the comparison of calls by messages, and of sections: threads in the place of ranks, and a library that hands
// messages from thread to thread and counts them.

#include "calls/comparison.h"

#include <sys/mman.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "harness.h"
#include "mpi/collectives.h"
#include "mpi/doubling.h"
#include "mpi/packing.h"
#include "records/recorder.h"
#include "shared_memory/combining_tree.h"

namespace pc = pycollective;

namespace {

thread_local int rank_of_thread = 0;

pc::Outcome IsCalled() {
  std::fprintf(stderr, "a function of MPI was called that comparisons do not need\n");
  std::_Exit(1);
}

// Messages between threads. Collectives are made of them.
class Mailboxes final : public pc::Library {
 public:
  explicit Mailboxes(int ranks) : size_(ranks), sent(size()), bytes(size()), collectives(size()) {}

  pc::Outcome Send(const pc::Channel&, const pc::Outgoing& out) const override {
    const auto from = static_cast<size_t>(rank_of_thread);
    sent[from] += 1;
    bytes[from] += out.count;
    Post(out.dest, out.tag, std::string(static_cast<const char*>(out.data), pc::Bytes(out.count, out.type)));
    return {};
  }
  pc::Outcome Recv(const pc::Channel&, const pc::Incoming& in) const override {
    const std::string data = Take(in.source, in.tag);
    CHECK(in.may_be_shorter ? data.size() <= pc::Bytes(in.count, in.type) : data.size() == pc::Bytes(in.count, in.type));
    std::memcpy(in.data, data.data(), data.size());
    return {};
  }
  pc::Outcome Sendrecv(const pc::Channel& channel, const pc::Outgoing& out, const pc::Incoming& in) const override {
    Send(channel, out);
    return Recv(channel, in);
  }
  pc::Outcome Bcast(const pc::Channel&, const pc::Arguments& a) const override {
    collectives[static_cast<size_t>(rank_of_thread)] += 1;
    const auto count = static_cast<size_t>(a.count);
    for (int rank = 0; rank < size_ && rank_of_thread == a.root; ++rank) {
      if (rank != a.root) Post(rank, kCollectives, std::string(static_cast<const char*>(a.send), count));
    }
    if (rank_of_thread != a.root) std::memcpy(a.recv, Take(a.root, kCollectives).data(), count);
    return {};
  }
  pc::Outcome Allreduce(const pc::Channel&, const pc::Arguments& a) const override {
    CHECK(a.op == pc::Op::kMin && a.type == pc::Type::kInt64 && a.count == 1);
    collectives[static_cast<size_t>(rank_of_thread)] += 1;
    for (int rank = 0; rank < size_; ++rank) Post(rank, kCollectives, std::string(static_cast<const char*>(a.send), 8));
    int64_t least = INT64_MAX;
    for (int rank = 0; rank < size_; ++rank) {
      int64_t number;
      std::memcpy(&number, Take(rank, kCollectives).data(), sizeof(number));
      least = std::min(least, number);
    }
    std::memcpy(a.recv, &least, sizeof(least));
    return {};
  }
  int proc_null() const override { return -1; }

  pc::Outcome Allgather(const pc::Channel&, const pc::Arguments&) const override { return IsCalled(); }
  pc::Outcome Alltoall(const pc::Channel&, const pc::Arguments&) const override { return IsCalled(); }
  pc::Outcome ReduceScatter(const pc::Channel&, const pc::Arguments&) const override { return IsCalled(); }
  pc::Outcome Reduce(const pc::Channel&, const pc::Arguments&) const override { return IsCalled(); }
  pc::Outcome Gather(const pc::Channel&, const pc::Arguments&) const override { return IsCalled(); }
  pc::Outcome Scatter(const pc::Channel&, const pc::Arguments&) const override { return IsCalled(); }
  pc::Outcome Scan(const pc::Channel&, const pc::Arguments&) const override { return IsCalled(); }
  pc::Outcome Exscan(const pc::Channel&, const pc::Arguments&) const override { return IsCalled(); }
  pc::Outcome Barrier(const pc::Channel&) const override { return IsCalled(); }
  pc::Outcome CheckTag(const pc::Channel&, int) const override { return IsCalled(); }
  pc::Outcome RecvInPlaces(const pc::Channel&, const pc::Incoming&, const std::array<pc::MemoryRange, 3>&) const override {
    return IsCalled();
  }
  pc::Outcome CheckReceived(const char*, const pc::Incoming&) const override { return IsCalled(); }
  pc::Outcome SetReceived(const pc::Incoming&) const override { return IsCalled(); }
  pc::Outcome Permute(const pc::Channel&, const pc::Outgoing&, const pc::Incoming&, const pc::Arguments*) const override {
    return IsCalled();
  }
  pc::Outcome Isend(const pc::Channel&, const pc::Outgoing&, int64_t*) const override { return IsCalled(); }
  pc::Outcome Irecv(const pc::Channel&, const pc::Incoming&, int64_t*) const override { return IsCalled(); }
  pc::Outcome WaitAll(std::vector<int64_t>*) const override { return IsCalled(); }
  pc::Outcome Finish(pc::MessageUnderWay*, bool) const override { return IsCalled(); }
  pc::Outcome Cancel(pc::MessageUnderWay*) const override { return IsCalled(); }
  pc::Outcome CreateComm(int64_t, const std::vector<int>&, int, int64_t*) const override { return IsCalled(); }
  pc::Outcome FreeComm(int64_t) const override { return IsCalled(); }
  bool IsOwn(pc::Op, pc::Type) const override { return false; }
  pc::Outcome Progress(const pc::Channel&, int rank) const override {
    return is_revoked || rank == failed_rank ? pc::Outcome{"MPI_Iprobe", 1, {}} : pc::Outcome{};
  }
  void Abort(int) const override { IsCalled(); }
  std::string ErrorString(int) const override { return ""; }

 private:
  static constexpr int kCollectives = -1;  // their tag
  using Key = std::tuple<int, int, int>;   // source, destination, tag

  void Post(int dest, int tag, std::string data) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    boxes_[{rank_of_thread, dest, tag}].push_back(std::move(data));
    arrived_.notify_all();
  }
  std::string Take(int source, int tag) const {
    std::unique_lock<std::mutex> lock(mutex_);
    std::deque<std::string>& box = boxes_[{source, rank_of_thread, tag}];
    CHECK(arrived_.wait_for(lock, std::chrono::seconds(20), [&] { return !box.empty(); }));
    std::string data = std::move(box.front());
    box.pop_front();
    return data;
  }

  size_t size() const { return static_cast<size_t>(size_); }

  const int size_;
  mutable std::mutex mutex_;
  mutable std::condition_variable arrived_;
  mutable std::map<Key, std::deque<std::string>> boxes_;

 public:
  mutable std::vector<int64_t> sent, bytes, collectives;  // by each rank
  std::atomic<int> failed_rank{-1};
  std::atomic<bool> is_revoked{false};  // the communicator
};

// A rank of a channel.
struct Rank {
  const pc::Library& mpi;
  pc::Channel channel;
  pc::Comparison comparison;

  pc::Difference Compare(const pc::Post& post, const pc::PiggybackedCollective* piggybacked = nullptr) {
    pc::Difference found;
    CHECK(comparison.Compare(mpi, channel, post, piggybacked, &found).ok());
    return found;
  }
};

// Runs function(rank) on so many ranks. The numbers of the ranks in the communicator of messages are those of the channel.
// `slot`: of the trees of a host, on which all ranks are; -1: they compare by messages.
void OnRanks(const pc::Library& mpi, int size, const std::function<void(Rank&)>& function, int64_t slot = -1) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      rank_of_thread = rank;
      pc::Channel channel;
      channel.rank = rank;
      channel.size = size;
      channel.own_messages = 3;
      channel.own_tag = 7;
      pc::CombiningTree tree(slot, rank, size);
      if (slot >= 0) channel.tree = &tree;
      Rank own{mpi, channel, pc::Comparison(true)};
      function(own);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The same on a host with trees. Another channel has used their slot before.
void OnOneHost(const pc::Library& mpi, int size, const std::function<void(Rank&)>& function) {
  const size_t nbytes = pc::CombiningTree::BytesOf(size);
  void* const memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(memory != MAP_FAILED);
  pc::CombiningTree::OpenMemory(memory, size);
  pc::CombiningTree first(5, 0, 2), second(5, 1, 2);
  const auto never = [](int) { return false; };
  const auto nothing = [](auto) {};
  for (int meeting = 0; meeting < 3; ++meeting) {
    for (pc::CombiningTree* const tree : {&second, &first}) CHECK(tree->Combine(never, nothing, nothing));
    CHECK(first.Share(never, nothing, nothing));
  }
  for (int rank = 0; rank < size; ++rank) pc::CombiningTree(5, rank, size).Begin();
  OnRanks(mpi, size, function, 5);
  munmap(memory, nbytes);
}

pc::Post PostOf(pc::Operation operation, int64_t count, int64_t site = 0, int64_t seq = 1) {
  pc::Post post{{operation, 1, count}, site, seq, 0};
  return post;
}

int RoundsOf(int ranks) { return static_cast<int>(std::ceil(std::log2(ranks))); }

// Each rank sends a message of one size for each doubling of the ranks, and one more if their number is no power of two.
void TestMessagesGrowWithTheLogarithm() {
  for (const int size : {2, 3, 4, 5, 7, 8, 12, 16, 33, 64, 100, 128}) {
    Mailboxes mpi(size);
    OnRanks(mpi, size, [](Rank& own) { CHECK(own.Compare(PostOf(pc::kAllreduce, 1000)).rank == -1); });
    for (int rank = 0; rank < size; ++rank) {
      const auto place = static_cast<size_t>(rank);
      CHECK(mpi.sent[place] >= 1 && mpi.sent[place] <= RoundsOf(size));
      CHECK(mpi.bytes[place] <= 64 * mpi.sent[place]);
    }
  }
}

// All ranks get the same bits, those of a tree in which lower ranks come first.
void TestSmallSumsHaveOneOrder() {
  const std::function<float(int, int, const std::function<float(int)>&)> tree = [&](int first, int count, const auto& of) {
    return count == 1 ? of(first) : tree(first, count / 2, of) + tree(first + count / 2, count / 2, of);
  };
  for (const int size : {2, 3, 4, 6, 7, 8, 16, 23}) {
    Mailboxes mpi(size);
    const auto operand = [](int rank) { return 1.0f / static_cast<float>(3 * rank + 1) - 0.3f * static_cast<float>(rank); };
    int power = 1;
    while (power * 2 <= size) power *= 2;
    const int pairs = size - power;
    const auto of_place = [&](int place) {
      return place < pairs ? operand(2 * place) + operand(2 * place + 1) : operand(place + pairs);
    };
    const float want = tree(0, power, of_place);
    OnRanks(mpi, size, [&](Rank& own) {
      for (int64_t number = 1; number <= 3; ++number) {
        const std::vector<float> x(30, operand(own.channel.rank));
        std::vector<float> y(30);
        const std::vector<pc::ArrayPair> arrays{{x.data(), y.data(), 20, pc::Type::kFloat32},
                                                {x.data() + 20, y.data() + 20, 10, pc::Type::kFloat32}};
        const pc::PiggybackedAllreduce sum(arrays, pc::Op::kSum);
        CHECK(own.comparison.Carries(own.channel, sum));
        CHECK(own.Compare(PostOf(pc::kAllreduce, 30, 0, number), &sum).rank == -1);
        for (const float got : y) CHECK(std::memcmp(&got, &want, sizeof(got)) == 0);
      }
    });
  }
}

// The operands of the ranks arrive with the verdict, each at its place.
void TestOperandsTravelWithTheComparison() {
  for (const int size : {2, 3, 4, 5, 7, 8, 12, 23}) {
    Mailboxes mpi(size);
    OnRanks(mpi, size, [&](Rank& own) {
      const int rank = own.channel.rank;
      const auto length = static_cast<size_t>(size);
      const auto element = [](int from, int block) { return 1000 * from + block; };
      std::vector<int32_t> x(length), all(length), exchanged(length);
      for (int block = 0; block < size; ++block) x[static_cast<size_t>(block)] = element(rank, block);
      const pc::PiggybackedArrayCollective allgather(pc::kAllgather, {x.data(), all.data(), 1, pc::Type::kInt32}, 1);
      const pc::PiggybackedArrayCollective alltoall(pc::kAlltoall, {x.data(), exchanged.data(), 1, pc::Type::kInt32}, size);
      CHECK(own.comparison.Carries(own.channel, allgather));
      CHECK(own.Compare(PostOf(pc::kAllgather, 1, 0, 1), &allgather).rank == -1);
      for (int from = 0; from < size; ++from) CHECK(all[static_cast<size_t>(from)] == element(from, 0));
      CHECK(own.Compare(PostOf(pc::kAlltoall, 1, 0, 2), &alltoall).rank == -1);
      for (int from = 0; from < size; ++from) CHECK(exchanged[static_cast<size_t>(from)] == element(from, rank));
    });
    CHECK(mpi.sent[0] <= 2 * RoundsOf(size));
  }
}

// What a rank gets of a small reduce_scatter has the bits of its block of the small sum.
void TestABlockOfASmallSumHasItsBits() {
  for (const int size : {2, 3, 4, 6, 23}) {
    Mailboxes mpi(size);
    OnRanks(mpi, size, [&](Rank& own) {
      const auto length = static_cast<size_t>(2 * size);
      std::vector<float> x(length), sum(length), block(2);  // short enough for each number of ranks
      for (size_t i = 0; i < length; ++i) x[i] = 1.0f / static_cast<float>(3 * own.channel.rank + static_cast<int>(i) + 1);
      const std::vector<pc::ArrayPair> arrays{{x.data(), sum.data(), 2 * size, pc::Type::kFloat32}};
      const pc::PiggybackedAllreduce allreduce(arrays, pc::Op::kSum);
      const pc::PiggybackedArrayCollective scatter(pc::kReduceScatter, {x.data(), block.data(), 2, pc::Type::kFloat32}, size);
      CHECK(own.comparison.Carries(own.channel, scatter));
      CHECK(own.Compare(PostOf(pc::kAllreduce, 2 * size, 0, 1), &allreduce).rank == -1);
      CHECK(own.Compare(PostOf(pc::kReduceScatter, 2, 0, 2), &scatter).rank == -1);
      CHECK(std::memcmp(block.data(), sum.data() + 2 * own.channel.rank, 2 * sizeof(float)) == 0);
    });
  }
}

// Of most collectives the operands of all ranks must find room, of a reduction what a rank sends in all rounds.
void TestWhatFindsRoomInABlock() {
  const auto carries = [&](pc::Channel& channel, pc::Operation operation, int64_t count, int64_t blocks) {
    return pc::Comparison(true)
        .Carries(channel, pc::PiggybackedArrayCollective(operation, {nullptr, nullptr, count, pc::Type::kUint8}, blocks));
  };
  const auto limits = [&](pc::Channel& channel, pc::Operation operation, int64_t count, int64_t blocks) {
    return carries(channel, operation, count, blocks) && !carries(channel, operation, count + 1, blocks);
  };
  constexpr int64_t kRoom = 32 << 10;
  pc::Channel channel;
  channel.size = 8;
  CHECK(limits(channel, pc::kAllgather, kRoom / 8, 1));
  CHECK(limits(channel, pc::kAlltoall, kRoom / 64, 8));
  CHECK(limits(channel, pc::kReduceScatter, kRoom / 3 / 8, 8));
  const auto carries_sum = [&](int64_t count) {
    const std::vector<pc::ArrayPair> arrays{{nullptr, nullptr, count, pc::Type::kUint8}};
    return pc::Comparison(true).Carries(channel, pc::PiggybackedAllreduce(arrays, pc::Op::kSum));
  };
  CHECK(carries_sum(kRoom / 3) && !carries_sum(kRoom / 3 + 1));
}

// Ranks of one host compare in their tree, and send no message. What they bring is combined in their order.
void TestRanksOfAHostCompareInATree() {
  for (const int size : {2, 16, 17, 40, 100}) {
    Mailboxes mpi(size);
    OnOneHost(mpi, size, [&](Rank& own) {
      const int rank = own.channel.rank;
      for (int64_t number = 1; number <= 20; ++number) {
        const std::vector<int32_t> x(81, rank);  // with 100 ranks they fill the room
        std::vector<int32_t> sum(81), all(static_cast<size_t>(81 * size));
        const std::vector<pc::ArrayPair> arrays{{x.data(), sum.data(), 81, pc::Type::kInt32}};
        const pc::PiggybackedAllreduce allreduce(arrays, pc::Op::kSum);
        const pc::PiggybackedArrayCollective allgather(pc::kAllgather, {x.data(), all.data(), 81, pc::Type::kInt32}, 1);
        CHECK(own.comparison.Carries(own.channel, allreduce) && own.comparison.Carries(own.channel, allgather));
        CHECK(own.Compare(PostOf(pc::kAllreduce, 81, 0, 2 * number), &allreduce).is_made);
        CHECK(own.Compare(PostOf(pc::kAllgather, 81, 0, 2 * number + 1), &allgather).is_made);
        for (const int32_t of_all : sum) CHECK(of_all == size * (size - 1) / 2);
        for (size_t i = 0; i < all.size(); ++i) CHECK(all[i] == static_cast<int32_t>(i) / 81);
      }
      CHECK(mpi.sent[static_cast<size_t>(rank)] == 0 && mpi.collectives[static_cast<size_t>(rank)] == 0);
    });
  }
}

// Each rank gets its block of the sum, and sends log2(ranks) messages.
void TestSumsAreScatteredByHalving() {
  for (const int size : {1, 2, 4, 16}) {
    for (const int64_t count : {1, 5}) {
      Mailboxes mpi(size);
      OnRanks(mpi, size, [&](Rank& own) {
        const int rank = own.channel.rank;
        const auto value = [&](int of, int64_t i) { return (of + 1) * (i + 1); };
        std::vector<int64_t> blocks(static_cast<size_t>(size * count)), memory(blocks.size() / 2 + 1, -7);
        for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = value(rank, static_cast<int64_t>(i));
        const auto add = [](void* sum, const void* next, int64_t n) {
          for (int64_t i = 0; i < n; ++i) static_cast<int64_t*>(sum)[i] += static_cast<const int64_t*>(next)[i];
        };
        CHECK(pc::ScatterSumByHalving(mpi, own.channel, 3, blocks.data(), memory.data(), count, pc::Type::kInt64, add).ok());
        for (int64_t i = rank * count; i < (rank + 1) * count; ++i) {
          CHECK(blocks[static_cast<size_t>(i)] == value(0, i) * size * (size + 1) / 2);
        }
        CHECK(memory.back() == -7);
      });
      for (const int64_t sent : mpi.sent) CHECK(1 << sent == size);
    }
  }
}

// A rank of a tree combines what at most 15 others have, for each of its levels. The first rank of 128 has two.
void TestARankReads15OthersForEachLevel() {
  constexpr int kRanks = 128;
  std::vector<int> reads(kRanks);
  Mailboxes mpi(kRanks);
  OnOneHost(mpi, kRanks, [&](Rank& own) {
    int& read = reads[static_cast<size_t>(own.channel.rank)];
    const auto goes_on = [](int) { return true; };
    const auto nothing = [](void*) {};
    const auto count = [&](const void*) { ++read; };
    CHECK(own.channel.tree->Combine(goes_on, count, nothing) && own.channel.tree->Share(goes_on, nothing, count));
  });
  for (int rank = 0; rank < kRanks; ++rank) CHECK(reads[static_cast<size_t>(rank)] == (rank == 0 ? 22 : rank % 16 == 0 ? 16 : 1));
}

// A rank of a host makes another call: all ranks learn of it, and go on afterwards.
void TestADifferenceInATree() {
  constexpr int kRanks = 40;
  for (const int odd : {0, 1, 15, 16, 39}) {
    Mailboxes mpi(kRanks);
    OnOneHost(mpi, kRanks, [&](Rank& own) {
      const bool is_odd = own.channel.rank == odd;
      CHECK(own.Compare(PostOf(pc::kAllreduce, 5, 0, 1)).rank == -1);
      const pc::Difference found = own.Compare(PostOf(is_odd ? pc::kAllgather : pc::kAllreduce, 5, 0, 2));
      CHECK(found.rank == (odd == 0 ? (is_odd ? 1 : 0) : (is_odd ? 0 : odd)));
      CHECK(own.Compare(PostOf(pc::kAllreduce, 5, 0, 3)).rank == -1);
    });
  }
}

// Rank 0 waits for one that has failed, and rank 2 for rank 0, until the communicator is revoked. Their next comparisons must not come to
// other ranks, which may still read their rooms.
void TestNoComparisonFollowsAFailedOne() {
  constexpr int kRanks = 3;
  Mailboxes mpi(kRanks);
  mpi.failed_rank = 1;
  std::atomic<int> left{0};
  OnOneHost(mpi, kRanks, [&](Rank& own) {
    if (own.channel.rank == 1) return;
    const auto compare = [&] {
      pc::Difference found;
      return own.comparison.Compare(mpi, own.channel, PostOf(pc::kAllreduce, 1), nullptr, &found);
    };
    CHECK(!compare().ok());
    mpi.is_revoked = true;
    for (left += 1; left < 2;) std::this_thread::yield();
    mpi.failed_rank = -1;
    mpi.is_revoked = false;
    CHECK(std::string(compare().call) == "MPI_Iprobe");
  });
}

// The places of ranks, host by host, where hosts come in the order of their first ranks.
void TestPlacesByHost() {
  const pc::HostLevels levels({5, 2, 5, 9, 2}, 0, 0, {}, 0);
  const int places[] = {0, 2, 1, 4, 3};
  for (int rank = 0; rank < 5; ++rank) CHECK(levels.PlaceByHost(rank) == places[rank]);
}

// A rank makes the call without data, as XLA's own collectives do: no rank takes its result from the block.
void TestARankWithoutDataLetsAllCallMpi() {
  for (const int size : {2, 3, 4, 7}) {
    for (const pc::Operation operation : {pc::kAllreduce, pc::kAllgather, pc::kReduceScatter}) {
      Mailboxes mpi(size);
      OnRanks(mpi, size, [&](Rank& own) {
        const bool brings = own.channel.rank != size / 2;
        std::vector<char> x(static_cast<size_t>(size), 1), y(static_cast<size_t>(size), 9);
        const pc::PiggybackedArrayCollective array(operation, {x.data(), y.data(), 1, pc::Type::kUint8},
                                                   operation == pc::kReduceScatter ? size : 1);
        const std::vector<pc::ArrayPair> arrays{{x.data(), y.data(), 1, pc::Type::kUint8}};
        const pc::PiggybackedAllreduce sum(arrays, pc::Op::kSum);
        const pc::PiggybackedCollective& all = operation == pc::kAllreduce ? static_cast<const pc::PiggybackedCollective&>(sum) : array;
        for (int64_t number = 1; number <= 3; ++number) {
          const pc::Difference found = own.Compare(PostOf(operation, 1, brings ? 0 : 5, number), brings ? &all : nullptr);
          CHECK(found.rank == -1 && !found.is_made && y[0] == 9);
        }
        const pc::Difference found = own.Compare(PostOf(operation, 1, 0, 4), &all);
        CHECK(found.rank == -1 && found.is_made && y[0] != 9);
      });
    }
  }
}

// With PYCOLLECTIVE_CHECK=always broadcasts, scans and the like travel as well.
void TestEachOperationTravels() {
  for (const int size : {2, 3, 5, 8}) {
    const int root = size / 2;
    Mailboxes mpi(size);
    OnRanks(mpi, size, [&](Rank& own) {
      const int rank = own.channel.rank;
      const auto length = static_cast<size_t>(size);
      std::vector<int32_t> x(length), y(length);
      for (int block = 0; block < size; ++block) x[static_cast<size_t>(block)] = 100 * rank + block;
      int64_t number = 0;
      const auto run = [&](pc::Operation operation, int64_t blocks) {
        pc::Arguments a{x.data(), y.data(), 1, pc::Type::kInt32};
        a.root = root;
        a.to = (rank + 1) % size;
        a.from = (rank + size - 1) % size;
        std::fill(y.begin(), y.end(), -1);
        const pc::PiggybackedArrayCollective array(operation, a, blocks);
        CHECK(own.comparison.Carries(own.channel, array));
        CHECK(own.Compare(PostOf(operation, 1, 0, ++number), &array).is_made);
        return y[0];
      };
      const auto sum_of_first = [](int ranks) { return 100 * ranks * (ranks - 1) / 2; };
      CHECK(run(pc::kBcast, 1) == 100 * root);
      CHECK(run(pc::kScatter, size) == 100 * root + rank);
      CHECK(run(pc::kReduce, 1) == (rank == root ? sum_of_first(size) : 0));
      CHECK(run(pc::kScan, 1) == sum_of_first(rank + 1));
      CHECK(run(pc::kExscan, 1) == sum_of_first(rank));
      CHECK(run(pc::kPpermute, 1) == 100 * ((rank + size - 1) % size));
      run(pc::kGather, 1);
      for (int from = 0; from < size; ++from) CHECK(y[static_cast<size_t>(from)] == (rank == root ? 100 * from : 0));
    });
  }
}

// The ranks bring operands of other lengths, which have no room together, or other collectives: each rank gets the error.
void TestOperandsOfOtherLengthsAreADifference() {
  for (const int size : {2, 3, 4, 7}) {
    Mailboxes mpi(size);
    OnRanks(mpi, size, [&](Rank& own) {
      constexpr int64_t kRoom = 32 << 10;
      const bool by_reduction = own.channel.rank == 1;
      const int64_t count = by_reduction ? kRoom / 64 : own.channel.rank == size - 1 ? kRoom : kRoom / size;
      std::vector<char> x(kRoom), y(kRoom);
      const pc::Arguments a{x.data(), y.data(), count, pc::Type::kUint8};
      const pc::PiggybackedArrayCollective gather(pc::kAllgather, a, 1), scatter(pc::kReduceScatter, a, size);
      const pc::Operation operation = by_reduction ? pc::kReduceScatter : pc::kAllgather;
      CHECK(own.Compare(PostOf(operation, count), by_reduction ? &scatter : &gather).rank != -1);
      CHECK(own.Compare(PostOf(pc::kAllreduce, 1, 0, 2)).rank == -1);
    });
  }
}

// One rank makes another call. All ranks learn of it, and which rank it is; that rank learns of rank 0's call, or of rank 1's.
void TestADifferenceIsFoundOnAllRanks() {
  for (const int size : {2, 3, 5, 8}) {
    for (int odd = 0; odd < size; ++odd) {
      for (const bool by_number : {false, true}) {
        Mailboxes mpi(size);
        OnRanks(mpi, size, [&](Rank& own) {
          const bool is_odd = own.channel.rank == odd;
          CHECK(own.Compare(PostOf(pc::kAllreduce, 5)).rank == -1);
          const pc::Post post = PostOf(pc::kAllreduce, is_odd && !by_number ? 6 : 5, 0, is_odd && by_number ? 3 : 2);
          const pc::Difference found = own.Compare(post);
          CHECK(found.rank == (odd == 0 ? (is_odd ? 1 : 0) : (is_odd ? 0 : odd)));
          CHECK(found.theirs.signature.count == (by_number || is_odd ? 5 : 6));
          CHECK(own.Compare(PostOf(pc::kAllreduce, 5, 0, 3)).rank == -1);
        });
      }
    }
  }
}

// Ranks call a sum at lines that the others do not have: they match, and the ranks look at the lines once.
void TestLinesThatMayDifferCostOnce() {
  constexpr int kRanks = 5;
  Mailboxes mpi(kRanks);
  OnRanks(mpi, kRanks, [&](Rank& own) {
    // Other functions, of one collective.
    const int64_t site = int64_t{own.channel.rank + 1} << 40 | 1;
    const int64_t& looks = mpi.collectives[static_cast<size_t>(own.channel.rank)];
    CHECK(own.Compare(PostOf(pc::kAllreduce, 9, site, 1)).rank == -1);
    const int64_t once = looks;
    CHECK(once > 0);
    for (int64_t number = 2; number <= 4; ++number) CHECK(own.Compare(PostOf(pc::kAllreduce, 9, site, number)).rank == -1);
    CHECK(looks == once);
    // The lines of two ranks change places.
    const int64_t other = own.channel.rank < 4 ? int64_t{(own.channel.rank ^ 1) + 1} << 40 | 1 : site;
    CHECK(own.Compare(PostOf(pc::kAllreduce, 9, other, 5)).rank == -1);
    CHECK(looks == 2 * once);
  });
}

// Two ranks differ from each other, but not from rank 0, whose line is unknown: any two calls are compared.
void TestCallsThatMatchTheFirstRankMayDiffer() {
  constexpr int kRanks = 4;
  Mailboxes mpi(kRanks);
  OnRanks(mpi, kRanks, [&](Rank& own) {
    const int64_t line = own.channel.rank == 0 ? 0 : own.channel.rank == 3 ? 7 << 20 | 1 : 8 << 20 | 1;
    const pc::Difference found = own.Compare(PostOf(pc::kAllreduce, 9, line));
    CHECK(found.rank == (own.channel.rank == 3 ? 1 : 3));
  });
}

// Sections -------------------------------------------------------------------------------------------------------

using Coverage = pc::Sections::Coverage;
constexpr pc::Section kNone{};
constexpr pc::Section kOf(int64_t id, int64_t run, bool begins = false) { return {id, begins, run}; }

// Makes a call that the ranks compare if it is not covered. Returns whether they do. `offer`: that of the other ranks; null: the
// same as this rank's.
bool IsCompared(pc::Sections& sections, const pc::Section& section, uint64_t call, const uint64_t* offer = nullptr) {
  if (sections.Enter(section, call) == Coverage::kCovered) return false;
  const std::optional<uint64_t> own = sections.Offer();
  sections.Compared(call, own.has_value() && (offer == nullptr || *offer == *own));
  return true;
}

std::string Run(pc::Sections& sections, int64_t id, int64_t run, int calls, uint64_t first = 1) {
  std::string compared;
  for (int i = 0; i < calls; ++i) compared += IsCompared(sections, kOf(id, run), first + static_cast<uint64_t>(i)) ? "c" : "-";
  return compared;
}

void TestASectionIsComparedOnceInLaterRuns() {
  pc::Sections sections;
  CHECK(Run(sections, 5, 1, 4) == "cccc");
  CHECK(Run(sections, 5, 2, 4) == "c---");
  CHECK(Run(sections, 5, 3, 4) == "c---");
  CHECK(IsCompared(sections, kNone, 9));
  CHECK(IsCompared(sections, kNone, 9));
  CHECK(Run(sections, 5, 4, 4) == "c---");
  CHECK(Run(sections, 6, 4, 3) == "ccc");  // another section of the same run
  CHECK(Run(sections, 6, 5, 3) == "c--");
  CHECK(Run(sections, 5, 5, 1) == "c");
}

void TestARunThatBeginsAgainIsComparedAgain() {
  pc::Sections sections;
  const auto trip = [&] {
    std::string compared;
    for (int i = 0; i < 3; ++i) compared += IsCompared(sections, kOf(5, 1, i == 0), static_cast<uint64_t>(i)) ? "c" : "-";
    return compared;
  };
  CHECK(trip() == "ccc");
  CHECK(trip() == "c--");
  CHECK(IsCompared(sections, kNone, 9));  // a call that depends on data
  CHECK(trip() == "c--");
}

// Histories are equal only if the ranks have made the same calls together.
void TestHistoriesTellWhatWasCompared() {
  const auto offer_after = [](std::vector<uint64_t> calls) {
    pc::Sections sections;
    for (const uint64_t call : calls) IsCompared(sections, kOf(5, 1), call);
    CHECK(sections.Enter(kOf(5, 2), calls.front()) == Coverage::kNone);
    return *sections.Offer();
  };
  CHECK(offer_after({1, 2, 3}) == offer_after({1, 2, 3}));
  for (const std::vector<uint64_t>& other : {std::vector<uint64_t>{1, 2}, {1, 3, 2}, {1, 2, 3, 4}, {1, 2, 4}, {3}}) {
    CHECK(offer_after(other) != offer_after({1, 2, 3}));
  }
  // Where the others offer another one, each call is compared, and the history stays.
  pc::Sections sections;
  CHECK(Run(sections, 5, 1, 3) == "ccc");
  const uint64_t other = offer_after({1, 2, 4});
  CHECK(IsCompared(sections, kOf(5, 2), 1, &other));
  CHECK(IsCompared(sections, kOf(5, 2), 2, &other));
  CHECK(IsCompared(sections, kOf(5, 2), 3, &other));
  CHECK(Run(sections, 5, 3, 3) == "c--");
}

// A run that ends early, since its program has failed, covers no more calls than the ranks have compared.
void TestRunsThatEndEarly() {
  pc::Sections sections;
  CHECK(Run(sections, 5, 1, 2) == "cc");
  CHECK(Run(sections, 5, 2, 4) == "c-cc");  // this one is whole
  CHECK(Run(sections, 5, 3, 4) == "c---");
  CHECK(Run(sections, 5, 4, 2) == "c-");  // it ends early
  CHECK(Run(sections, 5, 5, 4) == "c---");
  pc::Sections whole;
  CHECK(Run(whole, 5, 1, 4) == "cccc");
  CHECK(whole.Enter(kOf(5, 2), 1) == Coverage::kNone);
  CHECK(sections.Enter(kOf(5, 6), 1) == Coverage::kNone);
  CHECK(*whole.Offer() == *sections.Offer());  // the same calls, however the ranks have come to compare them
}

// Other calls come between two parts of a section, which nobody can foresee: a callback makes them, or another library. The second part
// is compared in each run.
void TestASectionThatIsInterrupted() {
  pc::Sections sections;
  for (int64_t run = 1; run <= 3; ++run) {
    CHECK(Run(sections, 5, run, 2, 1) == (run == 1 ? "cc" : "c-"));
    CHECK(IsCompared(sections, kNone, 9));
    CHECK(Run(sections, 5, run, 2, 3) == "cc");
    CHECK(IsCompared(sections, kNone, 9));
    CHECK(Run(sections, 5, run, 2, 5) == "cc");
  }
}

// A covered call of this rank is the one that it has made there before, whatever the program says.
void TestACallThatIsNotThatOfTheHistory() {
  pc::Sections sections;
  CHECK(Run(sections, 5, 1, 3) == "ccc");
  CHECK(IsCompared(sections, kOf(5, 2), 1));
  CHECK(sections.Enter(kOf(5, 2), 7) == Coverage::kDiffers);
  CHECK(sections.Enter(kOf(5, 2), 3) == Coverage::kCovered);
  CHECK(sections.Enter(kOf(5, 3), 7) == Coverage::kNone);
  CHECK(!sections.Offer().has_value());  // the first one is another one
}

// A history has a limit. What follows is compared in each run.
void TestALongSection() {
  constexpr int kCalls = (1 << 16) + 5;
  pc::Sections sections;
  CHECK(Run(sections, 5, 1, kCalls) == std::string(kCalls, 'c'));
  for (int64_t run = 2; run <= 3; ++run) CHECK(Run(sections, 5, run, kCalls) == "c" + std::string((1 << 16) - 1, '-') + "ccccc");
}

// So does the number of sections. More are compared call by call.
void TestManySections() {
  pc::Sections sections;
  constexpr int64_t kMost = 1 << 14;
  for (int64_t run = 1; run <= 2; ++run) {
    for (int64_t id = 1; id <= kMost + 2; ++id) {
      const std::string want = run == 1 || id > kMost ? "ccc" : "c--";
      CHECK(Run(sections, id, run, 3) == want);
    }
  }
}

// Calls that the ranks know, which need no comparison, are a part of the history.
void TestKnownCalls() {
  const auto run = [](pc::Sections& sections, int64_t number, std::vector<uint64_t> known, std::vector<uint64_t> compared) {
    std::string text;
    for (const uint64_t call : known) {
      if (sections.Enter(kOf(5, number), call) == Coverage::kCovered) {
        text += "-";
      } else {
        sections.Known(call);
        text += "k";
      }
    }
    for (const uint64_t call : compared) text += IsCompared(sections, kOf(5, number), call) ? "c" : "-";
    return text;
  };
  pc::Sections sections;
  CHECK(run(sections, 1, {8}, {1, 2}) == "kcc");
  CHECK(run(sections, 2, {8}, {1, 2}) == "kc-");
  CHECK(run(sections, 3, {8}, {1, 2}) == "kc-");
  // The same history, but this run has begun with another known call: the ranks must not take the offers for equal.
  pc::Sections other;
  CHECK(run(other, 1, {8}, {1, 2}) == "kcc");
  CHECK(other.Enter(kOf(5, 2), 9) == Coverage::kNone);
  other.Known(9);
  CHECK(other.Enter(kOf(5, 2), 1) == Coverage::kNone);
  CHECK(sections.Enter(kOf(5, 4), 8) == Coverage::kNone);
  sections.Known(8);
  CHECK(sections.Enter(kOf(5, 4), 1) == Coverage::kNone);
  CHECK(*other.Offer() != *sections.Offer());
  CHECK(!other.Offer().has_value());  // once in a run
}

const Tests kTests = {
    {"messages_grow_with_the_logarithm", TestMessagesGrowWithTheLogarithm},
    {"small_sums_have_one_order", TestSmallSumsHaveOneOrder},
    {"operands_travel_with_the_comparison", TestOperandsTravelWithTheComparison},
    {"a_block_of_a_small_sum_has_its_bits", TestABlockOfASmallSumHasItsBits},
    {"what_finds_room_in_a_block", TestWhatFindsRoomInABlock},
    {"operands_of_other_lengths_are_a_difference", TestOperandsOfOtherLengthsAreADifference},
    {"a_rank_without_data_lets_all_call_mpi", TestARankWithoutDataLetsAllCallMpi},
    {"each_operation_travels", TestEachOperationTravels},
    {"places_by_host", TestPlacesByHost},
    {"sums_are_scattered_by_halving", TestSumsAreScatteredByHalving},
    {"ranks_of_a_host_compare_in_a_tree", TestRanksOfAHostCompareInATree},
    {"a_rank_reads_15_others_for_each_level", TestARankReads15OthersForEachLevel},
    {"a_difference_in_a_tree", TestADifferenceInATree},
    {"no_comparison_follows_a_failed_one", TestNoComparisonFollowsAFailedOne},
    {"a_difference_is_found_on_all_ranks", TestADifferenceIsFoundOnAllRanks},
    {"lines_that_may_differ_cost_once", TestLinesThatMayDifferCostOnce},
    {"calls_that_match_the_first_rank_may_differ", TestCallsThatMatchTheFirstRankMayDiffer},
    {"a_section_is_compared_once_in_later_runs", TestASectionIsComparedOnceInLaterRuns},
    {"a_run_that_begins_again_is_compared_again", TestARunThatBeginsAgainIsComparedAgain},
    {"histories_tell_what_was_compared", TestHistoriesTellWhatWasCompared},
    {"runs_that_end_early", TestRunsThatEndEarly},
    {"a_section_that_is_interrupted", TestASectionThatIsInterrupted},
    {"a_call_that_is_not_that_of_the_history", TestACallThatIsNotThatOfTheHistory},
    {"a_long_section", TestALongSection},
    {"many_sections", TestManySections},
    {"known_calls", TestKnownCalls},
};

}  // namespace

int main(int argc, char** argv) { return RunOne(kTests, argc, argv); }
