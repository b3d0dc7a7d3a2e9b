// Arrays and calls on a device, with the stand-in for CUDA's runtime or CUDA's own runtime (PYCOLLECTIVE_CUDART).
//
// Slow work of a stream writes the operands, and later work of the stream reads the results, as XLA's kernels would.

#ifndef PYCOLLECTIVE_TESTS_NATIVE_ON_DEVICE_H_
#define PYCOLLECTIVE_TESTS_NATIVE_ON_DEVICE_H_

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "cudart.h"
#include "devices/device.h"
#include "harness.h"

namespace pc = pycollective;

// Checks that a call of the tests to the runtime succeeds.
#define CUDA(call) CHECK((call) == 0)

#ifdef PYCOLLECTIVE_CUDART
inline constexpr bool kStandIn = false;
#else
inline constexpr bool kStandIn = true;
#endif

inline void* NewStream() {
  void* stream = nullptr;
  CUDA(cudaStreamCreateWithFlags(&stream, 1));  // the stream waits for no other stream
  return stream;
}

#ifdef PYCOLLECTIVE_CUDART
// A fill of the device's memory that takes 0.1 ms or more.
struct Fill {
  Fill() {
    constexpr size_t kMost = 1 << 30;
    constexpr double kLeastUs = 100;
    CUDA(cudaMalloc(&memory, kMost));
    void* const stream = NewStream();
    do {
      nbytes *= 2;
      us = 1e9;
      for (int i = 0; i < 20; ++i) {  // the fastest one
        const auto begin = std::chrono::steady_clock::now();
        Enqueue(stream);
        CUDA(cudaStreamSynchronize(stream));
        const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
        us = std::min(us, took.count());
      }
    } while (us < kLeastUs && nbytes < kMost);
  }
  void Enqueue(void* stream) const { CUDA(cudaMemsetAsync(memory, 0, nbytes, stream)); }

  void* memory = nullptr;
  size_t nbytes = 1 << 18;
  double us = 0;
};
#endif

// Makes a stream busy for about this time or longer: on CUDA's library by fills of the device's memory, since no kernel is compiled
// here. A function of the host that sleeps would not do: CUDA may run those of independent streams one after the other, so it
// would hold up the streams that must overtake this one. Fills need none of the engines that copy from the device or to it.
inline void Delay(void* stream, int us) {
#ifdef PYCOLLECTIVE_CUDART
  static const Fill fill;
  for (double left = us; left > 0; left -= fill.us) fill.Enqueue(stream);
#else
  const auto sleep = [](void* for_us) { std::this_thread::sleep_for(std::chrono::microseconds(reinterpret_cast<intptr_t>(for_us))); };
  CUDA(standin_launch(stream, sleep, reinterpret_cast<void*>(intptr_t{us})));
#endif
}

// Launches a kernel: the stream calls a function of the host after its earlier work. The function must not call CUDA,
// and must not take long (`Delay`).
inline void Launch(void* stream, std::function<void()> kernel) {
  CUDA(cudaLaunchHostFunc(
      stream,
      [](void* argument) {
        auto* kernel = static_cast<std::function<void()>*>(argument);
        (*kernel)();
        delete kernel;
      },
      new std::function<void()>(std::move(kernel))));
}

