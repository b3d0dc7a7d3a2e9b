// Tests native/devices/device.cc on the stand-in for CUDA's runtime, or on CUDA's own (PYCOLLECTIVE_CUDART).

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cudart.h"
#include "devices/buffers.h"
#include "devices/device.h"
#include "harness.h"
#include "on_device.h"
#include "shared_memory/shared_arrays.h"

namespace {

// Doubles three arrays as one, in pieces of 16 elements. Returns whether the results are right.
bool DoublesInPieces(void* stream = NewStream()) {
  const std::vector<Ints> values{Counting(5), Counting(100), Counting(33)};
  const std::vector<Array> y{Array(5), Array(100), Array(33)};
  const Array before(100);
  const std::vector<Array> x = Late(stream, values);
  Delay(stream, late_us);
  y[1].CopyTo(before, stream);  // an earlier reader of the results' memory: it must still see zeros
  Sleep(2);                     // until the stream works: no other stream may begin before it
  Events events(stream);
  const pc::Transfer transfer{EndOf(x), EndOf(y), true, true};
  int64_t calls = 0;
  const pc::Outcome outcome = events.device.Stage(
      transfer, 64, events.ready, events.done, [&](const void* in, void* out, int64_t count) -> pc::Outcome {
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

void* of_kernels = nullptr;    // the stream whose kernels write the operands and read the results
int64_t stream_waits = 0;      // how often a stream was told to wait for an event
bool (*forgets)(void* stream);  // whether this wait is left out

// Whether one of several runs has wrong results: a busy machine may make the work late that should overtake.
bool IsEverWrong(void* (*next_stream)()) {
  for (int i = 0; i < 10; ++i) {
    if (!DoublesInPieces(next_stream())) return true;
  }
  return false;
}

// Whether results are wrong if some waits of streams are left out.
bool IsNoticed(bool (*some_waits)(void* stream)) {
  forgets = some_waits;
  pc::runtime.StreamWaitEvent = [](void* stream, void* event, unsigned flags) {
    ++stream_waits;
    return forgets(stream) ? 0 : cudaStreamWaitEvent(stream, event, flags);
  };
  const bool is_noticed = IsEverWrong([] {
    stream_waits = 0;
    return of_kernels = NewStream();
  });
  pc::runtime = ObservedRuntime();
  return is_noticed;
}

// If the runtime does not wait, results are wrong: so the other tests notice a forgotten wait.
void TestForgottenWaits() {
  SlowCopies(2000);
  late_us = 50000;
  pc::runtime.EventSynchronize = [](void*) { return 0; };
  CHECK(IsEverWrong(NewStream));
  pc::runtime = ObservedRuntime();
  CHECK(!IsNoticed([](void*) { return false; }));
  // The first wait is that of the copies from the device, for the operands. The last one is that for the results.
  CHECK(IsNoticed([](void*) { return stream_waits == 1; }));
  SlowCopies(10000);  // later than this thread, too, where other programs have the cores
  CHECK(IsNoticed([](void* stream) { return stream == of_kernels; }));
  // Those from the third one on are for buffers that are still copied to the device.
  FetchQuickly();
  CHECK(IsNoticed([](void* stream) { return stream != of_kernels && stream_waits > 2; }));
}

// A call that reverses the order of the blocks has the right result for pieces of any size.
void TestBlocks() {
  for (const int64_t stage_bytes : {12, 60, 1000, 1 << 20}) {
    for (const int64_t count : {1, 7, 64}) {
      void* stream = NewStream();
      constexpr int64_t kBlocks = 3;
      const Ints values = Counting(static_cast<size_t>(kBlocks * count));
      const std::vector<Array> y{Array(values.size())};
      const std::vector<Array> x = Late(stream, {values});
      Events events(stream);
      const pc::Transfer transfer{EndOf(x, kBlocks), EndOf(y, kBlocks), true, false};
      const pc::Outcome outcome = events.device.Stage(
          transfer, stage_bytes, events.ready, events.done,
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

// An allgather turns one block into several blocks; a receive has no operands.
void TestSidesOfDifferentShapes() {
  void* stream = NewStream();
  const Ints values = Counting(50);
  const std::vector<Array> y{Array(100)};
  const std::vector<Array> x = Late(stream, {values});
  Events events(stream);
  CHECK(events.device
            .Stage({EndOf(x), EndOf(y, 2)}, 64, events.ready, events.done,
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
  Delay(stream, late_us);
  received[0].CopyTo(before, stream);
  Events receive(stream);
  CHECK(receive.device
            .Stage({{}, EndOf(received), false, false}, 8, receive.ready, receive.done,
                   [&](const void*, void* out, int64_t n) -> pc::Outcome {
                     CHECK(n == 7);  // a message is not cut into pieces
                     std::memcpy(out, values.data(), 28);
                     return {};
                   })
            .ok());
  receive.End();
  CHECK(received[0].Read(stream) == Counting(7));
  CHECK(before.Read(stream) == Ints(7));
}

// Calls of different kinds follow each other without a pause and use the same buffers: no call writes over data that
// another call must still copy.
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
      const pc::Transfer transfer{EndOf(x), EndOf(results[i]), true, i % 3 == 0};
      CHECK(events[i]
                .device
                .Stage(transfer, i % 4 == 1 ? 128 : 512, events[i].ready, events[i].done,
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

// Blocks that are further apart than one copy may reach are copied one by one.
void TestBlocksFarApart() {
#ifndef PYCOLLECTIVE_CUDART
  standin_set_max_pitch(100);
#endif
  pc::max_pitch = 100;
  TestBlocks();
}

// A message of many pieces is one call of MPI, and needs no more page-locked memory than its pieces.
void TestMessageOfManyPieces() {
  pc::Device& device = pc::Device::Get(0);
  CHECK(device.Reserve(64).ok());
  const int64_t before = allocations.load();
  for (const size_t other : {1000, 7, 0}) {  // what comes back may be of another length
    void* stream = NewStream();
    const std::vector<Array> y{Array(other + 1)};
    const std::vector<Array> x = Late(stream, {Counting(1000)});
    Events events(stream);
    int calls = 0;
    pc::TransferEnd out = EndOf(y);
    out.count = out.arrays[0].count = static_cast<int64_t>(other);
    CHECK(events.device
              .Stage({EndOf(x), out, false, false}, 64, events.ready, events.done,
                     [&](const void* in, void* to, int64_t count) -> pc::Outcome {
                       CHECK(++calls == 1 && count == 1000);
                       CHECK(std::memcmp(in, Counting(1000).data(), 4000) == 0);
                       Double(in, to, static_cast<int64_t>(other));
                       return {};
                     })
              .ok());
    events.End();
    const Ints got = y[0].Read(stream);
    for (size_t i = 0; i <= other; ++i) CHECK(got[i] == (i < other ? 2 * (static_cast<int32_t>(i) + 1) : 0));
  }
  CHECK(allocations.load() == before);
}

// Buffers are page-locked when the device starts: that may wait for all work of the device, and so for a kernel that waits for
// another one. (The stand-in waits; the kernel here ends when the call has been made.)
void TestNoAllocationWhileProgramsRun() {
  pc::Device& device = pc::Device::Get(0);
  void* stream = NewStream();
  void* busy = NewStream();
  const std::vector<Array> y{Array(80)};
  const std::vector<Array> x = Late(stream, {Counting(80)});
  CHECK(device.Reserve(64).ok());
  static std::atomic<bool> is_made{false};
  Kernel(busy, [] { CHECK(BecomesTrue([] { return is_made.load(); })); });
  Events events(stream);
  CHECK(events.device
            .Stage({EndOf(x), EndOf(y)}, 64, events.ready, events.done,
                   [](const void* in, void* out, int64_t count) -> pc::Outcome {
                     Double(in, out, count);
                     return {};
                   })
            .ok());
  is_made = true;
  events.End();
  CHECK(y[0].Read(stream)[79] == 160);
}

// Without page-locked memory the call returns an error, and MPI gets nothing.
void TestNoMemory() {
  no_memory = true;
  void* stream = NewStream();
  const std::vector<Array> y{Array(160)};
  const std::vector<Array> x = Late(stream, {Counting(80)});
  Events events(stream);
  int64_t calls = 0;
  const pc::Outcome outcome = events.device.Stage({EndOf(x), EndOf(y, 2)}, 64, events.ready, events.done,
                                                  [&](const void*, void*, int64_t) -> pc::Outcome {
                                                    ++calls;
                                                    return {};
                                                  });
  CHECK(!outcome.ok() && outcome.of_runtime && outcome.detail == "out of memory");
  CHECK(calls == 0);
  CHECK(pc::Device::Get(0).Reserve(64).of_runtime);
}

// The buffers lie in this rank's part of the memory that ranks share, so another rank finds there what comes from the device. What is
// wanted beyond that part is an error: the other ranks would look for it there.
void TestBuffersInSharedMemory() {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), part = 6 * page;
  const int file = memfd_create("arrays", 0);
  CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(2 * part)) == 0);
  const auto map = [&] {
    void* const mapped = mmap(nullptr, 2 * part, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(mapped != MAP_FAILED);
    return static_cast<char*>(mapped);
  };
  char *const memory = map(), *const of_other_rank = map();
  pc::SharedArrays::Open(memory, 2 * part, memory + part, part);
  pc::Device& device = pc::Device::Get(0);
  no_memory = true;
  CHECK(device.Reserve(static_cast<int64_t>(page)).of_runtime);  // what it has taken is free again
  no_memory = false;
  CHECK(device.Reserve(static_cast<int64_t>(page)).ok());
  void* stream = NewStream();
  const std::vector<Array> y{Array(80)};
  const std::vector<Array> x = Late(stream, {Counting(80)});
  Events events(stream);
  int64_t read = 0;
  CHECK(events.device
            .Stage({EndOf(x), EndOf(y)}, 64, events.ready, events.done,
                   [&](const void* in, void* out, int64_t count) -> pc::Outcome {
                     CHECK(static_cast<const char*>(in) >= memory + part && pc::SharedArrays::Has(in) && pc::SharedArrays::Has(out));
                     const void* const there = of_other_rank + (static_cast<const char*>(in) - memory);
                     for (int64_t i = 0; i < count; ++i) CHECK(static_cast<const int32_t*>(there)[i] == ++read);
                     Double(there, out, count);
                     return {};
                   })
            .ok());
  events.End();
  CHECK(read == 80 && y[0].Read(stream)[79] == 160);
  const pc::Outcome outcome = device.Reserve(static_cast<int64_t>(page) + 1);
  CHECK(outcome.of_runtime && outcome.detail == "the memory for buffers that the ranks of this host share is full");
}

// A barrier moves no data: MPI is called once, after the stream's earlier work.
void TestNothing() {
  void* stream = NewStream();
  std::atomic<bool> ran{false};
  Delay(stream, late_us);
  Launch(stream, [&] { ran = true; });
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

// Buffers are allocated once, and again only for larger pieces.
void TestNoAllocationInSteadyState() {
  CHECK(DoublesInPieces());
  const int64_t before = allocations.load();
  for (int i = 0; i < 5; ++i) CHECK(DoublesInPieces());
  CHECK(allocations.load() == before);
  TestSidesOfDifferentShapes();
  const int64_t grown = allocations.load();
  CHECK(grown > before && grown <= before + 6);
  TestSidesOfDifferentShapes();
  CHECK(DoublesInPieces());
  CHECK(allocations.load() == grown);
}

// While MPI works on one piece, other pieces are copied from the device and to it.
void TestPiecesOverlap() {
  SlowCopies(2000);
  void* stream = NewStream();
  const std::vector<Array> y{Array(160)};
  const std::vector<Array> x = Late(stream, {Counting(160)});
  Events events(stream);
  int64_t calls = 0;
  CHECK(events.device
            .Stage({EndOf(x), EndOf(y), true, true}, 64, events.ready, events.done,
                   [&](const void* in, void* out, int64_t count) -> pc::Outcome {
                     // During each call except the last ones, another copy ends.
                     const int64_t before = copied.load();
                     if (++calls < 8) CHECK(BecomesTrue([&] { return copied.load() > before; }));
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

// The device does other work while MPI has the arrays: always on other streams, and on the same stream between the
// start and the end of a call.
void TestOtherWorkGoesOn() {
  void* stream = NewStream();
  void* other = NewStream();
  const std::vector<Array> y{Array(40)};
  const std::vector<Array> x = Late(stream, {Counting(40)});
  Events events(stream);
  std::atomic<bool> on_other{false}, on_same{false};
  pc::Outcome outcome;
  const uint64_t ticket = events.device.Post([&] {
    outcome = events.device.Stage({EndOf(x), EndOf(y), true, true}, 1 << 20, events.ready, events.done,
                                  [&](const void* in, void* out, int64_t count) -> pc::Outcome {
                                    Launch(other, [&] { on_other = true; });
                                    CHECK(BecomesTrue([&] { return on_other.load() && on_same.load(); }));
                                    Double(in, out, count);
                                    return {};
                                  });
  });
  Launch(stream, [&] { on_same = true; });
  events.device.Wait(ticket);
  events.End();
  CHECK(outcome.ok() && y[0].Read(stream)[39] == 80);
}

// The calls of a device run one after the other, in the order in which they were made.
void TestOrder() {
  pc::Device& device = pc::Device::Get(0);
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

// If a function of the runtime fails, MPI gets what has been copied before, and nothing after it: other ranks would take it
// for data. When the call returns, no copy writes the results any more.
void TestErrors() {
  const Ints counting = Counting(80);
  for (const bool in_pieces : {true, false}) {
    for (const int64_t nth : {1, 2, 5, 9}) {
      void* stream = NewStream();
      const std::vector<Array> y{Array(80)};
      const std::vector<Array> x = Late(stream, {counting});
      Events events(stream);
      int64_t calls = 0;
      until_failure = nth;
      SlowCopies(2000);
      const pc::Outcome outcome =
          events.device.Stage({EndOf(x), EndOf(y), in_pieces, false}, 64, events.ready, events.done,
                              [&](const void* in, void* out, int64_t count) -> pc::Outcome {
                                CHECK(until_failure > 0);  // no copy has failed
                                CHECK(std::memcmp(in, counting.data() + 16 * calls, static_cast<size_t>(4 * count)) == 0);
                                ++calls;
                                Double(in, out, count);
                                return {};
                              });
      const Ints now = y[0].Now();
      Sleep(10);
      CHECK(y[0].Now() == now);
      SlowCopies(200);
      CHECK(!outcome.ok() && outcome.of_runtime && outcome.detail == "invalid argument");
      CHECK(calls < 5);
      events.End();
    }
  }
  CHECK(DoublesInPieces());
}

// Of the parts of a call the first error stays, but one of the runtime goes before one of MPI.
void TestOutcomesOfParts() {
  const pc::Outcome of_mpi{"MPI_Allreduce", 1, {}}, later{"MPI_Bcast", 2, {}}, of_runtime{"MemcpyAsync", 3, "invalid argument", true};
  const auto add = [](std::vector<pc::Outcome> parts) {
    pc::Outcome all;
    for (const pc::Outcome& part : parts) all.Add(part);
    return all.code;
  };
  CHECK(add({{}, {}}) == 0);
  CHECK(add({{}, of_mpi, later, {}}) == 1);
  CHECK(add({of_mpi, of_runtime, later}) == 3);
  CHECK(add({of_runtime, of_mpi, {"StreamWaitEvent", 4, "unknown error", true}}) == 3);
}

#ifndef PYCOLLECTIVE_CUDART
// Each function of the runtime that a call uses may fail, once or for ever. The call has its right result, or returns an error
// and MPI has got no wrong number.
void TestEachFunctionFails() {
  pc::runtime = CudaRuntime();
  SlowCopies(0);
  standin_open_memory();  // for the calls in direct mode
  const Ints counting = Counting(80);
  void* stream = NewStream();
  std::vector<Array> x{Array(80)};
  const std::vector<Array> y{Array(80)};
  x[0].Write(stream, counting);
  CUDA(cudaStreamSynchronize(stream));
  for (const bool direct : {false, true}) {
    for (const bool sticky : {false, true}) {
      int64_t nth = 1;
      for (bool failed = true; failed; ++nth) {
        bool all_right = true;
        int64_t calls = 0;
        const auto call = [&](const void* in, void* out, int64_t count) -> pc::Outcome {
          all_right = all_right && std::memcmp(in, counting.data() + 16 * calls, static_cast<size_t>(4 * count)) == 0;
          ++calls;
          Double(in, out, count);
          return {};
        };
        standin_fail("", nth, sticky);
        pc::Device& device = pc::Device::Get(direct);  // a device whose streams and buffers are not made yet
        void *ready = nullptr, *done = nullptr;
        pc::Outcome outcome = device.AcquireEvent(&ready);
        if (outcome.ok()) outcome = device.AcquireEvent(&done);
        if (outcome.ok()) outcome = device.RecordEvent(ready, stream);
        const pc::Transfer transfer{EndOf(x), EndOf(y), true, false};
        if (outcome.ok()) {
          outcome = direct ? device.Direct(transfer, ready, done, call) : device.Stage(transfer, 64, ready, done, call);
        }
        if (outcome.ok()) outcome = device.WaitForEvent(stream, done);
        standin_fail("", 0, false);
        failed = !outcome.ok();
        CHECK(all_right && (!failed || outcome.of_runtime));
        if (failed) continue;
        CHECK(calls == (direct ? 1 : 5));
        const Ints got = y[0].Read(stream);
        for (int32_t i = 0; i < 80; ++i) CHECK(got[static_cast<size_t>(i)] == 2 * (i + 1));
      }
      CHECK(nth > (direct ? 5 : 30));
    }
  }
}

// The device's thread has no context of its own, and a call in another thread than XLA's makes its device current first.
void TestThreadWithoutContext() {
  pc::Device& device = pc::Device::Get(3);
  CHECK(device.Reserve(64).ok());
  pc::Outcome outcome;
  int current = -1;
  std::thread([&] {
    outcome = device.Reserve(128);
    cudaGetDevice(&current);
  }).join();
  CHECK(outcome.ok() && current == 0);  // and the device of that thread is as before
  for (const bool fails : {true, false}) {
    standin_fail("cudaSetDevice", fails ? 1 : 0, false);
    CHECK(device.Reserve(256).ok() != fails);
  }
}

// Random delays find waits that are missing only at times.
void TestRandomDelays() {
  for (const uint64_t seed : {1, 2, 3, 4, 5}) {
    standin_set_seed(seed);
    SlowCopies(static_cast<int>(100 * seed));
    CHECK(DoublesInPieces());
  }
}
#endif

// An MPI library that takes the device's memory is called after the operands are written.
void TestDirect() {
  void* stream = NewStream();
  const std::vector<Array> y{Array(10, 7)};
  const std::vector<Array> x = Late(stream, {Counting(10)});
  Events events(stream);
  CHECK(events.device
            .Direct({EndOf(x), EndOf(y)}, events.ready, events.done,
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

// Dispatch ahead ----------------------------------------------------------------------------------------------------

// Prepares the device for dispatch ahead.
pc::Outcome TryAhead(pc::Device& device = pc::Device::Get(0)) {
  static const Array memory(64);
  return device.TryAhead(memory.data(), 256);
}

pc::View ViewOf(const Array& array) { return {array.data(), static_cast<int64_t>(array.size()), 4, 1}; }

// Dispatches a call that doubles an array, as the handler of a collective does. `before`: called in the device's thread, where MPI
// would be called.
pc::Outcome DoubleAhead(pc::DeviceBuffers* buffers, const Array& x, const Array& y, std::function<void()> before = [] {},
                        pc::Outcome* of_work = nullptr) {
  const pc::View in = ViewOf(x), out = ViewOf(y);
  const pc::Outcome posted = buffers->PostAhead([=](pc::DeviceBuffers& own) {
    pc::Outcome outcome = own.Exchange({}, in, out, {true, true, pc::direct},
                                       [&](const pc::Channel&, const void* from, void* to, int64_t count) -> pc::Outcome {
                                         before();
                                         Double(from, to, count);
                                         return {};
                                       });
    if (outcome.ok()) outcome = own.WriteNumber();
    if (of_work != nullptr) *of_work = outcome;
  });
  return posted.ok() ? buffers->FinishAhead() : posted;
}

// Whether a chain of calls has the right result, each of which doubles what a kernel has copied from the result of the call before it.
// All of them are dispatched before the first one has its operand.
bool DoublesAhead(int calls = 12) {
  void* const stream = NewStream();
  std::vector<Array> x, y;
  for (int i = 0; i <= calls; ++i) x.emplace_back(80), y.emplace_back(80);
  std::atomic<bool> all_dispatched{false};
  std::atomic<int> too_early{0};
  Delay(stream, late_us);
  x[0].Write(stream, Counting(80));
  for (int i = 0; i < calls; ++i) {
    const auto at = static_cast<size_t>(i);
    pc::DeviceBuffers buffers({stream, 0});
    // The first call ends only when all have been dispatched.
    CHECK(DoubleAhead(&buffers, x[at], y[at], [&] { too_early += !BecomesTrue([&] { return all_dispatched.load(); }); }).ok());
    y[at].CopyTo(x[at + 1], stream);
    y[at].Write(stream, Ints(80, -7));  // XLA gives the array away
  }
  all_dispatched = true;
  const Ints got = x[static_cast<size_t>(calls)].Read(stream);
  pc::Device::Get(0).Drain();
  CHECK(too_early == 0);
  bool right = true;
  for (int32_t i = 0; i < 80; ++i) right = right && got[static_cast<size_t>(i)] == (i + 1) << calls;
  return right;
}

void TestAhead() {
  CHECK(TryAhead().ok());
  pc::stage_bytes = 64;
  CHECK(pc::Device::Get(0).Reserve(64).ok());
  const int64_t before = allocations.load();
  CHECK(DoublesAhead());
  CHECK(DoublesAhead());
  CHECK(allocations.load() == before);
}

// Numbers go on from the greatest one to 0.
void TestAheadNumbersWrapAround() {
  pc::first_number = UINT32_MAX - 4;
  TestAhead();
}

// Results are wrong if the stream does not wait, if it waits for the number before, or if the number is written before the last copy.
void TestForgottenWaitsAhead() {
  CHECK(TryAhead().ok());
  pc::stage_bytes = 64;
  CHECK(pc::Device::Get(0).Reserve(64).ok());
  SlowCopies(5000);
  late_us = 20000;
  const pc::AheadRuntime whole = pc::ahead_runtime;
  const auto is_noticed = [&] {
    bool noticed = false;
    for (int i = 0; i < 10 && !noticed; ++i) noticed = !DoublesAhead(3);
    pc::ahead_runtime = whole;
    return noticed;
  };
  CHECK(!is_noticed());
  pc::ahead_runtime.StreamWaitValue = [](void*, uint64_t, uint32_t, unsigned) { return 0; };
  CHECK(is_noticed());
  static const auto wait = whole.StreamWaitValue, write = whole.StreamWriteValue;
  pc::ahead_runtime.StreamWaitValue = [](void* stream, uint64_t address, uint32_t number, unsigned flags) {
    return wait(stream, address, number - 1, flags);
  };
  CHECK(is_noticed());
  static void* const other = NewStream();
  pc::ahead_runtime.StreamWriteValue = [](void*, uint64_t address, uint32_t number, unsigned flags) {
    return write(other, address, number, flags);
  };
  CHECK(is_noticed());
}

// A call that waits for its result runs after those that were dispatched before it.
void TestOthersRunAfterCallsAhead() {
  CHECK(TryAhead().ok());
  CHECK(pc::Device::Get(0).Reserve(4096).ok());
  void* const stream = NewStream();
  const Array y(80), z(80);
  const std::vector<Array> x = Late(stream, {Counting(80)});
  pc::DeviceBuffers first({stream, 0}), second({stream, 0});
  std::atomic<int> made{0};
  CHECK(DoubleAhead(&first, x[0], y, [&] { Sleep(5), ++made; }).ok());
  CHECK(second
            .Run([&] {
              CHECK(made == 1);
              CHECK(second
                        .Exchange({}, ViewOf(y), ViewOf(z), {false, false, false},
                                  [&](const pc::Channel&, const void* in, void* out, int64_t count) -> pc::Outcome {
                                    Double(in, out, count);
                                    return {};
                                  })
                        .ok());
            })
            .ok());
  CHECK(z.Read(stream)[79] == 320);
  first.WaitForEarlier();
}

#ifndef PYCOLLECTIVE_CUDART
// Two devices of a rank, whose calls wait for each other, dispatched by one thread, one device after the other.
void TestAheadOnTwoDevices() {
  constexpr int kCalls = 5;
  std::atomic<int> made[2] = {};
  void* streams[2];
  std::vector<Array> x, y;
  for (int device : {0, 1}) {
    CUDA(cudaSetDevice(device));
    CHECK(TryAhead(pc::Device::Get(device)).ok());
    CHECK(pc::Device::Get(device).Reserve(4096).ok());
    streams[device] = NewStream();
    x.emplace_back(80);
    y.emplace_back(80);
    x.back().Write(streams[device], Counting(80));
  }
  for (size_t device : {0, 1}) {
    CUDA(cudaSetDevice(static_cast<int>(device)));
    for (int i = 0; i < kCalls; ++i) {
      pc::DeviceBuffers buffers({streams[device], static_cast<int32_t>(device)});
      CHECK(DoubleAhead(&buffers, x[device], y[device], [&, device, i] {
              ++made[device];
              CHECK(BecomesTrue([&] { return made[1 - device] > i; }));
            }).ok());
      y[device].CopyTo(x[device], streams[device]);
    }
  }
  for (size_t device : {0, 1}) CHECK(x[device].Read(streams[device])[79] == 80 << kCalls);
}

// Dispatch ahead is refused, and all goes on, where a waiting stream holds up the copies or other threads, where a stream does not wait,
// and where a number is not written.
void TestAheadIsRefused() {
  const pc::AheadRuntime whole = pc::ahead_runtime;
  int device = 0;
  const auto refusal = [&](int limit_ms = 60000) {
    pc::ahead_limit_ms = limit_ms;
    const pc::Outcome outcome = TryAhead(pc::Device::Get(++device));
    pc::ahead_runtime = whole;
    CHECK(outcome.ok() || outcome.of_runtime);
    return outcome.detail;
  };
  CHECK(refusal() == "");
  pc::ahead_runtime.StreamWaitValue = [](void*, uint64_t, uint32_t, unsigned) { return 0; };
  CHECK(refusal() == "a stream that does not wait");
  pc::ahead_runtime.StreamWriteValue = [](void*, uint64_t, uint32_t, unsigned) { return 0; };
  CHECK(refusal() == "a number that is not written");
  standin_limit_queues(1000);
  CHECK(refusal(1000) == "copies that do not end while other streams wait");
  standin_share_queues(-5);
  standin_limit_queues(8);  // the thread that lets the streams wait is held up as well
  CHECK(TryAhead().detail == "copies that do not end while other streams wait");  // in 1 s as well
  standin_limit_queues(0);
  CHECK(refusal() == "");
  pc::ahead_runtime.StreamCreateWithPriority = [](void** stream, unsigned flags, int) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
  };
  CHECK(refusal(1000) == "copies that do not end while other streams wait");
  standin_share_queues(0);
  CHECK(refusal() == "streams of one priority");
  CHECK(DoublesInPieces());
}

// Each function may fail in the trial, or in a call. The call has its right result, or there is an error. Nothing waits for ever.
void TestEachFunctionFailsAhead() {
  pc::runtime = CudaRuntime();
  SlowCopies(0);
  pc::ahead_limit_ms = 60000;
  pc::stage_bytes = 64;
  int device = 0;
  CHECK(TryAhead(pc::Device::Get(7)).ok());
  for (const char* function :
       {"cudaSetDevice", "cudaDeviceGetStreamPriorityRange", "cudaStreamCreateWithPriority", "cudaHostRegister",
        "cudaHostGetDevicePointer", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags", "cudaMemcpyAsync",
        "cudaStreamSynchronize", "cudaMemsetAsync", "cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"}) {
    const std::string name = function;
    const bool is_called_once = name == "cudaDeviceGetStreamPriorityRange" || name == "cudaHostGetDevicePointer" ||
                                name == "cuStreamWriteValue32_v2";
    for (int nth = 1; nth <= (is_called_once ? 1 : 2); ++nth) {
      standin_fail(function, nth, false);
      const pc::Outcome outcome = TryAhead(pc::Device::Get(device = 1 + device % 6));
      standin_fail("", 0, false);
      CHECK(!outcome.ok() && outcome.of_runtime);
    }
  }
  CHECK(TryAhead().ok());
  CHECK(pc::Device::Get(0).Reserve(64).ok());
  void* const stream = NewStream();
  Array x(80);
  const Array y(80), z(80);
  x.Write(stream, Counting(80));
  CUDA(cudaStreamSynchronize(stream));
  bool failed = true;
  int64_t nth = 1;
  for (; failed; ++nth) {
    standin_fail("", nth, false);
    pc::Outcome of_work;
    pc::DeviceBuffers buffers({stream, 0});
    const pc::Outcome outcome = DoubleAhead(&buffers, x, y, [] {}, &of_work);
    buffers.WaitForEarlier();
    standin_fail("", 0, false);
    failed = !outcome.ok() || !of_work.ok();
    // The number of a later call ends the waits of those that have failed.
    pc::DeviceBuffers next({NewStream(), 0});
    CHECK(DoubleAhead(&next, x, z).ok());
    next.WaitForEarlier();
    if (failed) {
      CHECK((outcome.ok() || outcome.of_runtime) && (of_work.ok() || of_work.of_runtime));
    } else {
      CHECK(y.Read(stream)[79] == 160);
    }
  }
  CHECK(nth > 30);
}
#endif

const Tests kTests = {
    {"pieces", TestPieces},
    {"forgotten_waits", TestForgottenWaits},
    {"blocks", TestBlocks},
    {"sides_of_different_shapes", TestSidesOfDifferentShapes},
    {"calls_follow_each_other", TestCallsFollowEachOther},
    {"blocks_far_apart", TestBlocksFarApart},
    {"message_of_many_pieces", TestMessageOfManyPieces},
    {"no_allocation_while_programs_run", TestNoAllocationWhileProgramsRun},
    {"no_memory", TestNoMemory},
    {"buffers_in_shared_memory", TestBuffersInSharedMemory},
    {"nothing", TestNothing},
    {"no_allocation_in_steady_state", TestNoAllocationInSteadyState},
    {"pieces_overlap", TestPiecesOverlap},
    {"other_work_goes_on", TestOtherWorkGoesOn},
    {"order", TestOrder},
    {"errors", TestErrors},
    {"direct", TestDirect},
    {"ahead", TestAhead},
    {"ahead_numbers_wrap_around", TestAheadNumbersWrapAround},
    {"forgotten_waits_ahead", TestForgottenWaitsAhead},
    {"others_run_after_calls_ahead", TestOthersRunAfterCallsAhead},
#ifndef PYCOLLECTIVE_CUDART
    {"outcomes_of_parts", TestOutcomesOfParts},
    {"each_function_fails", TestEachFunctionFails},
    {"thread_without_context", TestThreadWithoutContext},
    {"random_delays", TestRandomDelays},
    {"ahead_on_two_devices", TestAheadOnTwoDevices},
    {"ahead_is_refused", TestAheadIsRefused},
    {"each_function_fails_ahead", TestEachFunctionFailsAhead},
#endif
};

}  // namespace

int main(int argc, char** argv) {
  CUDA(cudaSetDevice(0));
  pc::runtime = ObservedRuntime();
  pc::ahead_runtime = CudaAheadRuntime();
  SlowCopies(200);
  return RunOne(kTests, argc, argv);
}
