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

// The answer of a rank to kTellStatus. `own`: its status; `ranks`: those that it asks, for the same reason (monitor.h).
Heard HearFor(const SideChannel& channel, const std::vector<Process>& processes, const Status& own, const std::vector<int>& ranks,
              int64_t reason);

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
