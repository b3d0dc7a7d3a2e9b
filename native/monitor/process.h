// This process and others of its host, as the kernel shows them; what this process prints.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_PROCESS_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_PROCESS_H_

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "monitor/side_channel.h"

namespace pycollective {

// A process of the job, as the others know it. Those that are not of the job have pid 0.
struct Process {
  std::vector<Address> addresses;
  int64_t pid;
  int64_t started;  // field 22 of /proc/PID/stat: with the pid it names one process of a host
  int64_t host;     // processes on one host have the same number
  std::string host_name;
};

// The letter of its state, as /proc shows it; 0 if there is no such process on this host any more.
int64_t StateOf(const Process& process);

// Kills those processes of a host, this one's, that are stopped. They would outlive the job: a launcher's SIGTERM waits
// until they go on.
void EndStopped(const std::vector<Process>& processes, int64_t host);

// Writes a text to the standard error, as far as the launcher or the terminal takes it within `limit_ns`: nobody may read it.
// It needs no memory.
void Say(std::string_view text, int64_t limit_ns = 2000000000);
// Waits until the launcher has read it: the launcher may throw away what it has not read when the job ends.
//
// launch/child_processes.py has the same for processes that have not loaded this library, such as a rank before `init`. This
// one runs in threads that must not need the interpreter, whose lock another thread may keep. The times are Python's.
void WaitUntilRead();

// Says, for the first failures of this process, that its monitor could not do something.
void SayFailure(const char* what, const char* why);
// Makes one step of a monitor's thread, and says if it fails: there may be no memory, or no thread to be had. Returns whether it
// has succeeded. The step that comes next is made all the same.
template <typename Step>
bool Tried(const char* what, Step&& step) {
  try {
    step();
    return true;
  } catch (const std::exception& error) {
    SayFailure(what, error.what());
    return false;
  }
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_PROCESS_H_
