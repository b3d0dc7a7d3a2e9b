// What ranks answer in tests of reports: their calls under way.

#ifndef PYCOLLECTIVE_TESTS_NATIVE_STATUSES_H_
#define PYCOLLECTIVE_TESTS_NATIVE_STATUSES_H_

#include <utility>
#include <vector>

#include "base/operations.h"
#include "monitor/status.h"

namespace pycollective {

// A call that waits for these ranks.
inline CallStatus Waits(Operation operation, std::vector<int> members) {
  CallStatus call;
  call.operation = operation;
  call.state = kStarted;
  call.members = std::move(members);
  if (call.is_for_all()) call.group_size = static_cast<int64_t>(call.members.size());
  call.site = "train.py:1 (step)";
  return call;
}

// A rank in these calls.
inline Status In(int rank, std::vector<CallStatus> under_way) {
  Status status;
  status.ranks = {rank};
  status.under_way = std::move(under_way);
  return status;
}

// As many ranks, from 0 on.
inline std::vector<int> Count(int ranks) {
  std::vector<int> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(rank);
  return all;
}


}  // namespace pycollective

#endif  // PYCOLLECTIVE_TESTS_NATIVE_STATUSES_H_
