// The arrays of a call, in host memory or on an accelerator, and their way to MPI.
//
// Handlers are templates over these classes. Exchange(...) passes the arrays of a call to MPI. On an accelerator it is
// called inside Run(work), which runs a call's work after the earlier calls of the device.

#ifndef PYCOLLECTIVE_NATIVE_DEVICES_BUFFERS_H_
#define PYCOLLECTIVE_NATIVE_DEVICES_BUFFERS_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "devices/device.h"
#include "mpi/collectives.h"
#include "mpi/packing.h"
#include "records/signature.h"

namespace pycollective {

// One array of a call: `blocks` blocks of `count` elements.
struct View {
  void* data = nullptr;
  int64_t count = 0;
  int64_t element_bytes = 1;
  int64_t blocks = 1;
};

// The ways in which arrays may be passed to MPI.
struct ExchangeOptions {
  bool in_pieces = true;  // as in Transfer (device.h)
  bool in_place = false;  // as in Transfer
  bool direct = true;     // MPI may get pointers to the accelerator's memory
};

// Arrays in host memory: MPI reads and writes them where they are.
class HostBuffers {
 public:
  static constexpr bool kInHostMemory = true;
  static constexpr bool kIsAsync = false;

  explicit HostBuffers(int32_t device) : lane_id_(device) {}

  // The device's id in lanes.
  int64_t lane_id() const { return lane_id_; }
  Staging staging() const { return Staging::kHostMemory; }
  int64_t piece_bytes() const { return 0; }

  // Calls call(channel, in, out, count) until all elements of the blocks have been exchanged.
  template <typename Call>
  Outcome Exchange(const Channel& channel, const View& in, const View& out, ExchangeOptions, Call call) {
    return call(channel, in.data, out.data, std::max(in.count, out.count));
  }

 private:
  int64_t lane_id_;
};

// Arrays in host memory, for a call that overlaps with XLA's computation (async_calls.h).
class AsyncHostBuffers : public HostBuffers {
 public:
  static constexpr bool kIsAsync = true;

  using HostBuffers::HostBuffers;

  Staging staging() const { return Staging::kHostMemoryBesideComputation; }
};

// Where XLA runs a call: its stream, and its number of the device.
struct StreamOfDevice {
  void* stream;
  int32_t ordinal;
};

// Arrays in the memory of the accelerator that is current in this thread. Work on `stream` writes and reads them.
class DeviceBuffers {
 public:
  static constexpr bool kInHostMemory = false;
  static constexpr bool kIsAsync = false;  // calls in two halves are asynchronous: allreduce_halves.cc

  explicit DeviceBuffers(StreamOfDevice where) : stream_(where.stream) {
    found_ = Device::FindCurrent(&ordinal_);
    if (found_.ok() && ordinal_ != where.ordinal) {
      found_ = {"GetDevice", 0, "device " + std::to_string(ordinal_) + ", not XLA's " + std::to_string(where.ordinal), true};
    }
    device_ = &Device::Get(ordinal_);
  }

  // The ids of accelerators are larger than those of CPU devices.
  int64_t lane_id() const { return (int64_t{1} << 32) + ordinal_; }
  Staging staging() const { return direct ? Staging::kDirect : Staging::kPieces; }
  int64_t piece_bytes() const { return stage_bytes; }

  // Returns when `work` is done. The stream's later work waits for the results.
  template <typename Work>
  Outcome Run(Work work) {
    const Outcome begun = Begin();
    if (!begun.ok()) return begun;
    device_->Run(work);
    return End();
  }

  // Run in two steps. The stream's work between the steps overlaps with the call; it must not use the arrays.
  template <typename Work>
  Outcome Start(Work work) {
    const Outcome begun = Begin();
    if (begun.ok()) ticket_ = device_->Post(std::move(work));
    return begun;
  }
  Outcome Finish() {
    device_->Wait(ticket_);
    return End();
  }
  // Waits until no started work reads or writes arrays, in place of Finish.
  void Drain() {
    device_->Drain();
    ReleaseEvents();
  }

