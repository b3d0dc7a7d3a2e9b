// Tests of the inquiry, which puts together what all ranks of a job do, and of the guard of a rank, with ranks that the test
// plays.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/operations.h"
#include "harness.h"
#include "monitor/ask_tree.h"
#include "monitor/inquiry.h"
#include "monitor/python_stacks.h"
#include "monitor/rank_guard.h"
#include "monitor/rank_runs.h"
#include "monitor/status.h"
#include "ranks.h"
#include "records/recorder.h"
#include "statuses.h"

namespace pycollective {
namespace {

constexpr int64_t kReason = 3;

// The text of a request that a tree carries: the ranks to which it is handed on, and what it says.
std::string Through(const std::vector<int>& ranks, const std::string& text) {
  Writer writer;
  PutRanks(writer, ranks);
  return writer.Append(text).text();
}
std::string TellText(const std::vector<int>& ranks = {}) { return Through(ranks, Writer().Put(kReason).text()); }

// A rank that answers with a status to kTellStatus, and to other requests with what answer says. It asks no other ranks.
SideChannel::Answer Tells(const Status& status, std::function<std::string(int64_t, const std::string&)> answer = {}) {
  return [=](int64_t kind, const std::string& text) {
    return kind == kTellStatus ? Packed(Heard{{status}, {}}) : answer ? answer(kind, text) : std::string();
  };
}

// Processes of this test: it is each of them, unless another one is named.
struct Job {
  std::vector<Process> processes;

