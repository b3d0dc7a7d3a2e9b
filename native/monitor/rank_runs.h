// Sets of ranks as messages carry them: runs of equal distance. All ranks of a job, a block of them and every k-th one are one
// run each.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_RANK_RUNS_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_RANK_RUNS_H_

#include <cstddef>
#include <vector>

#include "monitor/side_channel.h"

namespace pycollective {

// Sorts ranks and removes those that stand there twice. All functions below take ranks in this order.
void SortRanks(std::vector<int>* ranks);

// The least number of runs into which the sorted ranks can be cut.
size_t RunCount(const std::vector<int>& ranks);

// Writes their number, and of each run its first rank, its number of ranks and their distance.
void PutRanks(Writer& to, const std::vector<int>& ranks);
// Reads them. Refuses the text if they do not ascend, or if there is one below 0 or not below `size`.
std::vector<int> RanksFrom(Reader& from, int size);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_RANK_RUNS_H_
