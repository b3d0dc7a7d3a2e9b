// XLA FFI handlers of the two halves of an allreduce on an accelerator: the table of device operations in operations.h.
// Between them XLA may run operations that do not depend on the sums.
//
// The second half has no token: otherwise the next sum could not begin before it. It finds its call by the address of its
// results.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/operations.h"
#include "calls/call.h"
#include "devices/buffers.h"
#include "mpi/packing.h"
#include "xla/allreduce.h"
#include "xla/decode.h"
#include "xla/started_calls.h"

namespace pycollective {
namespace {

struct StartedAllreduce : StartedCall {
  using StartedCall::StartedCall;

  AllreduceArrays all;
};

const void* KeyOf(const std::vector<ArrayPair>& arrays) {
  for (const ArrayPair& array : arrays) {
    if (array.count > 0) return array.y;
  }
  return nullptr;
}

bool AreInPlace(const std::vector<ArrayPair>& arrays) {
  return std::all_of(arrays.begin(), arrays.end(), [](const ArrayPair& a) { return a.count == 0 || a.x == a.y; });
}

// Starts the call and returns. The operands are in the buffers of the results, which XLA keeps until AllreduceDone.
ffi::Error AllreduceStart(DeviceBuffers buffers, const Participants& participants, InToken, ffi::RemainingArgs operands,
                          OutToken, ffi::RemainingRets results, int64_t op, int64_t bucket_bytes) {
  const auto started = std::make_shared<StartedAllreduce>(buffers, CallIn(buffers, kAllreduce, participants),
                                                          participants.section.run);
  AllreduceArrays& all = started->all;
  const ffi::Error bad = all.Decode(started->call, participants, operands, results, op);
  if (bad.failure()) return bad;
  const void* const key = KeyOf(all.arrays);
  if (key == nullptr) return ffi::Error::Success();  // only empty arrays: no rank makes a call
  if (!AreInPlace(all.arrays)) {
    return started->call.Error(ffi::ErrorCode::kInternal, "expected operands in the results' buffers, got others",
                               "Please report this.");
  }
  AddStarted(key, started);
  if (started->call.MayRunAhead(started->buffers)) {
    const ffi::Error posted = started->call.PostAhead(
        started->buffers, all.signature, all.nbytes,
        [arrays = all.arrays, op, bucket_bytes](DeviceBuffers& on, const Library& mpi, const Lane& lane) {
          return AllreduceIn(on, mpi, lane, arrays, static_cast<Op>(op), bucket_bytes);
        });
    if (posted.failure()) TakeStarted(key);
    return posted;
  }
  const Outcome begun = started->buffers.Start([started, op, bucket_bytes] {
    const auto body = [&](const Library& mpi, const Lane& lane) {
      return AllreduceIn(started->buffers, mpi, lane, started->all.arrays, static_cast<Op>(op), bucket_bytes);
    };
    started->error = CatchAsError(kAllreduce, [&] {
      return started->call.RunNow(started->all.signature, started->all.nbytes, {}, body);
    });
  });
  if (begun.ok()) return ffi::Error::Success();
  TakeStarted(key);
  return started->call.ErrorOf(begun);
}

// Waits for the end of the call, or lets XLA's stream wait for it. The operands are the results of AllreduceStart, in the same
// buffers as the results here.
ffi::Error AllreduceDone(DeviceBuffers buffers, const Participants& participants, ffi::RemainingArgs operands,
                         ffi::RemainingRets results) {
  const Call call = CallIn(buffers, kAllreduce, participants);
  std::vector<ArrayPair> arrays;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto x = operands.get<ffi::AnyBuffer>(i);
    auto y = results.get<ffi::AnyBuffer>(i);
    if (x.has_error()) return x.error();
    if (y.has_error()) return y.error();
    arrays.push_back({x->untyped_data(), (*y)->untyped_data(), Count(*x), Type::kUint8});
  }
  const void* const key = KeyOf(arrays);
  if (key == nullptr) return ffi::Error::Success();
  const std::shared_ptr<StartedCall> started = TakeStarted(key);
  if (started == nullptr || !AreInPlace(arrays)) {
    buffers.Drain();  // the call still reads and writes its memory
    return call.Error(ffi::ErrorCode::kInternal, "expected the results of a call that was started, got others",
                      "XLA has moved them in between. Please report this.");
  }
  if (started->call.MayRunAhead(started->buffers)) return started->call.FinishAhead(started->buffers);
  const Outcome finished = started->buffers.Finish();
  return started->error.failure() || finished.ok() ? started->error : call.ErrorOf(finished);
}

}  // namespace

#define PYCOLLECTIVE_HALF(name, Name, binding)                          \
  PYCOLLECTIVE_EXPORT_HANDLER(pycollective_device_##name, DeviceBuffers,  \
                              NewHandler<Buffers>(kAllreduce, binding, Name))
PYCOLLECTIVE_DEVICE_OPERATIONS(PYCOLLECTIVE_HALF)

}  // namespace pycollective
