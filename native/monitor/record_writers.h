// Which ranks write their records when a job ends: all ranks of a small job, a sample of a large one.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_RECORD_WRITERS_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_RECORD_WRITERS_H_

#include <cstddef>
#include <vector>

#include "monitor/status.h"

namespace pycollective {

// Up to so many ranks all write.
inline constexpr int kAllWrite = 16;
// Of more ranks: the most that write of the most common status, of all other statuses, and of the ranks without a status. The first
// number is greater than the second one and one more rank, so that the records show what most ranks did.
inline constexpr size_t kMostUsual = 33;
inline constexpr size_t kMostOthers = 31;
inline constexpr size_t kMostSilent = 64;

// The ranks that write, of `size` ranks, in ascending order. `own`, the rank that ends the job, is one of them. `statuses`: what ranks do,
// joined (Joined); empty if nobody knows. `silent`: ranks that have told no status. They have no records to write, unless they go on.
std::vector<int> RecordWriters(int size, int own, const std::vector<Status>& statuses, const std::vector<int>& silent);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_RECORD_WRITERS_H_