// Launches a kernel that waits for something: no host function, which would keep those of other streams from running. On CUDA's
// library, for which no kernel is compiled here, fills of 10 ms take its place.
inline void Kernel(void* stream, [[maybe_unused]] void (*kernel)()) {
#ifdef PYCOLLECTIVE_CUDART
  Delay(stream, 10'000);
#else
  CUDA(standin_launch(
      stream, [](void* argument) { reinterpret_cast<void (*)()>(argument)(); }, reinterpret_cast<void*>(kernel)));
#endif
}

// native/devices/device.cc calls the runtime through ObservedRuntime, which counts the calls, and makes them slow or fail as
// these variables say. The tests call the runtime itself.
inline std::atomic<int> slow_us{0};            // each copy takes at least this time
inline std::atomic<bool> fetches_fast{false};  // but copies from the device do not
inline std::atomic<int64_t> until_failure{0};  // which copy or set from now on fails, from 1; 0: none fails
inline std::atomic<bool> no_memory{false};     // no memory can be page-locked
inline std::atomic<int64_t> allocations{0};    // how often memory has been page-locked
inline std::atomic<int64_t> copied{0};         // the number of copies that have ended
inline constexpr int kInvalidValue = 1;        // cudaErrorInvalidValue
inline constexpr int kMemoryAllocation = 2;    // cudaErrorMemoryAllocation

inline bool Fails() { return until_failure.load() > 0 && until_failure.fetch_sub(1) == 1; }

template <typename Copy>
int Observed(void* stream, int kind, Copy copy) {
  if (Fails()) return kInvalidValue;
  const bool fast = kind == pc::kDeviceToHost && fetches_fast;
  if (!kStandIn && !fast) Delay(stream, slow_us);  // the stand-in's own copies are slow
  const int code = copy();
  if (code == 0) Launch(stream, [] { ++copied; });
  return code;
}

// Makes every copy take at least this time.
inline void SlowCopies(int us) {
  slow_us = us;
#ifndef PYCOLLECTIVE_CUDART
  standin_set_delay_us(us);
#endif
}

// Makes copies from the device take no time of their own.
inline void FetchQuickly() {
  fetches_fast = true;
#ifndef PYCOLLECTIVE_CUDART
  standin_set_fetches_fast(true);
#endif
}

inline pc::Runtime CudaRuntime() {
  return {cudaGetDevice,  // in the order of the table in native/devices/runtime.h
          cudaSetDevice,
          cudaStreamCreateWithFlags,
          cudaStreamSynchronize,
          cudaStreamWaitEvent,
          cudaEventCreateWithFlags,
          cudaEventRecord,
          cudaEventSynchronize,
          cudaHostRegister,
          cudaMemcpyAsync,
          cudaMemcpy2DAsync,
          cudaMemsetAsync,
          cudaGetErrorString};
}

// A function of CUDA's driver, which the stand-in contains.
template <typename Function>
Function OfDriver(const char* name, Function) {
  void* found = dlsym(RTLD_DEFAULT, name);
  void* const driver = found == nullptr ? dlopen("libcuda.so.1", RTLD_NOW) : nullptr;
  if (driver != nullptr) found = dlsym(driver, name);
  CHECK(found != nullptr);
  return reinterpret_cast<Function>(found);
}

inline pc::AheadRuntime CudaAheadRuntime() {
  pc::AheadRuntime made{};
  made.StreamCreateWithPriority = cudaStreamCreateWithPriority;
  made.GetStreamPriorityRange = cudaDeviceGetStreamPriorityRange;
  made.StreamDestroy = cudaStreamDestroy;
  made.HostGetDevicePointer = cudaHostGetDevicePointer;
#ifdef PYCOLLECTIVE_CUDART
  made.StreamWaitValue = OfDriver("cuStreamWaitValue32_v2", made.StreamWaitValue);
  made.StreamWriteValue = OfDriver("cuStreamWriteValue32_v2", made.StreamWriteValue);
#else
  made.StreamWaitValue = cuStreamWaitValue32_v2;
  made.StreamWriteValue = cuStreamWriteValue32_v2;
#endif
  return made;
}

inline pc::Runtime ObservedRuntime() {
  pc::Runtime runtime = CudaRuntime();
  runtime.HostRegister = [](void* memory, size_t nbytes, unsigned flags) {
    if (no_memory) return kMemoryAllocation;
    ++allocations;
    return cudaHostRegister(memory, nbytes, flags);
  };
  runtime.MemcpyAsync = [](void* to, const void* from, size_t nbytes, int kind, void* stream) {
    return Observed(stream, kind, [&] { return cudaMemcpyAsync(to, from, nbytes, kind, stream); });
  };
  runtime.Memcpy2DAsync = [](void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                             size_t height, int kind, void* stream) {
    return Observed(stream, kind,
                    [&] { return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, stream); });
  };
  runtime.MemsetAsync = [](void* to, int value, size_t nbytes, void* stream) {
    return Fails() ? kInvalidValue : cudaMemsetAsync(to, value, nbytes, stream);
  };
  return runtime;
}

