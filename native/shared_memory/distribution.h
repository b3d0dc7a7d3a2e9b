// A block-cyclic distribution of an array over the ranks of a host.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_DISTRIBUTION_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_DISTRIBUTION_H_

#include <algorithm>
#include <cstdint>

#include "mpi/collectives.h"
#include "mpi/elements.h"

namespace pycollective {

// Block i has the elements i * block, i * block + 1, ..., and belongs to rank i % ranks. The last block may be shorter. The part of
// a rank is its blocks, one after another. Ranks from `ranks` on have no part.
struct Distribution {
  int64_t count;  // elements of the array
  int64_t block;  // elements; at least 1
  int ranks;

  // One block for each rank.
  static Distribution Of(const Shares& shares, int ranks) { return {shares.count, std::max<int64_t>(1, shares.each), ranks}; }

  // The elements of a rank's part. No part is larger than that of rank 0.
  int64_t CountOf(int rank) const {
    if (rank >= ranks) return 0;
    const int64_t round = block * ranks;
    return count / round * block + std::clamp<int64_t>(count % round - rank * block, 0, block);
  }

  // Calls run(element of the array, element of the part, number of elements) for each run of elements `first` to `first + n` of a
  // rank's part that are contiguous in the array, until one fails.
  template <typename Run>
  Outcome ForEachRun(int rank, int64_t first, int64_t n, Run run) const {
    for (const int64_t end = std::min(first + n, CountOf(rank)); first < end;) {
      const int64_t within = first % block, some = std::min(end - first, block - within);
      PYCOLLECTIVE_RETURN_IF_FAILED(run((first / block * ranks + rank) * block + within, first, some));
      first += some;
    }
    return {};
  }
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_DISTRIBUTION_H_
