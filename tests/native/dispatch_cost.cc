// Measures how long the dispatch of calls takes between kernels, with dispatch ahead and without, on the stand-in for CUDA's runtime.
//
//     python -m tests.native.dispatch_cost

#include <chrono>
#include <cstdio>
#include <vector>

#include "cudart.h"
#include "devices/buffers.h"
#include "harness.h"
#include "on_device.h"

namespace {

constexpr int kCalls = 20;
constexpr int kKernelUs = 5000;

double MsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

// Dispatches kernels and calls in turns, and prints the milliseconds until all are dispatched, and until all have ended.
void Measure(bool ahead) {
  void* const stream = NewStream();
  const std::vector<Array> arrays(2, Array(1024));
  const pc::View x{arrays[0].data(), 1024, 4, 1}, y{arrays[1].data(), 1024, 4, 1};
  const auto make = [=](pc::DeviceBuffers& buffers) {
    return buffers.Exchange({}, x, y, {}, [](const pc::Channel&, const void* in, void* out, int64_t count) -> pc::Outcome {
      Double(in, out, count);
      return {};
    });
  };
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) {
    Delay(stream, kKernelUs);
    pc::DeviceBuffers buffers({stream, 0});
    if (ahead) {
      CHECK(buffers.PostAhead([=](pc::DeviceBuffers& own) { CHECK(make(own).ok() && own.WriteNumber().ok()); }).ok());
      CHECK(buffers.FinishAhead().ok());
    } else {
      CHECK(buffers.Run([&] { CHECK(make(buffers).ok()); }).ok());
    }
  }
  const double dispatched = MsSince(begin);
  CUDA(cudaStreamSynchronize(stream));
  std::printf("%s: %d calls behind kernels of %.0f ms are dispatched in %.2f ms, and end after %.1f ms\n", ahead ? "ahead" : "wait",
              kCalls, kKernelUs / 1e3, dispatched, MsSince(begin));
}

}  // namespace

int main() {
  CUDA(cudaSetDevice(0));
  pc::runtime = CudaRuntime();
  pc::ahead_runtime = CudaAheadRuntime();
  pc::Device& device = pc::Device::Get(0);
  CHECK(device.TryAhead(Array(64).data(), 256).ok());
  CHECK(device.Reserve(4096).ok());
  for (int turn = 0; turn < 3; ++turn) {
    for (const bool ahead : {false, true}) Measure(ahead);
  }
  std::fflush(nullptr);
  std::_Exit(0);
}
