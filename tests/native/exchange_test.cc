// Tests of the collectives through memory that ranks share: threads in the place of ranks, and no MPI. A call of MPI but
// those that start or that wait ends the test.

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "harness.h"
#include "mpi/collectives.h"
#include "mpi/packing.h"
#include "shared_memory/board.h"
#include "shared_memory/combine.h"
#include "shared_memory/exchange.h"
#include "shared_memory/host_collectives.h"
#include "shared_memory/piggyback.h"
#include "shared_memory/shared_arrays.h"

namespace pc = pycollective;

namespace {

constexpr int kNoRank = 99;
std::atomic<int> failed_rank{kNoRank};  // MPI says of it that it has failed

int CreatesOp(void (*)(void*, void*, int*, int*), int, int*) { return 0; }
int Probes(int rank, int, int, int*, void*) { return rank == failed_rank ? 1 : 0; }
int IsCalled() {
  std::fprintf(stderr, "MPI was called\n");
  std::_Exit(1);
}

std::unique_ptr<pc::Library> MakeLibrary() {
  std::vector<void*> addresses;
  for (const char* name : pc::kFunctionNames) {
    void* address = reinterpret_cast<void*>(&IsCalled);
    if (std::string(name) == "MPI_Op_create") address = reinterpret_cast<void*>(&CreatesOp);
    if (std::string(name) == "MPI_Iprobe") address = reinterpret_cast<void*>(&Probes);
    addresses.push_back(address);
  }
  const int64_t handles[pc::kTypeCount] = {};
  pc::Binding binding{};
  binding.handle_bytes = sizeof(int);
  binding.types = handles;
  binding.ops = handles;
  std::string error;
  auto library = pc::MakeLibrary(binding, addresses.data(), &error);
  CHECK(library != nullptr);
  return library;
}

// The memory of a host with `ranks` ranks. Processes that this one starts share it.
class Host {
 public:
  explicit Host(int ranks, int64_t read_bytes = 64 << 20) : board_(pc::BoardSlot::BytesOf(ranks)), nbytes_(board_ + pc::Exchange::BytesOf(ranks)) {
    memory_ = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory_ != MAP_FAILED);
    pc::BoardSlot::OpenBoard(memory_, ranks);
    pc::Exchange::OpenMemory(static_cast<char*>(memory_) + board_, ranks);
    for (int rank = 0; rank < ranks; ++rank) pc::Exchange::ShowMemory(rank);
    CHECK(pc::Exchange::ReadsAll());
    pc::Exchange::SetReadBytes(read_bytes);
  }
  ~Host() { munmap(memory_, nbytes_); }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

 private:
  const size_t board_, nbytes_;
  void* memory_;
};

// What the ranks of a channel do first.
void Begin(int64_t slot, int size) {
  for (int rank = 0; rank < size; ++rank) {
    pc::BoardSlot(slot, rank, size).Begin();
    pc::Exchange(slot, rank, size).Begin();
  }
}

// A channel of ranks 0 to size - 1, as one of them sees it.
struct Member {
  // `fan_in`: of the tree in which ranks wait for all.
  Member(int64_t slot, int rank, int size, int fan_in) : board(slot, rank, size), exchange(slot, rank, size, fan_in) {
    channel.rank = rank;
    channel.size = size;
    channel.exchange = &exchange;
  }
  Member(int64_t slot, int rank, int size) : Member(slot, rank, size, size) {}
  pc::BoardSlot board;
  pc::Exchange exchange;
  pc::Channel channel;
  float* memory = nullptr;  // for the arrays of all its calls; null: each call has memory of its own
};

