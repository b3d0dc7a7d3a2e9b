// Memory for arrays that all ranks of a host have mapped, each at an address of its own.
//
// Each rank has a part of it, from which it takes memory for its own arrays: the page-locked buffers of its accelerators (device.h). The
// other ranks read an array there where they have mapped it, without the kernel (Exchange::Mapped).
//
// All ranks of a call must have their arrays there, or none: by that they choose the algorithm (HostCollective::AlgorithmOf). So all ranks
// of a host open the memory or none does, and where it is open all buffers of all devices of a rank lie in its part. Memory that a call has
// used stays the buffer's.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_SHARED_ARRAYS_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_SHARED_ARRAYS_H_

#include <cstddef>

namespace pycollective {

class SharedArrays {
 public:
  // Before programs run.
  // @param memory: where this rank has mapped it, `nbytes` bytes.
  // @param own: where this rank's part begins, which has `own_bytes` bytes. It begins at a page.
  static void Open(char* memory, size_t nbytes, char* own, size_t own_bytes);
  // Unmaps it, if it is open. This rank has taken nothing.
  static void Close();

  // Takes memory of this rank's part, whole pages. Returns null if the part has no room, or if there is none.
  static void* Take(size_t nbytes);
  // Gives back what was taken last. No call may have used it.
  static void GiveBack(void* taken);

  // Whether an array of this rank, or another address of this process, lies in the memory.
  static bool Has(const void* data);
  // Where this rank has mapped the memory; null: it is not open.
  static const void* begin();
  // Where this rank has mapped what lies at the address `data` of another process; null if that lies elsewhere.
  // @param begin_there: where the other process has mapped the memory.
  static const void* Mapped(const void* begin_there, const void* data);
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_SHARED_ARRAYS_H_
