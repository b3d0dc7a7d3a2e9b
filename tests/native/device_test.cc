// Tests native/devices/device.cc on the stand-in for CUDA's runtime, or on CUDA's own (PYCOLLECTIVE_CUDART).

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "cudart.h"
#include "devices/device.h"
#include "harness.h"
#include "on_device.h"

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

// Returns in how many of three runs results are wrong if some waits of streams are left out.
int TimesNoticed(bool (*some_waits)(void* stream)) {
  forgets = some_waits;
  pc::runtime.StreamWaitEvent = [](void* stream, void* event, unsigned flags) {
    ++stream_waits;
    return forgets(stream) ? 0 : cudaStreamWaitEvent(stream, event, flags);
  };
  int noticed = 0;
  for (int i = 0; i < 3; ++i) {
    of_kernels = NewStream();
    stream_waits = 0;
    if (!DoublesInPieces(of_kernels)) ++noticed;
  }
  pc::runtime = ObservedRuntime();
  return noticed;
}

// If the runtime does not wait, results are wrong: so the other tests notice a forgotten wait.
void TestForgottenWaits() {
  SlowCopies(2000);
  late_us = 50000;
  pc::runtime.EventSynchronize = [](void*) { return 0; };
  CHECK(!DoublesInPieces());
  pc::runtime = ObservedRuntime();
  CHECK(TimesNoticed([](void*) { return false; }) == 0);
  // The first wait is that of the copies from the device, for the operands. The last one is that for the results.
  CHECK(TimesNoticed([](void*) { return stream_waits == 1; }) >= 2);
  SlowCopies(10000);  // later than this thread, too, where other programs have the cores
  CHECK(TimesNoticed([](void* stream) { return stream == of_kernels; }) >= 2);
  // Those from the third one on are for buffers that are still copied to the device.
  fetches_fast = true;
  CHECK(TimesNoticed([](void* stream) { return stream != of_kernels && stream_waits > 2; }) >= 2);
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

// A message takes the memory of one piece, not of three.
void TestMemoryOfAMessage() {
  void* stream = NewStream();
  const std::vector<Array> x = Late(stream, {Counting(1000)});
  Events events(stream);
  CHECK(events.device
            .Stage({EndOf(x), {}, false, false}, 64, events.ready, events.done,
                   [&](const void* in, void*, int64_t) -> pc::Outcome {
                     CHECK(std::memcmp(in, Counting(1000).data(), 4000) == 0);
                     return {};
                   })
            .ok());
  CHECK(held == 1);
}

// Without page-locked memory the call returns an error, but it still calls MPI, since other ranks wait there.
void TestNoMemory() {
  no_memory = true;
  void* stream = NewStream();
  const std::vector<Array> y{Array(160)};
  const std::vector<Array> x = Late(stream, {Counting(80)});
  Events events(stream);
  int64_t calls = 0;
  const pc::Outcome outcome = events.device.Stage({EndOf(x), EndOf(y, 2)}, 64, events.ready, events.done,
                                                  [&](const void* in, void* out, int64_t count) -> pc::Outcome {
                                                    ++calls;
                                                    std::memcpy(out, in, static_cast<size_t>(4 * count));
                                                    return {};
                                                  });
  CHECK(!outcome.ok() && outcome.of_runtime && outcome.detail == "out of memory");
  CHECK(calls == 10);
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
  CHECK(grown > before && held <= 6);
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

// A call returns an error of the runtime, but it still calls MPI, since other ranks wait there.
void TestErrors() {
  for (const int64_t nth : {1, 2, 5, 9}) {
    void* stream = NewStream();
    const std::vector<Array> y{Array(80)};
    const std::vector<Array> x = Late(stream, {Counting(80)});
    Events events(stream);
    int64_t calls = 0;
    until_failure = nth;
    const pc::Outcome outcome =
        events.device.Stage({EndOf(x), EndOf(y), true, true}, 64, events.ready, events.done,
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

const Tests kTests = {
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
};

}  // namespace

int main(int argc, char** argv) {
  pc::runtime = ObservedRuntime();
  SlowCopies(200);
  return RunOne(kTests, argc, argv);
}
