// native/device.cc on the stand-in for CUDA's runtime, or on CUDA's own (PYCOLLECTIVE_CUDART). `device_test NAME` runs one
// test, `device_test` lists them.
//
// Operands are written by late work of a stream and results are read by later work of it, as XLA's kernels would.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cudart.h"
#include "device.h"
#include "team.h"

namespace pc = pycollective;

namespace {

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);  \
      std::exit(1);                                                                 \
    }                                                                               \
  } while (false)

// What the tests themselves ask of the runtime must succeed.
#define CUDA(call) CHECK((call) == 0)

#ifdef PYCOLLECTIVE_CUDART
constexpr bool kStandIn = false;
#else
constexpr bool kStandIn = true;
#endif

void* NewStream() {
  void* stream = nullptr;
  CUDA(cudaStreamCreateWithFlags(&stream, 1));  // it waits for no other stream
  return stream;
}

// A kernel, as far as order goes: a function of the host in the order of the stream. It calls nothing of CUDA's.
void Launch(void* stream, std::function<void()> kernel) {
  CUDA(cudaLaunchHostFunc(
      stream,
      [](void* argument) {
        auto* kernel = static_cast<std::function<void()>*>(argument);
        (*kernel)();
        delete kernel;
      },
      new std::function<void()>(std::move(kernel))));
}