  void Add(const Address& address, int64_t host = 1, int64_t pid = getpid()) {
    processes.push_back(ProcessAt(address, pid, host));
  }
  std::vector<std::vector<Address>> Addresses() const {
    std::vector<std::vector<Address>> addresses;
    for (const Process& process : processes) addresses.push_back(process.addresses);
    return addresses;
  }
  SideChannel Channel() const { return SideChannel(0, Addresses(), kSecret); }
};

std::string WhyOf(const Inquiry& inquiry, int rank) {
  for (const SilentRank& one : inquiry.silent) {
    if (one.rank == rank) return one.why + (one.has_ended ? " (ended)" : "");
  }
  return "it has a status";
}

void TestStatusesHaveTheOrderOfRanks() {
  const Status far = In(3, {Waits(kAllreduce, {0, 3})});
  PlayedRank three(3, Tells(far)), one(1, Tells(In(1, {})));
  Job job;
  job.Add(NewAddress());
  job.Add(one.address());
  job.Add(Nobody());
  job.Add(three.address());
  const Inquiry inquiry = AskAll(job.Channel(), job.processes, {1, 3}, In(2, {Waits(kRecv, {1})}), kReason);
  CHECK(inquiry.silent.empty() && inquiry.statuses.size() == 3);
  CHECK(inquiry.statuses[0].ranks == std::vector<int>{1} && inquiry.statuses[0].under_way.empty());
  CHECK(inquiry.statuses[1].ranks == std::vector<int>{2} && inquiry.statuses[1].under_way[0].operation == kRecv);
  CHECK(Packed(Heard{{inquiry.statuses[2]}, {}}) == Packed(Heard{{far}, {}}));
  CHECK(one.requests() == std::vector<Asked>({{kTellStatus, TellText()}}));
}

// An answer that is cut, empty, or speaks of another rank is no status.
void TestAnswersThatAreNoStatus() {
  const auto packed = [](const Heard& heard) { return Packed(heard); };
  const Status own = In(1, {Waits(kAllreduce, {0, 1})});
  const std::string whole = packed({{own}, {}});
  for (const std::string& text : {std::string(), whole.substr(0, whole.size() - 1), packed({{In(0, {})}, {}}),
                                  packed({{In(1 << 30, {})}, {}}), packed({{own, own}, {}}), packed({{own, In(0, {})}, {}}),
                                  packed({{}, {{1, true}}}), packed({{own}, {{1, true}}})}) {
    PlayedRank one(1, [&text](int64_t, const std::string&) { return text; });
    Job job;
    job.Add(NewAddress());
    job.Add(one.address());
    const Inquiry inquiry = AskAll(job.Channel(), job.processes, {1}, In(0, {}), kReason);
    CHECK(inquiry.statuses.size() == 1 && inquiry.statuses[0].ranks == std::vector<int>{0});
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
  const Inquiry inquiry = AskAll(job.Channel(), job.processes, {1, 2, 3, 4}, In(0, {}), kReason);
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
  bool leads = true;
  // Rank 2 leads its host, and tells of rank 3; or it has no memory to ask it, and tells when it is asked by itself.
  PlayedRank near(1, Tells(In(1, {}))), far(2, [&](int64_t kind, const std::string& text) {
    Reader reader(text);
    const std::vector<int> ranks = RanksFrom(reader, 4);
    if (kind == kTellStatus && ranks.empty()) return Packed(Heard{{In(2, {})}, {}});
    CHECK(ranks == std::vector<int>{3});
    if (kind == kTellStatus) return leads ? Packed(Heard{{In(2, {})}, {{3, true, false, false, state}}}) : std::string();
    CHECK(kind == kProcessState);
    return Writer().Put(state).text();
  });
  Job job;
  job.Add(NewAddress());
  job.Add(near.address());
  job.Add(far.address(), 2);
  job.Add({"no address", 0}, 2);
  const auto why = [&] { return WhyOf(AskAll(job.Channel(), job.processes, {1, 2, 3}, In(0, {}), kReason), 3); };
  const std::string process = "process " + std::to_string(getpid()) + " on host host2";
  CHECK(why() == "does not answer: " + process + " is stopped");
  for (const int64_t ended : {int64_t{0}, int64_t{'Z'}}) {
    state = ended;
    CHECK(why() == "does not answer: " + process + " has ended (ended)");
  }
  state = 'S';
  CHECK(why() == "does not answer, though " + process + " is alive");
  CHECK(near.requests() == std::vector<Asked>(4, {kTellStatus, TellText()}));
  leads = false;
  const Inquiry inquiry = AskAll(job.Channel(), job.processes, {1, 2, 3}, In(0, {}), kReason);
  CHECK(inquiry.statuses[0].ranks == (std::vector<int>{0, 1, 2}) && WhyOf(inquiry, 3) == "does not answer: " + process);
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
  const Inquiry inquiry = AskAll(job.Channel(), job.processes, {1, 2, 3}, In(0, {}), kReason);
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
  const std::vector<RankFrames> got = AskForFrames(job.Channel(), 0, {In(0, {sum}), In(1, {}), In(2, {sum}), In(3, {})});
  CHECK(got.size() == 1 && got[0].rank == 1 && Packed(got[0].frames) == Packed(frames));
  CHECK(one.requests() == std::vector<Asked>({{kTellFrames, ""}}) && two.requests().empty());
  CHECK(three.requests().size() == 1);
}

// This rank does not ask itself by its channel.
void TestOwnFrames() {
  PlayedRank own(0), one(1);
  Job job;
  job.Add(own.address());
  job.Add(one.address());
  const std::vector<RankFrames> got = AskForFrames(job.Channel(), 0, {In(0, {}), In(1, {Waits(kAllreduce, {0, 1})})});
  CHECK(got.size() == 1 && got[0].rank == 0);
  CHECK(own.requests().empty() && one.requests().empty());
}

// Trees of hosts -----------------------------------------------------------------------------------------------------

// A job of H hosts with L ranks each, which answer as monitors do. Rank 0 is the test's own.
class PlayedJob {
 public:
  // `status_of`: what a rank tells of itself. Ranks in `gone` have ended, those in `stopped` accept connections, and answer none.
  PlayedJob(int hosts, int each, std::function<Status(int)> status_of, std::vector<int> gone = {}, std::vector<int> stopped = {})
      : size_(hosts * each), status_of_(std::move(status_of)) {
    for (int rank = 0; rank < size_; ++rank) {
      const auto is_in = [rank](const std::vector<int>& ranks) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); };
      Address address = NewAddress();
      if (is_in(stopped)) {
        listening_.push_back(Listening(&address));
      } else if (rank != 0 && !is_in(gone)) {
        ranks_.emplace_back(rank, [this, rank](int64_t kind, const std::string& text) { return Answer(rank, kind, text); }, kSecret,
                            [](int64_t, const std::string& text) { return Reader(text).Number() > 0; });
        address = ranks_.back().address();
      }
      job_.Add(address, 1 + rank / each);
    }
    channel_ = std::make_unique<SideChannel>(0, job_.Addresses(), kSecret);
    received_.resize(static_cast<size_t>(size_));
    replied_.resize(static_cast<size_t>(size_));
  }
  ~PlayedJob() {
    ranks_.clear();
    for (const int fd : listening_) close(fd);
  }

