// Implementation of combining_tree.h.

#include "shared_memory/combining_tree.h"

#include "shared_memory/board.h"

namespace pycollective {
namespace {

char* memory = nullptr;
int ranks_of_host = 0;

}  // namespace

size_t CombiningTree::BytesOf(int ranks) {
  static_assert(sizeof(Room) % 4096 == 0, "a rank's room lies in pages of its own, which are near its core");
  return static_cast<size_t>(BoardSlot::kSlots) * static_cast<size_t>(ranks) * sizeof(Room);
}

void CombiningTree::OpenMemory(void* begin, int ranks) {
  memory = static_cast<char*>(begin);
  ranks_of_host = ranks;
}

CombiningTree::Room& CombiningTree::RoomOf(int rank) const {
  const size_t place = static_cast<size_t>(slot_) * static_cast<size_t>(ranks_of_host) + static_cast<size_t>(rank);
  return reinterpret_cast<Room*>(memory)[place];
}

void CombiningTree::Begin() { RoomOf(rank_).posted.Clear(); }

}  // namespace pycollective
