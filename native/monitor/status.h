// What a rank does at a moment, as other ranks are told; and the report that one rank makes of what all ranks do.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_STATUS_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_STATUS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "monitor/python_stacks.h"
#include "monitor/rank_runs.h"
#include "monitor/side_channel.h"
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
  // Of a call of a whole group, if it is under way: how many members it has. A status that travels has the number alone where the
  // members are more than kMostRuns runs.
  int64_t group_size = 0;

  // Whether all its members must make it.
  bool is_for_all() const {
    return IsCollective(static_cast<int32_t>(operation)) || (operation >= kFirstWait && operation != kEnd);
  }
  bool is_wait(Wait wait) const { return operation == wait; }
  // Whether the members are known to be others than those in `members`.
  bool lacks_members() const { return members.empty() && group_size > 0; }
};

// The most runs (rank_runs.h) of a call's members in a status that travels. An axis of a mesh is one run.
inline constexpr size_t kMostRuns = 16;

// What some ranks do, all of them the same but for times: a call that is under way is as old as the oldest one of theirs, and the
// last call of a rank ended when the latest one of theirs did.
struct Status {
  std::vector<int> ranks;             // ascending
  std::vector<CallStatus> under_way;  // the one that began first in front
  // Of a rank without a call under way its last call. Of a rank at its end the last call of each channel; only the first of
  // these, the latest, has texts.
  std::vector<CallStatus> last;
  bool has_all = false;  // at the end: whether `last` has all channels on which the rank has ever called
};

// Finds out what this process does. It does not ask Python.
Status StatusOfThisProcess(int rank);
// Joins those that differ in times alone. The result is in the order of the lowest ranks.
std::vector<Status> Joined(const std::vector<Status>& statuses);

void Put(Writer& to, const std::vector<Status>& statuses);
// The reader is not ok if they are no statuses of ranks below `size`.
std::vector<Status> StatusesFrom(Reader& from, int size);
std::string Packed(const PythonFrames& frames);
bool Unpack(const std::string& text, PythonFrames* frames);

// A rank without a status: why there is none, as a sentence without its subject: "does not answer".
struct SilentRank {
  int rank;
  std::string why;
  bool has_ended;  // its process is gone
  std::string why_of_many;  // the same of several ranks, without their processes; "": `why` has none
};

// Where Python stands on a rank.
struct RankFrames {
  int rank;
  PythonFrames frames;
};

// The ranks whose frames a report shows: those that the others wait for, and those that wait in a call whose line nobody
// knows. Of many it names kMostFrames, some of each status.
std::vector<int> RanksWithoutPlace(const std::vector<Status>& statuses);
inline constexpr size_t kMostFrames = 16;

// What all ranks do: which wait in which call, which do not, and what does not match. The text has at most some dozens of lines,
// however many ranks there are.
std::string DescribeAll(const std::vector<Status>& statuses, const std::vector<SilentRank>& silent,
                        const std::vector<RankFrames>& frames = {});

// Whether some ranks wait for a rank that has ended, and so will wait for ever.
bool WaitForEnded(const std::vector<Status>& statuses, const std::vector<SilentRank>& silent);

// Whether any rank waits so long for others, before its end. 0: there is no such limit.
bool IsLongWait(const std::vector<Status>& statuses, int64_t limit_ns);

// Ranks as messages name them: "rank 1", "ranks 0, 2-5". Of more than some dozens of pieces the text counts the last ones.
std::string RankList(std::vector<int> ranks);

// "12.3 s"
std::string Seconds(int64_t ns);
// "600 s", "0.5 s"
std::string LimitText(int64_t ns);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_STATUS_H_
