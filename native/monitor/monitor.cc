// Implementation of monitor.h.

#include "monitor/monitor.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "base/clock.h"
#include "monitor/ask_tree.h"
#include "monitor/hmac.h"
#include "monitor/inquiry.h"
#include "monitor/own_end.h"
#include "monitor/own_file.h"
#include "monitor/process.h"
#include "monitor/python_stacks.h"
#include "monitor/rank_guard.h"
#include "monitor/rank_runs.h"
#include "monitor/record_writers.h"
#include "monitor/status.h"
#include "records/recorder.h"

namespace pycollective {
namespace {

constexpr int64_t kSecondNs = 1000000000;
constexpr int64_t kTellNs = 2 * kSecondNs;      // for a rank to hear of a wait
constexpr int64_t kReportNs = 15 * kSecondNs;   // after another rank has begun a report, or was told to, this one reports itself
constexpr int64_t kLeaderNs = 3 * kSecondNs;    // more, if that rank has to find the one that reports
constexpr int64_t kTurnNs = 1000000;            // times the number of hosts: until the leader of a host speaks to another host
constexpr int64_t kEndedNs = 10 * kSecondNs;    // a rank that has ended asks what the others do
constexpr int64_t kDeathNs = 6 * kSecondNs;     // after a rank has died, a wait for it counts as a long wait
constexpr auto kAfterFailure = std::chrono::milliseconds(200);  // before a thread goes on that has met an error

// Why a rank asks another one to report; the greater one matters more.
enum Reason : int64_t { kSomeHaveEnded = 1, kLongWait, kTooLongWait };
constexpr int64_t kNoReport = 0;  // in the place of a reason: a rank asks what others do, and makes no report

class Monitor {
 public:
  explicit Monitor(MonitorSettings settings)
      : settings_(std::move(settings)),
        channel_(settings_.rank, Addresses(), settings_.secret),
        warn_ns_(settings_.warn_ns),
        timeout_ns_(settings_.timeout_ns) {
    for (const int guarded : RanksGuardedBy(settings_.rank, settings_.processes)) {
      guards_.emplace_back(channel_, guarded, [this](int rank) { OnDeath(rank); });
    }
  }

  void SetTimeout(int64_t warn_ns, int64_t timeout_ns) {
    warn_ns_ = warn_ns;
    timeout_ns_ = timeout_ns;
  }

  // Throws std::system_error if there is a thread that cannot be made. Then none runs.
  void Start() {
    try {
      server_ = std::thread([this] { Serve(); });
      watcher_ = std::thread([this] { Watch(); });
      for (RankGuard& guard : guards_) guard.Start();
    } catch (...) {
      Stop();
      throw;
    }
  }
  void Stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    Leave();
    changed_.notify_all();
    for (const int fd : settings_.listening) shutdown(fd, SHUT_RDWR);  // it wakes the server
    if (watcher_.joinable()) watcher_.join();
    if (server_.joinable()) server_.join();
    for (RankGuard& guard : guards_) guard.Stop();
    for (const int fd : settings_.listening) close(fd);
  }

  void Forget(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    forgotten_.insert(rank);
  }

  void Leave() {
    if (getpid() == Own().pid) channel_.Leave();  // a forked child has these connections, too
  }

  bool BeginEnd(int status, const std::string& cause) {
    if (!SetEnd(status)) return false;
    const std::vector<int> writers = WritersAtAnError();
    TellEnd(status, cause, writers);
    Tried("write its records", [&] { WriteRecords(cause, writers); });
    return true;
  }

  [[noreturn]] void EndJob(const std::string& text) {
    EndJob(text, WritersAtAnError());
    AwaitEnd();
  }

 private:
  int size() const { return static_cast<int>(settings_.processes.size()); }
  std::vector<std::vector<Address>> Addresses() const {
    std::vector<std::vector<Address>> all;
    for (const Process& process : settings_.processes) all.push_back(process.addresses);
    return all;
  }
  std::vector<int> Others() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int> others;
    for (int rank = 0; rank < size(); ++rank) {
      const bool is_there = settings_.processes[static_cast<size_t>(rank)].pid != 0 && forgotten_.count(rank) == 0;
      if (rank != settings_.rank && is_there) others.push_back(rank);
    }
    return others;
  }