void Sleep(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// How the runtime behaves towards native/device.cc, and what that has asked it. The tests' own calls go to the runtime
// itself.
std::atomic<int> slow_us{0};                   // each copy takes at least so long
std::atomic<int64_t> until_failure{0};         // the copy or set of this number, from now on, fails; 0: none does
std::atomic<bool> no_memory{false};            // no page-locked memory is left
std::atomic<int64_t> allocations{0}, held{0};  // of page-locked memory: made so far, not yet given back
std::atomic<int64_t> copied{0};                // copies that have ended
constexpr int kInvalidValue = 1;               // cudaErrorInvalidValue
constexpr int kMemoryAllocation = 2;           // cudaErrorMemoryAllocation

bool Fails() { return until_failure.load() > 0 && until_failure.fetch_sub(1) == 1; }

template <typename Copy>
int Observed(void* stream, Copy copy) {
  if (Fails()) return kInvalidValue;
  if (const int us = slow_us; us > 0 && !kStandIn) {  // the stand-in's own copies are slow
    Launch(stream, [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
  }
  const int code = copy();
  if (code == 0) Launch(stream, [] { ++copied; });
  return code;
}

void SlowCopies(int us) {
  slow_us = us;
#ifndef PYCOLLECTIVE_CUDART
  standin_set_delay_us(us);
#endif
}

pc::Runtime ObservedRuntime() {
  pc::Runtime runtime{
      cudaGetDevice,            cudaSetDevice,   cudaStreamCreateWithFlags, cudaStreamSynchronize, cudaStreamWaitEvent,
      cudaEventCreateWithFlags, cudaEventRecord, cudaEventSynchronize,      cudaHostAlloc,         cudaFreeHost,
      cudaMemcpyAsync,          cudaMemcpy2DAsync, cudaMemsetAsync,         cudaGetErrorString};
  runtime.HostAlloc = [](void** memory, size_t nbytes, unsigned flags) {
    if (no_memory) return kMemoryAllocation;
    ++allocations;
    ++held;
    return cudaHostAlloc(memory, nbytes, flags);
  };
  runtime.HostFree = [](void* memory) {
    --held;
    return cudaFreeHost(memory);
  };
  runtime.MemcpyAsync = [](void* to, const void* from, size_t nbytes, int kind, void* stream) {
    return Observed(stream, [&] { return cudaMemcpyAsync(to, from, nbytes, kind, stream); });
  };
  runtime.Memcpy2DAsync = [](void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                             size_t height, int kind, void* stream) {
    return Observed(stream,
                    [&] { return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, stream); });
  };
  runtime.MemsetAsync = [](void* to, int value, size_t nbytes, void* stream) {
    return Fails() ? kInvalidValue : cudaMemsetAsync(to, value, nbytes, stream);
  };
  return runtime;
}

// For what must happen; the limit is for a test that fails.
bool Comes(const std::function<bool()>& condition) {
  for (int i = 0; i < 20000; ++i) {
    if (condition()) return true;
    Sleep(1);
  }
  return false;
}

using Ints = std::vector<int32_t>;

Ints Counting(size_t count) {
  Ints values(count);
  std::iota(values.begin(), values.end(), 1);
  return values;
}

// A copy of the tests' own: at once when its turn comes, since the stand-in's copies are slow.
void Copy(void* to, const void* from, size_t nbytes, int kind, void* stream) {
#ifdef PYCOLLECTIVE_CUDART
  CUDA(cudaMemcpyAsync(to, from, nbytes, kind, stream));
#else
  static_cast<void>(kind);
  Launch(stream, [=] { std::memcpy(to, from, nbytes); });
#endif
}

// An array in the device's memory. What it takes is not given back: each test is a process of its own, and copies may
// still be under way where a test is to fail.
class Array {
 public:
  explicit Array(size_t count, int32_t value = 0) : count_(count) {
    CUDA(cudaMalloc(&data_, nbytes()));
    CUDA(cudaHostAlloc(&written_, nbytes(), 0));  // now: later it would wait for the device
    CUDA(cudaHostAlloc(&read_, nbytes(), 0));
    void* const stream = NewStream();
    Write(stream, Ints(count, value));
    CUDA(cudaStreamSynchronize(stream));
  }

  void Write(void* stream, const Ints& values) {
    std::memcpy(written_, values.data(), nbytes());
    Copy(data_, written_, nbytes(), pc::kHostToDevice, stream);
  }
  // What work of `stream` reads when its turn comes.
  Ints Read(void* stream) const {
    Copy(read_, data_, nbytes(), pc::kDeviceToHost, stream);
    CUDA(cudaStreamSynchronize(stream));
    const auto* const read = static_cast<const int32_t*>(read_);
    return Ints(read, read + count_);
  }
  Ints Now() const { return Read(NewStream()); }
  void CopyTo(const Array& other, void* stream) const {
    Copy(other.data_, data_, nbytes(), pc::kDeviceToDevice, stream);
  }

  void* data() const { return data_; }
  size_t size() const { return count_; }

 private:
  size_t nbytes() const { return 4 * count_; }

  size_t count_;
  void* data_ = nullptr;
  void* written_ = nullptr;  // page-locked, of the host
  void* read_ = nullptr;
};

pc::Side SideOf(const std::vector<Array>& arrays, int64_t blocks = 1) {
  pc::Side side;
  side.unit = 4;
  side.blocks = blocks;
  for (const Array& array : arrays) {
    const auto count = static_cast<int64_t>(array.size()) / blocks;
    side.arrays.push_back({array.data(), count});
    side.count += count;
  }
  return side;
}

// What ends late ends so much later than what does not wait for it would begin.
constexpr int kLateMs = 5;

// Arrays in the device's memory, as results of a kernel that ends late: the last that a test makes.
std::vector<Array> Late(void* stream, const std::vector<Ints>& values) {
  std::vector<Array> arrays;
  for (const Ints& each : values) arrays.emplace_back(each.size(), -1);
  Launch(stream, [] { Sleep(kLateMs); });
  for (size_t i = 0; i < values.size(); ++i) arrays[i].Write(stream, values[i]);
  return arrays;
}

struct Events {
  explicit Events(void* stream) : stream(stream) {
    device.TakeEvent(&ready);
    device.TakeEvent(&done);
    device.Record(ready, stream);
  }
  void End() { device.Follow(stream, done); }

  pc::Device& device = pc::Device::Of(0);
  void* stream;
  void* ready = nullptr;
  void* done = nullptr;
};

void Double(const void* in, void* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) static_cast<int32_t*>(out)[i] = 2 * static_cast<const int32_t*>(in)[i];
}

// Doubles three arrays as one, in pieces of 16 elements; whether the results are right.
bool DoublesInPieces() {
  void* stream = NewStream();
  const std::vector<Ints> values{Counting(5), Counting(100), Counting(33)};
  const std::vector<Array> y{Array(5), Array(100), Array(33)};
  const Array before(100);
  const std::vector<Array> x = Late(stream, values);
  Launch(stream, [] { Sleep(kLateMs); });
  y[1].CopyTo(before, stream);  // reads the results' memory before them: it was another array's
  Events events(stream);
  const pc::Exchange exchange{SideOf(x), SideOf(y), true, true};
  int64_t calls = 0;
  const pc::Outcome outcome = events.device.Stage(
      exchange, 64, events.ready, events.done, [&](const void* in, void* out, int64_t count) -> pc::Outcome {
        ++calls;
        if (in != out || count > 16) return {"move", 1, "not in place"};
        Double(in, out, count);
        return {};
      });
  events.End();
  bool right = outcome.ok() && calls == (138 + 15) / 16;
  for (size_t i = 0; i < values.size(); ++i) {
    const Ints got = y[i].Read(stream);
    for (size_t j = 0; j < values[i].size(); ++j) right = right && got[j] == 2 * values[i][j];
  }
  return right && before.Read(stream) == Ints(100);
}

void TestPieces() { CHECK(DoublesInPieces()); }

// The same with a runtime that forgets to wait: that the other tests would show it.
void TestForgottenWaits() {
  SlowCopies(2000);
  pc::runtime.EventSynchronize = [](void*) { return 0; };
  CHECK(!DoublesInPieces());
  pc::runtime = ObservedRuntime();
  CHECK(DoublesInPieces());
  pc::runtime.StreamWaitEvent = [](void*, void*, unsigned) { return 0; };
  CHECK(!DoublesInPieces());
}

// Every rank's blocks in reverse, whatever the pieces are.
void TestBlocks() {
  for (const int64_t stage_bytes : {12, 60, 1000, 1 << 20}) {
    for (const int64_t count : {1, 7, 64}) {
      void* stream = NewStream();
      constexpr int64_t kBlocks = 3;
      const Ints values = Counting(static_cast<size_t>(kBlocks * count));
      const std::vector<Array> y{Array(values.size())};
      const std::vector<Array> x = Late(stream, {values});
      Events events(stream);
      const pc::Exchange exchange{SideOf(x, kBlocks), SideOf(y, kBlocks), true, false};
      const pc::Outcome outcome = events.device.Stage(
          exchange, stage_bytes, events.ready, events.done,
          [&](const void* in, void* out, int64_t n) -> pc::Outcome {
            for (int64_t block = 0; block < kBlocks; ++block) {
              std::memcpy(static_cast<int32_t*>(out) + block * n,
                          static_cast<const int32_t*>(in) + (kBlocks - 1 - block) * n, static_cast<size_t>(4 * n));
            }
            return {};
          });
      CHECK(outcome.ok());
      events.End();
      const Ints got = y[0].Read(stream);
      for (int64_t i = 0; i < kBlocks * count; ++i) {
        const int64_t block = i / count;
        CHECK(got[static_cast<size_t>(i)] == values[static_cast<size_t>((kBlocks - 1 - block) * count + i % count)]);
      }
    }
  }
}

// One block to several, as an allgather; and an array that nothing is read from, as a receive.
void TestSidesOfDifferentShapes() {
  void* stream = NewStream();
  const Ints values = Counting(50);
  const std::vector<Array> y{Array(100)};
  const std::vector<Array> x = Late(stream, {values});
  Events events(stream);
  CHECK(events.device
            .Stage({SideOf(x), SideOf(y, 2)}, 64, events.ready, events.done,
                   [&](const void* in, void* out, int64_t n) -> pc::Outcome {
                     std::memcpy(out, in, static_cast<size_t>(4 * n));
                     std::memcpy(static_cast<int32_t*>(out) + n, in, static_cast<size_t>(4 * n));
                     return {};
                   })
            .ok());
  events.End();
  const Ints got = y[0].Read(stream);
  for (size_t i = 0; i < 100; ++i) CHECK(got[i] == values[i % 50]);

  const std::vector<Array> received{Array(7)};
  const Array before(7);
  Launch(stream, [] { Sleep(kLateMs); });
  received[0].CopyTo(before, stream);
  Events receive(stream);
  CHECK(receive.device
            .Stage({{}, SideOf(received), false, false}, 8, receive.ready, receive.done,
                   [&](const void*, void* out, int64_t n) -> pc::Outcome {
                     CHECK(n == 7);  // a message goes whole
                     std::memcpy(out, values.data(), 28);
                     return {};
                   })
            .ok());
  receive.End();
  CHECK(received[0].Read(stream) == Counting(7));
  CHECK(before.Read(stream) == Ints(7));
}

// Calls of all kinds, begun one right behind the other, with the same buffers: none spoils what another has still to copy.
void TestCallsFollowEachOther() {
  SlowCopies(1000);
  void* stream = NewStream();
  std::vector<std::vector<Array>> results;
  for (int i = 0; i < 12; ++i) results.push_back({Array(90)});
  const std::vector<Array> x = Late(stream, {Counting(90)});
  std::vector<Events> events;
  for (size_t i = 0; i < results.size(); ++i) events.emplace_back(stream);
  uint64_t last = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    last = events[i].device.Post([&, i] {
      const pc::Exchange exchange{SideOf(x), SideOf(results[i]), true, i % 3 == 0};
      CHECK(events[i]
                .device
                .Stage(exchange, i % 4 == 1 ? 128 : 512, events[i].ready, events[i].done,
                       [](const void* in, void* out, int64_t count) -> pc::Outcome {
                         Double(in, out, count);
                         return {};
                       })
                .ok());
    });
  }
  events.back().device.Wait(last);
  for (Events& of_call : events) of_call.End();
  for (const std::vector<Array>& result : results) {
    const Ints got = result[0].Read(stream);
    for (int32_t i = 0; i < 90; ++i) CHECK(got[static_cast<size_t>(i)] == 2 * (i + 1));
  }
}

