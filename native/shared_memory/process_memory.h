// Copies from the memory of another process, and past the caches.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_PROCESS_MEMORY_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_PROCESS_MEMORY_H_

#include <cstddef>
#include <cstdint>

namespace pycollective {

// Lets other processes of this user read this one's memory, where the kernel asks for that (Yama's ptrace_scope 1); or takes that
// back, if it was given here.
void LetOthersRead(bool lets);

// Copies from an address of another process of this host, without its help (process_vm_readv). Returns 0 or an errno: ESRCH if
// the process is gone, EPERM or ENOSYS if the kernel does not let this one read it.
int CopyFromProcess(int64_t process, void* to, const void* from, size_t nbytes);

// As memcpy, but the caches do not get what is written. Saves a read of memory for each write, if the caches cannot
// hold the array. A later store with release order makes it visible, as after memcpy.
void CopyPastCaches(void* to, const void* from, size_t nbytes);

// The bytes of the largest cache of a core alone, and of one that cores share.
int64_t CacheBytesOfCore();
int64_t CacheBytesOfHost();

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_PROCESS_MEMORY_H_
