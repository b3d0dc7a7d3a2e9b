// One accelerator of this process: the order of its MPI calls, and the way of arrays in its memory to MPI.
//
// MPI does not use streams. So a call waits for an event that its operands are ready, is made after all earlier calls of
// the device, and records an event when its results are written. The work that XLA has put on its own streams continues
// in the meantime.
//
// Dispatch ahead: a stream of XLA waits for a call that the device's thread has not begun. A wait for an event that nothing has
// recorded yet is no wait. So the stream waits until a word of memory has come to the call's number, and the device's thread enqueues the
// write of that number behind the call's last copy.

#ifndef PYCOLLECTIVE_NATIVE_DEVICES_DEVICE_H_
#define PYCOLLECTIVE_NATIVE_DEVICES_DEVICE_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "devices/runtime.h"
#include "mpi/collectives.h"

namespace pycollective {

// The operands or the results of a call: `blocks` blocks of `count` elements in one array, or one block that is spread over
// several arrays.
struct TransferEnd {
  struct Array {
    void* data;
    int64_t count;  // elements
  };
  std::vector<Array> arrays;
  int64_t count = 0;
  int64_t element_bytes = 1;
  int64_t blocks = 1;

  int64_t nbytes() const { return count * element_bytes * blocks; }
};

// The arrays of one call of collectives.h.
struct Transfer {
  TransferEnd in, out;
  // Whether MPI may get pieces of the blocks one by one. False for a message, which the peer may cut differently: it is one
  // block, and not in place.
  bool in_pieces = true;
  // Whether MPI may overwrite the operands.
  bool in_place = false;
};

// Calls MPI for `count` elements of each block, in memory that MPI can read and write. The blocks are contiguous.
using MpiCall = std::function<Outcome(const void* in, void* out, int64_t count)>;

// The number before that of the first posted work of a device. Tests set it, to come to the wrap-around.
extern uint32_t first_number;

class Device {
 public:
  // Returns the device with a number. The first call makes it; it lives until the process ends.
  static Device& Get(int ordinal);
  // Finds the number of this thread's device, which XLA makes current before it calls a handler.
  static Outcome FindCurrent(int* ordinal);

  // Runs `work` after all earlier work, and returns when it is done. If `work` need not wait, it runs in this thread.
  void Run(const std::function<void()>& work);
  // Runs `work` after all earlier work, in a thread of the device. Wait(ticket) returns when it is done.
  uint64_t Post(std::function<void()> work);
  void Wait(uint64_t ticket);
  // Waits until all work has ended, and the copies that it has enqueued.
  void Drain() {
    Run([this] { Settle(); });
  }

  // Prepares dispatch ahead, and tries it: all streams that XLA may use wait for a number, one of them has more work than its queue
  // holds, and copies in both directions and the write of the number must end. Hardware queues and locks of the driver may prevent
  // that. Returns why it does not work; then nothing waits any more. It comes before Reserve and before programs run.
  // `memory`: `nbytes` bytes of the device.
  Outcome TryAhead(void* memory, int64_t nbytes);
  // Post for dispatch ahead: returns the number of the work, which it passes to `work`. The work ends with WriteNumber.
  uint32_t PostNumbered(std::function<void(uint32_t number)> work);
  // Later work of the stream waits until the number is written.
  Outcome WaitForNumber(void* stream, uint32_t number);
  // Writes the number behind the copies to the device. Only the work with that number may call it: numbers are written in order.
  Outcome WriteNumber(uint32_t number);

  // Makes the streams, events and page-locked buffers that pieces of at most `nbytes` need. Page-locking may wait for all
  // work of the device, so it is done before programs run: a kernel of NCCL may wait for a kernel that is launched later. The buffers
  // lie in memory that the ranks of the host share, if that is open (shared_arrays.h).
  Outcome Reserve(int64_t nbytes);