// Blocks further apart than one copy may reach, from there and to there.
void TestBlocksFarApart() {
#ifndef PYCOLLECTIVE_CUDART
  standin_set_max_pitch(100);
#endif
  pc::max_pitch = 100;
  TestBlocks();
}

// A message takes the memory of one piece, not of three.
void TestMemoryOfAMessage() {
  void* stream = NewStream();
  const std::vector<Array> x = Late(stream, {Counting(1000)});
  Events events(stream);
  CHECK(events.device
            .Stage({SideOf(x), {}, false, false}, 64, events.ready, events.done,
                   [&](const void* in, void*, int64_t) -> pc::Outcome {
                     CHECK(std::memcmp(in, Counting(1000).data(), 4000) == 0);
                     return {};
                   })
            .ok());
  CHECK(held == 1);
}

// Without page-locked memory there is an error, and MPI's calls are made all the same.
void TestNoMemory() {
  no_memory = true;
  void* stream = NewStream();
  const std::vector<Array> y{Array(160)};
  const std::vector<Array> x = Late(stream, {Counting(80)});
  Events events(stream);
  int64_t calls = 0;
  const pc::Outcome outcome = events.device.Stage({SideOf(x), SideOf(y, 2)}, 64, events.ready, events.done,
                                                  [&](const void* in, void* out, int64_t count) -> pc::Outcome {
                                                    ++calls;
                                                    std::memcpy(out, in, static_cast<size_t>(4 * count));
                                                    return {};
                                                  });
  CHECK(!outcome.ok() && outcome.of_runtime && outcome.detail == "out of memory");
  CHECK(calls == 10);
}