  void TellEnd(int status, const std::string& cause, const std::vector<int>& writers) {
    Writer writer;
    writer.Put(status);
    TellCause(kEndNow, std::move(writer), cause, writers);
  }
  // Tells all ranks a cause, and which of them write their records.
  void TellCause(int64_t kind, Writer writer, const std::string& cause, const std::vector<int>& writers) {
    PutRanks(writer.Put(cause), writers);
    Tried("tell the other ranks",
          [&] { TellAll(channel_, settings_.processes, settings_.rank, Others(), kind, writer.text()); });
  }

  // The ranks that write their records when this one has an error. It asks what the others do, for a short time.
  std::vector<int> WritersAtAnError() {
    Heard heard;
    Tried("ask what other ranks do", [&] {
      if (size() > kAllWrite) {
        heard = HearFor(channel_, settings_.processes, StatusOfThisProcess(settings_.rank), Others(), kNoReport, kBriefLimits);
      }
    });
    std::vector<int> silent;
    for (const Unheard& one : heard.unheard) silent.push_back(one.rank);
    SortRanks(&silent);
    return RecordWriters(size(), settings_.rank, heard.statuses, silent);
  }

  // Writes this process's records to the folder of the settings, if it is one of `writers`. Returns a line of a report that says so, or
  // why not. Where `anew` is false, records that lie there stay.
  std::string WriteRecords(const std::string& reason, const std::vector<int>& writers, bool anew = true) {
    if (settings_.folder.empty() || !std::binary_search(writers.begin(), writers.end(), settings_.rank)) return "";
    const std::lock_guard<std::mutex> lock(records_mutex_);  // several threads may learn of the end
    if (has_written_ && !anew) return "";
    const std::string name = "rank-" + std::to_string(settings_.rank) + ".json";
    const std::string wrong = WriteOwnFile(settings_.folder, name, RecorderJson(settings_.rank, size(), {reason, job_, writers}));
    has_written_ = wrong.empty();
    const std::string count = std::to_string(writers.size()) + " of " + std::to_string(size()) + " ranks";
    const std::string whose = static_cast<int>(writers.size()) == size() ? "each rank" : count;
    if (wrong.empty()) return "  The last calls of " + whose + " are in " + settings_.folder + ".\n";
    return "  The last calls are not in " + settings_.folder + ": " + wrong + ". Name another folder by PYCOLLECTIVE_RECORDS.\n";
  }

