// Tests of the inquiry, which puts together what all ranks of a job do, and of the guard of a rank, with ranks that the test
// plays.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <list>
#include <string>
#include <vector>

#include "base/operations.h"
#include "harness.h"
#include "monitor/inquiry.h"
#include "monitor/python_stacks.h"
#include "monitor/rank_guard.h"
#include "monitor/status.h"
#include "ranks.h"
#include "statuses.h"

namespace pycollective {
namespace {

// A rank that answers with a status to kTellStatus, and to other requests with what answer says.
SideChannel::Answer Tells(const Status& status, std::function<std::string(int64_t, const std::string&)> answer = {}) {
  return [=](int64_t kind, const std::string& text) {
    return kind == kTellStatus ? Packed(status) : answer ? answer(kind, text) : std::string();
  };
}

// Processes of this test: it is each of them, unless another one is named.
struct Job {
  std::vector<Process> processes;

  void Add(const Address& address, int64_t host = 1, int64_t pid = getpid()) {
    processes.push_back(ProcessAt(address, pid, host));
  }
  SideChannel Channel() const {
    std::vector<std::vector<Address>> addresses;
    for (const Process& process : processes) addresses.push_back(process.addresses);
    return SideChannel(0, addresses, kSecret);
  }
};

std::string WhyOf(const Inquiry& inquiry, int rank) {
  for (const SilentRank& one : inquiry.silent) {
    if (one.rank == rank) return one.why + (one.has_ended ? " (ended)" : "");
  }
  return "it has a status";
}

Address Nobody() {
  Address address = NewAddress();
  close(Listening(&address));
  return address;
}

void TestStatusesHaveTheOrderOfRanks() {
  Status far = In(3, {Waits(kAllreduce, {0, 3})});
  far.has_all = true;
  PlayedRank three(3, Tells(far)), one(1, Tells(In(1, {})));
  Job job;
  job.Add(NewAddress());
  job.Add(one.address());
  job.Add(Nobody());
  job.Add(three.address());
  const Inquiry inquiry = AskAll(job.Channel(), job.processes, {3, 1}, In(2, {Waits(kRecv, {1})}));
  CHECK(inquiry.silent.empty() && inquiry.statuses.size() == 3);
  CHECK(inquiry.statuses[0].rank == 1 && inquiry.statuses[0].under_way.empty());
  CHECK(inquiry.statuses[1].rank == 2 && inquiry.statuses[1].under_way[0].operation == kRecv);
  CHECK(Packed(inquiry.statuses[2]) == Packed(far));
  CHECK(one.requests() == std::vector<Asked>({{kTellStatus, ""}}));
}

// An answer that is cut, empty, or speaks of another rank is no status.
void TestAnswersThatAreNoStatus() {
  const std::string whole = Packed(In(1, {Waits(kAllreduce, {0, 1})}));
  for (const std::string& text : {std::string(), whole.substr(0, whole.size() - 1), Packed(In(2, {})), Packed(In(0, {})),
                                  Packed(In(1 << 30, {}))}) {
    PlayedRank one(1, [&text](int64_t, const std::string&) { return text; });
    Job job;
    job.Add(NewAddress());
    job.Add(one.address());
    const Inquiry inquiry = AskAll(job.Channel(), job.processes, {1}, In(0, {}));
    CHECK(inquiry.statuses.size() == 1 && inquiry.statuses[0].rank == 0);
    const std::string process = "process " + std::to_string(getpid()) + " on host host1";
    CHECK(WhyOf(inquiry, 1) == "does not answer, though " + process + " is alive");
  }
}

// A child that sleeps.
struct Child {
  pid_t pid;

