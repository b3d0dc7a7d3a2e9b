// Implementation of device.h.

#include "devices/device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "shared_memory/shared_arrays.h"

namespace pycollective {

Runtime runtime;
bool direct = false;
int64_t stage_bytes = 4 << 20;
int64_t max_pitch = INT32_MAX;
bool ahead = false;
AheadRuntime ahead_runtime{};
int64_t ahead_limit_ms = 5000;
uint32_t first_number = 0;

namespace {

Outcome RuntimeError(const char* call, int code) { return {call, code, runtime.GetErrorString(code), true}; }

// Calls a function of the runtime, from one of its two tables; returns from the enclosing function if the call fails.
#define PYCOLLECTIVE_CALL_OF(functions, name, ...)                 \
  do {                                                             \
    const int code_ = functions.name(__VA_ARGS__);                 \
    if (code_ != 0) return RuntimeError(#name, code_);             \
  } while (false)
#define PYCOLLECTIVE_RUNTIME(name, ...) PYCOLLECTIVE_CALL_OF(runtime, name, __VA_ARGS__)
#define PYCOLLECTIVE_AHEAD(name, ...) PYCOLLECTIVE_CALL_OF(ahead_runtime, name, __VA_ARGS__)

}  // namespace

Device& Device::Get(int ordinal) {
  static std::mutex making;
  static auto* devices = new std::unordered_map<int, Device*>;  // never destroyed: its threads may outlive main
  const std::lock_guard<std::mutex> lock(making);
  Device*& device = (*devices)[ordinal];
  if (device == nullptr) device = new Device(ordinal);
  return *device;
}

Outcome Device::FindCurrent(int* ordinal) {
  PYCOLLECTIVE_RUNTIME(GetDevice, ordinal);
  return {};
}

Device::Device(int ordinal) : ordinal_(ordinal) {}

// The order of calls -----------------------------------------------------------------------------------------------

void Device::Run(const std::function<void()>& work) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (completed_ < posted_) {  // earlier work is not done: the device's thread runs this work after it
    lock.unlock();
    Wait(Post(work));
    return;
  }
  const uint64_t ticket = ++posted_;
  lock.unlock();
  work();
  lock.lock();
  completed_ = ticket;
  changed_.notify_all();
}

uint64_t Device::Post(std::function<void()> work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return PostLocked(std::move(work));
}

uint64_t Device::PostLocked(std::function<void()> work) {
  if (!worker_.joinable()) worker_ = std::thread([this] { RunPosted(); });
  waiting_.push_back({posted_ + 1, std::move(work)});
  changed_.notify_all();
  return ++posted_;
}

void Device::Wait(uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return completed_ >= ticket; });
}

void Device::RunPosted() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    // Work that Run runs in another thread may come before the first posted work.
    changed_.wait(lock, [&] { return !waiting_.empty() && completed_ + 1 == waiting_.front().ticket; });
    const Task task = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    task.work();
    lock.lock();
    completed_ = task.ticket;
    changed_.notify_all();
  }
}

// Events -----------------------------------------------------------------------------------------------------------

Outcome Device::AcquireEvent(void** event) {
  const std::lock_guard<std::mutex> lock(events_mutex_);
  if (events_.empty()) {
    PYCOLLECTIVE_RUNTIME(EventCreate, event, kEventDisableTiming);
  } else {
    *event = events_.back();
    events_.pop_back();
  }
  return {};
}

void Device::ReleaseEvent(void* event) {
  const std::lock_guard<std::mutex> lock(events_mutex_);
  events_.push_back(event);
}

Outcome Device::RecordEvent(void* event, void* stream) {
  PYCOLLECTIVE_RUNTIME(EventRecord, event, stream);
  return {};
}

Outcome Device::WaitForEvent(void* stream, void* event) {
  PYCOLLECTIVE_RUNTIME(StreamWaitEvent, stream, event, 0);
  return {};
}

