// The part of an accelerator's runtime library that the transport calls, bound at run time like MPI (mpi.h): CUDA's, or
// HIP's under its own names. Its addresses come from the library that JAX has loaded, so one build serves machines with
// and without GPUs. Streams and events are opaque pointers; 0 is success.

#ifndef PYCOLLECTIVE_NATIVE_RUNTIME_H_
#define PYCOLLECTIVE_NATIVE_RUNTIME_H_

#include <cstddef>

namespace pycollective {

// One row per function: its name in CUDA and in HIP, and its type.
#define PYCOLLECTIVE_RUNTIME_FUNCTIONS(X)                                                                            \
  X(GetDevice, "cudaGetDevice", "hipGetDevice", int, int*)                                                           \
  X(SetDevice, "cudaSetDevice", "hipSetDevice", int, int)                                                            \
  X(StreamCreate, "cudaStreamCreateWithFlags", "hipStreamCreateWithFlags", int, void**, unsigned)                    \
  X(StreamSynchronize, "cudaStreamSynchronize", "hipStreamSynchronize", int, void*)                                  \
  X(StreamWaitEvent, "cudaStreamWaitEvent", "hipStreamWaitEvent", int, void*, void*, unsigned)                       \
  X(EventCreate, "cudaEventCreateWithFlags", "hipEventCreateWithFlags", int, void**, unsigned)                       \
  X(EventRecord, "cudaEventRecord", "hipEventRecord", int, void*, void*)                                             \
  X(EventSynchronize, "cudaEventSynchronize", "hipEventSynchronize", int, void*)                                     \
  X(HostAlloc, "cudaHostAlloc", "hipHostMalloc", int, void**, size_t, unsigned)                                      \
  X(HostFree, "cudaFreeHost", "hipHostFree", int, void*)                                                             \
  X(MemcpyAsync, "cudaMemcpyAsync", "hipMemcpyAsync", int, void*, const void*, size_t, int, void*)                   \
  X(Memcpy2DAsync, "cudaMemcpy2DAsync", "hipMemcpy2DAsync", int, void*, size_t, const void*, size_t, size_t, size_t, \
    int, void*)                                                                                                      \
  X(MemsetAsync, "cudaMemsetAsync", "hipMemsetAsync", int, void*, int, size_t, void*)                                \
  X(GetErrorString, "cudaGetErrorString", "hipGetErrorString", const char*, int)

struct Runtime {
#define PYCOLLECTIVE_DECLARE(name, cuda, hip, result, ...) result (*name)(__VA_ARGS__);
  PYCOLLECTIVE_RUNTIME_FUNCTIONS(PYCOLLECTIVE_DECLARE)
#undef PYCOLLECTIVE_DECLARE
};

// The same rows as names, CUDA's and HIP's: the order in which bind() takes their addresses.
inline constexpr const char* kRuntimeNames[][2] = {
#define PYCOLLECTIVE_NAME(name, cuda, hip, result, ...) {cuda, hip},
    PYCOLLECTIVE_RUNTIME_FUNCTIONS(PYCOLLECTIVE_NAME)
#undef PYCOLLECTIVE_NAME
};
inline constexpr size_t kRuntimeCount = sizeof(kRuntimeNames) / sizeof(kRuntimeNames[0]);

// Values of the runtime's enums and flags that are the same in CUDA and HIP.
inline constexpr int kHostToDevice = 1;
inline constexpr int kDeviceToHost = 2;
inline constexpr int kDeviceToDevice = 3;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostPortable = 1;

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_RUNTIME_H_
