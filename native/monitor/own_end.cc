// Implementation of own_end.h.

#include "monitor/own_end.h"

#include <unistd.h>

#include <chrono>
#include <thread>

#include "mpi/collectives.h"

namespace pycollective {
namespace {

constexpr auto kLastWords = std::chrono::seconds(4);  // for a process that was told to end to end by itself
constexpr auto kWholeEnd = std::chrono::seconds(20);  // for all that the rank does which ends the job

}  // namespace

void LimitOwnEnd() {
  Tried("limit its own end", [] {
    std::thread([] {
      std::this_thread::sleep_for(kWholeEnd);
      _exit(1);
    }).detach();
  });
}

void AwaitEnd() {
  LimitOwnEnd();
  while (true) std::this_thread::sleep_for(kWholeEnd);
}

void EndAsTold(int status, const std::vector<Process>& processes, int64_t host) {
  std::this_thread::sleep_for(kLastWords);
  Tried("end stopped ranks", [&] { EndStopped(processes, host); });
  _exit(status == 0 ? 1 : status);
}

void AbortJob(const std::vector<Process>& processes, int64_t host) {
  Tried("end stopped ranks", [&] { EndStopped(processes, host); });
  WaitUntilRead();
  Tried("call MPI_Abort", [] {
    std::thread([] {  // MPI may not come back
      if (library != nullptr) library->Abort(1);
    }).detach();
  });
  std::this_thread::sleep_for(kLastWords);
  _exit(1);
}

}  // namespace pycollective
