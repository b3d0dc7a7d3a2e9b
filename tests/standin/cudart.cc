// A stand-in for CUDA's runtime on machines without a GPU: the functions of native/devices/runtime.h on host memory.
//
// A stream is a thread, so its work is done late, as CUDA allows: a copy first overwrites its target with a pattern,
// waits, and only then copies. Code that forgets to wait for an event reads or sends the pattern. The stand-in is as strict as
// CUDA may be:
//
// - it knows which memory is page-locked, and refuses asynchronous copies to or from other host memory;
// - page-locking waits for all work of all streams;
// - the copies of a device in one direction share one copy engine, and run one after the other;
// - the host functions of all streams run in one thread;
// - a thread that has set no device has no context: all functions but cudaGetDevice and cudaSetDevice fail there;
// - a wait of a stream for a number holds up all streams that share its hardware queue: those of one priority, if the tests say so
//   (standin_share_queues); a queue may be full, and a thread that waits for room in it keeps the others out (standin_limit_queues);
// - page-locked memory has another address for the device than for the host;
// - memory of the device has addresses that the host cannot access, unless MPI is to take them (standin_open_memory);
// - each function may fail, once or from then on (standin_fail).

#include "cudart.h"

#include <sys/mman.h>
#include <unistd.h>

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
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int kInvalidValue = 1;      // cudaErrorInvalidValue
constexpr int kMemoryAllocation = 2;  // cudaErrorMemoryAllocation
constexpr int kContext = 201;         // cudaErrorDeviceUninitialized: the thread has no context
constexpr int kIllegalAddress = 700;  // cudaErrorIllegalAddress
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

std::mutex enqueuing;  // of the driver: of all threads that enqueue
std::atomic<int64_t> most_enqueued{0};  // how much work a queue holds; 0: any

// A thread that does work in its order.
class Worker {
 public:
  Worker() : thread_([this] { Work(); }) { thread_.detach(); }

  void Enqueue(std::function<void()> work) {
    const std::lock_guard<std::mutex> of_all(enqueuing);
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t most = most_enqueued;
    if (most > 0) taken_.wait(lock, [&] { return static_cast<int64_t>(queue_.size()) < most; });
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }
  // Returns when the earlier work is done.
  void Synchronize() {
    const auto moment = std::make_shared<Moment>();
    Enqueue([moment] { moment->Reach(); });
    moment->Wait();
  }

  // Ends the thread when the earlier work is done.
  void End() {
    Enqueue([this] { ends_ = true; });
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!ends_) {
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      taken_.notify_all();
      lock.unlock();
      work();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable taken_;
  std::deque<std::function<void()>> queue_;
  bool ends_ = false;  // of its thread alone
  std::thread thread_;
};

struct Stream {
  void Enqueue(std::function<void()> work) { queue.Enqueue(std::move(work)); }
  void Synchronize() { queue.Synchronize(); }