  // Whether collectives are dispatched ahead. Their buffers exist (Device::Reserve): to page-lock one would wait for the stream that
  // waits for the call.
  static bool runs_ahead() { return ahead; }
  // Start for dispatch ahead: passes `work` buffers of its own, in the device's thread. Its last step is WriteNumber.
  template <typename Work>
  Outcome PostAhead(Work work) {
    const Outcome begun = Begin();
    if (!begun.ok()) return begun;
    number_ = device_->PostNumbered([own = *this, work = std::move(work)](uint32_t number) mutable {
      own.number_ = number;
      work(own);
      own.ReleaseEvents();
    });
    ready_ = done_ = nullptr;
    return {};
  }
  Outcome WriteNumber() { return device_->WriteNumber(number_); }
  // Finish for dispatch ahead: returns at once. The stream's later work waits for the results.
  Outcome FinishAhead() { return device_->WaitForNumber(stream_, number_); }
  // Waits until all started work of the device has ended.
  void WaitForEarlier() {
    device_->Run([] {});
  }

  template <typename Call>
  Outcome Exchange(const Channel& channel, const View& in, const View& out, ExchangeOptions options, Call call) {
    const Transfer transfer{EndOf(in), EndOf(out), options.in_pieces, options.in_place};
    return Exchange(channel, transfer, options.direct, call);
  }

  // Exchange for an elementwise operation on arrays of one type, joined to one array. If MPI reads the device's memory,
  // an array of half a bucket or more is a call of its own.
  template <typename Call>
  Outcome ExchangeArrays(const Channel& channel, const std::vector<const ArrayPair*>& arrays, int64_t bucket_bytes,
                         bool may_direct, Call call) {
    Outcome all;
    Transfer staged{{}, {}, true, true};
    for (const ArrayPair* array : arrays) {
      void* x = const_cast<void*>(array->x);
      const int64_t element_bytes = kTypeBytes[int(array->type)];
      staged.in.element_bytes = staged.out.element_bytes = element_bytes;
      if (direct && may_direct && 2 * array->nbytes() >= bucket_bytes) {
        const View in{x, array->count, element_bytes}, out{array->y, array->count, element_bytes};
        all.Add(Exchange(channel, in, out, {}, call));
        if (all.of_runtime) return all;
      } else {
        staged.in.arrays.push_back({x, array->count});
        staged.in.count += array->count;
        staged.out.arrays.push_back({array->y, array->count});
        staged.out.count += array->count;
      }
    }
    if (!staged.in.arrays.empty()) all.Add(Exchange(channel, staged, false, call));
    return all;
  }

 private:
  static TransferEnd EndOf(const View& view) {
    TransferEnd end;
    if (view.data != nullptr) end.arrays.push_back({view.data, view.count});
    end.count = view.count;
    end.element_bytes = view.element_bytes;
    end.blocks = view.blocks;
    return end;
  }

  template <typename Call>
  Outcome Exchange(const Channel& of_lane, const Transfer& transfer, bool may_direct, Call call) {
    Channel channel = of_lane;
    const bool directly = direct && may_direct;
    if (directly) channel.memory = &device_->memory();
    const MpiCall on_channel = [&](const void* in, void* out, int64_t count) {
      return call(channel, in, out, count);
    };
    return directly ? device_->Direct(transfer, ready_, done_, on_channel)
                    : device_->Stage(transfer, stage_bytes, ready_, done_, on_channel);
  }

  Outcome Begin() {
    Outcome outcome = found_;
    if (outcome.ok()) outcome = device_->AcquireEvent(&ready_);
    if (outcome.ok()) outcome = device_->AcquireEvent(&done_);
    if (outcome.ok()) outcome = device_->RecordEvent(ready_, stream_);
    if (!outcome.ok()) ReleaseEvents();
    return outcome;
  }
  Outcome End() {
    const Outcome outcome = device_->WaitForEvent(stream_, done_);
    ReleaseEvents();
    return outcome;
  }
  void ReleaseEvents() {
    for (void** event : {&ready_, &done_}) {
      if (*event != nullptr) device_->ReleaseEvent(*event);
      *event = nullptr;
    }
  }

  void* stream_;
  int ordinal_ = 0;
  Outcome found_;
  Device* device_;
  void* ready_ = nullptr;
  void* done_ = nullptr;
  uint64_t ticket_ = 0;
  uint32_t number_ = 0;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_DEVICES_BUFFERS_H_