// Calls run(library, member) in a thread for each rank. `fan_in`: 0: the ranks do not wait in a tree.
void OnRanks(int size, const std::function<void(const pc::Library&, Member&)>& run, int64_t read_bytes = 64 << 20, int fan_in = 0) {
  const Host host(size, read_bytes);
  const auto library = MakeLibrary();
  const int64_t slot = pc::BoardSlot::Take();
  Begin(slot, size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Member member(slot, rank, size, fan_in == 0 ? size : fan_in);
      run(*library, member);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The ranks of a host, and the fan-in of their tree of waits; 0: each waits for all others.
const std::vector<std::pair<int, int>> kTrees = {{2, 0}, {3, 0}, {5, 0}, {3, 2}, {5, 2}, {9, 3}};

// Calls and what they must give ----------------------------------------------------------------------------------

enum Kind { kAllreduce, kReduce, kScan, kExscan, kBcast, kAllgather, kGather, kAlltoall, kReduceScatter, kScatter, kPermute, kKinds };

struct Try {
  Kind kind;
  int64_t count;
  int root;
  bool in_place;
  int64_t salt = 0;         // another one has other values
  bool by_reading = false;  // else through buffers
};

bool HasBlocks(Kind kind) { return kind == kAlltoall || kind == kReduceScatter || kind == kScatter; }
bool GivesBlocks(Kind kind) { return kind == kAllgather || kind == kGather || kind == kAlltoall; }

// What a rank brings: values whose sums depend on the order of the ranks.
float Value(int rank, int64_t number) {
  const int64_t index = number * 7 % 65521;
  const float large = index % 3 == 0 ? 1e8f : 1.0f;
  return static_cast<float>(rank + 1) * 0.3f + static_cast<float>(index % 1000) * large * (rank % 2 == 0 ? 1.0f : -1.0f);
}

// The sum of the first `ranks` ranks in their order.
float Sum(int ranks, int64_t index) {
  float sum = Value(0, index);
  for (int rank = 1; rank < ranks; ++rank) sum += Value(rank, index);
  return sum;
}

float Expected(const Try& call, int rank, int size, int64_t index) {
  const int64_t from = index / std::max<int64_t>(call.count, 1), within = index % std::max<int64_t>(call.count, 1);
  switch (call.kind) {
    case kAllreduce: return Sum(size, index + call.salt);
    case kReduce: return rank == call.root ? Sum(size, index + call.salt) : 0;
    case kScan: return Sum(rank + 1, index + call.salt);
    case kExscan: return rank == 0 ? 0 : Sum(rank, index + call.salt);
    case kBcast: return Value(call.root, index + call.salt);
    case kAllgather: return Value(static_cast<int>(from), within + call.salt);
    case kGather: return rank == call.root ? Value(static_cast<int>(from), within + call.salt) : 0;
    case kAlltoall: return Value(static_cast<int>(from), rank * call.count + within + call.salt);
    case kReduceScatter: return Sum(size, rank * call.count + index + call.salt);
    case kScatter: return Value(call.root, rank * call.count + index + call.salt);
    case kPermute: return rank == call.root ? 0 : Value((rank + size - 1) % size, index + call.salt);
    default: return -1;
  }
}

constexpr pc::Operation kOperations[] = {pc::kAllreduce, pc::kReduce, pc::kScan,     pc::kExscan,        pc::kBcast,
                                         pc::kAllgather, pc::kGather, pc::kAlltoall, pc::kReduceScatter, pc::kScatter,
                                         pc::kPpermute};

pc::Outcome Make(const pc::Library& library, const pc::Channel& channel, const Try& call, const pc::Arguments& a) {
  pc::HostCollective collective(library, channel);
  if (call.by_reading) return collective.ByReading(kOperations[call.kind], a);
  bool has_buffers = false;
  PYCOLLECTIVE_RETURN_IF_FAILED(collective.HasBuffers(&has_buffers));
  CHECK(has_buffers);
  return collective.ThroughBuffers(kOperations[call.kind], a);
}

// make(arguments) makes the call; false: it is not made, and there is nothing to check.
void MakeAndCheck(const Member& member, const Try& call, const std::function<bool(const pc::Arguments&)>& make) {
  const int rank = member.channel.rank, size = member.channel.size;
  const int64_t brought = call.count * (HasBlocks(call.kind) ? size : 1);
  const int64_t got = call.count * (GivesBlocks(call.kind) ? size : 1);
  std::vector<float> of_call(member.memory == nullptr ? static_cast<size_t>(brought + got) : 0);
  float* const x = member.memory == nullptr ? of_call.data() : member.memory;
  float* const y = x + brought;
  for (int64_t i = 0; i < brought; ++i) x[i] = Value(rank, i + call.salt);
  std::fill(y, y + got, -7.0f);
  const bool in_place = call.in_place && !HasBlocks(call.kind) && !GivesBlocks(call.kind) && call.kind != kPermute;
  pc::Arguments a{x, in_place ? x : y, call.count, pc::Type::kFloat32};
  a.root = call.root;
  if (call.kind == kPermute) {  // a ring without the arrow to `root`
    const int next = (rank + 1) % size;
    a.to = next == call.root ? -1 : next;
    a.from = rank == call.root ? -1 : (rank + size - 1) % size;
  }
  if (!make(a)) return;
  const auto* result = static_cast<const float*>(a.recv);
  for (int64_t i = 0; i < got; ++i) CHECK(result[i] == Expected(call, rank, size, i));
  for (int64_t i = 0; i < brought && !in_place; ++i) CHECK(x[i] == Value(rank, i + call.salt));
}

void MakeAndCheck(const pc::Library& library, const Member& member, const Try& call) {
  MakeAndCheck(member, call, [&](const pc::Arguments& a) {
    CHECK(Make(library, member.channel, call, a).ok());
    return true;
  });
}

// The others are read while results are written.
bool CanRead(Kind kind) { return kind != kReduce && kind != kScan && kind != kExscan; }

constexpr int64_t kPiece = pc::Exchange::kBufferBytes / sizeof(float);  // elements

void TestEachCollective() {
  for (const int size : {2, 3, 5}) {
    OnRanks(size, [size](const pc::Library& library, Member& member) {
      for (int kind = 0; kind < kKinds; ++kind) {
        for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{3000}, kPiece, 3 * kPiece + 5}) {
          for (const int root : {0, size - 1}) {
            for (const bool in_place : {false, true}) {
              for (const bool by_reading : {false, CanRead(static_cast<Kind>(kind))}) {
                MakeAndCheck(library, member, {static_cast<Kind>(kind), count, root, in_place, count, by_reading});
              }
            }
          }
        }
      }
      CHECK(library.Barrier(member.channel).ok());
    });
  }
}

// Several arrays of a bucket are reduced as if they were one, wherever the pieces begin and end, and nothing but them is touched.
// The library calls no MPI, so it has not made one array of them.
void TestABucketOfArrays() {
  for (const int size : {2, 3}) {
    for (const bool in_place : {false, true}) {
      OnRanks(size, [&](const pc::Library& library, Member& member) {
        std::mt19937 random(7);  // the same on all ranks
        for (int call = 0; call < 60; ++call) {
          std::vector<std::vector<float>> xs, ys;
          int64_t number = 0;
          for (int64_t left = 2100 + random() % (3 * kPiece); left > 0; left -= static_cast<int64_t>(xs.back().size())) {
            std::vector<float> x(std::min<int64_t>(left, 1 + random() % (random() % 4 == 0 ? 2 * kPiece : 300)));
            for (float& value : x) value = Value(member.channel.rank, number++);
            ys.emplace_back(x.size() + 2, -7.0f);  // with an element before and behind
            if (in_place) std::copy(x.begin(), x.end(), ys.back().begin() + 1);
            xs.push_back(std::move(x));
          }
          std::vector<pc::ArrayPair> arrays;
          for (size_t i = 0; i < xs.size(); ++i) {
            float* const y = ys[i].data() + 1;
            arrays.push_back({in_place ? y : xs[i].data(), y, static_cast<int64_t>(xs[i].size()), pc::Type::kFloat32});
          }
          pc::Bucket bucket;
          for (const pc::ArrayPair& array : arrays) bucket.Add(array);
          CHECK(bucket.count() == number);
          int64_t brought = 0, taken = 0;
          const pc::ScatteredArray scattered{
              [&](int64_t first, int64_t count, void* to) {
                CHECK(count <= kPiece);
                brought += count;
                bucket.Bring(first, count, to);
              },
              [&](int64_t first, int64_t count, const void* from) {
                taken += count;
                bucket.Take(first, count, from);
              },
          };
          CHECK(library.AllreduceScattered(member.channel, {nullptr, nullptr, number, pc::Type::kFloat32}, scattered).ok());
          CHECK(brought == number && taken == number);
          number = 0;
          for (const std::vector<float>& y : ys) {
            CHECK(y.front() == -7.0f && y.back() == -7.0f);
            for (size_t i = 1; i + 1 < y.size(); ++i) CHECK(y[i] == Sum(size, number++));
          }
        }
      });
    }
  }
}

