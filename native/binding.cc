// The C interface that transport/native.py calls through ctypes.

#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "collectives.h"
#include "communicators.h"
#include "device.h"
#include "handlers.h"
#include "hierarchy.h"

using pycollective::CommunicatorCount;
using pycollective::FindCommunicator;

// The MPI functions to look up, "MPI_Allgather" first; null ends the list.
PYCOLLECTIVE_EXPORT const char* pycollective_function_name(int64_t index) {
  if (index < 0 || index >= static_cast<int64_t>(pycollective::kFunctionCount)) return nullptr;
  return pycollective::kFunctionNames[index];
}

// Binds the handlers to an MPI library. `addresses` in the order of pycollective_function_name.
// Returns null, or a message that stays valid.
PYCOLLECTIVE_EXPORT const char* pycollective_bind(const pycollective::Binding* binding,
                                                  void* const* addresses) {
  static std::string error;
  auto made = pycollective::MakeLibrary(*binding, addresses, &error);
  if (made == nullptr) return error.c_str();
  pycollective::library = std::move(made);
  return nullptr;
}

// The functions of an accelerator's runtime to look up, CUDA's or HIP's names; null ends the list.
PYCOLLECTIVE_EXPORT const char* pycollective_runtime_name(int64_t index, int32_t hip) {
  if (index < 0 || index >= static_cast<int64_t>(pycollective::kRuntimeCount)) return nullptr;
  return pycollective::kRuntimeNames[index][hip != 0];
}

// Binds the handlers for accelerators to their runtime. `addresses` in the order of pycollective_runtime_name.
// `direct`: whether MPI reads and writes their memory; else it gets pieces of at most `stage_bytes`.
PYCOLLECTIVE_EXPORT void pycollective_bind_runtime(void* const* addresses, int32_t direct, int64_t stage_bytes) {
  static_assert(sizeof(pycollective::runtime) == pycollective::kRuntimeCount * sizeof(void*), "pointers alone");
  std::memcpy(&pycollective::runtime, addresses, sizeof(pycollective::runtime));
  pycollective::direct = direct != 0;
  pycollective::stage_bytes = stage_bytes;
}

// Returns the communicator's number, or -1 when there are too many.
PYCOLLECTIVE_EXPORT int64_t pycollective_communicator_add(const char* name, int32_t rank, int32_t size,
                                                          int64_t lane_count, const int64_t* device_ids,
                                                          const int64_t* collective,
                                                          const int64_t* point_to_point) {
  auto communicator = std::make_unique<pycollective::Communicator>();
  communicator->name = name;
  for (int64_t i = 0; i < lane_count; ++i) {
    auto lane = std::make_unique<pycollective::Lane>();
    lane->device_id = device_ids[i];
    lane->channel = {collective[i], point_to_point[i], rank, size};
    lane->index = static_cast<int>(i);
    communicator->lanes.push_back(std::move(lane));
  }
  return pycollective::AddCommunicator(std::move(communicator));
}

// A group of local devices x the ranks of communicator `base`, whose channels it uses: the device that calls on lane
// i is number members[i] of team teams[i], teams being of equal size. Returns as pycollective_communicator_add.
PYCOLLECTIVE_EXPORT int64_t pycollective_group_add(const char* name, int64_t base, const int64_t* teams,
                                                   const int64_t* members, int64_t team_size) {
  auto group = std::make_unique<pycollective::Communicator>();
  group->name = name;
  group->base = FindCommunicator(base);
  for (const auto& from : group->base->lanes) {
    auto lane = std::make_unique<pycollective::Lane>();
    lane->device_id = from->device_id;
    lane->channel = from->channel;
    lane->index = from->index;
    if (team_size > 1) {
      const auto team = static_cast<size_t>(teams[from->index]);
      while (group->teams.size() <= team) {
        group->teams.push_back(std::make_unique<pycollective::Team>(static_cast<int>(team_size)));
      }
      lane->team = group->teams[team].get();
      lane->member = static_cast<int>(members[from->index]);
    }
    group->lanes.push_back(std::move(lane));
  }
  for (const auto& lane : group->lanes) {
    for (const auto& other : group->lanes) {
      if (other->team == lane->team && other->member == 0) lane->first = other.get();
    }
  }
  return pycollective::AddCommunicator(std::move(group));
}

