// Implementation of own_reductions.h.

#include "mpi/own_reductions.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "mpi/bfloat16.h"

namespace pycollective {

Outcome SumAsBfloat16(const Library& library, const Channel& channel, const Arguments& arguments) {
  const int64_t count = arguments.count;
  const auto* x = static_cast<const float*>(arguments.send);
  auto* y = static_cast<float*>(arguments.recv);
  if (channel.size == 1) {
    if (x != y && count > 0) std::memcpy(y, x, static_cast<size_t>(count) * sizeof(float));
    return {};
  }
  constexpr int64_t kPiece = 1 << 20;  // elements: 4 MiB, which stay in the caches between the steps
  const int64_t ranks = channel.size;
  const int64_t most = (std::min(count, kPiece) + ranks - 1) / ranks * ranks;
  const std::unique_ptr<uint16_t[]> scratch(new uint16_t[static_cast<size_t>(2 * most)]);
  uint16_t* const mine = scratch.get();
  uint16_t* const theirs = mine + most;
  for (int64_t first = 0; first < count; first += kPiece) {
    const int64_t n = std::min(count - first, kPiece);
    const int64_t block = (n + ranks - 1) / ranks;
    for (int64_t i = 0; i < n; ++i) mine[i] = ToBfloat16(x[first + i]);
    std::fill(mine + n, mine + block * ranks, uint16_t{0});
    PYCOLLECTIVE_RETURN_IF_FAILED(library.Alltoall(channel, {mine, theirs, block, Type::kUint16}));
    for (int64_t i = 0; i < block; ++i) {
      float sum = FromBfloat16(theirs[i]);
      for (int64_t rank = 1; rank < ranks; ++rank) sum += FromBfloat16(theirs[rank * block + i]);
      mine[i] = ToBfloat16(sum);
    }
    PYCOLLECTIVE_RETURN_IF_FAILED(library.Allgather(channel, {mine, theirs, block, Type::kUint16}));
    for (int64_t i = 0; i < n; ++i) y[first + i] = FromBfloat16(theirs[i]);
  }
  return {};
}

}  // namespace pycollective
