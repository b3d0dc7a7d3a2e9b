// Implementation of start_watch.h.

#include "monitor/start_watch.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "base/exports.h"
#include "monitor/process.h"

namespace pycollective {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr char kThreadName[] = "pc mpi start";  // at most 15 letters
constexpr std::chrono::seconds kNotice(30);     // the wait after which a sentence is printed
constexpr std::chrono::seconds kLook(5);        // between two looks
constexpr std::chrono::seconds kSpawned(10);    // by when a launcher has started all processes of a host
constexpr std::chrono::seconds kDeath(1);       // by a signal, which a thread may block

std::string TextOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The numbers among the names in a folder of /proc.
std::vector<int64_t> NumbersIn(const std::string& folder) {
  std::vector<int64_t> numbers;
  DIR* const directory = opendir(folder.c_str());
  if (directory == nullptr) return numbers;
  while (const dirent* entry = readdir(directory)) {
    char* end = nullptr;
    const int64_t number = std::strtoll(entry->d_name, &end, 10);
    if (end != entry->d_name && *end == '\0') numbers.push_back(number);
  }
  closedir(directory);
  return numbers;
}

std::string Of(int64_t pid, const char* file) { return "/proc/" + std::to_string(pid) + "/" + file; }

// The parent of a process that has not ended; 0 for one that has, or that this host does not show.
int64_t ParentOf(int64_t pid) {
  const std::string stat = TextOf(Of(pid, "stat"));
  const size_t name_end = stat.rfind(')');  // the name may hold anything
  char state = 'Z';
  long long parent = 0;
  if (name_end == std::string::npos) return 0;
  if (std::sscanf(stat.c_str() + name_end + 1, " %c %lld", &state, &parent) != 2) return 0;
  return state == 'Z' || state == 'X' ? 0 : parent;
}

// A variable of a process's environment as it was when the process began, "NAME=value"; "" if it has none.
std::string VariableOf(const std::string& environ, const std::string& name) {
  for (size_t begin = 0; begin < environ.size();) {
    const size_t end = std::min(environ.find('\0', begin), environ.size());
    if (environ.compare(begin, name.size() + 1, name + "=") == 0) return environ.substr(begin, end - begin);
    begin = end + 1;
  }
  return "";
}

std::vector<std::string> OwnVariablesOf(int64_t pid, const StartSettings& settings) {
  const std::string environ = TextOf(Of(pid, "environ"));
  std::vector<std::string> values;
  for (const std::string& name : settings.own_variables) values.push_back(VariableOf(environ, name));
  return values;
}

// The launcher's process on this host: the nearest ancestor that is not of this rank. 0: this host does not show it.
int64_t LauncherOf(const StartSettings& settings) {
  const int64_t own = getpid();
  const std::vector<std::string> values = OwnVariablesOf(own, settings);
  for (int64_t pid = ParentOf(own); pid > 0; pid = ParentOf(pid)) {
    if (OwnVariablesOf(pid, settings) != values) return pid;
  }
  return 0;
}

bool WaitsInStart(int64_t pid) {
  for (const int64_t thread : NumbersIn(Of(pid, "task"))) {
    if (TextOf(Of(pid, "task/") + std::to_string(thread) + "/comm") == std::string(kThreadName) + "\n") return true;
  }
  return false;
}

std::string Named(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

int Ended(const LocalRanks& ranks, const StartSettings& settings) {
  if (!ranks.is_known || !ranks.is_complete) return 0;
  return std::max(0, settings.local_size - static_cast<int>(ranks.waiting.size() + ranks.running.size()));
}

class StartWatch {
 public:
  explicit StartWatch(StartSettings settings) : settings_(std::move(settings)) {}

  void Run() {
    pthread_setname_np(pthread_self(), kThreadName);
    const Clock::time_point begin = Clock::now();
    const nanoseconds limit = settings_.limit_ns > 0 ? nanoseconds(settings_.limit_ns) : nanoseconds::max() / 2;
    const nanoseconds notice = std::min<nanoseconds>(kNotice, limit / 2);
    bool has_told = false, had_ended = false;
    for (;;) {
      const nanoseconds waited = Clock::now() - begin;
      nanoseconds next = kLook;
      for (const nanoseconds moment : {notice, limit}) {
        if (moment > waited) next = std::min(next, moment - waited);
      }
      if (HasStarted(next)) return;
      const nanoseconds now = Clock::now() - begin;
      const LocalRanks ranks = LookAtLocalRanks(settings_);
      // The lowest rank that waits speaks and ends, or the next one if it cannot. If it has just ended, the launcher
      // ends this rank before the next look.
      const bool is_lowest = ranks.waiting.empty() || ranks.waiting.front() == settings_.rank;
      const bool was_lowest = std::exchange(is_lowest_, is_lowest);
      if (now < limit + 2 * kLook && !(is_lowest && was_lowest)) continue;
      const bool have_ended = Ended(ranks, settings_) > 0;
      if (now >= limit || (have_ended && had_ended && now > kSpawned)) End(ranks, now);
      had_ended = have_ended;
      if (now >= notice && !std::exchange(has_told, true)) Tell(ranks, now);
    }
  }

  void Stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_started_ = true;
    changed_.notify_all();
  }

 private:
  // Waits, and returns whether MPI has started meanwhile.
  bool HasStarted(nanoseconds wait) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, wait, [this] { return has_started_; });
  }

  std::string Place() const {
    return "rank " + std::to_string(settings_.rank) + " of " + std::to_string(settings_.size);
  }

  static std::string Seconds(nanoseconds time) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.3g s", static_cast<double>(time.count()) / 1e9);
    return text;
  }

  void Tell(const LocalRanks& ranks, nanoseconds now) const {
    std::string text = "pycollective: " + Place() + " has waited " + Seconds(now) + " for all ranks to start MPI. " +
                       Describe(ranks, settings_);
    if (settings_.limit_ns > 0) {
      text += " All ranks end after " + Seconds(nanoseconds(settings_.limit_ns)) +
              " (PYCOLLECTIVE_TIMEOUT, or init(timeout=)).";
    }
    Say(text + "\n");
  }

  [[noreturn]] void End(const LocalRanks& ranks, nanoseconds now) const {
    const bool is_late = settings_.limit_ns > 0 && now.count() >= settings_.limit_ns;
    const std::string within = is_late ? " within " + Seconds(nanoseconds(settings_.limit_ns)) : "";
    Say("pycollective.init: expected all ranks to start MPI" + within + ", got a wait of " + Seconds(now) + " (" +
        Place() + "). " + Describe(ranks, settings_) +
        " Look for a rank that raised or exited before it imported mpi4py or called init; ending all ranks.\n");
    WaitUntilRead();
    // The launcher ends the others; MPI_Abort may not be called yet. MPICH's does so on several hosts if a process dies by a
    // signal, and not if it exits.
    if (settings_.local_size < settings_.size) {
      signal(SIGTERM, SIG_DFL);
      kill(getpid(), SIGTERM);
      std::this_thread::sleep_for(kDeath);
    }
    _exit(1);
  }

  const StartSettings settings_;
  bool is_lowest_ = true;  // at the last look, of the ranks of this host that wait
  std::mutex mutex_;       // guards what follows
  std::condition_variable changed_;
  bool has_started_ = false;
};