  Child() : pid(Fork()) {
    if (pid != 0) return;
    while (true) pause();
  }
  void BecomesStopped() const {
    CHECK(kill(pid, SIGSTOP) == 0);
    int status;
    CHECK(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
  }
  void BecomesZombie() const {
    CHECK(kill(pid, SIGKILL) == 0);
    siginfo_t about;
    CHECK(waitid(P_PID, static_cast<id_t>(pid), &about, WEXITED | WNOWAIT) == 0);
  }
  void End() const {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
};

// Ranks of this host: the kernel says what has become of their processes.
void TestSilentRanksOfThisHost() {
  const Child stopped, zombie, gone;
  Job job;
  job.Add(NewAddress());
  job.Add(Nobody(), 1, stopped.pid);
  const Address unknown{"no address", 0};  // what the network says does not tell
  job.Add(unknown, 1, zombie.pid);
  job.Add(unknown, 1, gone.pid);
  job.Add(unknown);
  job.processes[4].started += 1;  // another process has its number
  stopped.BecomesStopped();
  zombie.BecomesZombie();
  gone.End();
  const Inquiry inquiry = AskAll(job.Channel(), job.processes, {1, 2, 3, 4}, In(0, {}));
  const auto process = [&](size_t rank) { return "process " + std::to_string(job.processes[rank].pid) + " on host host1"; };
  CHECK(inquiry.statuses.size() == 1 && inquiry.silent.size() == 4);
  CHECK(WhyOf(inquiry, 1) == "does not answer: " + process(1) + " is stopped");
  for (const int rank : {2, 3, 4}) {
    CHECK(WhyOf(inquiry, rank) == "does not answer: " + process(static_cast<size_t>(rank)) + " has ended (ended)");
  }
  stopped.End();
  zombie.End();
}

// Ranks of another host: another rank of that host says what has become of their processes.
void TestSilentRanksOfAnotherHost() {
  int64_t state = 'T';
  PlayedRank near(1, Tells(In(1, {}))), far(2, Tells(In(2, {}), [&](int64_t kind, const std::string& text) {
    CHECK(kind == kProcessState && Reader(text).Number() == 3);
    return Writer().Put(state).text();
  }));
  Job job;
  job.Add(NewAddress());
  job.Add(near.address());
  job.Add(far.address(), 2);
  job.Add({"no address", 0}, 2);
  const auto why = [&] { return WhyOf(AskAll(job.Channel(), job.processes, {1, 2, 3}, In(0, {})), 3); };
  const std::string process = "process " + std::to_string(getpid()) + " on host host2";
  CHECK(why() == "does not answer: " + process + " is stopped");
  for (const int64_t ended : {int64_t{0}, int64_t{'Z'}}) {
    state = ended;
    CHECK(why() == "does not answer: " + process + " has ended (ended)");
  }
  state = 'S';
  CHECK(why() == "does not answer, though " + process + " is alive");
  CHECK(near.requests() == std::vector<Asked>(4, {kTellStatus, ""}));
}

// Nobody of its host answers: what the network says is all there is.
void TestSilentHosts() {
  Address accepting = NewAddress();
  const int fd = Listening(&accepting);
  Job job;
  job.Add(NewAddress());
  job.Add({"no address", 0}, 2);
  job.Add(Nobody(), 3);
  job.Add(accepting, 4);
  const Inquiry inquiry = AskAll(job.Channel(), job.processes, {1, 2, 3}, In(0, {}));
  const std::string process = "process " + std::to_string(getpid()) + " on host ";
  CHECK(WhyOf(inquiry, 1) == "cannot be reached: host host2 does not answer");
  CHECK(WhyOf(inquiry, 2) == "does not answer: " + process + "host3 has ended (ended)");
  CHECK(WhyOf(inquiry, 3) == "does not answer, though its host does: " + process + "host4 is stopped, or the host is overloaded");
  close(fd);
}

// Those that the others wait for are asked for their frames, and no others.
void TestFramesOfThoseWithoutPlace() {
  const PythonFrames frames{"File \"train.py\", line 3 in load\n", "File \"b.py\", line 4 in callback\n", true};
  const auto answer = [&](int64_t kind, const std::string&) { return kind == kTellFrames ? Packed(frames) : std::string(); };
  PlayedRank one(1, answer), two(2, answer), three(3, [](int64_t, const std::string&) { return "no frames"; });
  Job job;
  job.Add(NewAddress());
  for (const PlayedRank* rank : {&one, &two, &three}) job.Add(rank->address());
  const auto sum = Waits(kAllreduce, {0, 1, 2, 3});
  std::vector<Status> statuses = {In(0, {sum}), In(1, {}), In(2, {sum}), In(3, {})};
  AskForFrames(job.Channel(), 0, &statuses);
  CHECK(statuses[1].stacks.main_thread == frames.main_thread && statuses[1].stacks.callbacks == frames.callbacks);
  CHECK(statuses[1].stacks.by_signal);
  CHECK(statuses[0].stacks.main_thread.empty() && statuses[2].stacks.main_thread.empty());
  CHECK(statuses[3].stacks.main_thread.empty());
  CHECK(one.requests() == std::vector<Asked>({{kTellFrames, ""}}) && two.requests().empty());
  CHECK(three.requests().size() == 1);
}

// This rank does not ask itself by its channel.
void TestOwnFrames() {
  PlayedRank own(0), one(1);
  Job job;
  job.Add(own.address());
  job.Add(one.address());
  std::vector<Status> statuses = {In(0, {}), In(1, {Waits(kAllreduce, {0, 1})})};
  AskForFrames(job.Channel(), 0, &statuses);
  CHECK(own.requests().empty() && one.requests().empty());
}

// The guard ----------------------------------------------------------------------------------------------------------

std::vector<int> Guarded(int rank, const std::vector<int64_t>& hosts) {
  std::vector<Process> processes;
  for (const int64_t host : hosts) processes.push_back({{}, host < 0 ? 0 : 1, 0, host, ""});  // below 0: it is not there
  return RanksGuardedBy(rank, processes);
}

using Ranks = std::vector<int>;

void TestWhoGuardsWhom() {
  CHECK(Guarded(0, {1}) == Ranks{});
  CHECK(Guarded(0, {1, -1, -1}) == Ranks{});
  CHECK(Guarded(0, {1, 1, 1}) == Ranks{1});
  CHECK(Guarded(2, {1, 1, 1}) == Ranks{0});
  CHECK(Guarded(0, {1, -1, 1}) == Ranks{2});
  // On two hosts, rank by rank: 0 and 2 are on one, 1 and 3 on the other.
  CHECK(Guarded(0, {1, 2, 1, 2}) == Ranks{2});
  CHECK(Guarded(2, {1, 2, 1, 2}) == (Ranks{1, 0}));
  CHECK(Guarded(1, {1, 2, 1, 2}) == Ranks{3});
  CHECK(Guarded(3, {1, 2, 1, 2}) == (Ranks{0, 1}));
  CHECK(Guarded(1, {1, 2}) == Ranks{0});  // alone on its host
  CHECK(Guarded(0, {1, 2}) == Ranks{1});
  // Whatever the hosts are, each rank is guarded by a rank, and by one of its host if there is another.
  const std::vector<int64_t> hosts = {3, 1, 3, 2, 1, -1, 3, 1};
  for (int guarded = 0; guarded < static_cast<int>(hosts.size()); ++guarded) {
    const int64_t host = hosts[static_cast<size_t>(guarded)];
    if (host < 0) continue;
    Ranks guards, neighbours;
    for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
      if (hosts[static_cast<size_t>(rank)] < 0) continue;
      for (const int one : Guarded(rank, hosts)) {
        if (one != guarded) continue;
        guards.push_back(rank);
        if (hosts[static_cast<size_t>(rank)] == host) neighbours.push_back(rank);
      }
    }
    CHECK(!guards.empty() && neighbours.empty() == (host == 2));
  }
}

// A guard of rank 1, and whose deaths it has told.
struct Guard {
  explicit Guard(const Address& address)
      : channel(0, {{}, {address}}, kSecret), guard(channel, 1, [this](int rank) { deaths += rank; }) {}