  const SideChannel& channel() const { return *channel_; }
  const std::vector<Process>& processes() const { return job_.processes; }
  std::vector<int> others() const {
    std::vector<int> ranks = Count(size_);
    ranks.erase(ranks.begin());
    return ranks;
  }
  Inquiry AskAll() const { return pycollective::AskAll(channel(), processes(), others(), status_of_(0), kReason); }
  std::vector<int> Tell(const std::string& text) const { return TellAll(channel(), processes(), 0, others(), kEndNow, text); }

  // The answers to kTellGroup.
  std::function<std::string(int, const std::string&)> members_of = [](int, const std::string& text) { return MembersOf(text); };

  // How many requests of a tree a rank has got, and the bytes of its replies.
  size_t received(int rank) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return received_[static_cast<size_t>(rank)].size();
  }
  size_t bytes(int rank) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return replied_[static_cast<size_t>(rank)];
  }
  // How many ranks a rank was asked to hand its last request on to.
  size_t handed_on(int rank) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return received_[static_cast<size_t>(rank)].back().first.size();
  }
  // What TellAll has told a rank; "" if nothing, or not the same each time.
  std::string told(int rank) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::set<std::string> texts;
    for (const auto& [ranks, text] : received_[static_cast<size_t>(rank)]) texts.insert(text);
    return texts.size() == 1 ? *texts.begin() : "";
  }

 private:
  std::string Answer(int rank, int64_t kind, const std::string& text) {
    Reader reader(text);
    if (kind == kProcessState) return StatesOf(processes(), rank, text);
    if (kind == kTellGroup) return members_of(rank, text);
    const std::vector<int> ranks = RanksFrom(reader, size_);
    const std::string rest = reader.Rest();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      received_[static_cast<size_t>(rank)].push_back({ranks, rest});
    }
    CHECK(kind == kTellStatus || kind == kEndNow);
    const std::string reply = kind == kEndNow
                                  ? HandOn(channel(), processes(), rank, ranks, kind, rest)
                                  : Packed(HearFor(channel(), processes(), status_of_(rank), ranks, Reader(rest).Number()));
    const std::lock_guard<std::mutex> lock(mutex_);
    replied_[static_cast<size_t>(rank)] += reply.size();
    return reply;
  }

  const int size_;
  const std::function<Status(int)> status_of_;
  Job job_;
  std::unique_ptr<SideChannel> channel_;
  std::vector<int> listening_;
  mutable std::mutex mutex_;  // guards the next two
  std::vector<std::vector<std::pair<std::vector<int>, std::string>>> received_;
  std::vector<size_t> replied_;
  std::list<PlayedRank> ranks_;  // the last one: its threads use the others
};

// All ranks wait in one call but `elsewhere`.
std::function<Status(int)> AllBut(int size, int elsewhere) {
  return [=](int rank) {
    return rank == elsewhere ? In(rank, {}) : In(rank, {Waits(kAllreduce, Count(size))});
  };
}