// An operation that combine.cc lacks is an error. Its operands do not travel with a comparison, in which no rank sees the error.
void TestACollectiveThatCannotBeCombined() {
  float x = 1, y = -7;
  const pc::Arguments a{&x, &y, 1, pc::Type::kFloat32};
  const pc::Outcome outcome = pc::Combine(pc::kBarrier, a, {0, 2}, 0, 1, [&](int) { return pc::Blocks{&x, 1}; });
  CHECK(std::string(outcome.call) == "barrier");
  CHECK(outcome.detail == "expected a collective that has a case in combine.cc, got barrier");
  const auto operand_of = [&](int) { return reinterpret_cast<const char*>(&x); };
  CHECK(!pc::PiggybackedArrayCollective(pc::kBarrier, a, 1).Complete({0, 2}, operand_of) && y == -7);
  CHECK(pc::PiggybackedArrayCollective(pc::kScan, a, 1).Complete({1, 2}, operand_of) && y == 2);
}

// No algorithm is by MPI, whether the kernel lets ranks read each other's memory or not.
void TestTheLibraryCallsNoMpi() {
  OnRanks(2, [](const pc::Library& library, Member& member) {
    std::vector<float> x(static_cast<size_t>(2 * kPiece), 1.0f), y(x);
    for (const int64_t count : {int64_t{0}, int64_t{1000}, kPiece}) {
      const pc::Arguments a{x.data(), y.data(), count, pc::Type::kFloat32};
      CHECK(library.Allreduce(member.channel, a).ok());
      CHECK(count == 0 || y[static_cast<size_t>(count) - 1] == 2.0f);
      CHECK(library.ReduceScatter(member.channel, a).ok());
      CHECK(library.Scan(member.channel, a).ok());
      CHECK(library.Allgather(member.channel, a).ok());
      CHECK(library.Alltoall(member.channel, a).ok());
      CHECK(library.Bcast(member.channel, a).ok());
    }
    CHECK(library.Barrier(member.channel).ok());
  });
  using Algorithm = pc::HostCollective::Algorithm;
  const Host host(2);
  const pc::Arguments large{nullptr, nullptr, kPiece, pc::Type::kFloat32}, larger{nullptr, nullptr, 16 * kPiece, pc::Type::kFloat32};
  CHECK(pc::HostCollective::AlgorithmOf(pc::kAllgather, large, 2) == Algorithm::kByReading);
  CHECK(pc::HostCollective::AlgorithmOf(pc::kScan, large, 2) == Algorithm::kThroughBuffers);
  CHECK(pc::HostCollective::AlgorithmOf(pc::kAllreduce, larger, 2) == Algorithm::kByReading);
  pc::Exchange::SetReadBytes(0);
  CHECK(pc::HostCollective::AlgorithmOf(pc::kAllgather, large, 2) == Algorithm::kThroughBuffers);
  CHECK(pc::HostCollective::AlgorithmOf(pc::kAllreduce, larger, 2) == Algorithm::kThroughBuffers);
}

// Each element of an array that is distributed over the ranks belongs to one of them, in the order of the array.
void TestADistribution() {
  for (const pc::Distribution parts : {pc::Distribution{0, 3, 2}, {10, 3, 2}, {12, 3, 2}, {13, 3, 2}, {16, 3, 2}, {5, 8, 3}, {9, 1, 4}}) {
    std::vector<int> owners(static_cast<size_t>(parts.count), -1);
    for (int rank = 0; rank <= parts.ranks; ++rank) {
      CHECK(parts.CountOf(rank) <= parts.CountOf(0) && (rank < parts.ranks || parts.CountOf(rank) == 0));
      for (const int64_t at_once : {int64_t{1}, int64_t{2}, int64_t{100}}) {
        int64_t next = 0, last = -1;
        for (int64_t first = 0; first < parts.CountOf(rank); first += at_once) {
          CHECK(parts.ForEachRun(rank, first, at_once, [&](int64_t element, int64_t at, int64_t n) -> pc::Outcome {
            CHECK(at == next && n > 0 && element > last && element + n <= parts.count);
            for (int64_t i = element; i < element + n; ++i) {
              CHECK(i / parts.block % parts.ranks == rank);
              owners[static_cast<size_t>(i)] = rank;
            }
            next += n;
            last = element + n - 1;
            return {};
          }).ok());
        }
        CHECK(next == parts.CountOf(rank));
      }
    }
    CHECK(std::find(owners.begin(), owners.end(), -1) == owners.end());
  }
}

// Blocks of an array go to the ranks in turns, in one call, and come back in another one.
void TestArraysThatAreDistributed() {
  for (const int64_t read_bytes : {0, 64 << 20}) {
    for (const auto& [size, fan_in] : kTrees) {
      OnRanks(size, [size = size](const pc::Library& library, Member& member) {
        const int rank = member.channel.rank;
        pc::HostCollective collective(library, member.channel);
        for (const int ranks : {1, size - 1, size}) {
          for (const int64_t block : {int64_t{1}, int64_t{700}, int64_t{2500}, kPiece + 3}) {
            for (const int64_t count : {int64_t{1}, 2 * block * ranks, 3 * block * ranks + block / 2, 5 * block * ranks + block + 1}) {
              const pc::Distribution parts{count, block, ranks};
              std::vector<float> x(static_cast<size_t>(count)), y(x.size(), -7.0f);
              std::vector<float> part(static_cast<size_t>(parts.CountOf(rank)) + 1, -7.0f);
              for (int64_t i = 0; i < count; ++i) x[static_cast<size_t>(i)] = Value(rank, i);
              CHECK(collective.ReduceScatter({x.data(), part.data(), count, pc::Type::kFloat32}, parts).ok());
              CHECK(part.back() == -7.0f);
              CHECK(collective.Allgather({part.data(), y.data(), count, pc::Type::kFloat32}, parts).ok());
              for (int64_t i = 0; i < count; ++i) CHECK(y[static_cast<size_t>(i)] == Sum(size, i));
              // Ranks need parts of it, and one needs nothing.
              const pc::HostCollective::Range range{rank * count / size, rank == 1 ? rank * count / size : (rank + 2) * count / (size + 1)};
              std::fill(y.begin(), y.end(), -7.0f);
              CHECK(collective.Allgather({part.data(), y.data(), count, pc::Type::kFloat32}, parts, range).ok());
              for (int64_t i = range.begin; i < range.end; ++i) CHECK(y[static_cast<size_t>(i)] == Sum(size, i));
              part.assign(part.size(), -7.0f);  // no other rank reads it any more
            }
          }
        }
        CHECK(library.Barrier(member.channel).ok());
      }, read_bytes, fan_in);
    }
  }
}

