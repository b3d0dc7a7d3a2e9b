// What all ranks of the job do, as far as they answer.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_INQUIRY_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_INQUIRY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "monitor/ask_tree.h"
#include "monitor/heard.h"
#include "monitor/process.h"
#include "monitor/side_channel.h"
#include "monitor/status.h"

namespace pycollective {

// The kinds of requests between monitors, beside SideChannel::kStay. kTellStatus, kEndNow and kDeathIsKnown go by a tree
// (ask_tree.h): the text begins with the ranks to which the rank that is asked hands them on.
enum Request : int64_t {
  kAreYouThere = 1,
  kTellStatus,
  kReport,
  kEndNow,
  kProcessState,
  kDeathIsKnown,
  kTellFrames,
  kTellGroup,
};

// The limits of a head, and of a rank that has an error and looks whose records are of use.
inline constexpr TreeLimits kHeadLimits{1000000000, 3000000000, 5000000000};
inline constexpr TreeLimits kBriefLimits{700000000, 1300000000, 2000000000};

// What some ranks do, and `own`, this rank's status: the answer of a head to kTellStatus. `reason`: see monitor.h.
Heard HearFor(const SideChannel& channel, const std::vector<Process>& processes, const Status& own, const std::vector<int>& ranks,
              int64_t reason, const TreeLimits& limits = kHeadLimits);

struct Inquiry {
  std::vector<Status> statuses;    // joined, this rank's among them
  std::vector<SilentRank> silent;  // those without a status, and why
};

// Asks other ranks for their status, because of a reason (monitor.h). `own`: this rank's.
Inquiry AskAll(const SideChannel& channel, const std::vector<Process>& processes, const std::vector<int>& others,
               const Status& own, int64_t reason);

// Answers kProcessState: of the ranks in `text` that are on this rank's host, the states of their processes.
std::string StatesOf(const std::vector<Process>& processes, int own, const std::string& text);
// Answers kTellGroup: the members of a group of ranks.
std::string MembersOf(const std::string& text);

// Asks those ranks for Python's frames whose place a report does not know otherwise. This one is `own`.
std::vector<RankFrames> AskForFrames(const SideChannel& channel, int own, const std::vector<Status>& statuses);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_INQUIRY_H_