  // Another rank has died. A rank of its host says so. On another host nobody can know whether the launcher did it: it
  // ends the ranks of one host after those of another. Others may die of the first death, by their MPI: it is not said
  // of them. All write their records, as far as the launcher lets them.
  void OnDeath(int rank) {
    const Process& process = settings_.processes[static_cast<size_t>(rank)];
    const std::string what = "rank " + std::to_string(rank) + " of " + std::to_string(size()) + " died: process " +
                             std::to_string(process.pid) + " on host " + process.host_name +
                             " was killed, crashed or called _exit.";
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (death_ns_ == 0) death_ns_ = NowNs();
      if (settings_.may_lose_ranks || stopping_ || has_end_ || process.host != Own().host) return;
      if (std::exchange(is_death_known_, true)) return;
    }
    if (settings_.says_deaths) Say("pycollective: " + what + "\n");
    // At the same time, since the launcher may end this rank in a few milliseconds.
    const std::vector<int> writers = RecordWriters(size(), settings_.rank, {}, {rank});
    const auto told = std::async([&] { TellCause(kDeathIsKnown, Writer(), what, writers); });
    WriteRecords(what, writers);
    told.wait();  // without a thread it is done now
  }

  // Returns whether this is the first end that this rank knows.
  bool SetEnd(int status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has_end_) return false;
    has_end_ = true;
    status_ = status;
    return true;
  }

  // What other ranks ask -----------------------------------------------------------------------------------------

  void Serve() {
    const auto answer = [this](int64_t kind, const std::string& text) { return Answer(kind, text); };
    while (!IsStopping()) {
      const bool served = Tried("answer other ranks", [&] {
        channel_.Serve(settings_.listening, answer, [this] { return IsStopping(); }, AsksOthers);
      });
      if (!served) std::this_thread::sleep_for(kAfterFailure);
    }
  }

  static bool GoesByTree(int64_t kind) { return kind == kTellStatus || kind == kEndNow || kind == kDeathIsKnown; }
  // Whether this rank has to ask others for its answer.
  static bool AsksOthers(int64_t kind, const std::string& text) { return GoesByTree(kind) && Reader(text).Number() > 0; }

  // Several threads call it at a time.
  std::string Answer(int64_t kind, const std::string& text) {
    Reader reader(text);
    std::vector<int> others;
    if (GoesByTree(kind)) {
      others = RanksFrom(reader, size());
      if (!reader.ok()) return "";
    }
    switch (kind) {
      case kAreYouThere: return "yes";
      case kTellStatus: {
        const int64_t reason = reader.Number();
        NoteReport(reason);
        return Packed(HearFor(channel_, settings_.processes, StatusOfThisProcess(settings_.rank), others, reason));
      }
      case kTellFrames: return Packed(StacksOfPython().Now());
      case kTellGroup: return MembersOf(text);
      case kProcessState: return StatesOf(settings_.processes, settings_.rank, text);
      case kDeathIsKnown: {
        const std::string rest = reader.Rest();
        const Cause cause = CauseFrom(rest);
        if (cause.writers.empty()) return "";
        bool writes;
        {
          const std::lock_guard<std::mutex> lock(mutex_);
          is_death_known_ = true;
          writes = !stopping_ && !has_end_;
        }
        const std::string told = HandedOn(kind, others, rest);
        if (writes) WriteRecords(cause.text, cause.writers);
        return told;
      }
      case kReport: {
        const int64_t reason = reader.Number(), age_ns = reader.Number(), is_of_host = reader.Number();
        const std::lock_guard<std::mutex> lock(mutex_);
        asked_ = std::max(asked_, reason);
        asked_for_ns_ = std::max(asked_for_ns_, age_ns);
        asked_by_other_host_ = asked_by_other_host_ || is_of_host == 0;
        changed_.notify_all();
        return "yes";
      }
      case kEndNow: {
        const std::string rest = reader.Rest();
        Reader of_end(rest);
        const int status = static_cast<int>(of_end.Number());
        const Cause cause = CauseFrom(of_end.Rest());
        if (cause.writers.empty()) return "";
        const bool is_new = SetEnd(status);
        if (is_new) {
          const std::lock_guard<std::mutex> lock(mutex_);
          is_told_ = true;
          changed_.notify_all();
        }
        const std::string told = HandedOn(kind, others, rest);  // first: a file system may hang
        WriteRecords(cause.text, cause.writers, is_new);  // several ranks may tell an end, with other writers
        return told;
      }
      default: return "";
    }
  }

  // What TellCause tells. Without writers it is none.
  struct Cause {
    std::string text;
    std::vector<int> writers;
  };
  Cause CauseFrom(const std::string& text) const {
    Reader reader(text);
    Cause cause;
    cause.text = reader.Text();
    cause.writers = RanksFrom(reader, size());
    return cause;
  }

  // Hands a request on, and returns the reply to it; "" if that fails, so that the rank that asks tells these ranks itself.
  std::string HandedOn(int64_t kind, const std::vector<int>& others, const std::string& text) {
    std::string told;
    Tried("tell other ranks", [&] { told = HandOn(channel_, settings_.processes, settings_.rank, others, kind, text); });
    return told;
  }

  // Another rank asks what this one does: it makes a report.
  void NoteReport(int64_t reason) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t now = NowNs();
    if (reason < seen_reason_ && now - seen_ns_ < kReportNs) return;
    seen_reason_ = reason;
    seen_ns_ = now;
  }

  // The watch -----------------------------------------------------------------------------------------------------

  bool IsStopping() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stopping_;
  }

  void Watch() {
    bool goes_on = true;
    while (goes_on) {
      const bool watched = Tried("watch this rank's waits", [&] { goes_on = WatchOnce(); });
      if (!watched) std::this_thread::sleep_for(kAfterFailure);
    }
  }

  // One look at the calls under way. Returns false if the monitor stops.
  bool WatchOnce() {
    const int64_t warn_after_ns = warn_ns_, timeout_ns = timeout_ns_;
    int64_t interval_ns = kSecondNs;
    if (timeout_ns > 0) interval_ns = std::min(interval_ns, timeout_ns / 4);
    int64_t asked, asked_for_ns, death_ns;
    bool is_told, is_reporter;
    int status;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, std::chrono::nanoseconds(interval_ns),
                        [this] { return stopping_ || is_told_ || asked_ != 0; });
      if (stopping_) return false;
      is_told = is_told_;
      status = status_;
      if (has_end_ && !is_told) return true;  // this rank ends the job
      asked = std::exchange(asked_, 0);
      asked_for_ns = std::exchange(asked_for_ns_, 0);
      is_reporter = std::exchange(asked_by_other_host_, false);
      death_ns = death_ns_;
    }
    if (is_told) EndAsTold(status, settings_.processes, Own().host);
    if (getppid() != parent_) {
      Leave();
      Say("pycollective: the launcher of rank " + std::to_string(settings_.rank) + " has ended; ending this rank.\n");
      _exit(1);
    }
    int64_t oldest_id = -1, oldest_ns = 0, reason = asked;
    const int64_t now = NowNs();
    bool has_ended = death_ns != 0 && now - death_ns > kDeathNs;
    for (const Record& record : RecordsUnderWay()) {
      const int64_t age_ns = now - record.created_ns;
      if (record.operation == kEnd) {
        has_ended = has_ended || age_ns > kEndedNs;
        continue;
      }
      if (timeout_ns > 0 && age_ns > timeout_ns) reason = kTooLongWait;
      if (reason == 0 && warn_after_ns > 0 && age_ns > warn_after_ns && record.id > warned_of_) reason = kLongWait;
      if (reason != 0 && age_ns > oldest_ns) oldest_id = record.id, oldest_ns = age_ns;
    }
    // A rank may end long before the others, or die without a word from its launcher. From time to time this one asks
    // whether others wait for it.
    if (reason == 0 && has_ended && now - asked_at_end_ns_ > kEndedNs) reason = kSomeHaveEnded, asked_at_end_ns_ = now;
    if (reason == 0) return true;
    if (asked == 0) warned_of_ = std::max(warned_of_, oldest_id);
    oldest_ns = std::max(oldest_ns, asked_for_ns);
    const bool reported = Tried("report a long wait", [&] {
      if (is_reporter || !AnotherReports(reason, oldest_ns, asked != 0)) Report(reason, oldest_ns);
    });
    if (!reported && reason == kTooLongWait) {
      EndJob("pycollective: a call has waited too long; ending all ranks.\n", RecordWriters(size(), settings_.rank, {}, {}));
    }
    return true;
  }

  // Lets a lower rank report: the leader of this host, which is its lowest rank that answers; the leader lets the lowest rank of
  // other hosts. So a rank hears from those of its host and from the leaders of other hosts. Returns false if no lower rank
  // answers, so that this one must report. `leads`: other ranks of this host have found it to be the leader.
  bool AnotherReports(int64_t reason, int64_t age_ns, bool leads) {
    if (IsReportUnderWay(reason) || (leads && reason == kLongWait && HasToldOtherHost())) return LeaveReportToOther(reason, 0);
    std::vector<int> here, there;
    std::set<int64_t> hosts;
    for (const int rank : Others()) {
      const int64_t host = settings_.processes[static_cast<size_t>(rank)].host;
      hosts.insert(host);
      if (rank < settings_.rank) (host == Own().host ? here : there).push_back(rank);
    }
    if (!leads && OneReports(here, reason, age_ns, true)) return LeaveReportToOther(reason, kLeaderNs);
    if (there.empty()) return false;
    // Leaders speak one after another, so that the first report makes the others silent.
    std::minstd_rand random(static_cast<uint32_t>(settings_.rank) + static_cast<uint32_t>(NowNs()));
    const int64_t turns = std::min(static_cast<int64_t>(hosts.size()) * kTurnNs, kSecondNs);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, std::chrono::nanoseconds(static_cast<int64_t>(random()) % turns),
                        [this] { return stopping_ || has_end_; });
    }
    if (IsReportUnderWay(reason)) return LeaveReportToOther(reason, 0);
    if (!OneReports(there, reason, age_ns, false)) return false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      told_other_host_ns_ = NowNs();
    }
    return LeaveReportToOther(reason, 0);
  }

  // Asks `lower`, which ascend, for a report. Returns whether one of them has taken it.
  bool OneReports(const std::vector<int>& lower, int64_t reason, int64_t age_ns, bool is_of_host) {
    const std::string text = Writer().Put(reason).Put(age_ns).Put(is_of_host ? 1 : 0).text();
    // In larger and larger groups: often the lowest answers, and a whole host may be silent.
    for (size_t first = 0, count = 1; first < lower.size(); first += count, count *= 8) {
      const std::vector<int> group(lower.begin() + static_cast<std::ptrdiff_t>(first),
                                   lower.begin() + static_cast<std::ptrdiff_t>(std::min(first + count, lower.size())));
      const std::vector<Reply> alive = channel_.Ask(group, kAreYouThere, "", kTellNs);
      for (size_t i = 0; i < group.size(); ++i) {
        if (alive[i].came && channel_.Ask({group[i]}, kReport, text, kTellNs)[0].came) return true;
      }
    }
    return false;
  }

  // Whether a rank of another host has just taken a report from this one. Then the warning of the same wait need not be told on for another rank of
  // this host. An end is always told on: that other rank may have died.
  bool HasToldOtherHost() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return told_other_host_ns_ != 0 && NowNs() - told_other_host_ns_ < kReportNs;
  }

  bool IsReportUnderWay(int64_t reason) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return seen_reason_ >= reason && NowNs() - seen_ns_ < kReportNs;
  }

  // Another rank makes the report. Where the report must end the job, this rank waits for the end, and returns false if none comes.
  bool LeaveReportToOther(int64_t reason, int64_t more_ns) {
    if (reason != kTooLongWait) return true;
    const int64_t begun_ns = NowNs();
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_ && !has_end_) {
      const int64_t seen_ns = seen_reason_ >= reason ? seen_ns_ : 0;
      const int64_t left_ns = std::max(begun_ns, seen_ns) + kReportNs + more_ns - NowNs();
      if (left_ns <= 0) return false;
      changed_.wait_for(lock, std::chrono::nanoseconds(std::min(left_ns, kSecondNs)));
    }
    return true;
  }

  const Process& Own() const { return settings_.processes[static_cast<size_t>(settings_.rank)]; }

  void Report(int64_t reason, int64_t age_ns) {
    const int64_t now = NowNs();
    int64_t& last_ns = last_report_ns_[reason];
    if (reason != kTooLongWait && last_ns != 0 && now - last_ns < kReportNs) return;
    last_ns = now;
    const std::vector<int> others = Others();
    const auto [statuses, silent] =
        AskAll(channel_, settings_.processes, others, StatusOfThisProcess(settings_.rank), reason);
    const bool for_ever = WaitForEnded(statuses, settings_.may_lose_ranks ? std::vector<SilentRank>() : silent);
    const bool ends = for_ever || (reason == kTooLongWait && IsLongWait(statuses, timeout_ns_));
    const bool warns = reason == kLongWait && IsLongWait(statuses, warn_ns_);  // else it has ended in the meantime
    if (!ends && !warns) return;
    std::string text = "pycollective: ";
    if (for_ever && !IsLongWait(statuses, timeout_ns_)) {
      text += "some ranks wait for a rank that has ended; ending all ranks.\n";
    } else if (ends) {
      text += "expected an answer from the other ranks within " + LimitText(timeout_ns_) + ", got none for " +
              Seconds(age_ns) + "; ending all ranks (PYCOLLECTIVE_TIMEOUT, or init(timeout=)).\n";
    } else {
      text += "a call has waited for " + Seconds(age_ns) + ".";
      if (timeout_ns_ > 0) text += " All ranks end after " + LimitText(timeout_ns_) + ".";
      text += "\n";
    }
    text += DescribeAll(statuses, silent, AskForFrames(channel_, settings_.rank, statuses));
    if (ends) {
      std::vector<int> without;
      for (const SilentRank& one : silent) without.push_back(one.rank);
      EndJob(text, RecordWriters(size(), settings_.rank, statuses, without));
    } else {
      Say(text);
    }
  }

  // Ends the job for the cause that `text` tells. `writers`: the ranks that write their records. Each step has a limit, and is made though another one has failed.
  void EndJob(const std::string& text, const std::vector<int>& writers) {
    if (!SetEnd(1)) return;
    LimitOwnEnd();
    // At the same time: who is told may end, and the launcher then ends this rank, too.
    const auto told = std::async([&] { TellEnd(1, text, writers); });
    Say(text);
    told.wait();  // without a thread it is done now
    Tried("write its records", [&] {
      const std::string where = WriteRecords(text, writers);
      if (!where.empty()) Say(where);
    });
    AbortJob(settings_.processes, Own().host);
  }

  const MonitorSettings settings_;
  const SideChannel channel_;
  const std::string job_ = Hex(HmacSha256(settings_.secret, "the name of the job").substr(0, 8));
  std::atomic<int64_t> warn_ns_;
  std::atomic<int64_t> timeout_ns_;
  std::thread server_;
  std::thread watcher_;
  std::list<RankGuard> guards_;
  std::mutex records_mutex_;
  bool has_written_ = false;  // whether this rank's records lie in the folder; guarded by records_mutex_
  const pid_t parent_ = getppid();
  // Of the watcher.
  std::map<int64_t, int64_t> last_report_ns_;  // by the reason
  int64_t warned_of_ = -1;                     // the record of the youngest call of a warning
  int64_t asked_at_end_ns_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool stopping_ = false;
  bool has_end_ = false;
  bool is_told_ = false;  // another rank has told the end
  int status_ = 0;
  int64_t asked_ = 0;  // Reason
  int64_t asked_for_ns_ = 0;
  bool asked_by_other_host_ = false;
  int64_t seen_reason_ = 0;  // of the last report of another rank that has asked this one
  int64_t seen_ns_ = 0;      // when that was
  int64_t told_other_host_ns_ = 0;  // when a rank of another host has taken a report from this one; 0: never
  int64_t death_ns_ = 0;  // when another rank died; 0: none has
  bool is_death_known_ = false;  // by a rank of its host, which has told all others
  std::set<int> forgotten_;  // ranks that have failed
};