using Ints = std::vector<int32_t>;

inline Ints Counting(size_t count) {
  Ints values(count);
  std::iota(values.begin(), values.end(), 1);
  return values;
}

// Copies for the tests. With the stand-in a function of the host copies, since the stand-in's own copies are slow.
inline void Copy(void* to, const void* from, size_t nbytes, int kind, void* stream) {
#ifdef PYCOLLECTIVE_CUDART
  CUDA(cudaMemcpyAsync(to, from, nbytes, kind, stream));
#else
  static_cast<void>(kind);
  Launch(stream, [=] { std::memcpy(standin_view(to), standin_view(from), nbytes); });
#endif
}

// An array in the device's memory. The memory is never freed: each test is a process of its own, and copies may still
// be under way when a test fails.
class Array {
 public:
  explicit Array(size_t count, int32_t value = 0) : count_(count) {
    CUDA(cudaMalloc(&data_, nbytes()));
    CUDA(cudaHostAlloc(&written_, nbytes(), 0));  // now, since a later allocation might wait for the device
    CUDA(cudaHostAlloc(&read_, nbytes(), 0));
    void* const stream = NewStream();
    Write(stream, Ints(count, value));
    CUDA(cudaStreamSynchronize(stream));
  }

  void Write(void* stream, const Ints& values) {
    std::memcpy(written_, values.data(), nbytes());
    Copy(data_, written_, nbytes(), pc::kHostToDevice, stream);
  }
  // Returns what a kernel reads after the stream's earlier work.
  Ints Read(void* stream) const {
    Copy(read_, data_, nbytes(), pc::kDeviceToHost, stream);
    CUDA(cudaStreamSynchronize(stream));
    const auto* const read = static_cast<const int32_t*>(read_);
    return Ints(read, read + count_);
  }
  Ints Now() const { return Read(NewStream()); }
  void CopyTo(const Array& other, void* stream) const {
    Copy(other.data_, data_, nbytes(), pc::kByAddress, stream);
  }

  void* data() const { return data_; }
  size_t size() const { return count_; }

 private:
  size_t nbytes() const { return 4 * count_; }

  size_t count_;
  void* data_ = nullptr;
  void* written_ = nullptr;  // page-locked memory of the host, like `read_`
  void* read_ = nullptr;
};

inline pc::TransferEnd EndOf(const std::vector<Array>& arrays, int64_t blocks = 1) {
  pc::TransferEnd end;
  end.element_bytes = 4;
  end.blocks = blocks;
  for (const Array& array : arrays) {
    const auto count = static_cast<int64_t>(array.size()) / blocks;
    end.arrays.push_back({array.data(), count});
    end.count += count;
  }
  return end;
}

// The time that a slow kernel takes: code that does not wait for it reads too early.
inline int late_us = 5000;

// Returns arrays in the device's memory that a slow kernel writes. A test makes its other arrays before, since an
// allocation may wait for the device.
inline std::vector<Array> Late(void* stream, const std::vector<Ints>& values) {
  std::vector<Array> arrays;
  for (const Ints& each : values) arrays.emplace_back(each.size(), -1);
  Delay(stream, late_us);
  for (size_t i = 0; i < values.size(); ++i) arrays[i].Write(stream, values[i]);
  return arrays;
}

// The events of one call, as DeviceBuffers (native/devices/buffers.h) makes them.
struct Events {
  explicit Events(void* stream) : stream(stream) {
    device.AcquireEvent(&ready);
    device.AcquireEvent(&done);
    device.RecordEvent(ready, stream);
  }
  void End() { device.WaitForEvent(stream, done); }

  pc::Device& device = pc::Device::Get(0);
  void* stream;
  void* ready = nullptr;
  void* done = nullptr;
};

// Unsigned, since it wraps around: after an error the numbers mean nothing.
inline void Double(const void* in, void* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) static_cast<uint32_t*>(out)[i] = 2 * static_cast<const uint32_t*>(in)[i];
}

#endif  // PYCOLLECTIVE_TESTS_NATIVE_ON_DEVICE_H_