std::mutex current_mutex;
std::shared_ptr<StartWatch>& Current() {
  static auto* const current = new std::shared_ptr<StartWatch>;  // never deleted: the process may end meanwhile
  return *current;
}

}  // namespace

LocalRanks LookAtLocalRanks(const StartSettings& settings) {
  LocalRanks found;
  const int64_t launcher = LauncherOf(settings);
  if (launcher == 0) return found;
  std::multimap<int64_t, int64_t> children;
  for (const int64_t pid : NumbersIn("/proc")) {
    if (const int64_t parent = ParentOf(pid); parent > 0) children.emplace(parent, pid);
  }
  std::map<int, std::vector<int64_t>> of_rank;  // its processes; it may be a shell that has started the program
  found.is_complete = true;
  const auto own = children.equal_range(launcher);
  for (auto child = own.first; child != own.second; ++child) {
    const std::string text = VariableOf(TextOf(Of(child->second, "environ")), settings.rank_variable);
    if (text.empty()) {
      found.is_complete = false;
      continue;
    }
    std::vector<int64_t>& all = of_rank[std::atoi(text.c_str() + settings.rank_variable.size() + 1)];
    all.push_back(child->second);
    for (size_t i = all.size() - 1; i < all.size(); ++i) {
      const auto more = children.equal_range(all[i]);
      for (auto grandchild = more.first; grandchild != more.second; ++grandchild) all.push_back(grandchild->second);
    }
  }
  found.is_known = of_rank.count(settings.rank) != 0;
  for (const auto& [rank, processes] : of_rank) {
    if (std::any_of(processes.begin(), processes.end(), WaitsInStart)) {
      found.waiting.push_back(rank);
    } else {
      found.running.push_back(rank);
      found.running_pids.push_back(processes.front());
    }
  }
  return found;
}

