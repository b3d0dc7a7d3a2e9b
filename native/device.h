// One accelerator of this process: in which order its calls reach MPI, and how arrays in its memory get there.
//
// MPI knows nothing of streams. So a call waits for the event behind which its operands are ready, has its turn at MPI
// behind all earlier calls of the device, and leaves an event behind which its results are. What XLA has put on its own
// streams meanwhile goes on.

#ifndef PYCOLLECTIVE_NATIVE_DEVICE_H_
#define PYCOLLECTIVE_NATIVE_DEVICE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "collectives.h"
#include "runtime.h"

namespace pycollective {

// What a call reads, or what it writes: `blocks` blocks of `count` elements; or one block that lies in several arrays.
struct Side {
  struct Array {
    void* data;
    int64_t count;  // elements
  };
  std::vector<Array> arrays;
  int64_t count = 0;
  int64_t unit = 1;  // bytes of an element
  int64_t blocks = 1;

  int64_t nbytes() const { return count * unit * blocks; }
};

// What one call of collectives.h is given.
struct Exchange {
  Side in, out;
  // Whether pieces of the blocks may be exchanged one by one: not those of a message, of which either end would make
  // its own.
  bool in_pieces = true;
  // Whether MPI may write over what it reads.
  bool in_place = false;
};

// The call itself, for `count` elements of each block: in memory that MPI can read and write, blocks one behind the other.
using Move = std::function<Outcome(const void* in, void* out, int64_t count)>;

class Device {
 public:
  // Made at the first call, kept until the process ends.
  static Device& Of(int ordinal);
  // That of this thread: XLA makes it so before it calls a handler.
  static Outcome Current(int* ordinal);

  // Runs `work` behind all that was posted before, and returns when it is done; here if there is nothing before it.
  void Run(const std::function<void()>& work);
  // The same in a thread of the device; Wait(ticket) returns when it is done.
  uint64_t Post(std::function<void()> work);
  void Wait(uint64_t ticket);

  // Events, of which any number may be on their way.
  Outcome TakeEvent(void** event);
  void GiveEvent(void* event);
  Outcome Record(void* event, void* stream);
  Outcome Follow(void* stream, void* event);  // work that the stream gets from now on waits for the event

  // Inside Run and Post alone: these use the device's buffers and its streams.

  // Staged: pieces of at most `stage_bytes` go through page-locked buffers, so that a piece that comes from the device,
  // one that is with MPI and one that goes back are under way at once. `ready`: when operands may be read and results
  // written; `done` is recorded behind the last piece.
  Outcome Stage(const Exchange& exchange, int64_t stage_bytes, void* ready, void* done, const Move& move);
  // Direct: MPI reads and writes the device's memory itself, both sides being one array.
  Outcome Direct(const Exchange& exchange, void* ready, void* done, const Move& move);
  // Zeros and copies in this device's memory, for a library that is handed it.
  const Memory& memory() const { return memory_; }

 private:
  class DeviceMemory : public Memory {
   public:
    explicit DeviceMemory(Device& device) : device_(device) {}
    Outcome Clear(void* to, size_t nbytes) const override;
    Outcome Copy(void* to, const void* from, size_t nbytes) const override;

   private:
    Device& device_;
  };

  // A place for one piece. Events: when its input has come, and its output has gone.
  struct Slot {
    char* in = nullptr;
    char* out = nullptr;
    int64_t in_bytes = 0;
    int64_t out_bytes = 0;
    void* came = nullptr;
    void* gone = nullptr;
  };
  static constexpr int64_t kSlots = 3;

  explicit Device(int ordinal);
  void Work();
  Outcome Prepare(int64_t pieces, int64_t in_bytes, int64_t out_bytes);
  Outcome Grow(char** buffer, int64_t* held, int64_t wanted);
  // Elements first to first + count of each block of a side, to or from `host`, where they lie without gaps.
  Outcome Fetch(const Side& side, int64_t first, int64_t count, char* host);
  Outcome Store(const Side& side, int64_t first, int64_t count, char* host);
  Outcome Copy2D(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t width, int64_t height,
                 int kind, void* stream);

  const int ordinal_;
  DeviceMemory memory_{*this};

  std::mutex mutex_;
  std::condition_variable changed_;
  struct Task {
    uint64_t ticket;
    std::function<void()> work;
  };
  std::deque<Task> waiting_;
  uint64_t posted_ = 0;
  uint64_t completed_ = 0;
  std::thread worker_;  // from the first Post on

  std::mutex events_mutex_;
  std::vector<void*> events_;

  // Of Stage and Direct.
  void* from_device_ = nullptr;  // streams
  void* to_device_ = nullptr;
  Slot slots_[kSlots];
};

// Set from Python before the first program runs.
extern Runtime runtime;

// Whether MPI reads and writes device memory, and the size of pieces where it does not. The same on all ranks.
extern bool direct;
extern int64_t stage_bytes;

// Blocks further apart are copied one by one: what CUDA allows. Tests lower it.
extern int64_t max_pitch;

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_DEVICE_H_
