// Implementation of recorder.h.

#include "records/recorder.h"

#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <x86intrin.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <fstream>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "base/clock.h"
#include "base/operations.h"
#include "mpi/dtypes.h"

namespace pycollective {
namespace {

std::array<Slot, kRecords> ring;
std::atomic<uint64_t> next{0};

constexpr size_t kStateWord = offsetof(Record, state) / sizeof(int64_t);
constexpr size_t kCompletedWord = offsetof(Record, completed_ns) / sizeof(int64_t);

// Reading the processor's counter takes a third of the time of reading the clock. Where Linux itself takes the time from
// that counter, it runs at one rate on all cores; elsewhere a tick is a nanosecond of the clock.
class Ticks {
 public:
  Ticks() : is_counter_(IsCounter()), first_(Reading()) {}

  int64_t Now() const {
#ifdef __x86_64__
    if (is_counter_) return static_cast<int64_t>(__rdtsc());
#endif
    return NowNs();
  }

  // The nanoseconds of a tick, as measured until now. Times that are compared need one rate.
  double Rate() const {
    if (!is_counter_) return 1;
    const Both now = Reading();
    return static_cast<double>(now.ns - first_.ns) / static_cast<double>(now.ticks - first_.ticks);
  }

  // The times of NowNs for some numbers of ticks.
  void ToNs(double rate, std::initializer_list<int64_t*> times) const {
    if (!is_counter_) return;
    for (int64_t* time : times) {
      if (*time != 0) *time = first_.ns + static_cast<int64_t>(static_cast<double>(*time - first_.ticks) * rate);
    }
  }

 private:
  struct Both {
    int64_t ticks;
    int64_t ns;
  };

  // The counter and the clock at one moment. Of a few readings the shortest counts: this thread may be interrupted in one.
  Both Reading() const {
    Both best{};
    int64_t shortest = INT64_MAX;
    for (int i = 0; i < 5; ++i) {
      const int64_t before = Now(), ns = NowNs(), length = Now() - before;
      if (length >= shortest) continue;
      shortest = length;
      best = {before + length / 2, ns};
    }
    return best;
  }

  static bool IsCounter() {
    std::ifstream file("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    std::string name;
#ifdef __x86_64__
    return std::getline(file, name) && name == "tsc";
#else
    return false;
#endif
  }

  const bool is_counter_;
  const Both first_;
};

const Ticks ticks;

void ToNs(double rate, Record* record) {
  ticks.ToNs(rate, {&record->created_ns, &record->started_ns, &record->completed_ns});
}

// The calls that have ended since StartTrace.
std::atomic<bool> is_traced{false};
std::mutex trace_mutex;  // guards the next two
Trace& TheTrace() {
  static Trace& trace = *new Trace;  // threads may use it while the process ends
  return trace;
}
size_t trace_most = 0;

// The record in `slot`, which the caller ends now.
void AddToTrace(const Slot& slot, int64_t completed, CallState state) {
  int64_t words[Slot::kWords];
  for (size_t i = 0; i < Slot::kWords; ++i) words[i] = slot.words[i].load(std::memory_order_relaxed);
  words[kCompletedWord] = completed;
  words[kStateWord] = state;
  Record record;
  std::memcpy(static_cast<void*>(&record), words, sizeof(record));
  const std::lock_guard<std::mutex> lock(trace_mutex);
  Trace& trace = TheTrace();
  if (!is_traced.load(std::memory_order_relaxed)) return;
  if (trace.records.size() < trace_most) {
    trace.records.push_back(record);
  } else {
    ++trace.dropped;
  }
}

bool IsUnderWay(int64_t state) { return state == kScheduled || state == kStarted; }

// Writes a record into a slot that this thread has claimed.
void Write(Slot& slot, const Record& record) {
  int64_t words[Slot::kWords];
  std::memcpy(words, &record, sizeof(record));
  for (size_t i = 0; i < Slot::kWords; ++i) slot.words[i].store(words[i], std::memory_order_release);
  slot.version.store(slot.version.load(std::memory_order_relaxed) + 1, std::memory_order_release);  // its owner alone writes
}

// Reads a slot, with times by `rate`. Returns false if it is written meanwhile, or holds no record.
bool Read(const Slot& slot, double rate, Record* record) {
  int64_t words[Slot::kWords];
  const uint64_t before = slot.version.load(std::memory_order_acquire);
  for (size_t i = 0; i < Slot::kWords; ++i) words[i] = slot.words[i].load(std::memory_order_acquire);
  if (before % 2 != 0 || slot.version.load(std::memory_order_acquire) != before) return false;
  std::memcpy(static_cast<void*>(record), words, sizeof(*record));
  if (record->state == kUnused) return false;
  ToNs(rate, record);
  return true;
}

// A table whose oldest rows go when it is full.
template <typename Value>
class Table {
 public:
  void Add(int64_t key, Value value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!rows_.emplace(key, std::move(value)).second) return;
    order_.push_back(key);
    if (order_.size() > kMost) {
      rows_.erase(order_.front());
      order_.pop_front();
    }
  }
  Value Find(int64_t key) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = rows_.find(key);
    return found == rows_.end() ? Value() : found->second;
  }

