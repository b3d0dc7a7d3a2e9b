// Where a call's arrays lie: in plain memory, or on an accelerator; and so how they get to MPI and when.
//
// Handlers are templates over these two. A place runs a call's work in its turn and exchanges arrays inside it.

#ifndef PYCOLLECTIVE_NATIVE_PLACE_H_
#define PYCOLLECTIVE_NATIVE_PLACE_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "buckets.h"
#include "collectives.h"
#include "communicators.h"
#include "device.h"

namespace pycollective {

// One array of a call: `blocks` blocks of `count` elements.
struct View {
  void* data = nullptr;
  int64_t count = 0;
  int64_t unit = 1;  // bytes of an element
  int64_t blocks = 1;
};

// What may be done with an exchange; see device.h's Exchange.
struct Liberties {
  bool in_pieces = true;
  bool in_place = false;
  bool direct = true;  // MPI may be handed the accelerator's memory
};

// Arrays that MPI reads and writes where they are.
class HostPlace {
 public:
  static constexpr bool kPlain = true;

  explicit HostPlace(int32_t device) : lane_id_(device) {}

  // By which lanes know the device.
  int64_t lane_id() const { return lane_id_; }
  // Of Signature.
  int64_t staging() const { return 0; }

  template <typename Work>
  Outcome Run(Work work) {
    work();
    return {};
  }

  // Calls move(channel, in, out, count) until all elements of the blocks have been exchanged.
  template <typename MoveOn>
  Outcome Exchange(const Lane& lane, const View& in, const View& out, Liberties, MoveOn move) {
    return move(lane.channel, in.data, out.data, std::max(in.count, out.count));
  }

 private:
  int64_t lane_id_;
};

// Arrays in the memory of the device that is current in this thread, written and read by work on `stream`.
class DevicePlace {
 public:
  static constexpr bool kPlain = false;

  explicit DevicePlace(void* stream) : stream_(stream) {
    found_ = Device::Current(&ordinal_);
    device_ = &Device::Of(ordinal_);
  }

  // Apart from the numbers of CPU devices.
  int64_t lane_id() const { return (int64_t{1} << 32) + ordinal_; }
  int64_t staging() const { return direct ? -stage_bytes : stage_bytes; }

  // The stream's later work waits for `work`, this thread as well.
  template <typename Work>
  Outcome Run(Work work) {
    const Outcome begun = Begin();
    if (!begun.ok()) return begun;
    device_->Run(work);
    return End();
  }

  // The same in two steps. What the stream is given between them goes on meanwhile: it must leave the arrays alone.
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
  // Until nothing that was started is under way.
  void Drain() {
    device_->Run([] {});
  }

  template <typename MoveOn>
  Outcome Exchange(const Lane& lane, const View& in, const View& out, Liberties may, MoveOn move) {
    return Exchange(lane, pycollective::Exchange{SideOf(in), SideOf(out), may.in_pieces, may.in_place}, may.direct, move);
  }

  // As Exchange for an elementwise operation on arrays of one type: as if they were one array. With a library that reads
  // the device's memory, those from half of `bucket_bytes` on go by themselves.
  template <typename MoveOn>
  Outcome ExchangeParts(const Lane& lane, const std::vector<const Part*>& parts, int64_t bucket_bytes, bool may_direct,
                        MoveOn move) {
    Outcome first;
    pycollective::Exchange staged{{}, {}, true, true};
    const auto note = [&](const Outcome& outcome) {
      if (first.ok()) first = outcome;
    };
    for (const Part* part : parts) {
      void* x = const_cast<void*>(part->x);
      const int64_t unit = kTypeBytes[int(part->type)];
      staged.in.unit = staged.out.unit = unit;
      if (direct && may_direct && 2 * part->nbytes() >= bucket_bytes) {
        note(Exchange(lane, View{x, part->count, unit}, View{part->y, part->count, unit}, {}, move));
      } else {
        staged.in.arrays.push_back({x, part->count});
        staged.in.count += part->count;
        staged.out.arrays.push_back({part->y, part->count});
        staged.out.count += part->count;
      }
    }
    if (!staged.in.arrays.empty()) note(Exchange(lane, staged, false, move));
    return first;
  }

 private:
  static Side SideOf(const View& view) {
    Side side;
    if (view.data != nullptr) side.arrays.push_back({view.data, view.count});
    side.count = view.count;
    side.unit = view.unit;
    side.blocks = view.blocks;
    return side;
  }

  template <typename MoveOn>
  Outcome Exchange(const Lane& lane, const pycollective::Exchange& exchange, bool may_direct, MoveOn move) {
    Channel channel = lane.channel;
    const bool directly = direct && may_direct;
    if (directly) channel.memory = &device_->memory();
    const Move on_channel = [&](const void* in, void* out, int64_t count) { return move(channel, in, out, count); };
    return directly ? device_->Direct(exchange, ready_, done_, on_channel)
                    : device_->Stage(exchange, stage_bytes, ready_, done_, on_channel);
  }

  Outcome Begin() {
    Outcome outcome = found_;
    if (outcome.ok()) outcome = device_->TakeEvent(&ready_);
    if (outcome.ok()) outcome = device_->TakeEvent(&done_);
    if (outcome.ok()) outcome = device_->Record(ready_, stream_);
    return outcome;
  }
  Outcome End() {
    const Outcome outcome = device_->Follow(stream_, done_);
    device_->GiveEvent(ready_);
    device_->GiveEvent(done_);
    return outcome;
  }

  void* stream_;
  int ordinal_ = 0;
  Outcome found_;
  Device* device_;
  void* ready_ = nullptr;
  void* done_ = nullptr;
  uint64_t ticket_ = 0;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_PLACE_H_