// Nothing to move, as a barrier: one call, when the stream's earlier work has been done.
void TestNothing() {
  void* stream = NewStream();
  std::atomic<bool> ran{false};
  Launch(stream, [&] {
    Sleep(5);
    ran = true;
  });
  Events events(stream);
  int calls = 0;
  CHECK(events.device
            .Stage({}, 64, events.ready, events.done,
                   [&](const void*, void*, int64_t count) -> pc::Outcome {
                     CHECK(ran.load() && count == 0);
                     ++calls;
                     return {};
                   })
            .ok());
  CHECK(calls == 1);
}

// The buffers are made once, and once more for what is larger.
void TestNoAllocationInSteadyState() {
  CHECK(DoublesInPieces());
  const int64_t before = allocations.load();
  for (int i = 0; i < 5; ++i) CHECK(DoublesInPieces());
  CHECK(allocations.load() == before);
  TestSidesOfDifferentShapes();
  const int64_t grown = allocations.load();
  CHECK(grown > before && held <= 6);
  TestSidesOfDifferentShapes();
  CHECK(DoublesInPieces());
  CHECK(allocations.load() == grown);
}

// While one piece is with MPI, others come from the device and go back to it.
void TestPiecesOverlap() {
  SlowCopies(2000);
  void* stream = NewStream();
  const std::vector<Array> y{Array(160)};
  const std::vector<Array> x = Late(stream, {Counting(160)});
  Events events(stream);
  int64_t calls = 0;
  CHECK(events.device
            .Stage({SideOf(x), SideOf(y), true, true}, 64, events.ready, events.done,
                   [&](const void* in, void* out, int64_t count) -> pc::Outcome {
                     // Some copy ends during each call but the last ones'.
                     const int64_t before = copied.load();
                     if (++calls < 8) CHECK(Comes([&] { return copied.load() > before; }));
                     Double(in, out, count);
                     return {};
                   })
            .ok());
  events.End();
  CHECK(y[0].Read(stream)[159] == 320);
#ifndef PYCOLLECTIVE_CUDART
  CHECK(standin_most_at_once() >= 2);
#endif
}