PYCOLLECTIVE_EXPORT void pycollective_communicator_free(int64_t number) {
  if (auto* communicator = FindCommunicator(number)) communicator->freed.store(true);
}

// The call that has waited inside MPI for longest.
struct pycollective_Waiting {
  const char* operation;
  const char* communicator;
  int64_t nbytes;
  int64_t waited_ns;
};

// Returns whether any call is under way.
PYCOLLECTIVE_EXPORT bool pycollective_longest_wait(pycollective_Waiting* longest) {
  const int64_t now = pycollective::NowNs();
  longest->waited_ns = -1;
  for (int64_t number = 0; number < CommunicatorCount(); ++number) {
    auto* communicator = FindCommunicator(number);
    for (const auto& lane : communicator->lanes) {
      const char* operation = lane->operation.load(std::memory_order_acquire);
      if (operation == nullptr) continue;
      const int64_t waited_ns = now - lane->started_ns.load(std::memory_order_relaxed);
      if (waited_ns <= longest->waited_ns) continue;
      *longest = {operation, communicator->name.c_str(), lane->nbytes.load(std::memory_order_relaxed),
                  waited_ns};
    }
  }
  return longest->waited_ns >= 0;
}

// 0: never compare what the ranks call; 1: the first time a lane meets a call; 2: every time.
PYCOLLECTIVE_EXPORT void pycollective_set_check(int32_t when) {
  pycollective::check = static_cast<pycollective::Check>(when);
}

// See hierarchy.h.
PYCOLLECTIVE_EXPORT void pycollective_set_all_lanes(int32_t all) { pycollective::all_lanes = all != 0; }

// For tests: counts above this take the path of arrays beyond MPI's int.
PYCOLLECTIVE_EXPORT void pycollective_set_max_count(int64_t max_count) {
  pycollective::library->max_count = max_count;
}

// Keeps freed memory in the process and asks for huge pages under it, so that a large result does not fault in
// page by page each time it is made:
// - no mmap for a large allocation, and no trimming: the heap keeps what it has had;
// - no fast bins: what lies in them is merged only when a heap is used up or a large block is asked for, which this one
//   is not; a loop of small calls would walk through all of the reserve (a quarter of memory in 25 s);
// - one arena, since glibc gives other threads' arenas at most 64 MiB at a time (small allocations stay in each
//   thread's own cache). Arenas that threads of NumPy's BLAS, say, have made before stay, and glibc gives them to later
//   threads too, XLA's among them: a pad of 64 MiB keeps such an arena from giving its memory back whenever it is empty;
// - a quarter of the machine's memory is taken as address space, advised and given back: allocations to come lie
//   there. Nothing of it is touched, so nothing is used up.
// Call this before XLA starts its threads. Returns whether glibc took the settings; huge pages are a hope.
PYCOLLECTIVE_EXPORT bool pycollective_tune_malloc() {
#ifdef __GLIBC__
  constexpr int kNone = 0;
  constexpr int kOne = 1;
  constexpr int kNever = -1;
  constexpr int kArenaBytes = 64 << 20;  // HEAP_MAX_SIZE of glibc's arena.c
  if (mallopt(M_ARENA_MAX, kOne) != 1 || mallopt(M_MMAP_MAX, kNone) != 1 ||
      mallopt(M_TRIM_THRESHOLD, kNever) != 1 || mallopt(M_MXFAST, kNone) != 1 ||
      mallopt(M_TOP_PAD, kArenaBytes) != 1) {
    return false;
  }
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page_bytes = sysconf(_SC_PAGESIZE);
  if (pages > 0 && page_bytes > 0) {
    const size_t nbytes = static_cast<size_t>(pages) / 4 * static_cast<size_t>(page_bytes);
    if (void* block = std::malloc(nbytes)) {
      const uintptr_t page = static_cast<uintptr_t>(page_bytes);
      const uintptr_t first = (reinterpret_cast<uintptr_t>(block) + page - 1) / page * page;
      const uintptr_t end = (reinterpret_cast<uintptr_t>(block) + nbytes) / page * page;
      madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
      std::free(block);
    }
  }
  return true;
#else
  return false;
#endif
}