std::vector<int> RanksBut(int size, const std::vector<int>& others) {
  std::vector<int> ranks = Count(size);
  for (const int other : others) ranks.erase(std::find(ranks.begin(), ranks.end(), other));
  return ranks;
}

// The rank that reports asks those of its host and one of each other host. Every other rank is asked once, and what comes to it
// from a host does not grow with the ranks of the host.
void TestLeadersAnswerForTheirHosts() {
  std::vector<size_t> bytes;
  for (const auto& [hosts, each] : std::vector<std::pair<int, int>>{{2, 2}, {4, 4}, {4, 16}, {16, 4}, {8, 8}}) {
    const int size = hosts * each;
    const PlayedJob job(hosts, each, AllBut(size, size - 2));
    const Inquiry inquiry = job.AskAll();
    CHECK(inquiry.silent.empty() && inquiry.statuses.size() == 2);
    CHECK(inquiry.statuses[0].ranks == RanksBut(size, {size - 2}) && inquiry.statuses[1].ranks == std::vector<int>{size - 2});
    size_t to_root = 0;
    for (int rank = 1; rank < size; ++rank) {
      CHECK(job.received(rank) == 1);
      const bool is_leader = rank % each == 0;
      CHECK(job.handed_on(rank) == (is_leader ? static_cast<size_t>(each) - 1 : 0));
      if (is_leader && rank < size - each) CHECK(job.bytes(rank) == job.bytes(1));  // no more than a rank tells of itself
      if (is_leader || rank < each) to_root += job.bytes(rank);
    }
    bytes.push_back(to_root / static_cast<size_t>(hosts + each - 2));
  }
  for (const size_t per_connection : bytes) CHECK(per_connection < 600);
}

// More hosts than a rank has connections to: a host asks others in turn.
void TestMoreHostsThanParts() {
  constexpr int kHosts = 130;
  const PlayedJob job(kHosts, 1, AllBut(kHosts, 77));
  const Inquiry inquiry = job.AskAll();
  CHECK(inquiry.silent.empty() && inquiry.statuses.size() == 2 && inquiry.statuses[1].ranks == std::vector<int>{77});
  for (int rank = 1; rank < kHosts; ++rank) CHECK(job.received(rank) == 1);
  const auto parts = PartsOf(job.processes(), 0, job.others());
  CHECK(parts.size() == kMostParts);
  for (const std::vector<int>& part : parts) {
    CHECK(part.size() == 2 || part.size() == 3);
    CHECK(job.handed_on(part.front()) == part.size() - 1);
  }
}

std::vector<std::vector<int>> Parts(const std::vector<int64_t>& hosts, int own, const std::vector<int>& ranks) {
  std::vector<Process> processes;
  for (const int64_t host : hosts) processes.push_back({{}, 1, 0, host, ""});
  return PartsOf(processes, own, ranks);
}

void TestParts() {
  using All = std::vector<std::vector<int>>;
  CHECK(Parts({1, 1, 1}, 0, {}) == All{});
  CHECK(Parts({1, 1, 1}, 1, {0, 2}) == (All{{0}, {2}}));
  CHECK(Parts({1, 2, 1, 2, 3}, 0, {1, 2, 3, 4}) == (All{{2}, {1, 3}, {4}}));
  CHECK(Parts({1, 2, 1, 2, 3}, 4, {1, 2, 3}) == (All{{2}, {1, 3}}));
  // However many hosts there are, each rank is in one part, a host in one too, and no part has many more hosts than another.
  for (const int count : {63, 64, 65, 127, 128, 200, 1280}) {
    std::vector<int64_t> hosts;
    for (int host = 0; host <= count; ++host) hosts.insert(hosts.end(), {host, host});
    std::vector<int> others = Count(2 * count + 2);
    others.erase(others.begin());
    const All parts = Parts(hosts, 0, others);
    CHECK(parts.size() == 1 + std::min<size_t>(kMostParts, static_cast<size_t>(count)));
    std::vector<int> all;
    const auto least = static_cast<size_t>(count) / (parts.size() - 1);
    for (size_t i = 1; i < parts.size(); ++i) {
      all.insert(all.end(), parts[i].begin(), parts[i].end());
      CHECK(parts[i].front() % 2 == 0 && parts[i].size() % 2 == 0);
      CHECK(parts[i].size() / 2 == least || parts[i].size() / 2 == least + 1);
    }
    CHECK(parts[0] == std::vector<int>{1} && all == std::vector<int>(others.begin() + 1, others.end()));
  }
}

