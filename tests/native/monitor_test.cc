// Tests of the monitor: what it tells other ranks, which the test plays, and what it does when something is missing: memory,
// somebody who reads the console, a free slot of the recorder.

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <list>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/operations.h"
#include "calls/settings.h"
#include "harness.h"
#include "monitor/inquiry.h"
#include "monitor/monitor.h"
#include "monitor/process.h"
#include "monitor/python_stacks.h"
#include "monitor/rank_runs.h"
#include "monitor/record_writers.h"
#include "monitor/side_channel.h"
#include "monitor/status.h"
#include "mpi/collectives.h"
#include "ranks.h"
#include "records/recorder.h"
#include "statuses.h"

// Of native/monitor/process.cc, for Python.
extern "C" void pycollective_set_read_times(double timeout_s, double forwarding_s);

namespace {

std::atomic<bool> no_memory{false};    // for all threads but the test's own
thread_local bool is_of_test = false;  // whether this is that thread

void* AllocatedOrNull(size_t size) noexcept { return no_memory && !is_of_test ? nullptr : std::malloc(size); }
void* Allocated(size_t size) {
  void* const memory = AllocatedOrNull(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t size) { return Allocated(size); }
void* operator new(size_t size, const std::nothrow_t&) noexcept { return AllocatedOrNull(size); }  // std::stable_sort's
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace pycollective {
namespace {

// The text of a request that a tree carries: the ranks to which it is handed on, and what it says.
std::string Through(const std::vector<int>& ranks, const std::string& text) {
  Writer writer;
  PutRanks(writer, ranks);
  return writer.Append(text).text();
}
std::string TellText(int64_t reason, const std::vector<int>& ranks = {}) { return Through(ranks, Writer().Put(reason).text()); }
std::string EndText(int status, const std::string& cause, const std::vector<int>& writers, const std::vector<int>& ranks = {}) {
  return Through(ranks, Writer().Put(status).Put(cause).Append(Through(writers, "")).text());
}
std::string DeathText(const std::string& what, const std::vector<int>& writers) {
  return Through({}, Writer().Put(what).Append(Through(writers, "")).text());
}
const std::string kAllTold = Through({}, "");  // the reply of a head that has told all ranks of its part

// A monitor whose thread meets a lack of memory goes on, and answers when there is memory again.
void TestLackOfMemory() {
  is_of_test = true;
  MonitorSettings settings;
  settings.processes.resize(2);
  Process& own = settings.processes[0];
  int fd = -1;
  Address address{"127.0.0.1", 0};
  CHECK(ListenOn(&address, &fd));
  own.addresses.push_back(address);
  own.pid = getpid();
  settings.listening = {fd};
  settings.secret = std::string(64, 's');
  const SideChannel other(1, {own.addresses, {}}, settings.secret);
  const auto tells = [&other] { return other.Ask({0}, kTellStatus, TellText(1), kSecondNs)[0].came; };
  CHECK(StartMonitor(settings).empty());
  CHECK(tells());
  no_memory = true;
  CHECK(!tells());
  no_memory = false;
  CHECK(BecomesTrue(tells));
  StopMonitor();
}

// The standard error is a pipe that `reading` reads.
int ReadingOfStderr() {
  int ends[2];
  CHECK(pipe(ends) == 0);
  CHECK(dup2(ends[1], STDERR_FILENO) == STDERR_FILENO);
  return ends[0];
}

void TestNobodyReads() {
  const int reading = ReadingOfStderr();
  CHECK(fcntl(reading, F_SETPIPE_SZ, 4096) >= 0);
  std::atomic<bool> said{false};
  std::thread([&said] {
    Say(std::string(1 << 20, 'a'), kSecondNs / 5);
    said = true;
  }).detach();
  const bool returned = BecomesTrue([&said] { return said.load(); });
  close(reading);  // what CHECK prints goes there
  CHECK(returned);
}

void TestAllIsSaid() {
  const int reading = ReadingOfStderr();
  std::string text;
  for (int i = 0; i < 100000; ++i) text += std::to_string(i);
  std::thread speaker([&text] { Say(text, 60 * kSecondNs); });
  std::string read_text;
  char part[1000];
  while (read_text.size() < text.size()) {
    const ssize_t n = read(reading, part, sizeof(part));
    CHECK(n > 0);
    read_text.append(part, static_cast<size_t>(n));
  }
  speaker.join();
  CHECK(read_text == text);
}

// A file has one place for all that write to it through one descriptor.
void TestFileIsContinued() {
  char name[] = "/tmp/pycollective-said-XXXXXX";
  const int file = mkstemp(name);
  CHECK(file >= 0 && unlink(name) == 0);
  CHECK(dup2(file, STDERR_FILENO) == STDERR_FILENO);
  CHECK(write(STDERR_FILENO, "one ", 4) == 4);
  Say("two ");
  CHECK(write(STDERR_FILENO, "three", 5) == 5);
  char text[64] = "";
  CHECK(pread(file, text, sizeof(text) - 1, 0) == 13);
  CHECK(std::strcmp(text, "one two three") == 0);
}

// What the monitor tells other ranks --------------------------------------------------------------------------------

// The settings of a rank's monitor in this process. `others`: where the other ranks are.
class Settings {
 public:
  explicit Settings(int rank, const std::vector<Address>& others) {
    char name[] = "/tmp/pycollective-records-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    settings_.folder = name;
    settings_.rank = rank;
    settings_.secret = kSecret;
    size_t next = 0;
    for (int other = 0; other <= static_cast<int>(others.size()); ++other) {
      Address address = other == rank ? NewAddress() : others[next++];
      if (other == rank) settings_.listening = {Listening(&address)};
      settings_.processes.push_back(ProcessAt(address, getpid(), 1));
    }
  }
  ~Settings() { std::filesystem::remove_all(settings_.folder); }

  MonitorSettings* operator->() { return &settings_; }
  const MonitorSettings& operator*() const { return settings_; }
  // What asks this monitor.
  Reply Ask(int64_t kind, const std::string& text = "") const {
    std::vector<std::vector<Address>> addresses;
    for (const Process& process : settings_.processes) addresses.push_back(process.addresses);
    return SideChannel(-1, addresses, kSecret).Ask({settings_.rank}, kind, text, 20 * kSecondNs)[0];
  }
  std::string Records() const {
    std::ifstream file(settings_.folder + "/rank-" + std::to_string(settings_.rank) + ".json");
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  bool HasRecords(const std::string& reason) const {
    return Records().find("\"reason\": \"" + reason + "\"") != std::string::npos;
  }

 private:
  MonitorSettings settings_;
};

void TestRequests() {
  Settings settings(0, {NewAddress()});
  CHECK(StartMonitor(*settings).empty());
  CHECK(StartMonitor(*settings).empty());  // it runs already
  CHECK(settings.Ask(kAreYouThere).text == "yes");
  Heard heard;
  CHECK(Unpack(settings.Ask(kTellStatus, TellText(1)).text, 2, {0}, &heard) && heard.statuses.size() == 1);
  CHECK(Unpack(settings.Ask(kTellStatus, TellText(1, {1})).text, 2, {0, 1}, &heard));  // nobody is there as rank 1
  CHECK(heard.unheard.size() == 1 && heard.unheard[0].rank == 1 && heard.unheard[0].is_asked && heard.unheard[0].refused);
  for (const int64_t kind : {kTellStatus, kEndNow, kDeathIsKnown}) {  // no ranks of this job
    for (const std::string& text : {std::string(), TellText(1, {2}), TellText(1).substr(1)}) CHECK(settings.Ask(kind, text).text.empty());
  }
  CHECK(settings.Ask(kEndNow, EndText(1, "nobody writes", {2})).text.empty());  // it is no end
  CHECK(settings.Ask(kDeathIsKnown, DeathText("nobody writes", {})).text.empty() && settings.Records().empty());
  AddGroup(4711, {"odd", {1, 0}});
  CHECK(settings.Ask(kTellGroup, Writer().Put(4711).text()).text == Through({0, 1}, ""));
  PythonFrames frames;
  CHECK(Unpack(settings.Ask(kTellFrames).text, &frames) && frames.main_thread.empty());
  const std::string states = settings.Ask(kProcessState, Through({0, 1}, "")).text;
  Reader of_states(states);
  for (int rank = 0; rank < 2; ++rank) {
    const int64_t state = of_states.Number();
    CHECK(state == 'S' || state == 'R');
  }
  CHECK(of_states.ok() && of_states.Rest().empty() && settings.Ask(kProcessState, Through({2}, "")).text.empty());
  CHECK(settings.Ask(kProcessState).came);
  const Reply unknown = settings.Ask(99, "what");
  CHECK(unknown.came && unknown.text.empty());
  CHECK(settings.Records().empty());
  CHECK(settings.Ask(kDeathIsKnown, DeathText("rank 1 died", {0, 1})).text == kAllTold);
  CHECK(settings.HasRecords("rank 1 died"));
  StopMonitor();
  CHECK(!settings.Ask(kAreYouThere).came);
}

void TestEndIsTold() {
  CHECK(BeginEnd(2, "nobody is told"));  // without a monitor
  PlayedRank one(1, [](int64_t, const std::string&) { return kAllTold; }), two(2);
  Settings settings(0, {one.address(), two.address()});
  CHECK(StartMonitor(*settings).empty());
  ForgetRank(2);
  CHECK(BeginEnd(3, "rank 0 raised"));
  const std::vector<Asked> told = {{kEndNow, EndText(3, "rank 0 raised", {0, 1, 2})}};
  CHECK(one.requests() == told && two.requests().empty());
  CHECK(settings.HasRecords("rank 0 raised"));
  CHECK(!BeginEnd(4, "another cause"));
  CHECK(settings.Ask(kEndNow, EndText(5, "a third one", {0, 1, 2})).text == kAllTold);
  CHECK(settings.Ask(kDeathIsKnown, DeathText("a death", {0, 1, 2})).text == kAllTold);
  CHECK(one.requests() == told && settings.HasRecords("rank 0 raised"));
  StopMonitor();
}

// The status with which a monitor ends its process.
void TestEndsAsTold() {
  std::list<Settings> all;
  std::vector<pid_t> children;
  for (int status : {7, 0}) {
    Settings& settings = all.emplace_back(0, std::vector<Address>{NewAddress()});
    children.push_back(Fork());
    if (children.back() == 0) {
      settings->processes[0].pid = getpid();
      CHECK(StartMonitor(*settings).empty());
      while (true) pause();
    }
    CHECK(BecomesTrue([&] { return settings.Ask(kEndNow, EndText(status, "told", {0, 1})).text == kAllTold; }));
    CHECK(settings.HasRecords("told"));
  }
  for (const int expected : {7, 1}) {  // none ends well while others fail
    int status = 0;
    CHECK(waitpid(children[expected == 7 ? 0 : 1], &status, 0) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == expected);
  }
}

// Rank 1 dies. This monitor says so if it `says` deaths, and tells rank 2 of it, unless the ranks go on without it, or it was on
// another host.
void Death(bool may_lose_ranks, bool says, bool is_on_this_host) {
  const int reading = ReadingOfStderr();
  Address address = NewAddress();
  const int fd = Listening(&address);
  const pid_t child = ServingChild(1, fd);
  PlayedRank two(2, [](int64_t, const std::string&) { return kAllTold; });
  Settings settings(0, {address, two.address()});
  settings->processes[1].pid = child;
  settings->processes[2].host = 2;
  if (!is_on_this_host) settings->processes[1].host = 2;
  settings->may_lose_ranks = may_lose_ranks;
  settings->says_deaths = says;
  CHECK(StartMonitor(*settings).empty());
  const SideChannel asking(-1, {{}, {address}}, kSecret);
  CHECK(asking.Ask({1}, kAreYouThere, "", 20 * kSecondNs)[0].came);
  Sleep(200);  // the guard is connected
  CHECK(two.requests().empty());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  const std::string what = "rank 1 of 3 died: process " + std::to_string(child) + " on host host1 was killed, crashed or called _exit.";
  if (may_lose_ranks || !is_on_this_host) {
    Sleep(200);
    CHECK(two.requests().empty() && settings.Records().empty());
  } else {
    CHECK(BecomesTrue([&] { return !two.requests().empty() && settings.HasRecords(what); }));
    CHECK(two.requests() == std::vector<Asked>({{kDeathIsKnown, DeathText(what, {0, 1, 2})}}));
  }
  StopMonitor();
  CHECK(fcntl(reading, F_SETFL, O_NONBLOCK) == 0);
  std::string said;
  char part[1000];
  for (ssize_t n; (n = read(reading, part, sizeof(part))) > 0;) said.append(part, static_cast<size_t>(n));
  CHECK(said == (says && !may_lose_ranks && is_on_this_host ? "pycollective: " + what + "\n" : ""));
  close(reading);
  close(fd);
}

void TestDeathOfARank() {
  const int console = dup(STDERR_FILENO);
  Death(false, true, true);
  Death(false, false, true);
  Death(true, true, true);
  Death(false, true, false);  // the launcher may have ended it
  CHECK(dup2(console, STDERR_FILENO) == STDERR_FILENO);
}

// A rank whose call waits long lets a lower rank report, and does so once for a call.
void TestALowerRankReports() {
  const auto answer = [](int64_t, const std::string&) { return "yes"; };
  PlayedRank zero(0, answer), two(2, answer);
  Settings settings(1, {zero.address(), two.address()});
  settings->warn_ns = kSecondNs / 10;
  CHECK(StartMonitor(*settings).empty());
  Record record;
  record.operation = kBarrier;
  record.state = kStarted;
  Recorded call(record);
  CHECK(BecomesTrue([&] { return zero.requests().size() >= 2; }));
  Sleep(1500);  // the next look
  CHECK(zero.requests().size() == 2 && two.requests().empty());
  CHECK(zero.requests()[0] == Asked(kAreYouThere, ""));
  CHECK(zero.requests()[1].first == kReport);
  const std::string text = zero.requests()[1].second;
  Reader reader(text);
  CHECK(reader.Number() == 2);  // a long wait
  const int64_t age_ns = reader.Number();
  CHECK(reader.Number() == 1);  // the two are of one host: rank 0 leads it
  CHECK(reader.ok() && kSecondNs / 10 < age_ns && age_ns < 20 * kSecondNs);
  StopMonitor();
}

// A long wait of this process.
Record LongWait() {
  Record record;
  record.operation = kBarrier;
  record.state = kStarted;
  return record;
}

// How many requests of one kind a rank has got.
size_t CountOf(const PlayedRank& rank, int64_t kind) {
  size_t count = 0;
  for (const auto& [asked, text] : rank.requests()) count += asked == kind ? 1 : 0;
  return count;
}

// Rank 2 of hosts (0, 1), (2, 3): it leads its host, and lets rank 0 report, which is on another one.
void TestALeaderSpeaksToOtherHosts() {
  const auto answer = [](int64_t, const std::string&) { return "yes"; };
  PlayedRank zero(0, answer), one(1, answer), three(3, answer);
  Settings settings(2, {zero.address(), one.address(), three.address()});
  for (const size_t rank : {2, 3}) settings->processes[rank].host = 2;
  settings->warn_ns = kSecondNs / 10;
  CHECK(StartMonitor(*settings).empty());
  Recorded call(LongWait());
  CHECK(BecomesTrue([&] { return CountOf(zero, kReport) == 1; }));
  const std::string text = zero.requests().back().second;
  Reader of_text(text);
  CHECK(of_text.Number() == 2 && of_text.Number() > 0 && of_text.Number() == 0 && of_text.ok());
  CHECK(CountOf(one, kReport) == 0 && three.requests().empty());
  // Rank 3 waits there as well. Rank 0 has the report already, but not if the job shall end.
  const auto told_of = [&](int64_t reason) {
    CHECK(settings.Ask(kReport, Writer().Put(reason).Put(kSecondNs).Put(1).text()).text == "yes");
  };
  told_of(2);
  Sleep(300);
  CHECK(CountOf(zero, kReport) == 1);
  told_of(3);
  CHECK(BecomesTrue([&] { return CountOf(zero, kReport) == 2; }));
  StopMonitor();
}

// Rank 3 of the same hosts tells rank 2, and no rank of another host.
void TestOtherRanksSpeakToTheirLeader() {
  const auto answer = [](int64_t, const std::string&) { return "yes"; };
  PlayedRank zero(0, answer), one(1, answer), two(2, answer);
  Settings settings(3, {zero.address(), one.address(), two.address()});
  for (const size_t rank : {2, 3}) settings->processes[rank].host = 2;
  settings->warn_ns = kSecondNs / 10;
  CHECK(StartMonitor(*settings).empty());
  Recorded call(LongWait());
  CHECK(BecomesTrue([&] { return CountOf(two, kReport) == 1; }));
  Sleep(300);
  CHECK(zero.requests().empty() && one.requests().empty());
  StopMonitor();
}

// What rank 2 does that ranks of its host have told of a wait: it asks rank 0 to report. Asked by another host, it reports.
void TestALeaderThatIsAsked() {
  for (const bool is_of_host : {true, false}) {
    const auto answer = [](int64_t kind, const std::string&) {
      return kind == kTellStatus ? Packed(Heard{{In(0, {})}, {}}) : std::string("yes");
    };
    PlayedRank zero(0, answer), one(1, answer), three(3, answer);
    Settings settings(2, {zero.address(), one.address(), three.address()});
    for (const size_t rank : {2, 3}) settings->processes[rank].host = 2;
    CHECK(StartMonitor(*settings).empty());
    const std::string text = Writer().Put(2).Put(kSecondNs).Put(is_of_host ? 1 : 0).text();
    CHECK(settings.Ask(kReport, text).text == "yes");
    CHECK(BecomesTrue([&] { return CountOf(zero, is_of_host ? kReport : kTellStatus) > 0; }));
    Sleep(300);
    CHECK(CountOf(zero, is_of_host ? kTellStatus : kReport) == 0 && CountOf(three, kReport) == 0);
    StopMonitor();
  }
}

// A rank that another one has asked for its status leaves the report of this reason to the asker. A less grave report does
// not silence it.
void TestOneReportMakesOthersSilent() {
  for (const int64_t reason : {1, 2, 3}) {
    const auto answer = [](int64_t, const std::string&) { return "yes"; };
    PlayedRank zero(0, answer), two(2, answer);
    Settings settings(1, {zero.address(), two.address()});
    settings->warn_ns = kSecondNs / 5;
    CHECK(StartMonitor(*settings).empty());
    CHECK(settings.Ask(kTellStatus, TellText(reason)).came);
    Recorded call(LongWait());
    if (reason < 2) {
      CHECK(BecomesTrue([&] { return CountOf(zero, kReport) == 1; }));
    } else {
      Sleep(1800);  // two looks
      CHECK(zero.requests().empty() && two.requests().empty());
    }
    StopMonitor();
  }
}

// The head of a part hands the end on, and tells to whom it has not come.
void TestTheEndIsHandedOn() {
  const pid_t child = Fork();
  if (child == 0) {  // its monitor ends it
    const auto answer = [](int64_t, const std::string&) { return kAllTold; };
    PlayedRank one(1, answer), two(2, answer);
    Settings settings(0, {one.address(), two.address(), Nobody()});
    CHECK(StartMonitor(*settings).empty());
    CHECK(settings.Ask(kEndNow, EndText(7, "the end", {0, 1, 2, 3}, {1, 2, 3})).text == Through({3}, ""));
    for (const PlayedRank* rank : {&one, &two}) CHECK(rank->requests() == std::vector<Asked>({{kEndNow, EndText(7, "the end", {0, 1, 2, 3})}}));
    CHECK(BecomesTrue([&] { return settings.HasRecords("the end"); }));
    // What comes again is handed on again: the rank that asks wants to know who has heard.
    CHECK(settings.Ask(kEndNow, EndText(7, "the end", {0, 1, 2, 3}, {1})).text == kAllTold);
    std::fflush(nullptr);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Whether `all` has each of `ranks`.
bool Has(const std::vector<int>& all, const std::vector<int>& ranks) {
  return std::includes(all.begin(), all.end(), ranks.begin(), ranks.end());
}
// How many of `all` are among `ranks`, which ascend.
size_t CountAmong(const std::vector<int>& all, const std::vector<int>& ranks) {
  size_t count = 0;
  for (const int rank : all) count += std::binary_search(ranks.begin(), ranks.end(), rank) ? 1 : 0;
  return count;
}

// The ranks that write their records: those that differ, and a sample of each status, in which the most common one has the majority.
void TestWriters() {
  const auto status = [](const std::vector<int>& ranks) {
    Status of_ranks;
    of_ranks.ranks = ranks;
    return of_ranks;
  };
  const auto without = [](std::vector<int> all, const std::vector<int>& ranks) {
    for (const int rank : ranks) all.erase(std::find(all.begin(), all.end(), rank));
    return all;
  };
  CHECK(RecordWriters(16, 3, {status({2}), status(without(Count(16), {2}))}, {}) == Count(16));
  CHECK(RecordWriters(17, 3, {}, {4}) == Count(17));  // as many as a sample has
  constexpr int kSize = 10240;
  const std::vector<int> most = without(Count(kSize), {0, 77, 4000, 4001, 9000});
  const std::vector<int> writers = RecordWriters(kSize, 4001, {status({0}), status(most), status({77, 4000, 4001})}, {9000});
  CHECK(Has(writers, {0, 77, 4000, 4001, 9000}) && writers.size() == 5 + kMostUsual);
  CHECK(*std::max_element(writers.begin(), writers.end()) > kSize - kSize / 30);  // they are spread
  // A third of the ranks differ: fewer of their records are written.
  std::vector<int> lower, upper;
  for (int rank = 0; rank < 300; ++rank) (rank < 100 ? lower : upper).push_back(rank);
  const std::vector<int> of_two = RecordWriters(300, 0, {status(lower), status(upper)}, {});
  CHECK(CountAmong(of_two, upper) == kMostUsual && CountAmong(of_two, lower) == kMostOthers);
  // As many states as ranks, and a host that is silent.
  std::vector<Status> many;
  for (int rank = 0; rank < 200; ++rank) many.push_back(status({rank}));
  const std::vector<int> silent = without(Count(400), Count(200));
  const std::vector<int> of_many = RecordWriters(400, 0, many, silent);
  CHECK(CountAmong(of_many, silent) == kMostSilent && of_many.size() <= kMostSilent + kMostOthers + 2);
  CHECK(RecordWriters(kSize, 5, {}, {6}).size() == kMostUsual + 2);  // nobody knows what ranks do
}

// Rank 0 of 64 has an error. Rank 5 waits in another call than the others, rank 7 is not there.
void TestRecordsOfSomeRanks() {
  constexpr int kSize = 64;
  std::list<PlayedRank> ranks;
  std::vector<Address> addresses;
  for (int rank = 1; rank < kSize; ++rank) {
    const auto call = rank == 5 ? Waits(kRecv, {0}) : Waits(kAllreduce, Count(kSize));
    const auto answer = [rank, call](int64_t kind, const std::string&) {
      return kind == kTellStatus ? Packed(Heard{{In(rank, {call})}, {}}) : kAllTold;
    };
    addresses.push_back(rank == 7 ? Nobody() : ranks.emplace_back(rank, answer).address());
  }
  Settings settings(0, addresses);
  CHECK(StartMonitor(*settings).empty());
  CHECK(BeginEnd(3, "rank 0 raised"));
  const std::vector<Asked> requests = ranks.front().requests();
  CHECK(requests.size() == 2 && requests[0] == Asked(kTellStatus, TellText(0)) && requests[1].first == kEndNow);
  for (const PlayedRank& rank : ranks) CHECK(rank.requests() == requests);
  Reader end(requests[1].second);
  CHECK(RanksFrom(end, kSize).empty() && end.Number() == 3 && end.Text() == "rank 0 raised");
  const std::vector<int> writers = RanksFrom(end, kSize);
  CHECK(end.ok() && Has(writers, {0, 5, 7}) && writers.size() == 3 + kMostUsual);
  std::string list;
  for (const int rank : writers) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  CHECK(settings.HasRecords("rank 0 raised") && settings.Records().find("\"writers\": [" + list + "]") != std::string::npos);
  CHECK(settings.Records().find("\"complete_from\": 0,") != std::string::npos);
  StopMonitor();
}

// A rank that is told the end writes its records if it is asked for them, be it by the second rank that tells an end.
void TestOnlyWritersWrite() {
  const pid_t child = Fork();
  if (child == 0) {  // its monitor ends it
    Settings settings(0, {NewAddress()});
    CHECK(StartMonitor(*settings).empty());
    CHECK(settings.Ask(kDeathIsKnown, DeathText("rank 1 died", {1})).text == kAllTold);
    CHECK(settings.Ask(kEndNow, EndText(1, "the first end", {1})).text == kAllTold);
    CHECK(settings.Records().empty());
    CHECK(settings.Ask(kEndNow, EndText(1, "the second end", {0, 1})).text == kAllTold);
    CHECK(settings.HasRecords("the second end"));
    CHECK(settings.Ask(kEndNow, EndText(1, "the third end", {0, 1})).text == kAllTold);
    CHECK(settings.HasRecords("the second end"));
    std::fflush(nullptr);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Two jobs have two names; the ranks of one job have one.
void TestRecordsNameTheirJob() {
  std::vector<std::string> names;
  for (const char secret : {'s', 's', 't'}) {
    Settings settings(0, {NewAddress()});
    settings->secret = std::string(64, secret);
    CHECK(StartMonitor(*settings).empty());
    CHECK(BeginEnd(1, "the end"));
    const std::string records = settings.Records();
    const size_t at = records.find("\"job\": \"");
    CHECK(at != std::string::npos);
    names.push_back(records.substr(at + 8, 16));
    StopMonitor();
  }
  CHECK(names[0] == names[1] && names[0] != names[2] && names[0].find('"') == std::string::npos);
}

// The records before `complete_from` are not whole: the ring has lost some of them, not the one that stays under way.
void TestFromWhichRecordAllAreThere() {
  const auto says = [](int64_t id) {
    return RecorderJson(0, 1, {}).find("\"complete_from\": " + std::to_string(id) + ",") != std::string::npos;
  };
  Record record;
  record.operation = kBarrier;
  record.state = kStarted;
  const Recorded stays(record);
  for (size_t i = 1; i < kRecords; ++i) Recorded(record).Finish(kCompleted);
  CHECK(says(0));
  Recorded(record).Finish(kCompleted);  // its slot is that of the call under way, so it gets the next one
  CHECK(says(2));
  CHECK(RecorderJson(0, 1, {}).find("{\"record_id\": 0,") != std::string::npos);
}

// Threads that come to a free slot at one time. One of them gets it.
void TestSlotsHaveOneOwner() {
  constexpr int kThreads = 4;
  constexpr int kRounds = 20000;
  std::vector<Slot> slots(kRounds);
  std::atomic<int> owners{0};
  std::atomic<int> ready{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (++ready; ready < kThreads;) std::this_thread::yield();
      for (Slot& slot : slots) owners += slot.Claim() ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(owners == kRounds);
}

bool Says(const std::vector<Status>& statuses, const std::string& verdict) {
  const std::string text = DescribeAll(statuses, {});
  if (text.find(verdict) != std::string::npos) return true;
  std::fprintf(stderr, "%s", text.c_str());
  return false;
}

// Whom a report blames for a wait in messages.
void TestVerdictOnMessages() {
  const std::string circle = "The ranks wait for each other, in messages";
  const auto sum = Waits(kAllreduce, {0, 1, 2});
  CHECK(Says({In(0, {Waits(kRecv, {1})}), In(1, {Waits(kRecv, {0})})}, circle));
  CHECK(Says({In(0, {Waits(kSend, {1})}), In(1, {Waits(kSend, {0})}), In(2, {sum})}, circle));
  CHECK(Says({In(0, {sum}), In(1, {Waits(kSend, {0})}), In(2, {sum})}, "Look at rank 0: "));
  CHECK(Says({In(0, {Waits(kSend, {1})}), In(1, {Waits(kSend, {2})}), In(2, {})}, "Look at rank 2: "));
  CHECK(Says({In(0, {Waits(kRecv, {1})})}, "Look at rank 1: "));  // it does not answer
}

// Frames of a rank at its end, and of one that nobody waits for, say nothing.
void TestFramesOfTheBlamed() {
  CallStatus end = Waits(kAllreduce, {});
  end.operation = kEnd;
  CallStatus split = Waits(kAllreduce, {0, 1});
  split.operation = kSplit;
  split.site = "";
  const auto sum = Waits(kAllreduce, {0, 1});
  CHECK(RanksWithoutPlace({In(0, {sum}), In(1, {}), In(2, {})}) == std::vector<int>{1});
  CHECK(RanksWithoutPlace({In(0, {sum}), In(1, {end})}).empty());
  CHECK(RanksWithoutPlace({In(0, {split}), In(1, {})}) == (std::vector<int>{0, 1}));
}

// What faulthandler writes becomes the main thread's frames and those of callbacks, wherever they stand in it.
void TestFramesInADump() {
  const std::string main = "  File \"train.py\", line 3 in step\n  File \"train.py\", line 9 in <module>\n";
  const std::string callback = "  File \"a/jax/_src/callback.py\", line 70 in _callback\n";
  const std::string dump = "Thread 0x00000000000000a1 (most recent call first):\n" + callback +
                           "\nCurrent thread 0x00000000000000a2 (most recent call first):\n  File \"Thread 0x\", line 1 in a\n" +
                           "\nThread 0x00000000000000a3 [python] (most recent call first):\n" + main;
  for (const std::string& end : {std::string(), std::string("\n")}) {
    CHECK(FramesIn(dump + end, 0xa3).main_thread == main);
    CHECK(FramesIn(dump + end, 0xa3).callbacks == callback);
  }
  CHECK(FramesIn(dump, 0xa2).main_thread == "  File \"Thread 0x\", line 1 in a\n");
  CHECK(FramesIn(dump, 0xa1).main_thread == callback);
  CHECK(FramesIn(dump, 0xa1).callbacks.empty());
  CHECK(FramesIn(dump, 0xa).main_thread.empty());
  CHECK(FramesIn("", 0xa3).main_thread.empty());
}

// A process that ends waits until somebody has read what it has written, as long as Python says.
void TestWaitUntilRead() {
  const int reading = ReadingOfStderr();
  CHECK(write(STDERR_FILENO, "last words", 10) == 10);
  std::atomic<bool> is_read{false};
  std::thread reader([&] {
    Sleep(50);
    is_read = true;
    char text[10];
    CHECK(read(reading, text, sizeof(text)) == 10);
  });
  pycollective_set_read_times(60, 0);
  WaitUntilRead();
  CHECK(is_read);
  reader.join();
  CHECK(write(STDERR_FILENO, "last words", 10) == 10);
  pycollective_set_read_times(0.01, 0);
  WaitUntilRead();  // nobody reads it
}

// The guard closes its connection, under the lock under which another thread may shut it down.
void TestConnectionStaysOpen() {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  close(ends[1]);
  CHECK(SideChannel::HasDied(ends[0], "farewell"));
  CHECK(fcntl(ends[0], F_GETFD) != -1);
}

}  // namespace
}  // namespace pycollective

int main(int argc, char** argv) {
  using namespace pycollective;
  return RunOne({{"lack_of_memory", TestLackOfMemory},
                 {"nobody_reads", TestNobodyReads},
                 {"all_is_said", TestAllIsSaid},
                 {"file_is_continued", TestFileIsContinued},
                 {"requests", TestRequests},
                 {"end_is_told", TestEndIsTold},
                 {"ends_as_told", TestEndsAsTold},
                 {"death_of_a_rank", TestDeathOfARank},
                 {"a_lower_rank_reports", TestALowerRankReports},
                 {"a_leader_speaks_to_other_hosts", TestALeaderSpeaksToOtherHosts},
                 {"other_ranks_speak_to_their_leader", TestOtherRanksSpeakToTheirLeader},
                 {"a_leader_that_is_asked", TestALeaderThatIsAsked},
                 {"one_report_makes_others_silent", TestOneReportMakesOthersSilent},
                 {"the_end_is_handed_on", TestTheEndIsHandedOn},
                 {"writers", TestWriters},
                 {"records_of_some_ranks", TestRecordsOfSomeRanks},
                 {"only_writers_write", TestOnlyWritersWrite},
                 {"records_name_their_job", TestRecordsNameTheirJob},
                 {"from_which_record_all_are_there", TestFromWhichRecordAllAreThere},
                 {"slots_have_one_owner", TestSlotsHaveOneOwner},
                 {"verdict_on_messages", TestVerdictOnMessages},
                 {"frames_of_the_blamed", TestFramesOfTheBlamed},
                 {"frames_in_a_dump", TestFramesInADump},
                 {"wait_until_read", TestWaitUntilRead},
                 {"connection_stays_open", TestConnectionStaysOpen}},
                argc, argv);
}
