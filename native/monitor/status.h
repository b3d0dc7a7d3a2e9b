// What a rank does at a moment, as other ranks are told; and the report that one rank makes of what all ranks do.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_STATUS_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_STATUS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "monitor/python_stacks.h"
#include "records/recorder.h"

namespace pycollective {

// A call of a rank, with names in the place of numbers that only its process knows.
struct CallStatus {
  int64_t group = 0;
  int64_t channel = 0;
  int64_t operation = 0;
  int64_t seq = 0;
  int64_t state = 0;
  int64_t age_ns = 0;  // since the call began, if it is under way; else since it ended
  std::string description;
  std::string site;
  std::string group_name;
  // Those without whom the call does not end, in MPI_COMM_WORLD; only if it is under way.
  std::vector<int> members;

  // Whether all its members must make it.
  bool is_for_all() const {
    return IsCollective(static_cast<int32_t>(operation)) || (operation >= kFirstWait && operation != kEnd);
  }
  bool is_wait(Wait wait) const { return operation == wait; }
};

struct Status {
  int rank = 0;
  std::vector<CallStatus> under_way;  // the one that began first in front
  std::vector<CallStatus> last;       // the last call of each channel that has ended, the latest in front
  bool has_all = false;               // whether `last` has all channels on which the rank has ever called
  PythonFrames stacks;                // if it was asked for: RanksWithoutPlace
};

// Finds out what this process does. It does not ask Python.
Status StatusOfThisProcess(int rank);
std::string Packed(const Status& status);
// Returns whether `text` holds a whole status.
bool Unpack(const std::string& text, Status* status);
std::string Packed(const PythonFrames& frames);
bool Unpack(const std::string& text, PythonFrames* frames);

// A rank without a status: why there is none, as a sentence without its subject: "does not answer".
struct SilentRank {
  int rank;
  std::string why;
  bool has_ended;  // its process is gone
};

// The ranks whose frames a report shows: those that the others wait for, and those that wait in a call whose line nobody
// knows.
std::vector<int> RanksWithoutPlace(const std::vector<Status>& statuses);

// What all ranks do: which wait in which call, which do not, and what does not match.
std::string DescribeAll(const std::vector<Status>& statuses, const std::vector<SilentRank>& silent);

// Whether some ranks wait for a rank that has ended, and so will wait for ever.
bool WaitForEnded(const std::vector<Status>& statuses, const std::vector<SilentRank>& silent);

// Whether any rank waits so long for others, before its end. 0: there is no such limit.
bool IsLongWait(const std::vector<Status>& statuses, int64_t limit_ns);

// Ranks as messages name them: "rank 1", "ranks 0, 2-5".
std::string RankList(std::vector<int> ranks);

// "12.3 s"
std::string Seconds(int64_t ns);
// "600 s", "0.5 s"
std::string LimitText(int64_t ns);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_STATUS_H_