 private:
  static constexpr size_t kMost = 10000;
  mutable std::mutex mutex_;
  std::unordered_map<int64_t, Value> rows_;
  std::deque<int64_t> order_;
};

Table<std::string>& Sites() {
  static Table<std::string>& table = *new Table<std::string>;  // threads may use it while the process ends
  return table;
}
Table<std::shared_ptr<const Group>>& Groups() {
  static Table<std::shared_ptr<const Group>>& table = *new Table<std::shared_ptr<const Group>>;
  return table;
}

}  // namespace

// Records --------------------------------------------------------------------------------------------------------

bool Record::is_collective() const { return IsCollective(static_cast<int32_t>(operation)); }

const char* Record::name() const {
  if (0 <= operation && operation < kOperationCount) return kOperationNames[operation];
  const int64_t wait = operation - kFirstWait;
  return 0 <= wait && wait < static_cast<int64_t>(std::size(kWaitNames)) ? kWaitNames[wait] : "?";
}

bool Slot::Claim() {
  uint64_t seen = version.load(std::memory_order_acquire);
  if (seen % 2 != 0 || IsUnderWay(words[kStateWord].load(std::memory_order_acquire))) return false;
  return version.compare_exchange_strong(seen, seen + 1, std::memory_order_acquire);
}

Recorded::Recorded(Record record) {
  record.created_ns = ticks.Now();
  if (record.state == kStarted) record.started_ns = record.created_ns;
  // A record that is under way keeps its slot. There are far fewer of these than slots: each has a thread.
  for (size_t tries = 0; tries < kRecords; ++tries) {
    const uint64_t id = next.fetch_add(1, std::memory_order_relaxed);
    Slot& slot = ring[id % kRecords];
    if (!slot.Claim()) continue;
    record.id = static_cast<int64_t>(id);
    Write(slot, record);
    slot_ = &slot;
    return;
  }
}

void Recorded::Finish(CallState state) {
  if (slot_ == nullptr) return;
  const int64_t now = ticks.Now();
  if (is_traced.load(std::memory_order_relaxed) && state != kUnused) AddToTrace(*slot_, now, state);
  slot_->words[kCompletedWord].store(now, std::memory_order_release);
  slot_->words[kStateWord].store(state, std::memory_order_release);
  slot_ = nullptr;
}

std::vector<Record> Records() {
  std::vector<Record> records;
  records.reserve(kRecords);
  Record record;
  const double rate = ticks.Rate();
  for (const Slot& slot : ring) {
    if (Read(slot, rate, &record)) records.push_back(record);
  }
  std::sort(records.begin(), records.end(), [](const Record& a, const Record& b) { return a.id < b.id; });
  return records;
}

std::vector<Record> RecordsUnderWay() {
  std::vector<Record> records;
  Record record;
  const double rate = ticks.Rate();
  for (const Slot& slot : ring) {
    if (!IsUnderWay(slot.words[kStateWord].load(std::memory_order_acquire))) continue;
    if (Read(slot, rate, &record) && record.is_under_way()) records.push_back(record);
  }
  std::sort(records.begin(), records.end(),
            [](const Record& a, const Record& b) { return a.created_ns < b.created_ns; });
  return records;
}

