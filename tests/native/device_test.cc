// native/device.cc on the stand-in for CUDA's runtime. `device_test NAME` runs one test, `device_test` lists them.
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

pc::Runtime StandIn() {
  return {cudaGetDevice,       cudaSetDevice,   cudaStreamCreateWithFlags, cudaStreamSynchronize, cudaStreamWaitEvent,
          cudaEventCreateWithFlags, cudaEventRecord, cudaEventSynchronize, cudaHostAlloc,         cudaFreeHost,
          cudaMemcpyAsync,     cudaMemcpy2DAsync, cudaMemsetAsync,         cudaGetErrorString};
}

void* NewStream() {
  void* stream = nullptr;
  cudaStreamCreateWithFlags(&stream, 0);
  return stream;
}

void Launch(void* stream, std::function<void()> kernel) {
  standin_launch(
      stream,
      [](void* argument) {
        auto* kernel = static_cast<std::function<void()>*>(argument);
        (*kernel)();
        delete kernel;
      },
      new std::function<void()>(std::move(kernel)));
}

void Sleep(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

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

pc::Side SideOf(std::vector<Ints>& arrays, int64_t blocks = 1) {
  pc::Side side;
  side.unit = 4;
  side.blocks = blocks;
  for (Ints& array : arrays) {
    const auto count = static_cast<int64_t>(array.size()) / blocks;
    side.arrays.push_back({array.data(), count});
    side.count += count;
  }
  return side;
}

// `arrays` in the device's memory, as results of a kernel that ends late.
struct Inputs {
  Inputs(void* stream, std::vector<Ints> values) : arrays(values) {
    for (Ints& array : arrays) std::fill(array.begin(), array.end(), -1);
    Launch(stream, [this, values] {
      Sleep(3);
      for (size_t i = 0; i < values.size(); ++i) std::copy(values[i].begin(), values[i].end(), arrays[i].begin());
    });
  }
  std::vector<Ints> arrays;
};

// What a kernel of `stream` reads from `arrays` when its turn comes.
template <typename Arrays>
Arrays Read(void* stream, const Arrays& arrays) {
  Arrays read;
  Launch(stream, [&] { read = arrays; });
  cudaStreamSynchronize(stream);
  return read;
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
  Inputs x(stream, values);
  std::vector<Ints> y{Ints(5), Ints(100), Ints(33)};
  Launch(stream, [&] {  // reads the results' memory before them: it was another array's
    Sleep(3);
    if (y[1][0] != 0) std::memset(&x.arrays[1][0], 0, 4);
  });
  Events events(stream);
  const pc::Exchange exchange{SideOf(x.arrays), SideOf(y), true, true};
  int64_t calls = 0;
  const pc::Outcome outcome = events.device.Stage(
      exchange, 64, events.ready, events.done, [&](const void* in, void* out, int64_t count) -> pc::Outcome {
        ++calls;
        if (in != out || count > 16) return {"move", 1, "not in place"};
        Double(in, out, count);
        return {};
      });
  events.End();
  const std::vector<Ints> got = Read(stream, y);
  bool right = outcome.ok() && calls == (138 + 15) / 16;
  for (size_t i = 0; i < values.size(); ++i) {
    for (size_t j = 0; j < values[i].size(); ++j) right = right && got[i][j] == 2 * values[i][j];
  }
  return right;
}

void TestPieces() { CHECK(DoublesInPieces()); }

// The same with a runtime that forgets to wait: that the other tests would show it.
void TestForgottenWaits() {
  standin_set_delay_us(2000);
  pc::runtime.EventSynchronize = [](void*) { return 0; };
  CHECK(!DoublesInPieces());
  pc::runtime = StandIn();
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
      Inputs x(stream, {values});
      std::vector<Ints> y{Ints(values.size())};
      Events events(stream);
      const pc::Exchange exchange{SideOf(x.arrays, kBlocks), SideOf(y, kBlocks), true, false};
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
      const Ints got = Read(stream, y)[0];
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
  Inputs x(stream, {values});
  std::vector<Ints> y{Ints(100)};
  Events events(stream);
  CHECK(events.device
            .Stage({SideOf(x.arrays), SideOf(y, 2)}, 64, events.ready, events.done,
                   [&](const void* in, void* out, int64_t n) -> pc::Outcome {
                     std::memcpy(out, in, static_cast<size_t>(4 * n));
                     std::memcpy(static_cast<int32_t*>(out) + n, in, static_cast<size_t>(4 * n));
                     return {};
                   })
            .ok());
  events.End();
  const Ints got = Read(stream, y)[0];
  for (size_t i = 0; i < 100; ++i) CHECK(got[i] == values[i % 50]);

  std::vector<Ints> received{Ints(7)};
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
  CHECK(Read(stream, received)[0] == Counting(7));
}

// Calls of all kinds, begun one right behind the other, with the same buffers: none spoils what another has still to copy.
void TestCallsFollowEachOther() {
  standin_set_delay_us(1000);
  void* stream = NewStream();
  Inputs x(stream, {Counting(90)});
  std::vector<std::vector<Ints>> results(12, std::vector<Ints>{Ints(90)});
  std::vector<Events> events;
  for (size_t i = 0; i < results.size(); ++i) events.emplace_back(stream);
  uint64_t last = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    last = events[i].device.Post([&, i] {
      const pc::Exchange exchange{SideOf(x.arrays), SideOf(results[i]), true, i % 3 == 0};
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
  for (const std::vector<Ints>& result : Read(stream, results)) {
    for (int32_t i = 0; i < 90; ++i) CHECK(result.at(0)[static_cast<size_t>(i)] == 2 * (i + 1));
  }
}

// Blocks further apart than one copy may reach, from there and to there.
void TestBlocksFarApart() {
  standin_set_max_pitch(100);
  pc::max_pitch = 100;
  TestBlocks();
}

// A message takes the memory of one piece, not of three.
void TestMemoryOfAMessage() {
  void* stream = NewStream();
  Inputs x(stream, {Counting(1000)});
  Events events(stream);
  CHECK(events.device
            .Stage({SideOf(x.arrays), {}, false, false}, 64, events.ready, events.done,
                   [&](const void* in, void*, int64_t) -> pc::Outcome {
                     CHECK(std::memcmp(in, Counting(1000).data(), 4000) == 0);
                     return {};
                   })
            .ok());
  CHECK(standin_held() == 1);
}

// Without page-locked memory there is an error, and MPI's calls are made all the same.
void TestNoMemory() {
  standin_refuse_memory();
  void* stream = NewStream();
  Inputs x(stream, {Counting(80)});
  std::vector<Ints> y{Ints(160)};
  Events events(stream);
  int64_t calls = 0;
  const pc::Outcome outcome = events.device.Stage({SideOf(x.arrays), SideOf(y, 2)}, 64, events.ready, events.done,
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
  const int64_t before = standin_allocations();
  for (int i = 0; i < 5; ++i) CHECK(DoublesInPieces());
  CHECK(standin_allocations() == before);
  TestSidesOfDifferentShapes();
  const int64_t grown = standin_allocations();
  CHECK(grown > before && standin_held() <= 6);
  TestSidesOfDifferentShapes();
  CHECK(DoublesInPieces());
  CHECK(standin_allocations() == grown);
}

// While one piece is with MPI, others come from the device and go back to it.
void TestPiecesOverlap() {
  standin_set_delay_us(2000);
  void* stream = NewStream();
  Inputs x(stream, {Counting(160)});
  std::vector<Ints> y{Ints(160)};
  Events events(stream);
  int64_t calls = 0;
  CHECK(events.device
            .Stage({SideOf(x.arrays), SideOf(y), true, true}, 64, events.ready, events.done,
                   [&](const void* in, void* out, int64_t count) -> pc::Outcome {
                     // Some copy ends during each call but the last ones'.
                     const int64_t before = standin_copied();
                     if (++calls < 8) CHECK(Comes([&] { return standin_copied() > before; }));
                     Double(in, out, count);
                     return {};
                   })
            .ok());
  events.End();
  CHECK(Read(stream, y)[0][159] == 320);
  CHECK(standin_most_at_once() >= 2);
}

// What the device does otherwise goes on while MPI has the arrays: on other streams in any case, and on the same one
// between the two parts of a call.
void TestOtherWorkGoesOn() {
  void* stream = NewStream();
  void* other = NewStream();
  Inputs x(stream, {Counting(40)});
  std::vector<Ints> y{Ints(40)};
  Events events(stream);
  std::atomic<bool> on_other{false}, on_same{false};
  pc::Outcome outcome;
  const uint64_t ticket = events.device.Post([&] {
    outcome = events.device.Stage({SideOf(x.arrays), SideOf(y), true, true}, 1 << 20, events.ready, events.done,
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
  CHECK(outcome.ok() && Read(stream, y)[0][39] == 80);
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
    Inputs x(stream, {Counting(80)});
    std::vector<Ints> y{Ints(80)};
    Events events(stream);
    int64_t calls = 0;
    standin_fail_copy(nth);
    const pc::Outcome outcome =
        events.device.Stage({SideOf(x.arrays), SideOf(y), true, true}, 64, events.ready, events.done,
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
  Inputs x(stream, {Counting(10)});
  std::vector<Ints> y{Ints(10, 7)};
  Events events(stream);
  CHECK(events.device
            .Direct({SideOf(x.arrays), SideOf(y)}, events.ready, events.done,
                    [&](const void* in, void* out, int64_t count) -> pc::Outcome {
                      CHECK(in == x.arrays[0].data() && out == y[0].data() && count == 10);
                      CHECK(x.arrays[0] == Counting(10));
                      pc::Outcome outcome = events.device.memory().Clear(out, 40);
                      CHECK(outcome.ok() && y[0] == Ints(10, 0));
                      return events.device.memory().Copy(out, in, 40);
                    })
            .ok());
  events.End();
  CHECK(Read(stream, y)[0] == Counting(10));
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
  pc::runtime = StandIn();
  standin_set_delay_us(200);
  kTests.at(argv[1])();
  std::fflush(nullptr);
  std::_Exit(0);  // streams are threads that never end
}
