// What all ranks of the job do, as far as they answer.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_INQUIRY_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_INQUIRY_H_

#include <cstdint>
#include <vector>

#include "monitor/process.h"
#include "monitor/side_channel.h"
#include "monitor/status.h"

namespace pycollective {

// The kinds of requests between monitors, beside SideChannel::kStay.
enum Request : int64_t { kAreYouThere = 1, kTellStatus, kReport, kEndNow, kProcessState, kDeathIsKnown, kTellFrames };

struct Inquiry {
  std::vector<Status> statuses;    // by rank, this one's among them
  std::vector<SilentRank> silent;  // those without a status, and why
};

// Asks other ranks for their status. `own`: this rank's.
Inquiry AskAll(const SideChannel& channel, const std::vector<Process>& processes, const std::vector<int>& others,
               const Status& own);

// Asks those ranks for Python's frames whose place a report does not know otherwise. This one is `own`.
void AskForFrames(const SideChannel& channel, int own, std::vector<Status>* statuses);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_INQUIRY_H_
