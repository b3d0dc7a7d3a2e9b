// Arrays and calls on a device of the stand-in for CUDA's runtime.
//
// Late work of a stream writes the operands, and later work of it reads the results, as XLA's kernels would.

#ifndef PYCOLLECTIVE_TESTS_NATIVE_ON_DEVICE_H_
#define PYCOLLECTIVE_TESTS_NATIVE_ON_DEVICE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "cudart.h"
#include "device.h"
#include "harness.h"

namespace pc = pycollective;

// In the order of the table in native/runtime.h.
inline pc::Runtime StandIn() {
  return {cudaGetDevice,
          cudaSetDevice,
          cudaStreamCreateWithFlags,
          cudaStreamSynchronize,
          cudaStreamWaitEvent,
          cudaEventCreateWithFlags,
          cudaEventRecord,
          cudaEventSynchronize,
          cudaHostAlloc,
          cudaFreeHost,
          cudaMemcpyAsync,
          cudaMemcpy2DAsync,
          cudaMemsetAsync,
          cudaGetErrorString};
}

inline void* NewStream() {
  void* stream = nullptr;
  cudaStreamCreateWithFlags(&stream, 0);
  return stream;
}

inline void Launch(void* stream, std::function<void()> kernel) {
  standin_launch(
      stream,
      [](void* argument) {
        auto* kernel = static_cast<std::function<void()>*>(argument);
        (*kernel)();
        delete kernel;
      },
      new std::function<void()>(std::move(kernel)));
}

using Ints = std::vector<int32_t>;

inline Ints Counting(size_t count) {
  Ints values(count);
  std::iota(values.begin(), values.end(), 1);
  return values;
}

inline pc::Side SideOf(std::vector<Ints>& arrays, int64_t blocks = 1) {
  pc::Side side;
  side.element_bytes = 4;
  side.blocks = blocks;
  for (Ints& array : arrays) {
    const auto count = static_cast<int64_t>(array.size()) / blocks;
    side.arrays.push_back({array.data(), count});
    side.count += count;
  }
  return side;
}

// Arrays in the device's memory that a kernel writes late.
struct Inputs {
  Inputs(void* stream, std::vector<Ints> values) : arrays(values) {
    for (Ints& array : arrays) std::fill(array.begin(), array.end(), -1);
    Launch(stream, [this, values] {
      Sleep(3);
      for (size_t i = 0; i < values.size(); ++i) std::copy(values[i].begin(), values[i].end(), arrays[i].begin());
    });
  }
  std::vector<Ints> arrays;
};

// Returns what a kernel reads from `arrays` when the stream comes to it.
template <typename Arrays>
Arrays Read(void* stream, const Arrays& arrays) {
  Arrays read;
  Launch(stream, [&] { read = arrays; });
  cudaStreamSynchronize(stream);
  return read;
}

// The events of one call, as DevicePlace (native/place.h) makes them.
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

inline void Double(const void* in, void* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) static_cast<int32_t*>(out)[i] = 2 * static_cast<const int32_t*>(in)[i];
}

#endif  // PYCOLLECTIVE_TESTS_NATIVE_ON_DEVICE_H_
