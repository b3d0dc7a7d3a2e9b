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
  call.site = "train.py:1 (step)";
  return call;
}

// A rank in these calls.
inline Status In(int rank, std::vector<CallStatus> under_way) {
  Status status;
  status.rank = rank;
  status.under_way = std::move(under_way);
  return status;
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_TESTS_NATIVE_STATUSES_H_
