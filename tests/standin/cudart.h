// The stand-in for CUDA's runtime: CUDA's functions, and functions for tests.

#ifndef PYCOLLECTIVE_TESTS_STANDIN_CUDART_H_
#define PYCOLLECTIVE_TESTS_STANDIN_CUDART_H_

#include <cstddef>
#include <cstdint>

extern "C" {

// The functions of CUDA that native/devices/runtime.h lists.
int cudaGetDevice(int* device);
int cudaSetDevice(int device);
int cudaStreamCreateWithFlags(void** stream, unsigned flags);
int cudaStreamSynchronize(void* stream);
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags);
int cudaEventCreateWithFlags(void** event, unsigned flags);
int cudaEventRecord(void* event, void* stream);
int cudaEventSynchronize(void* event);
int cudaHostRegister(void* memory, size_t nbytes, unsigned flags);
int cudaMemcpyAsync(void* to, const void* from, size_t nbytes, int kind, void* stream);
int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                      int kind, void* stream);
int cudaMemsetAsync(void* to, int value, size_t nbytes, void* stream);
int cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority);
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
int cudaStreamDestroy(void* stream);
int cudaHostGetDevicePointer(void** device, void* host, unsigned flags);
const char* cudaGetErrorString(int code);

// Functions of CUDA that the tests call: cudaMalloc allocates memory of the device, cudaHostAlloc page-locked memory, and
// cudaLaunchHostFunc makes a stream call function(argument) on the host after its earlier work.
int cudaMalloc(void** memory, size_t nbytes);
int cudaHostAlloc(void** memory, size_t nbytes, unsigned flags);
int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* argument);

// Functions of CUDA's driver. Those of the first list are in it, too: a stream waits until a word of memory is at least a number, by the
// sign of the difference, and a stream writes a number. The others return the device with a number, and the identity of a device.
int cuStreamWaitValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned flags);
int cuStreamWriteValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned flags);
int cuDeviceGet(int* device, int ordinal);
int cuDeviceGetUuid_v2(char* uuid, int device);

// Memory of the device, which only the stand-in's copies and kernels reach: any other access from the host ends the process. A
// kernel gets the address for its accesses from standin_view, which returns other addresses as they are.
void* standin_malloc(size_t nbytes);
void standin_free(void* memory, size_t nbytes);
void* standin_view(const void* memory);
// Lets the host access it too, as an MPI library does that takes such memory.
void standin_open_memory();

// Like cudaLaunchHostFunc, but the function is a kernel: it runs in the order of its stream alone.
int standin_launch(void* stream, void (*kernel)(void*), void* argument);

// Makes every copy take at least this time, and a random time of up to as much besides, which the seed decides.
void standin_set_delay_us(int64_t delay);
// But not copies from the device.
void standin_set_fetches_fast(bool fast);
void standin_set_seed(uint64_t seed);
// Lets the streams that are made from now on share a hardware queue where they have the same priority. Priorities go from 0 to
// `greatest`, a negative number; 0: there is one priority.
void standin_share_queues(int greatest);
// Queues have room for so much work. A thread that waits for room holds a lock that every other thread needs that enqueues work. 0: any.
void standin_limit_queues(int64_t most);
// Makes copies fail whose rows are further apart than this.
void standin_set_max_pitch(int64_t nbytes);
// Makes a call to a function of the runtime fail, by its name: the `nth` from now, from 1. "" counts all functions. `sticky`: all
// later calls fail as well, as after a fault of a kernel.
void standin_fail(const char* function, int64_t nth, bool sticky);
// Puts functions that look at the memory of each call in the place of MPI's, which stand in the order of
// pycollective::kFunctionNames (native/mpi/mpi.h). A call with memory of the wrong kind ends the process with a sentence.
// @param handle_bytes: of MPI's handles.
// @param in_place: MPI_IN_PLACE.
// @param direct: an array of one of these datatypes, if no operation of the package's own reduces it, must lie on the device; else no array
//     may.
// @param strict: the arrays of an allreduce as well, of which small ones go through the host, unless buckets have 0 bytes; and those of
//     MPI_Recv, which gets memory of the host for a message of another dtype or shape than the expected one.
void standin_watch_mpi(void** functions, int64_t handle_bytes, int64_t in_place, bool direct, bool strict, const int64_t* types,
                       int64_t count);
// Returns the largest number of copies, from and to the device, that were under way at the same time.
int64_t standin_most_at_once();
}

#endif  // PYCOLLECTIVE_TESTS_STANDIN_CUDART_H_
