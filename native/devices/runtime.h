// The functions of an accelerator's runtime library that the transport calls: those of CUDA, or of HIP under its own
// names. They are bound at run time, like those of MPI (mpi.h): their addresses come from the library that JAX has loaded,
// so one build works with and without GPUs. Streams and events are opaque pointers; 0 is success.

#ifndef PYCOLLECTIVE_NATIVE_DEVICES_RUNTIME_H_
#define PYCOLLECTIVE_NATIVE_DEVICES_RUNTIME_H_

#include <cstddef>
#include <cstdint>

namespace pycollective {

// One row for each function: our name, its names in CUDA and HIP, the type of its result, the types of its parameters.
#define PYCOLLECTIVE_RUNTIME_FUNCTIONS(X)                                                                            \
  X(GetDevice, "cudaGetDevice", "hipGetDevice", int, int*)                                                           \
  X(SetDevice, "cudaSetDevice", "hipSetDevice", int, int)                                                            \
  X(StreamCreate, "cudaStreamCreateWithFlags", "hipStreamCreateWithFlags", int, void**, unsigned)                    \
  X(StreamSynchronize, "cudaStreamSynchronize", "hipStreamSynchronize", int, void*)                                  \
  X(StreamWaitEvent, "cudaStreamWaitEvent", "hipStreamWaitEvent", int, void*, void*, unsigned)                       \
  X(EventCreate, "cudaEventCreateWithFlags", "hipEventCreateWithFlags", int, void**, unsigned)                       \
  X(EventRecord, "cudaEventRecord", "hipEventRecord", int, void*, void*)                                             \
  X(EventSynchronize, "cudaEventSynchronize", "hipEventSynchronize", int, void*)                                     \
  X(HostRegister, "cudaHostRegister", "hipHostRegister", int, void*, size_t, unsigned)                               \
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

// The names of the same functions, in the order in which pycollective_bind_runtime takes their addresses.
inline constexpr const char* kRuntimeNames[][2] = {
#define PYCOLLECTIVE_NAME(name, cuda, hip, result, ...) {cuda, hip},
    PYCOLLECTIVE_RUNTIME_FUNCTIONS(PYCOLLECTIVE_NAME)
#undef PYCOLLECTIVE_NAME
};
inline constexpr size_t kRuntimeCount = sizeof(kRuntimeNames) / sizeof(kRuntimeNames[0]);

// The functions for dispatch ahead (Device::TryAhead), of CUDA's runtime and of its driver. They may be missing: HIP's waits for values
// have other parameters. One row for each function: our name, its name, the types of its parameters. All return an int.
#define PYCOLLECTIVE_AHEAD_FUNCTIONS(X)                                            \
  X(StreamCreateWithPriority, "cudaStreamCreateWithPriority", void**, unsigned, int) \
  X(GetStreamPriorityRange, "cudaDeviceGetStreamPriorityRange", int*, int*)          \
  X(StreamDestroy, "cudaStreamDestroy", void*)                                       \
  X(HostGetDevicePointer, "cudaHostGetDevicePointer", void**, void*, unsigned)       \
  X(StreamWaitValue, "cuStreamWaitValue32_v2", void*, uint64_t, uint32_t, unsigned)  \
  X(StreamWriteValue, "cuStreamWriteValue32_v2", void*, uint64_t, uint32_t, unsigned)

struct AheadRuntime {
#define PYCOLLECTIVE_DECLARE(name, cuda, ...) int (*name)(__VA_ARGS__);
  PYCOLLECTIVE_AHEAD_FUNCTIONS(PYCOLLECTIVE_DECLARE)
#undef PYCOLLECTIVE_DECLARE
};

// Their names, in the order in which pycollective_bind_ahead takes their addresses.
inline constexpr const char* kAheadNames[] = {
#define PYCOLLECTIVE_NAME(name, cuda, ...) cuda,
    PYCOLLECTIVE_AHEAD_FUNCTIONS(PYCOLLECTIVE_NAME)
#undef PYCOLLECTIVE_NAME
};

// Values of the runtime's enums and flags; they are the same in CUDA and HIP.
inline constexpr int kHostToDevice = 1;
inline constexpr int kDeviceToHost = 2;
inline constexpr int kByAddress = 4;  // cudaMemcpyDefault: either end may be on the device
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostPortable = 1;
inline constexpr unsigned kHostMapped = 2;
inline constexpr unsigned kWaitValueAtLeast = 0;  // the difference as a signed number is at least 0, so numbers may wrap around
inline constexpr unsigned kWriteValueBehind = 0;  // behind all that the stream has written before

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_DEVICES_RUNTIME_H_