  const int device;
  Worker& queue;
};

constexpr int kDevices = 8;
constexpr int kDefaultPriority = 0;
std::atomic<int> greatest_priority{-5};
std::atomic<bool> shares_queues{false};  // streams of one device and one priority share a queue

// The queue of a new stream.
Worker& QueueFor(int device, int priority) {
  static std::mutex mutex;
  static auto& queues = *new std::map<std::pair<int, int>, Worker*>;
  if (!shares_queues) return *new Worker;
  const std::lock_guard<std::mutex> lock(mutex);
  Worker*& queue = queues[{device, priority}];
  if (queue == nullptr) queue = new Worker;
  return *queue;
}

std::mutex copy_engines[kDevices][2];  // of each device one to it and one from it

// The thread of the host functions of all streams; never deleted, like the streams.
Worker& HostFunctions() {
  static auto* const worker = new Worker;
  return *worker;
}

std::mutex streams_mutex;
auto& streams = *new std::set<Stream*>;

thread_local int current_device = -1;  // the thread has no context

// Failures ---------------------------------------------------------------------------------------------------------

std::mutex failure_mutex;
auto& failing = *new std::string;
int64_t until_failure = 0;  // how many calls of `failing` from now on fail first; 0: none
bool is_sticky = false;
std::atomic<bool> has_failed{false};  // for ever

// Returns the code with which a function fails; 0: it runs.
int Refuse(const char* function) {
  if (has_failed) return kIllegalAddress;
  if (current_device < 0) return kContext;
  const std::lock_guard<std::mutex> lock(failure_mutex);
  if (until_failure == 0 || (!failing.empty() && failing != function) || --until_failure > 0) return 0;
  has_failed = is_sticky;
  return is_sticky ? kIllegalAddress : kInvalidValue;
}

#define STANDIN_MAY_FAIL                                        \
  do {                                                          \
    if (const int code_ = Refuse(__func__)) return code_;       \
  } while (false)

std::mutex memory_mutex;
std::map<const char*, size_t> page_locked;
std::atomic<int64_t> delay_us{0};
std::atomic<bool> fetches_fast{false};  // copies from the device are not late
std::mutex random_mutex;
auto& random_numbers = *new std::minstd_rand(1);
std::atomic<int64_t> at_once{0};
std::atomic<int64_t> most_at_once{0};
std::atomic<size_t> max_pitch{INT32_MAX};  // CUDA's cudaDevAttrMaxPitch

// The memory of all devices: mapped once without access, at the addresses that the program knows, and once for the copies.
class DeviceMemory {
 public:
  DeviceMemory() {
    const int file = memfd_create("standin", 0);
    if (file < 0 || ftruncate(file, kBytes) != 0) std::abort();
    known_ = Map(file, PROT_NONE);
    view_ = Map(file, PROT_READ | PROT_WRITE);
    close(file);
  }