// What the device does otherwise goes on while MPI has the arrays: on other streams in any case, and on the same one
// between the two parts of a call.
void TestOtherWorkGoesOn() {
  void* stream = NewStream();
  void* other = NewStream();
  const std::vector<Array> y{Array(40)};
  const std::vector<Array> x = Late(stream, {Counting(40)});
  Events events(stream);
  std::atomic<bool> on_other{false}, on_same{false};
  pc::Outcome outcome;
  const uint64_t ticket = events.device.Post([&] {
    outcome = events.device.Stage({SideOf(x), SideOf(y), true, true}, 1 << 20, events.ready, events.done,
                                  [&](const void* in, void* out, int64_t count) -> pc::Outcome {
                                    Launch(other, [&] { on_other = true; });
                                    CHECK(Comes([&] { return on_other.load() && on_same.load(); }));
                                    Double(in, out, count);
                                    return {};
                                  });
  });
  Launch(stream, [&] { on_same = true; });
  events.device.Wait(ticket);
  events.End();
  CHECK(outcome.ok() && y[0].Read(stream)[39] == 80);
}

// Calls of a device have their turns one after the other, in whatever thread.
void TestOrder() {
  pc::Device& device = pc::Device::Of(0);
  std::vector<int> order;
  uint64_t last = 0;
  for (int i = 0; i < 20; ++i) {
    last = device.Post([&order, i] {
      Sleep(1);
      order.push_back(i);
    });
  }
  device.Run([&] { order.push_back(20); });
  device.Run([&] { order.push_back(21); });
  device.Wait(last);
  std::vector<int> want(22);
  std::iota(want.begin(), want.end(), 0);
  CHECK(order == want);
}