void StartTrace(int64_t most) {
  const std::lock_guard<std::mutex> lock(trace_mutex);
  TheTrace() = Trace();
  trace_most = static_cast<size_t>(most);
  TheTrace().records.reserve(trace_most);  // a call must not copy those before it; pages are taken when they are used
  is_traced.store(true, std::memory_order_relaxed);
}

Trace StopTrace() {
  const std::lock_guard<std::mutex> lock(trace_mutex);
  is_traced.store(false, std::memory_order_relaxed);
  Trace stopped = std::exchange(TheTrace(), Trace());
  const double rate = ticks.Rate();
  for (Record& record : stopped.records) ToNs(rate, &record);
  return stopped;
}

// Names ----------------------------------------------------------------------------------------------------------

void AddSite(int64_t site, const std::string& text) { Sites().Add(site, text); }
std::string SiteText(int64_t site) { return Sites().Find(site); }
void AddGroup(int64_t identity, Group group) { Groups().Add(identity, std::make_shared<const Group>(std::move(group))); }
std::shared_ptr<const Group> FindGroup(int64_t identity) { return Groups().Find(identity); }

std::string Describe(const Record& record) {
  if (record.operation >= kFirstWait) return record.name();
  Signature signature;
  signature.operation = static_cast<int32_t>(record.operation);
  signature.dtype = static_cast<int32_t>(record.dtype);
  signature.dimensions = record.dimensions;
  signature.count = record.count;
  signature.reduce_op = static_cast<int32_t>(record.reduce_op);
  signature.root = static_cast<int32_t>(record.root);
  std::string text = Describe(signature, false);
  if (record.is_collective()) return text;
  const auto rank = [](int64_t peer) { return peer == Record::kAnyPeer ? "any rank" : "rank " + std::to_string(peer); };
  if (record.dest != Record::kNoPeer) text += " to " + rank(record.dest);
  if (record.source != Record::kNoPeer) text += " from " + rank(record.source);
  return text;
}

// JSON -----------------------------------------------------------------------------------------------------------