// A leader that is dead, stopped, or without memory does not silence its host.
void TestDeputies() {
  const std::string process = "process " + std::to_string(getpid()) + " on host host2";
  {
    const PlayedJob job(3, 4, AllBut(12, 6), {4});
    const Inquiry inquiry = job.AskAll();
    CHECK(inquiry.statuses[0].ranks == RanksBut(12, {4, 6}) && inquiry.silent.size() == 1);
    CHECK(WhyOf(inquiry, 4) == "does not answer: " + process + " has ended (ended)");
    CHECK(job.received(5) == 1 && job.handed_on(5) == 2 && job.received(7) == 1);
  }
  {
    const PlayedJob job(3, 4, AllBut(12, 6), {}, {4});
    const Inquiry inquiry = job.AskAll();
    CHECK(inquiry.statuses[0].ranks == RanksBut(12, {4, 6}) && inquiry.silent.size() == 1 && WhyOf(inquiry, 4) != "it has a status");
    CHECK(job.received(5) == 1 && job.handed_on(5) == 2 && job.received(7) == 1);
  }
  {  // The leader and the deputy: the others are asked one by one.
    const PlayedJob job(3, 4, AllBut(12, 6), {4}, {5});
    const Inquiry inquiry = job.AskAll();
    CHECK(inquiry.statuses[0].ranks == RanksBut(12, {4, 5, 6}) && inquiry.silent.size() == 2);
    CHECK(job.received(6) == 1 && job.handed_on(6) == 0 && job.received(7) == 1 && job.received(9) == 1);
  }
}

// A rank that its leader finds silent, though it is alive, is asked once more, by the rank that reports.
void TestSlowRanksOfLeaders() {
  std::atomic<int> asked{0};
  const PlayedJob job(2, 3, [&asked](int rank) {
    if (rank == 5 && asked++ == 0) Sleep(1500);  // longer than its leader waits
    return In(rank, {});
  });
  const Inquiry inquiry = job.AskAll();
  CHECK(inquiry.silent.empty() && inquiry.statuses.size() == 1 && inquiry.statuses[0].ranks == Count(6));
  CHECK(job.received(5) == 2 && job.received(4) == 1);
}

std::string MembersText(const std::vector<int>& members) {
  Writer writer;
  PutRanks(writer, members);
  return writer.text();
}

