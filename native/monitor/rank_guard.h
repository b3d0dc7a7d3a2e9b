// The guard of a rank: it notices when that rank dies.
//
// Some launchers name the process that has died, not its rank, and end the others at once; or they name the rank that
// notices it first; or they do not notice that a rank has left by _exit. The kernel ends the connection to a process that
// has died a moment before the launcher learns of the death.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_RANK_GUARD_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_RANK_GUARD_H_

#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "monitor/process.h"
#include "monitor/side_channel.h"

namespace pycollective {

// The ranks that a rank guards. It guards the next rank of its host, which can say the death while the launcher still
// ends the ranks of other hosts. The last rank of a host guards the first one of the next host as well: a rank may be
// alone on its host, and all ranks of a host may die.
std::vector<int> RanksGuardedBy(int rank, const std::vector<Process>& processes);

class RankGuard {
 public:
  // `rank`: the other rank. `on_death`: called once, when it has died. `channel` must outlive the guard.
  RankGuard(const SideChannel& channel, int rank, std::function<void(int rank)> on_death);

  void Start();
  void Stop();

 private:
  void Wait();

  const SideChannel& channel_;
  const int rank_;
  const std::function<void(int rank)> on_death_;
  std::thread thread_;

  std::mutex mutex_;  // guards what follows
  bool stopping_ = false;
  int connection_ = -1;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_RANK_GUARD_H_