std::string Describe(const LocalRanks& ranks, const StartSettings& settings) {
  char host[256] = "?";
  gethostname(host, sizeof(host) - 1);
  const std::string here = std::string("On this host (") + host + ") ";
  if (!ranks.is_known) return here + "the processes of the other ranks are not to be seen.";
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : "; ") + part; };
  if (const int ended = Ended(ranks, settings); ended > 0) {
    std::vector<int> gone;
    if (settings.local_size == settings.size) {  // else nobody here knows the numbers of the ranks of this host
      for (int rank = 0; rank < settings.size; ++rank) {
        const auto is_in = [rank](const std::vector<int>& some) {
          return std::find(some.begin(), some.end(), rank) != some.end();
        };
        if (!is_in(ranks.waiting) && !is_in(ranks.running)) gone.push_back(rank);
      }
    }
    const std::string who = gone.empty() ? std::to_string(ended) + " of " + std::to_string(settings.local_size) + " ranks"
                                         : Named(gone);
    add(who + (ended == 1 ? " has no process: it has ended" : " have no process: they have ended"));
  }
  for (size_t i = 0; i < ranks.running.size(); ++i) {
    add(Named({ranks.running[i]}) + " has a process (" + std::to_string(ranks.running_pids[i]) +
        ") that does not start MPI by this package");
  }
  if (text.empty()) return here + "all ranks start MPI; look at the other hosts.";
  return here + text + ".";
}

void BeginStartWatch(StartSettings settings) {
  const std::lock_guard<std::mutex> lock(current_mutex);
  Current() = std::make_shared<StartWatch>(std::move(settings));
  try {
    // It is not joined: it may be writing to a console that nobody reads.
    std::thread([watch = Current()] {
      try {
        watch->Run();
      } catch (const std::exception& error) {  // no memory
        Say(std::string("pycollective: nobody watches the start of MPI: ") + error.what() + "\n");
      }
    }).detach();
  } catch (const std::exception& error) {  // no more threads
    Say(std::string("pycollective: nobody watches the start of MPI: ") + error.what() + "\n");
  }
}

void EndStartWatch() {
  const std::lock_guard<std::mutex> lock(current_mutex);
  if (Current() != nullptr) Current()->Stop();
  Current() = nullptr;
}

}  // namespace pycollective

// Begins the watch over the start of MPI: see StartSettings. `own_variables`: names, with blanks between them.
PYCOLLECTIVE_EXPORT void pycollective_start_watch_begin(int32_t rank, int32_t size, int32_t local_size,
                                                        const char* rank_variable, const char* own_variables,
                                                        double limit_s) {
  std::istringstream names(own_variables);
  const std::vector<std::string> own{std::istream_iterator<std::string>(names), {}};
  pycollective::BeginStartWatch({rank, size, local_size, rank_variable, own, static_cast<int64_t>(limit_s * 1e9)});
}
PYCOLLECTIVE_EXPORT void pycollective_start_watch_end() { pycollective::EndStartWatch(); }

namespace {
const pycollective::Listed listed{
    PYCOLLECTIVE_TYPED(start_watch_begin), PYCOLLECTIVE_TYPED(start_watch_end)};
}  // namespace