std::mutex monitor_mutex;
Monitor* monitor = nullptr;  // never deleted: a thread may use it while the process ends

Monitor* Current() {
  const std::lock_guard<std::mutex> lock(monitor_mutex);
  return monitor;
}

}  // namespace

std::string StartMonitor(MonitorSettings settings) {
  const std::lock_guard<std::mutex> lock(monitor_mutex);
  if (monitor != nullptr) return "";
  auto* const started = new Monitor(std::move(settings));
  try {
    started->Start();
  } catch (const std::exception& error) {
    return error.what();
  }
  monitor = started;
  std::atexit(LeaveMonitor);
  return "";
}

void LeaveMonitor() {
  Monitor* const current = Current();
  if (current != nullptr) current->Leave();
}

void StopMonitor() {
  Monitor* stopped;
  {
    const std::lock_guard<std::mutex> lock(monitor_mutex);
    stopped = std::exchange(monitor, nullptr);
  }
  if (stopped != nullptr) stopped->Stop();
}

void SetMonitorTimeout(int64_t warn_ns, int64_t timeout_ns) {
  Monitor* const current = Current();
  if (current != nullptr) current->SetTimeout(warn_ns, timeout_ns);
}

void ForgetRank(int rank) {
  Monitor* const current = Current();
  if (current != nullptr) current->Forget(rank);
}

bool BeginEnd(int status, const std::string& cause) {
  Monitor* const current = Current();
  return current == nullptr || current->BeginEnd(status, cause);
}

void EndJob(const std::string& text) {
  if (Monitor* const current = Current()) current->EndJob(text);
  Say(text);
  AbortJob({}, 0);
}

}  // namespace pycollective