  void* Allocate(size_t nbytes) {
    const size_t rounded = Rounded(nbytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& free = free_[rounded];
    if (!free.empty()) {
      void* const memory = free.back();
      free.pop_back();
      return memory;
    }
    if (used_ + rounded > static_cast<size_t>(kBytes)) std::abort();
    void* const memory = known_ + used_;
    used_ += rounded;
    return memory;
  }
  void Free(void* memory, size_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[Rounded(nbytes)].push_back(memory);
  }
  char* View(const void* memory) const {
    auto* const address = static_cast<char*>(const_cast<void*>(memory));
    return address >= known_ && address < known_ + kBytes ? view_ + (address - known_) : address;
  }
  void Open() {
    if (mprotect(known_, kBytes, PROT_READ | PROT_WRITE) != 0) std::abort();
  }

 private:
  static constexpr off_t kBytes = off_t{16} << 30;  // of addresses; the system gives memory to those that are used

  static char* Map(int file, int access) {
    void* const made = mmap(nullptr, kBytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (made == MAP_FAILED) std::abort();
    return static_cast<char*>(made);
  }
  static size_t Rounded(size_t nbytes) {
    size_t rounded = 256;
    while (rounded < nbytes) rounded *= 2;
    return rounded;
  }

  char* known_;
  char* view_;
  size_t used_ = 0;
  std::mutex mutex_;
  std::map<size_t, std::vector<void*>> free_;
};

DeviceMemory& Memory() {
  static auto* const memory = new DeviceMemory;
  return *memory;
}

bool IsPageLocked(const void* memory, size_t nbytes) {
  const auto* first = static_cast<const char*>(memory);
  const std::lock_guard<std::mutex> lock(memory_mutex);
  auto after = page_locked.upper_bound(first);
  if (after == page_locked.begin()) return false;
  --after;
  return first + nbytes <= after->first + after->second;
}

std::chrono::microseconds Delay() {
  const std::lock_guard<std::mutex> lock(random_mutex);
  const int64_t least = delay_us;
  return std::chrono::microseconds(least + static_cast<int64_t>(random_numbers() % static_cast<uint64_t>(least + 1)));
}

Stream& AsStream(void* stream) { return *static_cast<Stream*>(stream); }

// A copy of `height` rows, or an error.
int CopyRows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int kind,
             void* stream) {
  if (width > to_pitch || width > from_pitch) return kInvalidValue;
  if (height > 1 && std::max(to_pitch, from_pitch) > max_pitch.load()) return kInvalidValue;
  if (kind == kDeviceToHost && !IsPageLocked(to, to_pitch * (height - 1) + width)) return kInvalidValue;
  if (kind == kHostToDevice && !IsPageLocked(from, from_pitch * (height - 1) + width)) return kInvalidValue;
  std::mutex& engine = copy_engines[AsStream(stream).device][kind == kDeviceToHost];
  AsStream(stream).Enqueue([=, &engine] {
    const std::lock_guard<std::mutex> is_used(engine);
    const int64_t now = ++at_once;
    int64_t most = most_at_once.load();
    while (now > most && !most_at_once.compare_exchange_weak(most, now)) {
    }
    char* const target = Memory().View(to);
    const char* const source = Memory().View(from);
    for (size_t row = 0; row < height; ++row) std::memset(target + row * to_pitch, kSpoilt, width);
    if (kind != kDeviceToHost || !fetches_fast) std::this_thread::sleep_for(Delay());
    for (size_t row = 0; row < height; ++row) {
      std::memcpy(target + row * to_pitch, source + row * from_pitch, width);
    }
    --at_once;
  });
  return 0;
}

Stream* NewStream(int priority) {
  auto* const made = new Stream{current_device, QueueFor(current_device, priority)};
  const std::lock_guard<std::mutex> lock(streams_mutex);
  streams.insert(made);
  return made;
}

constexpr uintptr_t kForDevice = uintptr_t{1} << 60;  // in the device's address of page-locked memory

std::atomic<uint32_t>* WordAt(uint64_t address) {
  auto* const word = reinterpret_cast<std::atomic<uint32_t>*>(address ^ kForDevice);
  return (address & kForDevice) != 0 && IsPageLocked(word, sizeof *word) ? word : nullptr;
}

}  // namespace

extern "C" {

int cudaGetDevice(int* device) {
  const int code = Refuse(__func__);
  *device = std::max(current_device, 0);
  return code == kContext ? 0 : code;
}

int cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return kInvalidValue;
  const int before = std::exchange(current_device, device);
  const int code = Refuse(__func__);
  if (code != 0) current_device = before;
  return code;
}

int cudaStreamCreateWithFlags(void** stream, unsigned) {
  STANDIN_MAY_FAIL;
  *stream = NewStream(kDefaultPriority);
  return 0;
}

int cudaStreamCreateWithPriority(void** stream, unsigned, int priority) {
  STANDIN_MAY_FAIL;
  *stream = NewStream(std::max(std::min(priority, kDefaultPriority), greatest_priority.load()));  // as CUDA does
  return 0;
}

int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  STANDIN_MAY_FAIL;
  *least = kDefaultPriority;
  *greatest = greatest_priority;
  return 0;
}

int cudaStreamDestroy(void* stream) {
  STANDIN_MAY_FAIL;
  const std::lock_guard<std::mutex> lock(streams_mutex);
  streams.erase(&AsStream(stream));
  if (!shares_queues) AsStream(stream).queue.End();
  return 0;
}

int cudaStreamSynchronize(void* stream) {
  AsStream(stream).Synchronize();
  STANDIN_MAY_FAIL;
  return 0;
}

int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  STANDIN_MAY_FAIL;
  const auto moment = static_cast<Event*>(event)->Get();
  if (moment != nullptr) AsStream(stream).Enqueue([moment] { moment->Wait(); });
  return 0;
}

int cudaEventCreateWithFlags(void** event, unsigned) {
  STANDIN_MAY_FAIL;
  *event = new Event;
  return 0;
}

int cudaEventRecord(void* event, void* stream) {
  STANDIN_MAY_FAIL;
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
  STANDIN_MAY_FAIL;
  return 0;
}

int cudaHostRegister(void* memory, size_t nbytes, unsigned) {
  STANDIN_MAY_FAIL;
  std::set<Stream*> all;
  {
    const std::lock_guard<std::mutex> lock(streams_mutex);
    all = streams;
  }
  for (Stream* stream : all) stream->Synchronize();
  std::memset(memory, kSpoilt, nbytes);
  const std::lock_guard<std::mutex> lock(memory_mutex);
  page_locked[static_cast<const char*>(memory)] = nbytes;
  return 0;
}

