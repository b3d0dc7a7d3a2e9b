// The watch over the start of MPI: MPI_Init returns when all ranks call it, and says nothing while it waits.
//
// A thread of C++ looks at the processes of this host: Python holds its lock while MPI starts. It needs neither Python nor
// MPI. A rank that waits in MPI's start has a thread of the watch's name, by which the watches of other ranks know it.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_START_WATCH_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_START_WATCH_H_

#include <cstdint>
#include <string>
#include <vector>

namespace pycollective {

struct StartSettings {
  int rank = 0;
  int size = 1;
  int local_size = 0;  // ranks on this host; 0: the launcher does not say it
  std::string rank_variable;  // where a process of this job has the number of its rank
  // The variables that all processes of a rank have alike, and the launcher's own process does not.
  std::vector<std::string> own_variables;
  int64_t limit_ns = 0;  // the wait after which this process ends; 0: never
};

// What a look at the processes of this host has found.
struct LocalRanks {
  bool is_known = false;             // else the host does not show them
  bool is_complete = false;          // whether every process of the launcher on this host is that of a rank
  std::vector<int> waiting;          // ranks that wait in MPI's start, in ascending order, as the next
  std::vector<int> running;          // ranks that have a process, and do not
  std::vector<int64_t> running_pids;  // a process of each of those
};

// Looks once.
LocalRanks LookAtLocalRanks(const StartSettings& settings);

// The ranks of this host that do not wait, in words.
std::string Describe(const LocalRanks& ranks, const StartSettings& settings);

// Begins to watch. Ends this process, with a sentence, when the limit is over, or when a rank of this host has ended: then
// it never comes. Prints what is known after 30 s, or half of a shorter limit.
void BeginStartWatch(StartSettings settings);
// MPI has started.
void EndStartWatch();

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_START_WATCH_H_