// An error of the runtime is returned, and MPI's calls are made all the same: other ranks wait in them.
void TestErrors() {
  for (const int64_t nth : {1, 2, 5, 9}) {
    void* stream = NewStream();
    const std::vector<Array> y{Array(80)};
    const std::vector<Array> x = Late(stream, {Counting(80)});
    Events events(stream);
    int64_t calls = 0;
    until_failure = nth;
    const pc::Outcome outcome =
        events.device.Stage({SideOf(x), SideOf(y), true, true}, 64, events.ready, events.done,
                            [&](const void*, void*, int64_t) -> pc::Outcome {
                              ++calls;
                              return {};
                            });
    events.End();
    cudaStreamSynchronize(stream);
    CHECK(!outcome.ok() && outcome.of_runtime && outcome.detail == "invalid argument");
    CHECK(calls == 5);
  }
  CHECK(DoublesInPieces());
}

// A library that reads the device's memory is handed it when the operands are there.
void TestDirect() {
  void* stream = NewStream();
  const std::vector<Array> y{Array(10, 7)};
  const std::vector<Array> x = Late(stream, {Counting(10)});
  Events events(stream);
  CHECK(events.device
            .Direct({SideOf(x), SideOf(y)}, events.ready, events.done,
                    [&](const void* in, void* out, int64_t count) -> pc::Outcome {
                      CHECK(in == x[0].data() && out == y[0].data() && count == 10);
                      CHECK(x[0].Now() == Counting(10));
                      pc::Outcome outcome = events.device.memory().Clear(out, 40);
                      CHECK(outcome.ok() && y[0].Now() == Ints(10, 0));
                      return events.device.memory().Copy(out, in, 40);
                    })
            .ok());
  events.End();
  CHECK(y[0].Read(stream) == Counting(10));
}

// A team's ------------------------------------------------------------------------------------------------------------

// Whoever waits for a member that does not come is told, and so is whoever comes later; nobody does the team's work.
void TestBrokenTeam() {
  pc::Team team(3);
  std::atomic<int> told{0};
  const auto meets = [&] {
    try {
      team.AddPost({});
      team.Meet([] { CHECK(false); });
      CHECK(false);
    } catch (const pc::Team::Broken&) {
      ++told;
    }
  };
  std::thread first(meets), second(meets);
  Sleep(20);
  CHECK(told == 0);
  team.Break();
  first.join();
  second.join();
  CHECK(told == 2);
  for (int i = 0; i < 5; ++i) meets();
  CHECK(told == 7);

  // A meeting that is complete stays so.
  pc::Team pair(2);
  std::thread waits([&] { pair.Meet(); });
  pair.Meet();
  pair.Break();
  waits.join();
}

const std::map<std::string, void (*)()> kTests = {
    {"pieces", TestPieces},
    {"forgotten_waits", TestForgottenWaits},
    {"blocks", TestBlocks},
    {"sides_of_different_shapes", TestSidesOfDifferentShapes},
    {"calls_follow_each_other", TestCallsFollowEachOther},
    {"blocks_far_apart", TestBlocksFarApart},
    {"memory_of_a_message", TestMemoryOfAMessage},
    {"no_memory", TestNoMemory},
    {"nothing", TestNothing},
    {"no_allocation_in_steady_state", TestNoAllocationInSteadyState},
    {"pieces_overlap", TestPiecesOverlap},
    {"other_work_goes_on", TestOtherWorkGoesOn},
    {"order", TestOrder},
    {"errors", TestErrors},
    {"direct", TestDirect},
    {"broken_team", TestBrokenTeam},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    for (const auto& [name, test] : kTests) std::printf("%s\n", name.c_str());
    return 0;
  }
  pc::runtime = ObservedRuntime();
  SlowCopies(200);
  kTests.at(argv[1])();
  std::fflush(nullptr);
  std::_Exit(0);  // streams are threads that never end
}