namespace {

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      constexpr char kDigits[] = "0123456789abcdef";
      quoted += std::string("\\u00") + kDigits[c >> 4] + kDigits[c & 15];
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string ShapeJson(const Record& record) {
  if (record.operation >= kFirstWait || record.operation == kBarrier) return "[]";
  std::string text = "[[";
  if (static_cast<size_t>(record.dimensions.rank) > Dimensions::kShown) {
    text += std::to_string(record.count);
  } else {
    for (int64_t i = 0; i < record.dimensions.rank; ++i) {
      text += (i > 0 ? ", " : "") + std::to_string(record.dimensions.first[static_cast<size_t>(i)]);
    }
  }
  return text + "]]";
}

// "train.py:12 (step)" as {"name": "step", "filename": "train.py", "line": 12}. The names of files and functions may hold
// colons and brackets: what counts is the last number between these.
std::string FramesJson(const std::string& site) {
  for (size_t open = site.rfind(" ("); open != std::string::npos && open > 0; open = site.rfind(" (", open - 1)) {
    const size_t colon = site.find_last_not_of("0123456789", open - 1);
    if (colon == std::string::npos || site[colon] != ':' || colon + 1 == open || site.back() != ')') continue;
    const std::string line = site.substr(colon + 1, open - colon - 1);
    if (line[0] == '0' && line.size() > 1) continue;  // JSON has no such numbers
    return "[{\"name\": " + Quoted(site.substr(open + 2, site.size() - open - 3)) +
           ", \"filename\": " + Quoted(site.substr(0, colon)) + ", \"line\": " + line + "}]";
  }
  return "[]";
}

std::string ListJson(const std::vector<int>& numbers) {
  std::string text = "[";
  for (size_t i = 0; i < numbers.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(numbers[i]);
  return text + "]";
}

std::string RecordJson(const Record& record, int64_t to_wall_ns) {
  const auto group = FindGroup(record.group);
  const bool is_message = record.operation < kFirstWait && !record.is_collective();
  const auto time = [&](int64_t ns) { return ns == 0 ? std::string("null") : std::to_string(ns + to_wall_ns); };
  const bool has_dtype = ShapeJson(record) != "[]";
  std::string text = "{\"record_id\": " + std::to_string(record.id) +
                     ", \"pg_id\": " + Quoted(std::to_string(record.group)) +
                     ", \"process_group\": [" + Quoted(group == nullptr ? "" : group->name) + ", " +
                     Quoted("channel " + std::to_string(record.channel)) + "]" +
                     ", \"collective_seq_id\": " + std::to_string(is_message ? 0 : record.seq) +
                     ", \"p2p_seq_id\": " + std::to_string(is_message ? record.seq : 0) +
                     ", \"op_id\": " + std::to_string(record.id) +
                     ", \"profiling_name\": " + Quoted(std::string("pycollective:") + record.name()) +
                     ", \"input_sizes\": " + ShapeJson(record) + ", \"input_dtypes\": [" +
                     (has_dtype ? Quoted(DtypeName(static_cast<int32_t>(record.dtype))) : "") + "]" +
                     ", \"description\": " + Quoted(Describe(record)) +
                     ", \"nbytes\": " + std::to_string(record.nbytes) + ", \"state\": " + Quoted(kStateNames[record.state]) +
                     ", \"time_created_ns\": " + time(record.created_ns) +
                     ", \"time_discovered_started_ns\": " + time(record.started_ns) +
                     ", \"time_discovered_completed_ns\": " +
                     (record.is_under_way() ? "null" : time(record.completed_ns)) +
                     ", \"retired\": " + (record.is_under_way() ? "false" : "true") +
                     ", \"is_p2p\": " + (is_message ? "true" : "false") +
                     ", \"frames\": " + FramesJson(SiteText(record.site)) + "}";
  return text;
}

}  // namespace

std::string RecordJson(const Record& record) { return RecordJson(record, 0); }

std::string GroupJson(int64_t identity) {
  const auto group = FindGroup(identity);
  if (group == nullptr) return "null";
  return "{\"name\": " + Quoted(std::to_string(identity)) + ", \"desc\": " + Quoted(group->name) +
         ", \"ranks\": \"" + ListJson(group->ranks) + "\"}";
}

std::string RecorderJson(int rank, int size, const End& end) {
  timespec wall{};
  clock_gettime(CLOCK_REALTIME, &wall);
  const int64_t to_wall_ns = wall.tv_sec * int64_t{1000000000} + wall.tv_nsec - NowNs();
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  std::string text = "{\"version\": \"2.9\", \"rank\": " + std::to_string(rank) + ", \"world_size\": " +
                     std::to_string(size) + ", \"host_name\": " + Quoted(host) +
                     ", \"pid\": " + std::to_string(getpid()) + ", \"reason\": " + Quoted(end.reason);
  if (!end.writers.empty()) text += ", \"job\": " + Quoted(end.job) + ", \"writers\": " + ListJson(end.writers);
  const std::vector<Record> records = Records();
  const uint64_t begun = next.load(std::memory_order_relaxed);  // read last: a slot that is taken meanwhile has no older record
  text += ", \"complete_from\": " + std::to_string(begun > kRecords ? begun - kRecords : 0) + ", \"pg_config\": {";
  std::vector<int64_t> shown;
  for (const Record& record : records) {
    if (record.group == 0 || std::find(shown.begin(), shown.end(), record.group) != shown.end()) continue;
    if (FindGroup(record.group) == nullptr) continue;
    text += std::string(shown.empty() ? "" : ", ") + Quoted(std::to_string(record.group)) + ": " + GroupJson(record.group);
    shown.push_back(record.group);
  }
  text += "}, \"entries\": [";
  for (size_t i = 0; i < records.size(); ++i) {
    text += (i > 0 ? ",\n" : "\n") + RecordJson(records[i], to_wall_ns);
  }
  return text + "]}\n";
}

}  // namespace pycollective