// Members that a status does not tell come from the rank that knows them.
void TestMembersOfIrregularGroups() {
  std::vector<int> members;
  for (int rank = 1; rank < 64; rank += rank % 3 + 1) members.push_back(rank);  // not rank 0, which reports
  CHECK(RunCount(members) > kMostRuns);
  CallStatus sum = Waits(kAllreduce, members);
  sum.group = 4711;
  sum.group_name = "odd";
  const auto status_of = [&](int rank) {
    const bool waits = rank != 63 && std::count(members.begin(), members.end(), rank) != 0;
    return waits ? In(rank, {sum}) : In(rank, {});
  };
  CHECK(members.back() == 63);
  // One rank that is asked does not know the group, or says something else. `tells`: what the first and the second one reply.
  const auto report = [&](std::vector<std::string> tells) {
    PlayedJob job(4, 16, status_of);
    std::mutex mutex;
    size_t asked = 0;
    job.members_of = [&](int, const std::string& text) {
      CHECK(Reader(text).Number() == 4711);
      const std::lock_guard<std::mutex> lock(mutex);
      return asked < tells.size() ? tells[asked++] : "";
    };
    const Inquiry inquiry = job.AskAll();
    CHECK(asked == tells.size());
    return DescribeAll(inquiry.statuses, inquiry.silent);
  };
  const std::string whole = MembersText(members), known = "Look at rank 63: the others wait for it.";
  CHECK(report({whole}).find(known) != std::string::npos);
  for (const std::string& wrong : {std::string(), MembersText({}), MembersText({0, 63}), whole.substr(1), MembersText({0, 64})}) {
    CHECK(report({wrong, whole}).find(known) != std::string::npos);
    CHECK(report({wrong, wrong}).find("  1 rank of communicator odd is not in this call") != std::string::npos);
  }
  AddGroup(4711, {"odd", {members.rbegin(), members.rend()}});
  CHECK(MembersOf(Writer().Put(4711).text()) == whole);
  CHECK(MembersOf(Writer().Put(4712).text()) == MembersText({}) && MembersOf("") == MembersText({}));
  CHECK(report({}).find(known) != std::string::npos);  // the rank that reports knows it itself
}

// Ends by a tree: each rank hears of it once, and the rank that tells them makes few connections.
void TestEndsAreToldByATree() {
  for (const auto& [hosts, each] : std::vector<std::pair<int, int>>{{1, 4}, {4, 4}, {8, 8}, {130, 1}}) {
    const PlayedJob job(hosts, each, AllBut(1, 0));
    CHECK(job.Tell("the end").empty());
    for (int rank = 1; rank < hosts * each; ++rank) CHECK(job.received(rank) == 1 && job.told(rank) == "the end");
    size_t connections = 0;
    for (const auto& part : PartsOf(job.processes(), 0, job.others())) {
      ++connections;
      CHECK(job.handed_on(part.front()) == part.size() - 1);
    }
    CHECK(connections == std::min<size_t>(kMostParts, static_cast<size_t>(hosts) - 1) + static_cast<size_t>(each) - 1);
  }
}

// All that can hear, hear of the end, whichever others are silent.
void TestEndsWithoutLeaders() {
  {
    const PlayedJob job(3, 4, AllBut(1, 0), {4}, {8});
    CHECK(job.Tell("the end") == (std::vector<int>{4, 8}));
    for (const int rank : RanksBut(12, {0, 4, 8})) CHECK(job.told(rank) == "the end" && job.received(rank) == 1);
  }
  {
    const PlayedJob job(2, 6, AllBut(1, 0), {6, 9}, {7});
    CHECK(job.Tell("the end") == (std::vector<int>{6, 7, 9}));
    for (const int rank : RanksBut(12, {0, 6, 7, 9})) CHECK(job.told(rank) == "the end");
  }
  // The head of several hosts.
  const PlayedJob job(130, 1, AllBut(1, 0), {}, {1});
  CHECK(job.Tell("the end") == std::vector<int>{1});
  for (int rank = 2; rank < 130; ++rank) CHECK(job.told(rank) == "the end");
}

// What heads reply that is no list of ranks of theirs: these are told again.
void TestWrongRepliesOfHeads() {
  for (const std::string& reply :
       {std::string(), std::string("no"), MembersText({0}), MembersText({1}), MembersText({2, 3})}) {
    PlayedRank one(1, [&reply](int64_t, const std::string&) { return reply; }), two(2, [](int64_t, const std::string&) { return ""; });
    Job job;
    job.Add(NewAddress());
    job.Add(one.address(), 2);
    job.Add(two.address(), 2);
    CHECK(TellAll(job.Channel(), job.processes, 0, {1, 2}, kEndNow, "the end").empty());
    CHECK(one.requests().size() == 3 && one.requests().back().second == Through({}, "the end"));
    CHECK(two.requests() == std::vector<Asked>({{kEndNow, Through({}, "the end")}}));
  }
}