// Dispatch ahead ---------------------------------------------------------------------------------------------------

uint32_t Device::PostNumbered(std::function<void(uint32_t number)> work) {
  const std::lock_guard<std::mutex> lock(mutex_);  // so the order of the numbers is that of the queue
  const uint32_t number = last_number_ + 1;
  PostLocked([number, work = std::move(work)] { work(number); });
  return last_number_ = number;
}

Outcome Device::WaitForNumber(void* stream, uint32_t number) {
  PYCOLLECTIVE_AHEAD(StreamWaitValue, stream, number_address_, number, kWaitValueAtLeast);
  return {};
}

Outcome Device::WriteNumber(uint32_t number) {
  PYCOLLECTIVE_AHEAD(StreamWriteValue, to_device_, number_address_, number, kWriteValueBehind);
  return {};
}

Outcome Device::PrepareAhead() {
  PYCOLLECTIVE_RUNTIME(SetDevice, ordinal_);
  // XLA's streams have the default priority, the least, or the greatest. Streams of another priority have hardware queues of their own, so
  // no copy lies behind a stream that waits.
  int least = 0, greatest = 0;
  PYCOLLECTIVE_AHEAD(GetStreamPriorityRange, &least, &greatest);  // a greater priority is a smaller number
  if (greatest >= least) return {"GetStreamPriorityRange", 0, "streams of one priority", true};
  const int priority = std::min(greatest + 1, least - 1);
  PYCOLLECTIVE_AHEAD(StreamCreateWithPriority, &from_device_, kStreamNonBlocking, priority);
  PYCOLLECTIVE_AHEAD(StreamCreateWithPriority, &to_device_, kStreamNonBlocking, priority);
  const size_t nbytes = 4096;  // a page
  void* const made = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return {"mmap", errno, std::strerror(errno), true};
  PYCOLLECTIVE_RUNTIME(HostRegister, made, nbytes, kHostPortable | kHostMapped);
  void* address = nullptr;
  PYCOLLECTIVE_AHEAD(HostGetDevicePointer, &address, made, 0);
  number_address_ = reinterpret_cast<uintptr_t>(address);
  number_ = new (made) std::atomic<uint32_t>(first_number);
  return {};
}

Outcome Device::TryAhead(void* memory, int64_t nbytes) {
  Outcome outcome;
  Wait(Post([&] { outcome = TryAheadHere(static_cast<char*>(memory), static_cast<size_t>(nbytes)); }));
  return outcome;
}

