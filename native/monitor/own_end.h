// How a process ends that its monitor ends. Each function has a limit: MPI, the launcher and file systems may hang.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_OWN_END_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_OWN_END_H_

#include <cstdint>
#include <vector>

#include "monitor/process.h"

namespace pycollective {

// Ends this process some time from now, whatever hangs until then.
void LimitOwnEnd();

// Waits for an end that is under way.
[[noreturn]] void AwaitEnd();

// Ends this process, since another rank has told it to. Its launcher ends it soon; if the launcher cannot, it ends itself.
[[noreturn]] void EndAsTold(int status, const std::vector<Process>& processes, int64_t host);

// Ends all ranks by MPI_Abort when the launcher has read what this process has written. Then it ends this process.
[[noreturn]] void AbortJob(const std::vector<Process>& processes, int64_t host);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_OWN_END_H_
