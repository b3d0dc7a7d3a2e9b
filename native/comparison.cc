// Implementation of comparison.h.

#include "comparison.h"

#include <algorithm>
#include <cstring>

#include "elements.h"
#include "messages.h"
#include "reduction.h"

namespace pycollective {
namespace {

struct Block {
  uint64_t digest;
  alignas(8) char data[kCarriedBytes];
};
static_assert(sizeof(Block) == 128, "ranks send it as bytes");

}  // namespace

bool Reduction::IsCarried() const {
  if (arrays == nullptr || arrays->empty() || op == Op::kSumBfloat16) return false;
  int64_t nbytes = 0;
  for (const ArrayPair& array : *arrays) {
    if (array.type != arrays->front().type) return false;
    nbytes += array.nbytes();
  }
  return nbytes <= kCarriedBytes;
}

Outcome CompareWithAll(const Library& mpi, const Channel& channel, const Post& own, const Reduction* carried,
                       Difference* found) {
  Block mine{own.Digest(), {}};
  int64_t count = 0;
  Type type = Type::kUint8;
  if (carried != nullptr) {
    type = carried->arrays->front().type;
    for (const ArrayPair& array : *carried->arrays) {
      if (array.count > 0) std::memcpy(At(mine.data, count, type), array.x, static_cast<size_t>(array.nbytes()));
      count += array.count;
    }
  }
  std::vector<Block> all(static_cast<size_t>(channel.size));
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Allgather(channel, {&mine, all.data(), sizeof(Block), Type::kUint8}));
  if (std::any_of(all.begin(), all.end(), [&](const Block& block) { return block.digest != mine.digest; })) {
    const Told own_call(own);
    std::vector<Told> calls(all.size());
    PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Allgather(channel, {&own_call, calls.data(), sizeof(Told), Type::kUint8}));
    for (size_t rank = 0; rank < calls.size(); ++rank) {
      if (own.Matches(calls[rank].post)) continue;
      *found = {static_cast<int>(rank), calls[rank].post, calls[rank].line};
      return {};
    }
  }
  if (carried == nullptr) return {};
  alignas(16) char result[kCarriedBytes];
  ReduceInOrder(channel.size, [&](int rank) { return all[static_cast<size_t>(rank)].data; }, count, result, type, carried->op);
  int64_t first = 0;
  for (const ArrayPair& array : *carried->arrays) {
    if (array.count > 0) std::memcpy(array.y, At(result, first, type), static_cast<size_t>(array.nbytes()));
    first += array.count;
  }
  return {};
}

}  // namespace pycollective