// The first ranks get a share each of the host's sum, and hand on what the step between hosts has made of it: here twice the sum.
void TestAHierarchicalAllreduce() {
  for (const int64_t read_bytes : {0, 64 << 20}) {
    for (const auto& [ranks, fan_in] : kTrees) {
      const int size = ranks;
      std::atomic<int64_t> shared{0}, steps{0}, expected_steps{0}, expected_shared{0};
      OnRanks(size, [&](const pc::Library& library, Member& member) {
        const int rank = member.channel.rank;
        std::mt19937 own(static_cast<unsigned>(rank));
        for (const int lanes : {1, size - 1, size}) {
          for (const int64_t count : {int64_t{1}, int64_t{7}, int64_t{3000}, kPiece, 3 * kPiece + 5, 9 * kPiece + 1}) {
            for (const bool in_place : {false, true}) {
              std::vector<float> x(static_cast<size_t>(count)), y(x.size(), -7.0f);
              for (int64_t i = 0; i < count; ++i) x[static_cast<size_t>(i)] = Value(rank, i);
              float* const to = in_place ? x.data() : y.data();
              if (own() % 8 == 0) Sleep(1);
              const auto doubles = [&](void* share, int64_t n) -> pc::Outcome {
                for (int64_t i = 0; i < n; ++i) static_cast<float*>(share)[i] *= 2;
                steps += 1;
                shared += n;
                return {};
              };
              const pc::Arguments a{x.data(), to, count, pc::Type::kFloat32};
              CHECK(pc::HostCollective(library, member.channel).Allreduce(a, lanes, doubles).ok());
              for (int64_t i = 0; i < count; ++i) CHECK(to[i] == 2 * Sum(size, i));
              if (rank > 0) continue;
              expected_shared += count;
              for (int lane = 0; lane < lanes; ++lane) expected_steps += pc::Shares(count, lanes, pc::Type::kFloat32).CountOf(lane) > 0;
            }
          }
        }
      }, read_bytes, fan_in);
      CHECK(shared == expected_shared && steps == expected_steps);
    }
  }
}

// A rank ends a call that reads arrays when the others have read its own: it may overwrite them then.
void TestAnArrayIsOverwrittenAfterTheCall() {
  for (const Kind kind : {kAllreduce, kBcast, kAllgather, kGather, kAlltoall, kReduceScatter, kScatter, kPermute}) {
    OnRanks(3, [kind](const pc::Library& library, Member& member) {
      for (int i = 0; i < 20; ++i) {
        if (i % 3 == member.channel.rank) Sleep(1);
        MakeAndCheck(library, member, {kind, kPiece, i % 3, false, i, true});  // its arrays are freed here
      }
    });
  }
}