Outcome Device::TryAheadHere(char* memory, size_t nbytes) {
  constexpr size_t kStreams = 32;    // the most hardware queues that CUDA_DEVICE_MAX_CONNECTIONS allows
  constexpr int kFills = 4096;       // a queue holds about 1024
  constexpr int kLooks = 20;
  constexpr char kBefore = 1, kAfter = 2;
  const auto size = static_cast<int64_t>(nbytes);
  PYCOLLECTIVE_RETURN_IF_FAILED(PrepareAhead());
  PYCOLLECTIVE_RETURN_IF_FAILED(Prepare(1, size, size));
  char* const host = slots_[0].in;
  const auto copy = [&](bool fetches) -> Outcome {
    void* const stream = fetches ? from_device_ : to_device_;
    const auto [to, from] = fetches ? std::pair(host, memory) : std::pair(memory, host);
    PYCOLLECTIVE_RUNTIME(MemcpyAsync, to, from, nbytes, fetches ? kDeviceToHost : kHostToDevice, stream);
    PYCOLLECTIVE_RUNTIME(StreamSynchronize, stream);
    return {};
  };
  const auto has = [&](char value) { return std::all_of(host, host + nbytes, [=](char byte) { return byte == value; }); };
  std::memset(host, kBefore, nbytes);
  PYCOLLECTIVE_RETURN_IF_FAILED(copy(false));

  const uint32_t number = first_number + 1;
  const auto release = [&] { number_->store(number); };  // the host itself writes the number
  std::mutex mutex;
  std::condition_variable ended;
  bool has_ended = false, in_time = true;
  std::thread timer([&] {  // it calls nothing of the driver, which may hold up any thread that does
    std::unique_lock<std::mutex> lock(mutex);
    in_time = ended.wait_for(lock, std::chrono::milliseconds(ahead_limit_ms), [&] { return has_ended; });
    if (!in_time) release();
  });
  std::vector<void*> streams;
  const auto wait_for_number = [&]() -> Outcome {
    while (streams.size() < kStreams) {
      void* stream = nullptr;
      PYCOLLECTIVE_RUNTIME(StreamCreate, &stream, kStreamNonBlocking);
      streams.push_back(stream);
      PYCOLLECTIVE_RETURN_IF_FAILED(WaitForNumber(stream, number));
    }
    PYCOLLECTIVE_RUNTIME(MemsetAsync, memory, kAfter, nbytes, streams[0]);
    return {};
  };
  const auto fill = [&]() -> Outcome {
    PYCOLLECTIVE_RUNTIME(SetDevice, ordinal_);
    for (int i = 0; i < kFills; ++i) PYCOLLECTIVE_RUNTIME(MemsetAsync, memory, kAfter, nbytes, streams[0]);
    return {};
  };
  const auto copy_and_write = [&]() -> Outcome {
    for (int i = 0; i < kLooks; ++i) {
      PYCOLLECTIVE_RETURN_IF_FAILED(copy(true));
      if (!has(kBefore)) return {"StreamWaitValue", 0, "a stream that does not wait", true};
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // a fill that does not wait has time to come
    }
    PYCOLLECTIVE_RETURN_IF_FAILED(copy(false));
    PYCOLLECTIVE_RETURN_IF_FAILED(WriteNumber(number));
    PYCOLLECTIVE_RUNTIME(StreamSynchronize, to_device_);
    if (number_->load() != number) return {"StreamWriteValue", 0, "a number that is not written", true};
    return {};
  };
  Outcome outcome = wait_for_number(), filled;
  std::thread fills;
  if (outcome.ok()) {
    fills = std::thread([&] { filled = fill(); });
    outcome = copy_and_write();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    has_ended = true;
    ended.notify_all();
  }
  timer.join();
  if (!outcome.ok()) release();
  if (fills.joinable()) fills.join();
  if (outcome.ok()) outcome = filled;
  if (!in_time) outcome = {"StreamWriteValue", 0, "copies that do not end while other streams wait", true};
  for (void* stream : streams) {
    const int code = runtime.StreamSynchronize(stream);
    if (outcome.ok() && code != 0) outcome = RuntimeError("StreamSynchronize", code);
    ahead_runtime.StreamDestroy(stream);
  }
  if (outcome.ok()) outcome = copy(true);
  if (outcome.ok() && !has(kAfter)) outcome = {"StreamWaitValue", 0, "a stream that does not go on", true};
  const std::lock_guard<std::mutex> lock(mutex_);
  if (outcome.ok()) last_number_ = number;
  return outcome;
}

// Arrays -----------------------------------------------------------------------------------------------------------

Outcome Device::Grow(char** buffer, int64_t* held, int64_t wanted) {
  if (wanted <= *held) return {};
  wanted = std::max(wanted, 2 * *held);  // the old buffer stays, so all buffers together take at most twice the largest
  // Memory that the ranks of the host have mapped, or if there is none memory of this process. The runtime page-locks it afterwards, so
  // other ranks can read it. Memory of the runtime's own allocator can be read by them with some drivers only.
  const auto nbytes = static_cast<size_t>(wanted);
  const bool shares = SharedArrays::begin() != nullptr;
  void* const made = shares ? SharedArrays::Take(nbytes)
                            : mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return {"mmap", errno, std::strerror(errno), true};
  // Not in other memory: the other ranks would expect this one's buffers in the shared memory.
  if (made == nullptr) return {"HostRegister", 0, "the memory for buffers that the ranks of this host share is full", true};
  if (const int code = runtime.HostRegister(made, nbytes, kHostPortable); code != 0) {
    if (shares) SharedArrays::GiveBack(made);
    if (!shares) munmap(made, nbytes);
    return RuntimeError("HostRegister", code);
  }
  *buffer = static_cast<char*>(made);
  *held = wanted;
  return {};
}