int cudaHostAlloc(void** memory, size_t nbytes, unsigned flags) {
  *memory = std::malloc(nbytes);
  return cudaHostRegister(*memory, nbytes, flags);
}

int cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  STANDIN_MAY_FAIL;
  if (!IsPageLocked(host, 1)) return kInvalidValue;
  *device = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) | kForDevice);
  return 0;
}

int cuStreamWaitValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned) {
  STANDIN_MAY_FAIL;
  const std::atomic<uint32_t>* const word = WordAt(address);
  if (word == nullptr) return kInvalidValue;
  AsStream(stream).Enqueue([=] {
    while (static_cast<int32_t>(word->load() - value) < 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
  });
  return 0;
}

int cuStreamWriteValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned) {
  STANDIN_MAY_FAIL;
  std::atomic<uint32_t>* const word = WordAt(address);
  if (word == nullptr) return kInvalidValue;
  AsStream(stream).Enqueue([=] { word->store(value); });
  return 0;
}

int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                      int kind, void* stream) {
  STANDIN_MAY_FAIL;
  return CopyRows(to, to_pitch, from, from_pitch, width, height, kind, stream);
}

int cudaMemcpyAsync(void* to, const void* from, size_t nbytes, int kind, void* stream) {
  STANDIN_MAY_FAIL;
  return CopyRows(to, nbytes, from, nbytes, nbytes, 1, kind, stream);
}

int cudaMemsetAsync(void* to, int value, size_t nbytes, void* stream) {
  STANDIN_MAY_FAIL;
  AsStream(stream).Enqueue([=] { std::memset(Memory().View(to), value, nbytes); });
  return 0;
}

const char* cudaGetErrorString(int code) {
  switch (code) {
    case kInvalidValue: return "invalid argument";
    case kMemoryAllocation: return "out of memory";
    case kContext: return "invalid device context";
    case kIllegalAddress: return "an illegal memory access was encountered";
    default: return "no error";
  }
}

int cuDeviceGet(int* device, int ordinal) {
  if (ordinal >= kDevices) return kInvalidValue;
  *device = ordinal;
  return 0;
}

int cuDeviceGetUuid_v2(char* uuid, int device) {
  std::memset(uuid, 0x10 + device, 16);
  return 0;
}

int cudaMalloc(void** memory, size_t nbytes) {
  *memory = Memory().Allocate(nbytes);
  return 0;
}

void* standin_malloc(size_t nbytes) { return Memory().Allocate(nbytes); }

void standin_free(void* memory, size_t nbytes) { Memory().Free(memory, nbytes); }

void* standin_view(const void* memory) { return Memory().View(memory); }

void standin_open_memory() { Memory().Open(); }

int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  STANDIN_MAY_FAIL;
  AsStream(stream).Enqueue([=] {
    const auto moment = std::make_shared<Moment>();
    HostFunctions().Enqueue([=] {
      function(argument);
      moment->Reach();
    });
    moment->Wait();
  });
  return 0;
}

int standin_launch(void* stream, void (*kernel)(void*), void* argument) {
  AsStream(stream).Enqueue([=] { kernel(argument); });
  return 0;
}

void standin_set_delay_us(int64_t delay) { delay_us.store(delay); }

void standin_set_fetches_fast(bool fast) { fetches_fast = fast; }

void standin_share_queues(int greatest) {
  greatest_priority = greatest;
  shares_queues = true;
}

void standin_limit_queues(int64_t most) { most_enqueued = most; }

void standin_set_seed(uint64_t seed) {
  const std::lock_guard<std::mutex> lock(random_mutex);
  random_numbers.seed(static_cast<std::minstd_rand::result_type>(seed));
}

void standin_set_max_pitch(int64_t nbytes) { max_pitch.store(static_cast<size_t>(nbytes)); }

void standin_fail(const char* function, int64_t nth, bool sticky) {
  const std::lock_guard<std::mutex> lock(failure_mutex);
  failing = function;
  until_failure = nth;
  is_sticky = sticky;
  has_failed = false;
}

int64_t standin_most_at_once() { return most_at_once.load(); }
}
