// The C interface that transport/native.py calls through ctypes.

#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
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

using pycollective::FindCommunicator;
using pycollective::Lane;

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

// A communicator on `lane_count` devices of each rank, by their ids. `calls`, `rest`: as Ranks has them. Returns its number.
PYCOLLECTIVE_EXPORT int64_t pycollective_communicator_add(const char* name, int64_t fingerprint, int32_t rank,
                                                          int32_t size, int32_t lane_count, const int64_t* device_ids,
                                                          int64_t calls, int64_t rest) {
  const auto ranks = std::make_shared<pycollective::Ranks>(rank, size, lane_count, calls, rest);
  auto communicator = std::make_shared<pycollective::Communicator>(name, fingerprint, ranks);
  for (int i = 0; i < lane_count; ++i) {
    communicator->lanes.push_back(std::make_unique<Lane>(device_ids[i], i, ranks->channel(i), i));
  }
  return pycollective::AddCommunicator(std::move(communicator));
}

// A part of communicator `whole`: `size` of its ranks, in the order of `members` (null: all of them), of which this is
// `rank`. Its devices: those of the whole (`lane_count` < 0); or those of a mesh, in its order, the i-th being number
// seats[i] of team teams[i], teams being of equal size. Returns its number.
PYCOLLECTIVE_EXPORT int64_t pycollective_part_add(const char* name, int64_t fingerprint, int64_t whole, int32_t rank,
                                                  int32_t size, const int32_t* members, int32_t lane_count,
                                                  const int64_t* device_ids, const int32_t* teams,
                                                  const int32_t* seats, int32_t team_size) {
  const auto of = FindCommunicator(whole);
  const auto ranks = members == nullptr ? of->ranks : pycollective::PartOf(*of, {members, members + size}, rank);
  auto part = std::make_shared<pycollective::Communicator>(name, fingerprint, ranks);
  part->whole = of;
  part->by_position = lane_count >= 0;
  if (!part->by_position) {
    for (const auto& lane : of->lanes) {
      part->lanes.push_back(
          std::make_unique<Lane>(lane->device_id, lane->index, ranks->channel(lane->index), lane->index));
    }
  }
  for (int i = 0; i < lane_count; ++i) {
    const int number = ranks->devices() + i;
    part->lanes.push_back(std::make_unique<Lane>(device_ids[i], i, ranks->channel(number), number));
    if (team_size > 1) {
      const auto team = static_cast<size_t>(teams[i]);
      while (part->teams.size() <= team) part->teams.push_back(std::make_unique<pycollective::Team>(team_size));
      part->lanes.back()->team = part->teams[team].get();
      part->lanes.back()->member = seats[i];
    }
  }
  for (const auto& lane : part->lanes) {
    for (const auto& other : part->lanes) {
      if (other->team == lane->team && other->member == 0) lane->first = other.get();
    }
  }
  return pycollective::AddCommunicator(std::move(part));
}

// See FreeCommunicator. Returns null, or a message that stays valid until the next call.
PYCOLLECTIVE_EXPORT const char* pycollective_communicator_free(int64_t number) {
  static std::string error;
  const pycollective::Outcome outcome = pycollective::FreeCommunicator(*pycollective::library, number);
  if (outcome.ok()) return nullptr;
  error = std::string(outcome.call) + ": " + pycollective::library->ErrorString(outcome.code);
  return error.c_str();
}

// The call that has waited inside MPI for longest. The communicator's name is valid until the next call.
struct pycollective_Waiting {
  const char* operation;
  const char* communicator;
  int64_t nbytes;
  int64_t waited_ns;
};

// Returns whether any call is under way.
PYCOLLECTIVE_EXPORT bool pycollective_longest_wait(pycollective_Waiting* longest) {
  static std::string name;
  const int64_t now = pycollective::NowNs();
  longest->waited_ns = -1;
  for (const auto& communicator : pycollective::LiveCommunicators()) {
    const auto look = [&, &of = communicator->name](const Lane& lane) {
      const char* operation = lane.operation.load(std::memory_order_acquire);
      if (operation == nullptr) return;
      const int64_t waited_ns = now - lane.started_ns.load(std::memory_order_relaxed);
      if (waited_ns <= longest->waited_ns) return;
      name = of;
      *longest = {operation, name.c_str(), lane.nbytes.load(std::memory_order_relaxed), waited_ns};
    };
    look(communicator->alone);
    for (const auto& lane : communicator->lanes) look(*lane);
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

// Keeps some of the freed memory in the process and asks for huge pages under it, so that a large result does not fault
// in page by page each time it is made:
// - no mmap for a large allocation: it comes from the heap;
// - the heap keeps `kept` bytes when what lies at its end is freed, and gives back the rest;
// - no fast bins: what lies in them is merged only when a heap is used up or a large block is asked for, which this one
//   is not; a loop of small calls would walk through all of the reserve (a quarter of memory in 25 s);
// - one arena, since glibc gives other threads' arenas at most 64 MiB at a time (small allocations stay in each
//   thread's own cache). Arenas that threads of NumPy's BLAS, say, have made before stay, and glibc gives them to later
//   threads too, XLA's among them; what a heap keeps keeps such an arena, too, from giving its memory back whenever it is
//   empty;
// - what will be kept is taken as address space, advised and freed: allocations to come lie there. Nothing of it is
//   touched, so nothing is used up.
// `ranks` of this host each keep their share of a quarter of its memory, and at most as much as glibc's settings, which
// are ints, can say. Call this before XLA starts its threads. Returns whether glibc took the settings; huge pages are a
// hope.
PYCOLLECTIVE_EXPORT bool pycollective_tune_malloc(int32_t ranks) {
#ifdef __GLIBC__
  constexpr int kNone = 0;
  constexpr int kOne = 1;
  constexpr int kMost = 7 << 28;       // 1.75 GiB
  constexpr int kLeast = 64 << 20;     // HEAP_MAX_SIZE of glibc's arena.c
  constexpr int kAboveKept = 64 << 20;  // freed at the end of the heap, before it is given back
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
  if (void* block = std::malloc(static_cast<size_t>(kLeast))) {  // comes with what the heap keeps behind it
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