Outcome Device::Prepare(int64_t pieces, int64_t in_bytes, int64_t out_bytes) {
  PYCOLLECTIVE_RUNTIME(SetDevice, ordinal_);  // of this thread
  if (from_device_ == nullptr) PYCOLLECTIVE_RUNTIME(StreamCreate, &from_device_, kStreamNonBlocking);
  if (to_device_ == nullptr) PYCOLLECTIVE_RUNTIME(StreamCreate, &to_device_, kStreamNonBlocking);
  for (Slot& slot : slots_) {
    if (slot.fetched == nullptr) PYCOLLECTIVE_RUNTIME(EventCreate, &slot.fetched, kEventDisableTiming);
    if (slot.stored == nullptr) PYCOLLECTIVE_RUNTIME(EventCreate, &slot.stored, kEventDisableTiming);
    if (pieces-- <= 0) continue;
    PYCOLLECTIVE_RETURN_IF_FAILED(Grow(&slot.in, &slot.in_bytes, in_bytes));
    PYCOLLECTIVE_RETURN_IF_FAILED(Grow(&slot.out, &slot.out_bytes, out_bytes));
  }
  return {};
}

Outcome Device::Reserve(int64_t nbytes) {
  Outcome outcome;
  Wait(Post([&] { outcome = Prepare(kSlots, nbytes, nbytes); }));  // the device stays current in no other thread
  return outcome;
}

void Device::Settle() {
  for (void* stream : {from_device_, to_device_}) {
    if (stream != nullptr) runtime.StreamSynchronize(stream);  // it fails if the device runs nothing any more
  }
}

namespace {

// Calls copy(data, offset, pitch, width, height) for elements first to first + count of each block of a side: `height`
// rows of `width` bytes. On the device the rows begin at `data` with distance `pitch`; in the contiguous copy they begin at
// byte `offset`.
template <typename Copy>
Outcome ForEachCopy(const TransferEnd& end, int64_t first, int64_t count, Copy copy) {
  if (end.blocks > 1) {
    char* const data = static_cast<char*>(end.arrays[0].data) + first * end.element_bytes;
    const int64_t pitch = end.count * end.element_bytes;
    const int64_t width = count * end.element_bytes;
    if (pitch <= max_pitch) return copy(data, int64_t{0}, pitch, width, end.blocks);
    for (int64_t block = 0; block < end.blocks; ++block) {
      PYCOLLECTIVE_RETURN_IF_FAILED(copy(data + block * pitch, block * width, width, width, int64_t{1}));
    }
    return {};
  }
  int64_t start = 0;  // where the array begins in the block
  for (const TransferEnd::Array& array : end.arrays) {
    const int64_t from = std::max(first, start);
    const int64_t to = std::min(first + count, start + array.count);
    if (from < to) {
      char* const data = static_cast<char*>(array.data) + (from - start) * end.element_bytes;
      const int64_t width = (to - from) * end.element_bytes;
      PYCOLLECTIVE_RETURN_IF_FAILED(copy(data, (from - first) * end.element_bytes, width, width, int64_t{1}));
    }
    start += array.count;
  }
  return {};
}

}  // namespace

Outcome Device::Fetch(const TransferEnd& end, int64_t first, int64_t count, char* host) {
  return ForEachCopy(end, first, count, [&](const char* data, int64_t offset, auto pitch, auto width, auto height) {
    return Copy2D(host + offset, width, data, pitch, width, height, kDeviceToHost, from_device_);
  });
}