// A host that nobody can connect to is not tried rank by rank.
void TestLostHosts() {
  std::vector<Process> processes;
  for (const int64_t host : {1, 2, 2, 3, 3, 4, 4}) processes.push_back({{}, 1, 0, host, ""});
  LostHosts lost(processes);
  Reply accepted, refused;
  accepted.accepted = true;
  refused.refused = true;
  lost.Add(1, {});
  lost.Add(3, {});
  lost.Add(4, accepted);
  lost.Add(5, refused);
  CHECK(lost.Has(1) && lost.Has(2) && !lost.Has(3) && !lost.Has(4) && !lost.Has(5) && !lost.Has(0));
  Job job;
  job.Add(NewAddress());
  for (int rank = 1; rank < 4; ++rank) job.Add({"no address", 0}, 2);
  PlayedRank third(4);
  job.Add(third.address(), 2);
  const Inquiry inquiry = AskAll(job.Channel(), job.processes, {1, 2, 3, 4}, In(0, {}), kReason);
  CHECK(inquiry.silent.size() == 4 && third.requests().empty());
  for (int rank = 1; rank < 5; ++rank) CHECK(WhyOf(inquiry, rank) == "cannot be reached: host host2 does not answer");
  CHECK(TellAll(job.Channel(), job.processes, 0, {1, 2, 3, 4}, kEndNow, "") == (std::vector<int>{1, 2, 3, 4}));
  CHECK(third.requests().empty());
}

// What ranks tell of others is read as it was written, or refused.
void TestHeard() {
  const Heard heard{{In(1, {Waits(kAllreduce, {0, 1, 2})}), In(4, {})}, {{2, true, true, false, 'T'}, {3, false, false, true, -1}}};
  const std::string text = Packed(heard);
  Heard got;
  CHECK(Unpack(text, 5, {1, 2, 3, 4}, &got) && Packed(got) == text);
  CHECK(got.unheard[0].is_asked && got.unheard[0].refused && !got.unheard[0].accepted && got.unheard[0].state == 'T');
  CHECK(!got.unheard[1].is_asked && !got.unheard[1].refused && got.unheard[1].accepted && got.unheard[1].state == -1);
  for (const std::vector<int>& others : {std::vector<int>{1, 2, 3}, {1, 2, 4}, {0, 1, 2, 3, 4}, {}}) CHECK(!Unpack(text, 5, others, &got));
  CHECK(!Unpack(text, 4, {1, 2, 3, 4}, &got));
  for (size_t cut = 0; cut < text.size(); ++cut) CHECK(!Unpack(text.substr(0, cut), 5, {1, 2, 3, 4}, &got));
  CHECK(!Unpack(Packed(Heard{{}, {{-1}}}), 5, {-1}, &got));
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
                 {"leaders_answer_for_their_hosts", TestLeadersAnswerForTheirHosts},
                 {"more_hosts_than_parts", TestMoreHostsThanParts},
                 {"parts", TestParts},
                 {"deputies", TestDeputies},
                 {"slow_ranks_of_leaders", TestSlowRanksOfLeaders},
                 {"members_of_irregular_groups", TestMembersOfIrregularGroups},
                 {"ends_are_told_by_a_tree", TestEndsAreToldByATree},
                 {"ends_without_leaders", TestEndsWithoutLeaders},
                 {"wrong_replies_of_heads", TestWrongRepliesOfHeads},
                 {"lost_hosts", TestLostHosts},
                 {"heard", TestHeard},
                 {"who_guards_whom", TestWhoGuardsWhom},
                 {"death_is_told", TestDeathIsTold},
                 {"end_in_order_is_no_death", TestEndInOrderIsNoDeath},
                 {"stop", TestStop},
                 {"nobody_there", TestNobodyThere}},
                argc, argv);
}