  // Events for the caller: any number may be in use at once.
  Outcome AcquireEvent(void** event);
  void ReleaseEvent(void* event);
  Outcome RecordEvent(void* event, void* stream);
  // Later work of the stream waits for the event.
  Outcome WaitForEvent(void* stream, void* event);

  // The two ways to MPI. Only the work of Run and Post may call them, since they use the device's buffers and streams.
  // The event `ready` says that operands may be read and results written. They record the event `done` after the last
  // result. MPI gets an operand only after the runtime has said that its copy has succeeded. If a function of the runtime
  // fails, they make no further call, and return its error when nothing reads or writes the arrays any more.

  // Staged: pieces of at most `piece_bytes` are copied through page-locked buffers of the host. The copy of one piece from
  // the device, MPI's call for another and the copy of a third back to the device overlap. If MPI must get the array in one
  // piece, the pieces are joined in memory of the host that is not page-locked.
  Outcome Stage(const Transfer& transfer, int64_t piece_bytes, void* ready, void* done, const MpiCall& call);
  // Direct: MPI reads and writes the device's memory. Each side must be one array.
  Outcome Direct(const Transfer& transfer, void* ready, void* done, const MpiCall& call);
  // Writes zeros and copies in this device's memory, for a library that gets pointers to it.
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

  // Page-locked buffers for one piece, and two events: the input was copied from the device, the output to the device.
  // The buffers only grow, and are never freed: that may wait for all work of the device, as Reserve says.
  struct Slot {
    char* in = nullptr;
    char* out = nullptr;
    int64_t in_bytes = 0;
    int64_t out_bytes = 0;
    void* fetched = nullptr;
    void* stored = nullptr;
  };
  static constexpr int64_t kSlots = 3;

  explicit Device(int ordinal);
  // Adds work to the queue. Its lock is held.
  uint64_t PostLocked(std::function<void()> work);
  // Runs posted work, in the device's thread.
  void RunPosted();
  // Makes the number and the streams of dispatch ahead.
  Outcome PrepareAhead();
  Outcome TryAheadHere(char* memory, size_t nbytes);
  // Makes the device current in this thread, and makes the streams, events and buffers (of these sizes, for `pieces`) of
  // Stage and Direct that do not exist yet.
  Outcome Prepare(int64_t pieces, int64_t in_bytes, int64_t out_bytes);
  Outcome Grow(char** buffer, int64_t* held, int64_t wanted);
  // Waits until nothing that was enqueued here reads or writes arrays.
  void Settle();
  // Copy elements first to first + count of each block of a side to or from `host`, where they are contiguous.
  Outcome Fetch(const TransferEnd& end, int64_t first, int64_t count, char* host);
  Outcome Store(const TransferEnd& end, int64_t first, int64_t count, char* host);
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
  std::thread worker_;  // started by the first Post

  std::mutex events_mutex_;
  std::vector<void*> events_;

  // For Stage and Direct.
  void* from_device_ = nullptr;  // a stream
  void* to_device_ = nullptr;    // a stream
  Slot slots_[kSlots];

  // For dispatch ahead.
  uint32_t last_number_ = first_number;     // of posted work; guarded by `mutex_`
  std::atomic<uint32_t>* number_ = nullptr;  // page-locked memory of the host, which the device writes
  uint64_t number_address_ = 0;             // its address for the device
};

// Python sets these before the first program runs.
extern Runtime runtime;
// Whether MPI reads and writes device memory, and otherwise the size of the pieces. Both are the same on all ranks.
extern bool direct;
extern int64_t stage_bytes;
// Whether collectives are dispatched ahead, the same on all ranks, and the functions for it, which are null where there are none.
extern bool ahead;
extern AheadRuntime ahead_runtime;
// The longest time that TryAhead waits for its copies. Tests lower it.
extern int64_t ahead_limit_ms;

// The largest distance between blocks, in bytes, for one strided copy: CUDA's limit. Blocks with a larger distance are
// copied one by one. Tests lower it.
extern int64_t max_pitch;

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_DEVICES_DEVICE_H_
