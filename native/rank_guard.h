// The guard of a rank: it notices when the next rank dies.
//
// Some launchers name the process that has died, not its rank, and end the others at once; or they do not notice that a
// rank has left by _exit. The kernel ends the connection to a process that has died a moment before the launcher learns
// of the death.

#ifndef PYCOLLECTIVE_NATIVE_RANK_GUARD_H_
#define PYCOLLECTIVE_NATIVE_RANK_GUARD_H_

#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "process.h"
#include "side_channel.h"

namespace pycollective {

class RankGuard {
 public:
  // `processes`: by their ranks; `rank`: this process's. `on_death`: called when the next rank has died; returns whether
  // the guard shall say so, if that rank was on this host. What is passed by reference must outlive the guard.
  RankGuard(const SideChannel& channel, const std::vector<Process>& processes, int rank, std::function<bool()> on_death);

  void Start();
  void Stop();

 private:
  int Next() const;
  void Wait(int rank);

  const SideChannel& channel_;
  const std::vector<Process>& processes_;
  const int rank_;
  const std::function<bool()> on_death_;
  std::thread thread_;

  std::mutex mutex_;  // guards what follows
  bool stopping_ = false;
  int connection_ = -1;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_RANK_GUARD_H_