// An array that cannot be read is an error of those that read it. The others go on.
void TestAnArrayThatCannotBeRead() {
  std::atomic<int> errors{0};
  OnRanks(2, [&](const pc::Library& library, Member& member) {
    const bool is_root = member.channel.rank == 0;
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* const x = mmap(nullptr, page, is_root ? PROT_NONE : PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const pc::Arguments a{x, x, static_cast<int64_t>(page / sizeof(float)), pc::Type::kFloat32};
    const pc::Outcome outcome = pc::HostCollective(library, member.channel).ByReading(pc::kBcast, a);
    munmap(x, page);
    CHECK(outcome.ok() == is_root);
    if (!is_root) CHECK(outcome.detail.find("the array of rank 0") != std::string::npos);
    if (!is_root) ++errors;
    MakeAndCheck(library, member, {kAllreduce, 7, 0, false});
  });
  CHECK(errors == 1);
}

// A root that ends before the others have read its array: they wait until MPI says that it has failed.
void TestAProcessThatIsGone() {
  const Host host(2);
  const int64_t slot = pc::BoardSlot::Take();
  Begin(slot, 2);
  std::vector<float> x(1000, 1.0f), y(2000);
  const pid_t child = fork();
  if (child == 0) {
    pc::Exchange::ShowMemory(1);
    Member member(slot, 1, 2);
    member.exchange.ShowArrays(x.data(), y.data());
    member.exchange.Post();
    _exit(0);
  }
  CHECK(waitpid(child, nullptr, 0) == child);
  failed_rank = 1;
  const Member member(slot, 0, 2);
  const auto library = MakeLibrary();
  pc::Arguments a{x.data(), y.data(), 1000, pc::Type::kFloat32};
  a.root = 1;
  const pc::Outcome outcome = pc::HostCollective(*library, member.channel).ByReading(pc::kBcast, a);
  CHECK(!outcome.ok() && std::string(outcome.call) == "MPI_Iprobe");
  failed_rank = kNoRank;
}

// Arrays in memory that all ranks have mapped, each at another address. No rank can read another one's memory by the kernel, nor takes
// buffers for what it reads. Ranks come late, and overwrite their arrays at once when a call has ended.
void TestArraysInSharedMemory() {
  constexpr int kSize = 3;
  constexpr size_t kPart = 32 << 20;
  const Host host(kSize, 0);  // this process has shown its own memory, in which the arrays are not
  const int64_t slot = pc::BoardSlot::Take();
  Begin(slot, kSize);
  const int file = memfd_create("arrays", 0);
  CHECK(file >= 0 && ftruncate(file, kSize * kPart) == 0);
  std::vector<pid_t> processes;
  for (int rank = 0; rank < kSize; ++rank) {
    processes.push_back(fork());
    if (processes.back() > 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const size_t before = static_cast<size_t>(rank + 1) * kSize * kPart;  // so the addresses differ
    CHECK(mmap(nullptr, before, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED);
    void* const mapped = mmap(nullptr, kSize * kPart, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(mapped != MAP_FAILED);
    char* const memory = static_cast<char*>(mapped);
    pc::SharedArrays::Open(memory, kSize * kPart, memory + static_cast<size_t>(rank) * kPart, kPart);
    Member member(slot, rank, kSize);
    member.memory = static_cast<float*>(pc::SharedArrays::Take(kPart));
    CHECK(member.memory != nullptr && pc::SharedArrays::Take(1) == nullptr);
    const auto library = MakeLibrary();
    std::mt19937 calls(7), own(static_cast<unsigned>(rank));
    for (int i = 0; i < 200; ++i) {
      Try call{static_cast<Kind>(calls() % kKinds), static_cast<int64_t>(2048 + calls() % (2 * kPiece)), static_cast<int>(calls() % kSize),
               calls() % 2 == 0, i, true};
      if (!CanRead(call.kind)) call.kind = kAllgather;
      if (own() % 8 == 0) Sleep(static_cast<int>(own() % 3));
      MakeAndCheck(member, call, [&](const pc::Arguments& a) {
        const auto algorithm = pc::HostCollective::AlgorithmOf(kOperations[call.kind], a, kSize);
        CHECK((algorithm == pc::HostCollective::Algorithm::kByReading) == (call.kind != kAllreduce));  // those are too small
        CHECK(Make(*library, member.channel, call, a).ok());
        return true;
      });
      CHECK(!member.exchange.HasBuffers());
    }
    for (const int lanes : {1, 2, kSize}) {
      MakeAndCheck(member, {kAllreduce, 8 * kPiece + 5, 0, true, lanes}, [&](const pc::Arguments& a) {
        CHECK(pc::HostCollective(*library, member.channel).Allreduce(a, lanes, [](void*, int64_t) { return pc::Outcome{}; }).ok());
        return true;
      });
      CHECK(!member.exchange.HasBuffers());
    }
    // A large allreduce may take either algorithm, and a scan overwrites what others have yet to read.
    for (int i = 0; i < 20; ++i) {
      MakeAndCheck(member, {kAllreduce, 8 * kPiece + 5, 0, i % 2 == 0, i}, [&](const pc::Arguments& a) {
        CHECK(library->Allreduce(member.channel, a).ok());
        return true;
      });
      MakeAndCheck(member, {kScan, 3 * kPiece, 0, true, i}, [&](const pc::Arguments& a) {
        CHECK(library->Scan(member.channel, a).ok());
        return true;
      });
    }
    _exit(0);
  }
  for (size_t ended = 0; ended < processes.size(); ++ended) {  // those that wait for one that has failed end with this process
    int status = 0;
    CHECK(waitpid(-1, &status, 0) > 0 && status == 0);
  }
}

// Without buffers and without the kernel's help the parts of an array in mapped memory are broadcast. The root's part may lie elsewhere, and
// all ranks choose the same algorithm all the same.
void TestPartsFromElsewhereInSharedMemory() {
  constexpr int kSize = 3;
  constexpr size_t kBytes = static_cast<size_t>(kSize) * kPiece * sizeof(float);
  void* const memory = mmap(nullptr, kSize * kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  pc::SharedArrays::Open(static_cast<char*>(memory), kSize * kBytes, static_cast<char*>(memory), kSize * kBytes);
  std::atomic<int> ready{0};
  OnRanks(kSize, [&](const pc::Library& library, Member& member) {
    const int rank = member.channel.rank;
    if (rank == 0) {
      for (int taken = 0; taken < 1000; ++taken) {  // all buffers
        pc::Exchange other(pc::BoardSlot::Take(), 0, kSize);
        other.Begin();
        CHECK(other.FindBuffers([](int) { return true; }));
        if (!other.HasBuffers()) break;
      }
      ready = 1;
    }
    while (ready == 0) Sleep(1);
    std::vector<float> part(static_cast<size_t>(kPiece));
    for (int64_t i = 0; i < kPiece; ++i) part[static_cast<size_t>(i)] = Value(rank, i);
    float* const whole = static_cast<float*>(memory) + static_cast<size_t>(rank) * kBytes / sizeof(float);
    const pc::Arguments a{part.data(), whole, kSize * kPiece, pc::Type::kFloat32};
    CHECK(pc::HostCollective(library, member.channel).Allgather(a, {kSize * kPiece, kPiece, kSize}).ok());
    for (int64_t i = 0; i < kSize * kPiece; ++i) CHECK(whole[i] == Value(static_cast<int>(i / kPiece), i % kPiece));
  }, 0);
  pc::SharedArrays::Close();
}

// A rank without a part leaves before the rank with the part has reduced the arrays, since MPI says that a rank has failed: its array
// may be anything then.
void TestAnArrayThatIsGivenUp() {
  constexpr size_t kPart = 1 << 20;
  for (const bool is_shared : {false, true}) {
    void* const memory = mmap(nullptr, 2 * kPart, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    if (is_shared) pc::SharedArrays::Open(static_cast<char*>(memory), 2 * kPart, static_cast<char*>(memory), 2 * kPart);
    std::atomic<bool> has_left{false};
    OnRanks(2, [&](const pc::Library& library, Member& member) {
      const int rank = member.channel.rank;
      float* const x = static_cast<float*>(memory) + static_cast<size_t>(rank) * kPart / sizeof(float);
      while (rank == 0 && !has_left) Sleep(1);
      failed_rank = 1 - rank;
      const pc::Arguments a{x, x, kPiece, pc::Type::kFloat32};
      const pc::Outcome outcome = pc::HostCollective(library, member.channel).ReduceScatter(a, {kPiece, kPiece, 1});
      CHECK(!outcome.ok() && std::string(outcome.call) == "MPI_Iprobe");
      x[0] = -1.0f;
      has_left = true;
    });
    failed_rank = kNoRank;
    if (is_shared) pc::SharedArrays::Close();
    if (!is_shared) munmap(memory, 2 * kPart);
  }
}

// A root leaves a broadcast that others have not read yet, since MPI says that a rank has failed. Its array may be anything
// then: a rank that comes late gets the error as well.
void TestARootThatGivesUp() {
  std::atomic<bool> has_left{false};
  OnRanks(2, [&](const pc::Library& library, Member& member) {
    std::vector<float> x(kPiece, 1.0f);
    const pc::Arguments a{x.data(), x.data(), kPiece, pc::Type::kFloat32};
    if (member.channel.rank == 1) {
      while (!has_left) Sleep(1);
      failed_rank = 0;
    } else {
      failed_rank = 1;
    }
    const pc::Outcome outcome = pc::HostCollective(library, member.channel).ByReading(pc::kBcast, a);
    CHECK(!outcome.ok() && std::string(outcome.call) == "MPI_Iprobe");
    std::fill(x.begin(), x.end(), -1.0f);
    has_left = true;
  });
  failed_rank = kNoRank;
}

// An allreduce whose arrays some ranks cannot read: all get an error, and the channel still counts alike.
void TestAnAllreduceThatCannotRead() {
  std::atomic<int> errors{0};
  OnRanks(3, [&](const pc::Library& library, Member& member) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), nbytes = 3 * page;
    void* const x = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (member.channel.rank == 0) CHECK(mprotect(static_cast<char*>(x) + page, 2 * page, PROT_NONE) == 0);
    std::vector<char> y(nbytes);
    const pc::Arguments a{x, y.data(), static_cast<int64_t>(nbytes / sizeof(float)), pc::Type::kFloat32};
    if (!pc::HostCollective(library, member.channel).ByReading(pc::kAllreduce, a).ok()) ++errors;
    munmap(x, nbytes);
    MakeAndCheck(library, member, {kAllreduce, 7, 0, false});
  });
  CHECK(errors == 3);
}

// The same calls in the same order on all ranks, which are late at different moments. A step that waits for too few ranks, or
// a buffer that is filled too early, gives wrong numbers.
void TestRandomCallsOfLateRanks() {
  for (const auto& [size, fan_in] : kTrees) {
    OnRanks(size, [size = size](const pc::Library& library, Member& member) {
      std::mt19937 calls(7), own(static_cast<unsigned>(member.channel.rank));
      for (int i = 0; i < 300; ++i) {
        const auto kind = static_cast<Kind>(calls() % kKinds);
        const int64_t most = calls() % 4 == 0 ? 2 * kPiece : 3000;
        const Try call{kind, static_cast<int64_t>(calls() % static_cast<unsigned>(most)), static_cast<int>(calls() % static_cast<unsigned>(size)),
                       calls() % 2 == 0, i, calls() % 2 == 0 && CanRead(kind)};
        if (own() % 8 == 0) Sleep(static_cast<int>(own() % 3));
        MakeAndCheck(library, member, call);
        if (calls() % 16 == 0) CHECK(library.Barrier(member.channel).ok());
      }
    }, 64 << 20, fan_in);
  }
}

// Data in the buffers of the ranks travel with comparisons, between calls whose pieces use the same buffers and whose root does
// not wait, and calls that differ. Ranks come late, are late when they read, and may bring nothing.
void TestDataThatTravelWithComparisons() {
  for (const int size : {2, 3, 4}) {
    std::atomic<int> made{0};
    OnRanks(size, [&](const pc::Library& library, Member& member) {
      const int rank = member.channel.rank;
      std::mt19937 calls(11), own(static_cast<unsigned>(rank));
      const auto is_late = [&] { if (own() % 16 == 0) Sleep(1 + static_cast<int>(own() % 2)); };
      for (int i = 0; i < 600; ++i) {
        constexpr Kind kKindsThatMeet[] = {kAllreduce, kAllgather, kAlltoall, kReduceScatter};
        const bool meets = calls() % 3 != 0, some_bring_nothing = calls() % 8 == 0, one_differs = calls() % 8 == 0;
        const Try call{meets ? kKindsThatMeet[calls() % 4] : kBcast, static_cast<int64_t>(1 + calls() % 2000), 0, calls() % 2 == 0, i};
        pc::Post post;
        post.signature.operation = kOperations[call.kind];
        post.signature.count = call.count;
        // Of three ranks and more, rank 0 has no line and matches the others, whose lines differ.
        if (one_differs && meets && rank > 0) post.site = rank + 1;
        is_late();
        bool is_made = false;
        MakeAndCheck(member, call, [&](const pc::Arguments& a) {
          const pc::PiggybackedArrayCollective piggybacked(kOperations[call.kind], a, HasBlocks(call.kind) ? size : 1);
          bool has_buffer = false;
          const bool brings = meets && !(some_bring_nothing && own() % 2 == 0);
          if (brings) CHECK(pc::HostCollective(library, member.channel).FreeBuffer(member.board.next_call(), &has_buffer).ok());
          const pc::BoardSlot::BufferOfRank buffer_of = [&](int of, uint64_t number) {
            if (of != rank) is_late();
            return member.exchange.BufferOf(of, number);
          };
          const auto found = member.board.Compare(post, meets, [](int) { return true; }, has_buffer ? &piggybacked : nullptr,
                                                  has_buffer ? &buffer_of : nullptr);
          CHECK((found.rank >= 0) == (one_differs && meets && rank > 0 && size > 2));
          is_made = found.is_made;
          made += is_made;
          return is_made;
        });
        // Nobody may make it if one differs, since then the others do not.
        if (!is_made && !(one_differs && meets)) MakeAndCheck(library, member, call);
      }
    });
    CHECK(made > 100 * size);
  }
}

// The algorithm of a large allreduce changes while ranks come late, and all take the same: else they would wait for ever.
void TestAllRanksTakeTheSameAlgorithm() {
  for (const int size : {2, 3}) {
    OnRanks(size, [&](const pc::Library& library, Member& member) {
      std::mt19937 random(static_cast<unsigned>(member.channel.rank));
      std::vector<float> x(8 * kPiece + 3), y(x.size());
      for (size_t i = 0; i < x.size(); ++i) x[i] = Value(member.channel.rank, static_cast<int64_t>(i));
      const auto nbytes = static_cast<int64_t>(x.size() * sizeof(float));
      int algorithms[2] = {};
      for (int call = 0; call < 300; ++call) {
        if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        ++algorithms[member.exchange.NextAlgorithm(nbytes)];
        CHECK(library.Allreduce(member.channel, {x.data(), y.data(), static_cast<int64_t>(x.size()), pc::Type::kFloat32}).ok());
        for (size_t i = 0; i < y.size(); i += 997) CHECK(y[i] == Sum(size, static_cast<int64_t>(i)));
        // Whatever the calls have taken, the other algorithm seems to be better now and then.
        for (int algorithm : {0, 1}) member.exchange.Learn(algorithm, nbytes, static_cast<int64_t>(random() % 1000));
      }
      CHECK(algorithms[0] > 30 && algorithms[1] > 30);
    });
  }
}

// It finds the faster algorithm, probes the other one seldom, and notices when that has become the faster one. The next algorithm
// is chosen before the time of a call is known.
void TestATwoWayAutotuner() {
  pc::TwoWayAutotuner autotuner;
  int next = 0;
  const auto calls_of = [&](int algorithm, int calls, int64_t cost_of_0, int64_t cost_of_1) {
    int found = 0;
    for (int call = 0; call < calls; ++call) {
      const int own = next;
      if (own == algorithm) ++found;
      next = autotuner.Next();
      autotuner.Learn(own, 1000, own == 0 ? cost_of_0 : cost_of_1);
    }
    return found;
  };
  CHECK(calls_of(1, 20, 5000, 2000) >= 15);
  CHECK(calls_of(0, 3000, 5000, 2000) == 5);     // after 64, 128, 256, 512 and 1024 more
  CHECK(calls_of(0, 3000, 1000, 2000) >= 1900);  // a probe of the first algorithm shows it
  CHECK(calls_of(1, 100, 6000, 2000) >= 85);     // the first algorithm itself has become slow
  CHECK(calls_of(1, 1000, 6000, 2100) >= 980);
}

// The root may be some broadcasts ahead. Its next call, of another kind, must leave alone what the others have yet to read.
void TestAReaderThatIsLate() {
  OnRanks(2, [](const pc::Library& library, Member& member) {
    for (int i = 0; i < 20; ++i) {
      if (member.channel.rank == 1) Sleep(2);
      for (int call = 0; call < 2; ++call) MakeAndCheck(library, member, {kBcast, kPiece, 0, false, 3 * i + call});
      MakeAndCheck(library, member, {i % 2 == 0 ? kAllreduce : kReduceScatter, kPiece, 0, false, 3 * i + 2});
    }
  });
}

// No rank leaves a barrier before all have come.
void TestBarrier() {
  for (const auto& [size, fan_in] : kTrees) {
    std::atomic<int> come{0};
    OnRanks(size, [&come, size = size](const pc::Library& library, Member& member) {
      for (int call = 1; call <= 200; ++call) {
        if (call % 50 == member.channel.rank) Sleep(2);
        ++come;
        CHECK(library.Barrier(member.channel).ok());
        CHECK(come >= size * call);
      }
    }, 64 << 20, fan_in);
  }
}

// A root of broadcasts sends a message to the first rank of another group after each of them, for which that rank waits before it begins the
// broadcast: no rank waits for others that its step does not need.
void TestARootMayBeAhead() {
  constexpr int kSize = 5, kRoot = 1, kFanIn = 2;
  for (const int to : {0, 2, 3, 4}) {
    std::atomic<int> sent{0};
    OnRanks(kSize, [&](const pc::Library& library, Member& member) {
      bool has_buffers = false;  // rank 0 takes them
      CHECK(pc::HostCollective(library, member.channel).HasBuffers(&has_buffers).ok() && has_buffers);
      for (int call = 0; call < 20; ++call) {
        while (member.channel.rank == to && sent <= call) std::this_thread::yield();
        MakeAndCheck(library, member, {kBcast, 10, kRoot, false, call});
        if (member.channel.rank == kRoot) ++sent;
      }
    }, 64 << 20, kFanIn);
  }
}

// The ranks of which a rank of 128 reads the counters, when it waits for all.
void TestARankWaitsFor15OthersOnEachLevel() {
  constexpr int kRanks = 128;
  const Host host(kRanks);
  const int64_t slot = pc::BoardSlot::Take();
  Begin(slot, kRanks);
  for (uint64_t turn = 1; turn <= kRanks; ++turn) {
    std::vector<std::unique_ptr<pc::Exchange>> ranks;
    for (int rank = 0; rank < kRanks; ++rank) ranks.push_back(std::make_unique<pc::Exchange>(slot, rank, kRanks));
    // Each rank posts, and waits for all, when the first one waits for it. Its own wait for rank 0 ends, if that waits itself.
    std::vector<int> waits(kRanks);
    const std::function<bool(int)> come = [&](int rank) {
      pc::Exchange& exchange = *ranks[static_cast<size_t>(rank)];
      exchange.counter(rank).Post(turn, std::memory_order_release);
      return exchange.WaitForAll(turn, [&](int other) {
        ++waits[static_cast<size_t>(rank)];
        if (other == 0 && waits[0] > 0) return false;
        if (rank % 16 != 0 || other == 0 || other % 16 == 0) return come(other) || rank == 0;
        ranks[static_cast<size_t>(other)]->counter(other).Post(turn, std::memory_order_release);
        return true;
      });
    };
    const int rank = static_cast<int>(turn) - 1;
    CHECK(come(rank));
    CHECK(waits[static_cast<size_t>(rank)] == (rank == 0 ? 22 : rank % 16 == 0 ? 16 : 1));
  }
}

// Channels take buffers while there are some; what a channel gives back another one takes. The bound holds.
void TestBuffersRunOut() {
  const int size = 2;
  const Host host(size);
  const auto find = [&](int64_t slot) {
    pc::Exchange first(slot, 0, size), second(slot, 1, size);
    CHECK(first.FindBuffers([](int) { return true; }));
    CHECK(second.FindBuffers([](int) { return true; }));
    CHECK(first.HasBuffers() == second.HasBuffers());
    return first;
  };
  std::vector<int64_t> slots;
  std::vector<pc::Exchange> all;
  std::vector<char*> buffers;
  for (int64_t slot = pc::BoardSlot::Take(); slot >= 0; slot = pc::BoardSlot::Take()) {
    slots.push_back(slot);
    Begin(slot, size);
    const pc::Exchange found = find(slot);
    if (!found.HasBuffers()) break;
    all.push_back(found);
    for (const int rank : {0, 1}) {
      for (const uint64_t piece : {0, 1}) buffers.push_back(found.BufferOf(rank, piece));
    }
  }
  CHECK(!find(slots.back()).HasBuffers());
  CHECK(slots.size() > 100);
  std::sort(buffers.begin(), buffers.end());
  for (size_t i = 1; i < buffers.size(); ++i) CHECK(buffers[i] - buffers[i - 1] >= pc::Exchange::kBufferBytes);
  CHECK(buffers.size() * pc::Exchange::kBufferBytes <= pc::Exchange::BytesOf(size));
  all[3].End();
  Begin(slots.back(), size);
  CHECK(find(slots.back()).HasBuffers());
}

// After a failure all buffers are given back. A new channel in the slot of one that had some ends before it has taken any: it leaves those
// alone that another new channel has taken.
void TestBuffersAreGivenBackOnce() {
  const Host host(1);
  const auto goes_on = [](int) { return true; };
  constexpr int64_t kOld = 1, kNew = 2, kThird = 3;
  pc::Exchange old(kOld, 0, 1);
  CHECK(old.FindBuffers(goes_on) && old.HasBuffers());
  pc::Exchange::EndAll();
  pc::Exchange other(kNew, 0, 1);
  CHECK(other.FindBuffers(goes_on) && other.BufferOf(0, 0) == old.BufferOf(0, 0));
  pc::Exchange failed(kOld, 0, 1);
  failed.End();
  pc::Exchange third(kThird, 0, 1);
  CHECK(third.FindBuffers(goes_on) && third.BufferOf(0, 0) != other.BufferOf(0, 0));
}

// The user is told once that slots or buffers have run out.
void TestSlotsRunOut() {
  const Host host(2);
  std::FILE* const told = std::tmpfile();
  const int own_stderr = dup(2);
  CHECK(told != nullptr && own_stderr >= 0 && dup2(fileno(told), 2) == 2);
  int64_t slots = 0;
  for (int64_t slot = pc::BoardSlot::Take(); slot >= 0; slot = pc::BoardSlot::Take()) {
    Begin(slot, 2);
    CHECK(pc::Exchange(slot, 0, 2).FindBuffers([](int) { return true; }));
    ++slots;
  }
  const bool has_none = pc::BoardSlot::Take() < 0;
  CHECK(dup2(own_stderr, 2) == 2);
  CHECK(has_none && slots == pc::BoardSlot::kSlots);
  std::rewind(told);
  char text[4096] = {};
  CHECK(std::fread(text, 1, sizeof(text) - 1, told) > 0);
  int of_slots = 0, of_buffers = 0;
  for (const char* at = text; (at = std::strstr(at, "expected a free slot")) != nullptr; ++at) ++of_slots;
  for (const char* at = text; (at = std::strstr(at, "expected free buffers")) != nullptr; ++at) ++of_buffers;
  CHECK(of_slots == 1 && of_buffers == 1);
}

// A channel begins anew in a slot that another one has left.
void TestASlotIsUsedAgain() {
  const int size = 2;
  const Host host(size);
  const auto library = MakeLibrary();
  const int64_t slot = pc::BoardSlot::Take();
  for (int time = 0; time < 3; ++time) {
    Begin(slot, size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        Member member(slot, rank, size);
        for (int call = 0; call < 5; ++call) MakeAndCheck(*library, member, {kAllreduce, kPiece + time, 0, false});
        CHECK(library->Barrier(member.channel).ok());
        if (rank == 0) member.exchange.End();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// MPI says that a rank has failed: the wait for it ends with MPI's error.
void TestAWaitForAFailedRankEnds() {
  constexpr int kSize = 3;
  std::atomic<int> errors{0};
  OnRanks(kSize, [&](const pc::Library& library, Member& member) {
    MakeAndCheck(library, member, {kAllreduce, 10, 0, false});
    if (member.channel.rank == 1) {
      failed_rank = 1;
      return;
    }
    std::vector<float> x(kPiece, 1.0f);
    const pc::Outcome outcome = library.Allreduce(member.channel, {x.data(), x.data(), kPiece, pc::Type::kFloat32});
    CHECK(!outcome.ok() && std::string(outcome.call) == "MPI_Iprobe");
    ++errors;
  });
  failed_rank = kNoRank;
  CHECK(errors == 2);
}

const Tests kTests = {
    {"each_collective", TestEachCollective},
    {"a_bucket_of_arrays", TestABucketOfArrays},
    {"a_collective_that_cannot_be_combined", TestACollectiveThatCannotBeCombined},
    {"the_library_calls_no_mpi", TestTheLibraryCallsNoMpi},
    {"a_distribution", TestADistribution},
    {"arrays_that_are_distributed", TestArraysThatAreDistributed},
    {"a_hierarchical_allreduce", TestAHierarchicalAllreduce},
    {"an_array_is_overwritten_after_the_call", TestAnArrayIsOverwrittenAfterTheCall},
    {"an_array_that_cannot_be_read", TestAnArrayThatCannotBeRead},
    {"a_process_that_is_gone", TestAProcessThatIsGone},
    {"arrays_in_shared_memory", TestArraysInSharedMemory},
    {"parts_from_elsewhere_in_shared_memory", TestPartsFromElsewhereInSharedMemory},
    {"an_array_that_is_given_up", TestAnArrayThatIsGivenUp},
    {"a_root_that_gives_up", TestARootThatGivesUp},
    {"an_allreduce_that_cannot_read", TestAnAllreduceThatCannotRead},
    {"random_calls_of_late_ranks", TestRandomCallsOfLateRanks},
    {"a_reader_that_is_late", TestAReaderThatIsLate},
    {"data_that_travel_with_comparisons", TestDataThatTravelWithComparisons},
    {"all_ranks_take_the_same_algorithm", TestAllRanksTakeTheSameAlgorithm},
    {"a_two_way_autotuner", TestATwoWayAutotuner},
    {"barrier", TestBarrier},
    {"a_root_may_be_ahead", TestARootMayBeAhead},
    {"a_rank_waits_for_15_others_on_each_level", TestARankWaitsFor15OthersOnEachLevel},
    {"buffers_run_out", TestBuffersRunOut},
    {"buffers_are_given_back_once", TestBuffersAreGivenBackOnce},
    {"slots_run_out", TestSlotsRunOut},
    {"a_slot_is_used_again", TestASlotIsUsedAgain},
    {"a_wait_for_a_failed_rank_ends", TestAWaitForAFailedRankEnds},
};

}  // namespace

int main(int argc, char** argv) { return RunOne(kTests, argc, argv); }