Outcome Device::Store(const TransferEnd& end, int64_t first, int64_t count, char* host) {
  return ForEachCopy(end, first, count, [&](char* data, int64_t offset, auto pitch, auto width, auto height) {
    return Copy2D(data, pitch, host + offset, width, width, height, kHostToDevice, to_device_);
  });
}

Outcome Device::Copy2D(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t width, int64_t height,
                       int kind, void* stream) {
  const auto bytes = [](int64_t n) { return static_cast<size_t>(n); };
  if (height == 1) {
    PYCOLLECTIVE_RUNTIME(MemcpyAsync, to, from, bytes(width), kind, stream);
  } else {
    PYCOLLECTIVE_RUNTIME(Memcpy2DAsync, to, bytes(to_pitch), from, bytes(from_pitch), bytes(width), bytes(height), kind,
                         stream);
  }
  return {};
}

Outcome Device::Stage(const Transfer& transfer, int64_t piece_bytes, void* ready, void* done, const MpiCall& call) {
  const TransferEnd& in = transfer.in;
  const TransferEnd& out = transfer.out;
  const bool reads = in.nbytes() > 0;
  const bool writes = out.nbytes() > 0;
  const int64_t count = std::max(in.count, out.count);
  // All ranks must make the same pieces, so the pieces depend only on values that are the same on all ranks.
  const int64_t bytes_of_one = std::max(in.element_bytes * in.blocks, out.element_bytes * out.blocks);
  const int64_t piece = std::max<int64_t>(1, piece_bytes / bytes_of_one);
  const int64_t pieces = (count + piece - 1) / piece;
  const auto size = [&](const TransferEnd& end, int64_t i) {
    return std::clamp<int64_t>(end.count - i * piece, 0, piece);
  };
  const auto buffer_bytes = [&](const TransferEnd& end) { return size(end, 0) * end.element_bytes * end.blocks; };
  const auto slot_of = [&](int64_t i) -> Slot& { return slots_[i % kSlots]; };
  const auto out_of = [&](int64_t i) { return transfer.in_place ? slot_of(i).in : slot_of(i).out; };
  const auto fetch = [&](int64_t i) -> Outcome {
    // The slot's previous piece, perhaps of an earlier call, may still be copied from the same buffer.
    PYCOLLECTIVE_RUNTIME(StreamWaitEvent, from_device_, slot_of(i).stored, 0);
    PYCOLLECTIVE_RETURN_IF_FAILED(Fetch(in, i * piece, size(in, i), slot_of(i).in));
    PYCOLLECTIVE_RUNTIME(EventRecord, slot_of(i).fetched, from_device_);
    return {};
  };
  int64_t fetched = 0;
  const auto wait_until_fetched = [&](int64_t i) -> Outcome {
    if (!reads) return {};
    while (fetched < std::min(pieces, i + kSlots)) PYCOLLECTIVE_RETURN_IF_FAILED(fetch(fetched++));
    PYCOLLECTIVE_RUNTIME(EventSynchronize, slot_of(i).fetched);
    return {};
  };
  const auto store = [&](int64_t i) -> Outcome {
    if (!writes) return {};
    PYCOLLECTIVE_RETURN_IF_FAILED(Store(out, i * piece, size(out, i), out_of(i)));
    PYCOLLECTIVE_RUNTIME(EventRecord, slot_of(i).stored, to_device_);
    return {};
  };
  Outcome of_mpi;
  // After an error of MPI the remaining calls are made nevertheless, since other ranks wait in them.
  const auto make_call = [&](const void* from, void* to, int64_t n) {
    const Outcome outcome = call(from, to, n);
    if (of_mpi.ok()) of_mpi = outcome;
  };
  const auto make_calls = [&]() -> Outcome {
    for (int64_t i = 0; i < pieces; ++i) {
      PYCOLLECTIVE_RETURN_IF_FAILED(wait_until_fetched(i));
      if (!transfer.in_place) PYCOLLECTIVE_RUNTIME(EventSynchronize, slot_of(i).stored);
      make_call(slot_of(i).in, out_of(i), size(reads ? in : out, i));
      PYCOLLECTIVE_RETURN_IF_FAILED(store(i));
    }
    return {};
  };
  // One call for all pieces, in memory that is not page-locked: the pieces go through the slots as well.
  const auto make_whole_call = [&]() -> Outcome {
    const auto bytes = [](const TransferEnd& end, int64_t n) { return static_cast<size_t>(n * end.element_bytes); };
    const std::unique_ptr<char[]> whole_in(new char[bytes(in, in.count)]), whole_out(new char[bytes(out, out.count)]);
    for (int64_t i = 0; reads && i < pieces; ++i) {
      PYCOLLECTIVE_RETURN_IF_FAILED(wait_until_fetched(i));
      std::memcpy(whole_in.get() + bytes(in, i * piece), slot_of(i).in, bytes(in, size(in, i)));
    }
    make_call(whole_in.get(), whole_out.get(), reads ? in.count : out.count);
    for (int64_t i = 0; writes && i < pieces; ++i) {
      PYCOLLECTIVE_RUNTIME(EventSynchronize, slot_of(i).stored);
      std::memcpy(slot_of(i).out, whole_out.get() + bytes(out, i * piece), bytes(out, size(out, i)));
      PYCOLLECTIVE_RETURN_IF_FAILED(store(i));
    }
    return {};
  };
  const auto transfer_all = [&]() -> Outcome {
    PYCOLLECTIVE_RETURN_IF_FAILED(Prepare(pieces, buffer_bytes(in), transfer.in_place ? 0 : buffer_bytes(out)));
    PYCOLLECTIVE_RUNTIME(StreamWaitEvent, from_device_, ready, 0);
    PYCOLLECTIVE_RUNTIME(StreamWaitEvent, to_device_, ready, 0);
    if (!reads && !writes) PYCOLLECTIVE_RUNTIME(EventSynchronize, ready);
    if (pieces == 0) {
      make_call(nullptr, nullptr, 0);
    } else {
      PYCOLLECTIVE_RETURN_IF_FAILED(transfer.in_pieces || pieces == 1 ? make_calls() : make_whole_call());
    }
    PYCOLLECTIVE_RUNTIME(EventRecord, done, to_device_);
    return {};
  };
  const Outcome of_runtime = transfer_all();
  if (of_runtime.ok()) return of_mpi;
  Settle();
  return of_runtime;
}

