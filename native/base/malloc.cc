// How this process keeps freed memory: settings of glibc's malloc.

#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "base/exports.h"

// Keeps some of the freed memory in the process and asks for huge pages under it, so that a large result does not fault
// in page by page each time it is made. `ranks` ranks of this host each keep their share of a quarter of its memory,
// and at most as much as glibc's settings, which are ints, can say. Call this before XLA starts its threads. Returns
// whether glibc took the settings; whether there are huge pages is up to the kernel.
//
// - Large allocations use no mmap: they come from the heap.
// - The heap keeps `kept` bytes when the memory at its end is freed, and gives back the rest.
// - There are no fast bins: glibc merges what lies in them only when a heap is used up or a large block is asked for,
//   and this heap is never used up. A loop of small calls would walk through all of the reserve (a quarter of memory in
//   25 s).
// - There is one arena, since glibc gives the arenas of other threads at most 64 MiB at a time (small allocations stay
//   in each thread's own cache). Arenas that threads have made before, NumPy's BLAS for example, stay, and glibc gives
//   them to later threads too, XLA's among them; they, too, keep memory at their end instead of giving it back whenever
//   they are empty.
// - What will be kept is allocated as address space, advised and freed: later allocations lie there. It is not touched,
//   so it uses no memory yet.
PYCOLLECTIVE_EXPORT bool pycollective_tune_malloc(int32_t ranks) {
#ifdef __GLIBC__
  constexpr int kNone = 0;
  constexpr int kOne = 1;
  constexpr int kMost = 7 << 28;       // 1.75 GiB
  constexpr int kLeast = 64 << 20;     // HEAP_MAX_SIZE of glibc's arena.c
  constexpr int kAboveKept = 64 << 20;  // freed memory at the end of the heap, before the heap gives it back
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page_bytes = sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page_bytes <= 0) return false;
  const int64_t share = int64_t{pages} / 4 * page_bytes / std::max(1, ranks);
  const int kept = static_cast<int>(std::min<int64_t>(std::max<int64_t>(share, kLeast), kMost));
  if (mallopt(M_ARENA_MAX, kOne) != 1 || mallopt(M_MMAP_MAX, kNone) != 1 ||
      mallopt(M_TRIM_THRESHOLD, kept + kAboveKept) != 1 || mallopt(M_MXFAST, kNone) != 1 ||
      mallopt(M_TOP_PAD, kept) != 1) {
    return false;
  }
  if (void* block = std::malloc(static_cast<size_t>(kLeast))) {  // after it lies what the heap keeps
    const uintptr_t page = static_cast<uintptr_t>(page_bytes);
    const uintptr_t first = (reinterpret_cast<uintptr_t>(block) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(block) + static_cast<size_t>(kept)) / page * page;
    madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
    std::free(block);
  }
  return true;
#else
  return false;
#endif
}

namespace {
const pycollective::Listed listed{PYCOLLECTIVE_TYPED(tune_malloc)};
}  // namespace
