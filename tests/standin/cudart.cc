// A stand-in for CUDA's runtime on machines without a GPU: the functions of native/devices/runtime.h on host memory.
//
// A stream is a thread, so its work is done late, as CUDA allows: a copy first overwrites its target with a pattern,
// waits, and only then copies. Code that forgets to wait for an event reads or sends the pattern. The stand-in
// knows which memory is page-locked, and refuses asynchronous copies to or from other host memory.

#include "cudart.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace {

constexpr int kInvalidValue = 1;      // cudaErrorInvalidValue
constexpr int kMemoryAllocation = 2;  // cudaErrorMemoryAllocation
constexpr int kHostToDevice = 1;
constexpr int kDeviceToHost = 2;
constexpr int kSpoilt = 0xA5;  // the pattern's bytes

// One moment in the work of a stream, which an event records.
struct Moment {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;

  void Reach() {
    const std::lock_guard<std::mutex> lock(mutex);
    reached = true;
    changed.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return reached; });
  }
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Moment> moment;  // null: the event was never recorded, which counts as reached

  std::shared_ptr<Moment> Get() {
    const std::lock_guard<std::mutex> lock(mutex);
    return moment;
  }
};

class Stream {
 public:
  Stream() : thread_([this] { Work(); }) { thread_.detach(); }

  void Enqueue(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

thread_local int current_device = 0;

std::mutex memory_mutex;
std::mutex host_functions_mutex;  // CUDA may run the host functions of independent streams one after the other
std::map<const char*, size_t> page_locked;
std::atomic<int64_t> delay_us{0};
std::atomic<int64_t> at_once{0};
std::atomic<int64_t> most_at_once{0};
std::atomic<size_t> max_pitch{INT32_MAX};  // CUDA's cudaDevAttrMaxPitch

bool IsPageLocked(const void* memory, size_t nbytes) {
  const auto* first = static_cast<const char*>(memory);
  const std::lock_guard<std::mutex> lock(memory_mutex);
  auto after = page_locked.upper_bound(first);
  if (after == page_locked.begin()) return false;
  --after;
  return first + nbytes <= after->first + after->second;
}

Stream& AsStream(void* stream) { return *static_cast<Stream*>(stream); }

}  // namespace

extern "C" {

int cudaGetDevice(int* device) {
  *device = current_device;
  return 0;
}

int cudaSetDevice(int device) {
  current_device = device;
  return 0;
}

int cudaStreamCreateWithFlags(void** stream, unsigned) {
  *stream = new Stream;
  return 0;
}

int cudaStreamSynchronize(void* stream) {
  const auto moment = std::make_shared<Moment>();
  AsStream(stream).Enqueue([moment] { moment->Reach(); });
  moment->Wait();
  return 0;
}

int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  const auto moment = static_cast<Event*>(event)->Get();
  if (moment != nullptr) AsStream(stream).Enqueue([moment] { moment->Wait(); });
  return 0;
}

int cudaEventCreateWithFlags(void** event, unsigned) {
  *event = new Event;
  return 0;
}

int cudaEventRecord(void* event, void* stream) {
  const auto moment = std::make_shared<Moment>();
  {
    auto* recorded = static_cast<Event*>(event);
    const std::lock_guard<std::mutex> lock(recorded->mutex);
    recorded->moment = moment;
  }
  AsStream(stream).Enqueue([moment] { moment->Reach(); });
  return 0;
}

int cudaEventSynchronize(void* event) {
  const auto moment = static_cast<Event*>(event)->Get();
  if (moment != nullptr) moment->Wait();
  return 0;
}

int cudaHostRegister(void* memory, size_t nbytes, unsigned) {
  std::memset(memory, kSpoilt, nbytes);
  const std::lock_guard<std::mutex> lock(memory_mutex);
  page_locked[static_cast<const char*>(memory)] = nbytes;
  return 0;
}

int cudaHostUnregister(void* memory) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  return page_locked.erase(static_cast<const char*>(memory)) == 0 ? kInvalidValue : 0;
}

int cudaHostAlloc(void** memory, size_t nbytes, unsigned flags) {
  *memory = std::malloc(nbytes);
  return cudaHostRegister(*memory, nbytes, flags);
}

int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                      int kind, void* stream) {
  if (width > to_pitch || width > from_pitch) return kInvalidValue;
  if (height > 1 && std::max(to_pitch, from_pitch) > max_pitch.load()) return kInvalidValue;
  if (kind == kDeviceToHost && !IsPageLocked(to, to_pitch * (height - 1) + width)) return kInvalidValue;
  if (kind == kHostToDevice && !IsPageLocked(from, from_pitch * (height - 1) + width)) return kInvalidValue;
  AsStream(stream).Enqueue([=] {
    const int64_t now = ++at_once;
    int64_t most = most_at_once.load();
    while (now > most && !most_at_once.compare_exchange_weak(most, now)) {
    }
    for (size_t row = 0; row < height; ++row) std::memset(static_cast<char*>(to) + row * to_pitch, kSpoilt, width);
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us.load()));
    for (size_t row = 0; row < height; ++row) {
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    }
    --at_once;
  });
  return 0;
}

int cudaMemcpyAsync(void* to, const void* from, size_t nbytes, int kind, void* stream) {
  return cudaMemcpy2DAsync(to, nbytes, from, nbytes, nbytes, 1, kind, stream);
}

int cudaMemsetAsync(void* to, int value, size_t nbytes, void* stream) {
  AsStream(stream).Enqueue([=] { std::memset(to, value, nbytes); });
  return 0;
}

const char* cudaGetErrorString(int code) {
  return code == kInvalidValue ? "invalid argument" : code == kMemoryAllocation ? "out of memory" : "no error";
}

int cuDeviceGet(int* device, int ordinal) {
  if (ordinal > 7) return kInvalidValue;
  *device = ordinal;
  return 0;
}

int cuDeviceGetUuid_v2(char* uuid, int device) {
  std::memset(uuid, 0x10 + device, 16);
  return 0;
}

int cudaMalloc(void** memory, size_t nbytes) {
  *memory = std::malloc(nbytes);
  return 0;
}

int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  AsStream(stream).Enqueue([=] {
    const std::lock_guard<std::mutex> lock(host_functions_mutex);
    function(argument);
  });
  return 0;
}

void standin_set_delay_us(int64_t delay) { delay_us.store(delay); }

void standin_set_max_pitch(int64_t nbytes) { max_pitch.store(static_cast<size_t>(nbytes)); }

int64_t standin_most_at_once() { return most_at_once.load(); }
}
