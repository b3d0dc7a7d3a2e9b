// The monitor of a process: threads that need neither Python nor MPI.
//
// One answers what other ranks ask on the side channel: what this process does (Status), and that it shall end. The other
// looks at the calls under way. When one lasts too long it tells the lowest rank that answers, which asks all ranks what
// they do, writes one report, and ends the job.
//
// One or two more notice the deaths of other ranks (rank_guard.h). Answers for which this rank has to ask others have threads of their
// own (ask_tree.h).
//
// The leader of a host is its lowest rank that answers. The states of a wait of this rank, which the watcher changes
// (Monitor::WatchOnce):
//
//   silent --- it is as old as warn_ns, and the first warning of it ---> asking: (a)
//   silent or warned --- it is as old as timeout_ns ---> asking: (a), and the job shall end
//   asking --- (a) a rank has asked this one for its status, for this reason or a graver one, in the last 15 s ---> told
//   asking for another rank of this host, of a long wait --- (a) a rank of another host has taken a report from this one in the last 15 s
//     ---> told
//   asking --- (a) a lower rank of this host answers, and takes the report to the lowest rank ---> told
//   asking --- (a) there is none: this rank leads its host ---> leading
//   leading --- some ms later, a rank of another host has asked for the status by now ---> told
//   leading --- some ms later, a lower rank of another host answers, and takes the report ---> told
//   leading --- no lower rank answers ---> reporting: this rank asks all ranks what they do
//   told --- that rank reports; this one says nothing, unless the job shall end
//   told --- the job shall end, and this rank has heard of no end 15 s after the last question for its status (18 s if it had told
//     its leader) ---> reporting
//   reporting --- by the answers the wait has ended, or is not a long one ---> silent
//   reporting --- it is a long wait ---> warned: this rank has printed a report, at most one in 15 s
//   reporting --- the job shall end, or a rank has ended for which others wait for ever ---> ended
//   any --- the wait ends ---> no record is under way any more
//   any --- another rank has told the end (kEndNow), or the launcher has ended ---> ended
//
// A rank that others ask to report (kReport) goes from any of these states to leading, if those are of its host, else to
// reporting. A rank that has come to its end asks from time to time as well, since others may wait for it (kSomeHaveEnded).

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_MONITOR_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_MONITOR_H_

#include <cstdint>
#include <string>
#include <vector>

#include "monitor/process.h"

namespace pycollective {

struct MonitorSettings {
  int rank = 0;
  std::vector<Process> processes;  // by their ranks in MPI_COMM_WORLD
  std::vector<int> listening;  // sockets of this process
  std::string secret;
  int64_t warn_ns = 0;     // the age of a call at which all ranks are asked once; 0: never
  int64_t timeout_ns = 0;  // the age at which the job ends; 0: never
  // Where this process writes its records when the job fails; "": nowhere.
  std::string folder;
  bool may_lose_ranks = false;  // whether MPI ends the waits for a rank that has died, and the others may go on
  bool says_deaths = false;  // whether it says that a rank of its host has died: the launcher may not
};

// Starts the threads. They live as long as the process, or until StopMonitor. Returns why it could not; "" if it could.
std::string StartMonitor(MonitorSettings settings);
void SetMonitorTimeout(int64_t warn_ns, int64_t timeout_ns);
void StopMonitor();
// Tells the rank that guards this one that this process ends, in order.
void LeaveMonitor();
// Leaves a rank out from now on: it has failed, and the others go on without it.
void ForgetRank(int rank);

// Ends the job: tells all other ranks, which write their records, and writes this rank's. Then the caller ends this
// process. Returns false if another rank has told this one to end before: then the other rank's cause is the first.
bool BeginEnd(int status, const std::string& cause);

// Ends the job, and this process, in a call that this rank cannot make while others wait in it. If the job ends already, it
// waits for that end: the call never returns.
[[noreturn]] void EndJob(const std::string& text);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_MONITOR_H_