  SideChannel channel;
  std::atomic<int> deaths{0};
  RankGuard guard;
};

void TestDeathIsTold() {
  Address address = NewAddress();
  const int fd = Listening(&address);
  const pid_t pid = ServingChild(1, fd);
  Guard guard(address);
  guard.guard.Start();
  CHECK(SideChannel(0, {{}, {address}}, kSecret).Ask({1}, kAreYouThere, "", 20 * kSecondNs)[0].came);
  Sleep(100);
  CHECK(guard.deaths == 0);
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  close(fd);
  CHECK(BecomesTrue([&] { return guard.deaths == 1; }));
  guard.guard.Stop();
  CHECK(guard.deaths == 1);
}

void TestEndInOrderIsNoDeath() {
  PlayedRank one(1);
  Guard guard(one.address());
  guard.guard.Start();
  Sleep(100);
  one.Leave();
  one.End();
  guard.guard.Stop();
  CHECK(guard.deaths == 0);
}

// The guard's own end is no death of the other rank, whether it stops at once or while it waits.
void TestStop() {
  for (const int ms : {0, 0, 0, 1, 2, 5, 100}) {
    PlayedRank one(1);
    Guard guard(one.address());
    guard.guard.Start();
    Sleep(ms);
    guard.guard.Stop();
    CHECK(guard.deaths == 0);
    guard.guard.Stop();
  }
  Guard never(NewAddress());
  never.guard.Stop();  // it has not been started
}

// Nobody knows of a rank that was never there whether it has died.
void TestNobodyThere() {
  Guard guard(Nobody());
  guard.guard.Start();
  Sleep(100);
  guard.guard.Stop();
  CHECK(guard.deaths == 0);
}

}  // namespace
}  // namespace pycollective

int main(int argc, char** argv) {
  using namespace pycollective;
  return RunOne({{"statuses_have_the_order_of_ranks", TestStatusesHaveTheOrderOfRanks},
                 {"answers_that_are_no_status", TestAnswersThatAreNoStatus},
                 {"silent_ranks_of_this_host", TestSilentRanksOfThisHost},
                 {"silent_ranks_of_another_host", TestSilentRanksOfAnotherHost},
                 {"silent_hosts", TestSilentHosts},
                 {"frames_of_those_without_place", TestFramesOfThoseWithoutPlace},
                 {"own_frames", TestOwnFrames},
                 {"who_guards_whom", TestWhoGuardsWhom},
                 {"death_is_told", TestDeathIsTold},
                 {"end_in_order_is_no_death", TestEndInOrderIsNoDeath},
                 {"stop", TestStop},
                 {"nobody_there", TestNobodyThere}},
                argc, argv);
}