Outcome Device::Direct(const Transfer& transfer, void* ready, void* done, const MpiCall& call) {
  PYCOLLECTIVE_RETURN_IF_FAILED(Prepare(0, 0, 0));
  PYCOLLECTIVE_RUNTIME(EventSynchronize, ready);
  const auto data = [](const TransferEnd& end) { return end.arrays.empty() ? nullptr : end.arrays[0].data; };
  const Outcome outcome =
      call(data(transfer.in), data(transfer.out), std::max(transfer.in.count, transfer.out.count));
  PYCOLLECTIVE_RUNTIME(EventRecord, done, to_device_);
  return outcome;
}

Outcome Device::DeviceMemory::Clear(void* to, size_t nbytes) const {
  PYCOLLECTIVE_RUNTIME(MemsetAsync, to, 0, nbytes, device_.to_device_);
  PYCOLLECTIVE_RUNTIME(StreamSynchronize, device_.to_device_);
  return {};
}

Outcome Device::DeviceMemory::Copy(void* to, const void* from, size_t nbytes) const {
  PYCOLLECTIVE_RUNTIME(MemcpyAsync, to, from, nbytes, kByAddress, device_.to_device_);
  PYCOLLECTIVE_RUNTIME(StreamSynchronize, device_.to_device_);
  return {};
}

}  // namespace pycollective
