// A stateless model checker: runs a program in all ways that the memory model of C++ allows, but for those named below.
//
// The program is compiled with -fsanitize=thread, and linked without the runtime library of that sanitizer. So the compiler
// calls a function for each access to memory, atomic or not, and this file defines these functions. The code under exploration
// needs no change, and its build for users has none. One file of a program includes this one; that file is compiled without
// the flag.
//
// Threads are fibers. A thread runs without a stop up to its next *event* that another thread may influence:
//   - a load or a read-modify-write: which of the values that were written does it read?
//   - a store or a fence with memory_order_seq_cst: what is its place in the order S of these events?
// The events of a state that can come next are its alternatives, and each value that a load may read is an alternative. They
// are explored depth first. Plain stores need no alternative: a value that was written early can still be read late.
//
// The memory model is that of release and acquire with views (Kang et al., "A promising semantics for relaxed-memory
// concurrency", POPL 2017, without promises): each location has a list of writes in its modification order; a thread's view says up to which write
// it has seen each location, and it reads none before that. A release store takes the view of its thread along, and an
// acquire load takes it over. Release sequences go through read-modify-writes alone, as in C++20. S is the order in which the
// events with memory_order_seq_cst are executed; of one location, such an event sees all writes that such events before it have
// read or written. An exploration has no load that reads from a later store of another thread (*load buffering*), which C++
// allows for relaxed accesses, and none of the orders S that C++20 allows and C++11 does not.
//
// Two alternatives of different threads that commute are executed in one order (*sleep sets*, Godefroid 1996). So the executions
// that remain differ in what is read from where.
//
// A loop that waits calls sched_yield, or sleeps at a futex. A load before it, whose value did not end the loop, did not happen: the thread
// tries another value, and waits for a later one if there is none. If no thread can go on, one hour passes on the clock of the
// program, and waits with a limit end. If nothing goes on then, that is a deadlock.
//
// A futex has the kernel's semantics, with a weaker memory model: SleepWhile reads the word and falls asleep in one event, and reads
// any value that its thread may read, but none that is older than what a thread had seen that has called WakeAll. WakeAll wakes the
// threads that sleep then, and orders nothing else. A sleep has no limit, and ends by WakeAll alone, or since a rank has failed. So a
// wake-up that is lost is a deadlock.
//
// Accesses that are not atomic are checked with vector clocks, where Track() has named the memory: for each 4 bytes the last
// write, and the last read of each thread.

#ifndef PYCOLLECTIVE_TESTS_NATIVE_EXPLORE_H_
#define PYCOLLECTIVE_TESTS_NATIVE_EXPLORE_H_

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/futex.h"
#include "explored/explored.h"

namespace explore {

constexpr int kMostThreads = 4;
constexpr int kMostLocations = 320;  // there are 256 buffers, and an atomic object for each
constexpr size_t kStackBytes = size_t{1} << 20;
constexpr int64_t kHourNs = int64_t{3600} * 1000000000;
constexpr int kMostSteps = 100'000;  // of an execution: more are a loop that ends nowhere

[[noreturn]] inline void Stop(const char* what) {
  std::fprintf(stderr, "explore.h: %s\n", what);
  std::abort();
}

// What is known of the writes of each location, and of the accesses of each thread that happened before.
struct View {
  std::array<uint16_t, kMostLocations> seen{};  // by the number of the location; the number of a write
  std::array<uint32_t, kMostThreads> clock{};
};

struct Write {
  uint64_t value;
  View view;
  bool is_followed = false;  // by a read-modify-write, with nothing between the two
};

// An atomic object.
struct Location {
  const volatile void* address;
  size_t nbytes;
  std::vector<Write> writes;       // as they were executed; the first is the value from before
  std::vector<uint16_t> order;     // their numbers, in the modification order
  std::vector<uint16_t> position;  // of each write there
};

enum Kind : uint8_t { kLoad, kStore, kUpdate, kFence, kSleep, kWake };
enum Function : uint8_t { kExchange, kAdd, kSub, kAnd, kOr, kXor };

struct Event {
  Kind kind = kLoad;
  int order = __ATOMIC_RELAXED;
  int location = -1;  // -1: of a fence
  Function function = kExchange;
  uint64_t operand = 0;
  const void* site = nullptr;

  bool Acquires() const { return order != __ATOMIC_RELAXED && order != __ATOMIC_RELEASE; }
  bool Releases() const { return order >= __ATOMIC_RELEASE; }
  bool IsOrdered() const { return order == __ATOMIC_SEQ_CST; }
  bool Writes() const { return kind == kStore || kind == kUpdate; }
};

// What a thread may do next.
struct Alternative {
  int thread;
  int write;  // that it reads, or after which its own comes; -1: of a fence, or of WakeAll; kInterrupt
  Event event;

  bool operator==(const Alternative& other) const { return thread == other.thread && write == other.write; }
};
constexpr int kInterrupt = -2;  // the wait ends, since a rank has failed

// Whether the order of two events of different threads matters.
inline bool Depend(const Event& a, const Event& b) {
  if (a.kind == kFence || b.kind == kFence) return a.IsOrdered() && b.IsOrdered();
  if (a.location != b.location) return false;
  if (a.kind == kWake || b.kind == kWake) return a.kind == kSleep || b.kind == kSleep;
  // A store that was executed late can still come early in the modification order, and a load can read what was written long ago.
  return (a.IsOrdered() && b.IsOrdered()) || (a.Writes() && b.Writes());
}

struct Node {
  std::vector<Alternative> enabled, asleep, done, failed;
  Alternative chosen;
};

enum State : uint8_t { kRuns, kHasEvent, kSleeps, kMeets, kBegins, kHasEnded };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state = kRuns;
  Event event;
  uint64_t result = 0;
  View current, acquired, released;
  // Of a wait.
  std::vector<int> failed;    // the writes that did not end it
  bool at_yield = false;      // it has called sched_yield, and will load again
  bool just_loaded = false;   // its last event was a load, since it was resumed
  bool has_loaded_ahead = false;  // `result` is what it will load
  bool is_interrupted = false;  // a rank has failed, and this thread knows
  bool is_timed = false;        // an hour has passed
  bool is_stuck = false;        // and that did not end the wait
  View before, before_acquired, before_ordered;  // before that load
};

// The accesses to 4 bytes.
struct Cell {
  uint8_t writer;
  uint32_t written;  // by the clock of the writer; 0: never
  std::array<uint32_t, kMostThreads> read;
};
constexpr uintptr_t kCellBytes = 4, kLineBytes = 64;
struct Line {
  std::array<Cell, kLineBytes / kCellBytes> cells;
};
struct Tracked {
  uintptr_t begin, end;
  std::vector<uint32_t> lines;  // the number of the line in `lines_` and 1; 0: nobody has come there
};

// Whether the code under exploration runs. Else its accesses are no events: they may be those of the explorer itself.
inline bool in_code = false;

class Explorer {
 public:
  Result Run(const Scenario& scenario) {
    scenario_ = &scenario;
    Result result;
    path_.clear();
    while (result.executions + result.redundant < scenario.most_executions) {
      const bool is_whole = Execute();
      result.violation = violation_;
      if (!violation_.empty()) break;
      ++(is_whole ? result.executions : result.redundant);
      if (is_whole && scenario.outcome != nullptr) result.outcomes.insert(scenario.outcome());
      if (!Backtrack()) {
        result.is_complete = true;
        break;
      }
    }
    scenario_ = nullptr;
    touched_.clear();
    tracked_.clear();
    grow_.clear();
    return result;
  }

  // An atomic access of the code under exploration. `site`: where it is.
  uint64_t Access(const volatile void* address, size_t nbytes, Event event, const void* site) {
    event.site = site;
    sites.emplace(site, event);
    if (const auto weak = weakened.find(site); weak != weakened.end()) event.order = weak->second;
    if (event.kind == kFence && event.IsOrdered() && scenario_->weakens_fences) event.order = __ATOMIC_ACQ_REL;
    event.location = event.kind == kFence ? -1 : LocationOf(address, nbytes);
    Thread& own = threads_[current_];
    own.just_loaded = false;
    if (event.kind == kFence && !event.IsOrdered()) {
      Fence(own, event.order);
      return 0;
    }
    if (own.has_loaded_ahead) {
      if (event.kind != kLoad || event.location != own.event.location) Stop("expected a loop that loads what it has loaded before");
      own.has_loaded_ahead = own.at_yield = false;
      own.just_loaded = true;
      return own.result;
    }
    own.event = event;
    own.at_yield = own.is_timed = own.is_stuck = false;
    own.failed.clear();
    if (event.kind == kStore && !event.IsOrdered()) {
      const std::vector<Alternative> places = AlternativesOf(current_);
      if (places.size() == 1) {
        Perform(places.front());
        Wake(places.front());
        return 0;
      }
    }
    own.state = kHasEvent;
    Leave();
    own.just_loaded = event.kind == kLoad;
    return own.result;
  }

  void Yield() {
    Thread& own = threads_[current_];
    if (own.is_interrupted || std::exchange(own.is_timed, false) || !own.just_loaded) return;
    own.at_yield = true;
    own.state = kHasEvent;
    Leave();
  }

  // SleepWhile and WakeAll. The former returns whether the limit has not ended the sleep.
  bool Sleep(const void* word, uint32_t value) {
    MakeFutexEvent(kSleep, word, value);
    return threads_[current_].result != 0;
  }
  void WakeSleepers(const void* word) { MakeFutexEvent(kWake, word, 0); }

  // An access that is not atomic.
  void Touch(const void* begin, size_t nbytes, bool writes, const void* site) {
    const auto address = reinterpret_cast<uintptr_t>(begin);
    for (Tracked& tracked : tracked_) {
      if (address < tracked.begin || address >= tracked.end) continue;
      for (uintptr_t at = address / kCellBytes * kCellBytes; at < address + nbytes; at += kCellBytes) {
        const uintptr_t offset = at - tracked.begin;
        uint32_t& line = tracked.lines[offset / kLineBytes];
        if (line == 0) {
          if (used_lines_ == lines_.size()) lines_.emplace_back();
          lines_[used_lines_] = Line{};
          touched_.push_back(&line);
          line = static_cast<uint32_t>(++used_lines_);
        }
        CheckCell(lines_[line - 1].cells[offset % kLineBytes / kCellBytes], at, writes, site);
      }
      return;
    }
  }

  void Track(const void* begin, size_t nbytes) {
    const auto address = reinterpret_cast<uintptr_t>(begin) / kLineBytes * kLineBytes;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(begin) + nbytes + kLineBytes - 1) / kLineBytes * kLineBytes;
    for (const Tracked& tracked : tracked_) {
      if (tracked.begin == address && tracked.end == end) return;
    }
    tracked_.push_back({address, end, std::vector<uint32_t>((end - address) / kLineBytes)});
  }

  void OnlyGrow(const void* begin, size_t nbytes) {
    const auto address = reinterpret_cast<uintptr_t>(begin);
    grow_.emplace(address, address + nbytes);
  }

  void WaitFor(State state) {
    threads_[current_].state = state;
    Leave();
  }
  void FailRank() { has_failed_ = true; }
  bool IsInterrupted() { return threads_[current_].is_interrupted; }
  [[noreturn]] void Fail(const std::string& what) {
    if (violation_.empty()) {
      violation_ = what + " (thread " + std::to_string(current_) + ")";
      for (const std::string& step : steps_) violation_ += "\n  " + step;
    }
    Leave();
    Stop("a thread went on after a violation");
  }
  int64_t now_ns() const { return now_ns_; }

  std::map<const void*, Event> sites;  // all atomic accesses that were made, as they stand in the code
  std::map<const void*, int> weakened;  // those that are made with this order instead

 private:
  void MakeFutexEvent(Kind kind, const void* word, uint32_t value) {
    Thread& own = threads_[current_];
    own.event = {kind, __ATOMIC_RELAXED, LocationOf(word, sizeof(uint64_t)), kExchange, value, nullptr};
    own.just_loaded = own.at_yield = own.is_timed = own.is_stuck = false;
    own.failed.clear();
    own.state = kHasEvent;
    Leave();
  }

  // Executions -----------------------------------------------------------------------------------------------------

  // Returns whether it is a whole one.
  bool Execute() {
    Reset();
    for (int thread = 0; thread < scenario_->threads && violation_.empty(); ++thread) Resume(thread);
    size_t depth = 0;
    for (int steps = 0; violation_.empty(); ++steps) {
      if (steps > kMostSteps) Stop("an execution does not end");
      if (PassTogether()) continue;
      const std::vector<Alternative> enabled = Enabled();
      if (enabled.empty()) {
        if (AllHaveEnded()) break;
        if (!LetTimePass()) SetDeadlock();
        continue;
      }
      if (!is_exploring_) {
        Take(enabled.back());  // of the first thread that can go on, what was written last
        continue;
      }
      const bool is_new = depth == path_.size();
      if (is_new) {
        path_.push_back({enabled, {}, {}, {}, {}});
        for (const Alternative& one : enabled) {
          if (Has(asleep_, one)) path_.back().asleep.push_back(one);
        }
        if (!ChooseNext(path_.back())) {
          path_.pop_back();
          return false;
        }
      }
      Node& node = path_[depth++];
      for (const Alternative& one : node.failed) threads_[one.thread].failed.push_back(one.write);
      const std::vector<Alternative> before = asleep_;
      while (violation_.empty() && node.failed.size() < node.enabled.size()) {
        if (has_sleep_sets) asleep_.insert(asleep_.end(), node.done.begin(), node.done.end());
        if (Take(node.chosen)) break;
        asleep_ = before;
        node.failed.push_back(node.chosen);
        if (!ChooseNext(node) && node.failed.size() < node.enabled.size()) return false;  // the others are done or asleep
      }
    }
    return violation_.empty();
  }

  // The next alternative of a node that is neither done, nor asleep, nor failed.
  static bool ChooseNext(Node& node) {
    for (const Alternative& one : node.enabled) {
      if (Has(node.done, one) || Has(node.asleep, one) || Has(node.failed, one)) continue;
      node.chosen = one;
      return true;
    }
    return false;
  }
  static bool Has(const std::vector<Alternative>& some, const Alternative& one) {
    return std::find(some.begin(), some.end(), one) != some.end();
  }

  bool Backtrack() {
    while (!path_.empty()) {
      Node& node = path_.back();
      if (node.failed.size() < node.enabled.size()) node.done.push_back(node.chosen);
      if (ChooseNext(node)) return true;
      path_.pop_back();
    }
    return false;
  }

  void Reset() {
    current_ = -1;
    is_exploring_ = !scenario_->has_prelude;
    has_failed_ = false;
    now_ns_ = kHourNs;
    violation_.clear();
    steps_.clear();
    asleep_.clear();
    locations_.clear();
    numbers_.clear();
    ordered_ = woken_ = View{};
    for (uint32_t* line : touched_) *line = 0;
    touched_.clear();
    used_lines_ = 0;
    scenario_->begin();
    for (int number = 0; number < kMostThreads; ++number) {
      Thread& thread = threads_[number];
      std::unique_ptr<char[]> stack = std::move(thread.stack);
      thread = Thread{};
      thread.stack = std::move(stack);
      thread.state = number < scenario_->threads ? kRuns : kHasEnded;
      thread.current.clock[number] = 1;
      if (number >= scenario_->threads) continue;
      if (thread.stack == nullptr) thread.stack.reset(new char[kStackBytes]);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStackBytes;
      thread.context.uc_link = nullptr;
      const auto self = reinterpret_cast<uintptr_t>(this);  // in two parts, since makecontext takes integers
      makecontext(&thread.context, reinterpret_cast<void (*)()>(&Explorer::Begin), 2, static_cast<unsigned>(self >> 32),
                  static_cast<unsigned>(self));
    }
  }

  static void Begin(unsigned high, unsigned low) {
    auto* const self = reinterpret_cast<Explorer*>(uintptr_t{high} << 32 | low);
    in_code = true;
    self->scenario_->run(self->current_);
    in_code = false;
    self->WaitFor(kHasEnded);
  }

  void Resume(int thread) {
    current_ = thread;
    threads_[thread].state = kRuns;
    swapcontext(&own_context_, &threads_[thread].context);
    current_ = -1;
  }
  void Leave() {
    Thread& own = threads_[current_];
    swapcontext(&own.context, &own_context_);
  }

  bool AllHaveEnded() const {
    return std::all_of(threads_.begin(), threads_.end(), [](const Thread& one) { return one.state == kHasEnded; });
  }

  // Whether threads that have waited for all others have gone on.
  bool PassTogether() {
    for (const State state : {kMeets, kBegins}) {
      const auto first = threads_.begin(), end = first + scenario_->threads;
      if (!std::all_of(first, end, [&](const Thread& one) { return one.state == state; })) continue;
      if (state == kBegins) is_exploring_ = true;
      if (state == kMeets) {
        View all;
        for (auto one = first; one != end; ++one) Join(&all, one->current);
        for (auto one = first; one != end; ++one) {
          Join(&one->current, all);
          Tick(*one);
        }
      }
      for (auto one = first; one != end; ++one) one->state = kRuns;
      for (int thread = 0; thread < scenario_->threads && violation_.empty(); ++thread) Resume(thread);
      return true;
    }
    return false;
  }

  std::vector<Alternative> Enabled() {
    std::vector<Alternative> all;
    for (int thread = 0; thread < scenario_->threads; ++thread) {
      const Thread& one = threads_[thread];
      if (one.state == kSleeps && has_failed_ && !one.is_interrupted) all.push_back({thread, kInterrupt, one.event});
      if (one.state != kHasEvent) continue;
      const std::vector<Alternative> some = AlternativesOf(thread);
      // The place of a plain store concerns no other thread, nor does a load of a number that only grows.
      const bool concerns_others = one.event.kind != kStore && !OnlyGrows(one.event);
      if (!some.empty() && !concerns_others && !one.event.IsOrdered() && !scenario_->has_failure) return some;
      all.insert(all.end(), some.begin(), some.end());
      if (!is_exploring_ && !some.empty()) break;
    }
    return all;
  }

  std::vector<Alternative> AlternativesOf(int thread) {
    const Thread& one = threads_[thread];
    const Event& event = one.event;
    if (event.kind == kFence || event.kind == kWake) return {{thread, -1, event}};
    const Location& location = locations_[event.location];
    size_t first = location.position[one.current.seen[event.location]];
    if (event.IsOrdered()) first = std::max<size_t>(first, location.position[ordered_.seen[event.location]]);
    if (event.kind == kSleep) first = std::max<size_t>(first, location.position[woken_.seen[event.location]]);
    std::vector<Alternative> some;
    for (size_t at = first; at < location.order.size(); ++at) {
      const int write = location.order[at];
      if (event.Writes() && location.writes[write].is_followed) continue;
      if (std::find(one.failed.begin(), one.failed.end(), write) != one.failed.end()) continue;
      some.push_back({thread, write, event});
      if (OnlyGrows(event)) break;
    }
    if (has_failed_ && !one.failed.empty()) some.push_back({thread, kInterrupt, event});
    return some;
  }

  bool OnlyGrows(const Event& event) const {
    if (event.kind != kLoad || event.order != __ATOMIC_ACQUIRE || scenario_->sleeps) return false;
    const auto address = reinterpret_cast<uintptr_t>(locations_[event.location].address);
    if (address % kLineBytes != 0) return false;
    const auto has = [&](const std::pair<uintptr_t, uintptr_t>& one) { return one.first <= address && address < one.second; };
    return std::any_of(grow_.begin(), grow_.end(), has);
  }

  // Executes an alternative, and its thread up to its next event. Returns false if it was a load that did not end a wait.
  bool Take(const Alternative& chosen) {
    Thread& thread = threads_[chosen.thread];
    const std::vector<int> failed = thread.failed;
    if (chosen.write == kInterrupt) {
      steps_.push_back(std::to_string(chosen.thread) + ": its wait ends");
      thread.is_interrupted = true;
      Wake(chosen);
      if (thread.state == kSleeps) {
        thread.result = 0;
        Resume(chosen.thread);
      } else {
        LoopAgain(chosen.thread);
      }
      return true;
    }
    if (thread.event.kind == kLoad) {
      thread.before = thread.current;
      thread.before_acquired = thread.acquired;
      thread.before_ordered = ordered_;
    }
    const size_t step = steps_.size();
    Perform(chosen);
    Wake(chosen);
    thread.has_loaded_ahead = thread.at_yield;
    if (thread.state != kSleeps) Resume(chosen.thread);
    if (chosen.event.kind == kWake) ResumeWoken(chosen.event.location);
    if (!violation_.empty() || !thread.at_yield || thread.state != kHasEvent) return true;
    // It has loaded and yielded: that did not happen.
    thread.current = thread.before;
    thread.acquired = thread.before_acquired;
    ordered_ = thread.before_ordered;
    thread.failed = failed;
    thread.failed.push_back(chosen.write);
    steps_.resize(step);
    return false;
  }

  void ResumeWoken(int location) {
    for (int number = 0; number < scenario_->threads && violation_.empty(); ++number) {
      Thread& thread = threads_[number];
      if (thread.state != kSleeps || thread.event.location != location) continue;
      thread.result = 1;
      Resume(number);
    }
  }

  // Lets a thread go on that has loaded in vain, and may see now why it must end its wait.
  void LoopAgain(int number) {
    Thread& thread = threads_[number];
    const std::vector<Write>& writes = locations_[thread.event.location].writes;
    if (!std::exchange(thread.at_yield, false)) thread.result = writes[thread.failed.front()].value;
    Resume(number);
  }

  // Lets a wait with a limit end. Returns false if there is none.
  bool LetTimePass() {
    for (int number = 0; number < scenario_->threads; ++number) {
      Thread& thread = threads_[number];
      if (thread.state != kHasEvent || thread.failed.empty() || thread.is_stuck) continue;
      now_ns_ += kHourNs;
      steps_.push_back(std::to_string(number) + ": an hour passes");
      const Event event = thread.event;
      const std::vector<int> failed = thread.failed;
      for (int look = 0; look < 2; ++look) {  // a loop may look at its number before it looks at the clock
        thread.is_timed = !thread.at_yield;
        LoopAgain(number);
        const bool is_same = thread.event.site == event.site && thread.event.location == event.location;
        if (thread.state != kHasEvent || !is_same) return true;
        thread.failed = failed;
      }
      thread.is_stuck = true;
      return true;
    }
    return false;
  }

  void SetDeadlock() {
    violation_ = "deadlock:";
    for (int number = 0; number < scenario_->threads; ++number) {
      if (threads_[number].state != kHasEnded) violation_ += " thread " + std::to_string(number) + " waits for ever;";
    }
    for (const std::string& step : steps_) violation_ += "\n  " + step;
  }

  // The memory model ----------------------------------------------------------------------------------------------

  int LocationOf(const volatile void* address, size_t nbytes) {
    const auto found = numbers_.find(address);
    if (found != numbers_.end()) return found->second;
    const int number = static_cast<int>(locations_.size());
    if (number == kMostLocations) Stop("too many atomic objects: raise kMostLocations");
    uint64_t value = 0;
    std::memcpy(&value, const_cast<const void*>(address), nbytes);
    locations_.push_back({address, nbytes, {{value, View{}, false}}, {0}, {0}});
    numbers_[address] = number;
    return number;
  }

  void Join(View* view, const View& other) const {
    for (size_t number = 0; number < locations_.size(); ++number) {
      const std::vector<uint16_t>& position = locations_[number].position;
      if (position[other.seen[number]] > position[view->seen[number]]) view->seen[number] = other.seen[number];
    }
    for (int thread = 0; thread < kMostThreads; ++thread) view->clock[thread] = std::max(view->clock[thread], other.clock[thread]);
  }
  // The seen writes alone: it makes nothing happen before anything.
  void JoinSeen(View* view, const View& other) const {
    View seen = other;
    seen.clock = {};
    Join(view, seen);
  }
  int NumberOf(const Thread& thread) const { return static_cast<int>(&thread - threads_.data()); }
  void Tick(Thread& thread) { ++thread.current.clock[NumberOf(thread)]; }

  void Fence(Thread& thread, int order) {
    const Event event{kFence, order};
    if (event.Acquires()) Join(&thread.current, thread.acquired);
    if (event.IsOrdered()) {
      JoinSeen(&thread.current, ordered_);
      JoinSeen(&ordered_, thread.current);
    }
    if (event.Releases()) {
      thread.released = thread.current;
      Tick(thread);
    }
  }

  void Perform(const Alternative& chosen) {
    Thread& thread = threads_[chosen.thread];
    const Event event = thread.event;
    if (event.kind == kFence) {
      Fence(thread, event.order);
      Say(chosen, "fence", 0);
      return;
    }
    Location& location = locations_[event.location];
    if (event.kind == kWake) {
      uint16_t& newest = woken_.seen[event.location];
      const uint16_t known = thread.current.seen[event.location];
      if (location.position[known] > location.position[newest]) newest = known;
      Say(chosen, "WakeAll", location.writes[known].value);
      return;
    }
    if (event.kind == kSleep) {
      const uint64_t word = location.writes[chosen.write].value;
      thread.current.seen[event.location] = static_cast<uint16_t>(chosen.write);
      thread.result = 1;
      if (static_cast<uint32_t>(word) == event.operand) thread.state = kSleeps;
      Say(chosen, thread.state == kSleeps ? "SleepWhile, asleep" : "SleepWhile, not asleep", word);
      return;
    }
    const View read = location.writes[chosen.write].view;
    const uint64_t value = location.writes[chosen.write].value;
    uint16_t& seen = thread.current.seen[event.location];
    if (event.kind != kStore) {
      thread.result = value;
      seen = static_cast<uint16_t>(chosen.write);
      if (event.Acquires()) Join(&thread.current, read);
      Join(&thread.acquired, read);
    }
    if (event.Writes()) {
      const auto number = static_cast<uint16_t>(location.writes.size());
      location.writes.push_back({event.kind == kStore ? event.operand : Updated(event, value, location.nbytes), {}, false});
      location.order.insert(location.order.begin() + location.position[chosen.write] + 1, number);
      location.position.resize(location.writes.size());
      for (size_t at = 0; at < location.order.size(); ++at) location.position[location.order[at]] = static_cast<uint16_t>(at);
      seen = number;
      View view = event.Releases() ? thread.current : thread.released;
      view.seen[event.location] = number;
      if (event.kind == kUpdate) {
        Join(&view, read);
        location.writes[chosen.write].is_followed = true;
      }
      location.writes[number].view = view;
      if (event.Releases()) Tick(thread);
    }
    if (event.IsOrdered() && location.position[seen] > location.position[ordered_.seen[event.location]]) {
      ordered_.seen[event.location] = seen;
    }
    Say(chosen, event.kind == kLoad ? "load" : event.kind == kStore ? "store" : "update", location.writes[seen].value);
  }

  static uint64_t Updated(const Event& event, uint64_t value, size_t nbytes) {
    uint64_t made = 0;
    switch (event.function) {
      case kExchange: made = event.operand; break;
      case kAdd: made = value + event.operand; break;
      case kSub: made = value - event.operand; break;
      case kAnd: made = value & event.operand; break;
      case kOr: made = value | event.operand; break;
      case kXor: made = value ^ event.operand; break;
    }
    return nbytes == 8 ? made : made & ((uint64_t{1} << (8 * nbytes)) - 1);
  }

  // Takes those alternatives out of the sleep set that depend on what was executed.
  void Wake(const Alternative& executed) {
    asleep_.erase(std::remove_if(asleep_.begin(), asleep_.end(),
                                 [&](const Alternative& one) {
                                   return one.thread == executed.thread || Depend(one.event, executed.event);
                                 }),
                  asleep_.end());
  }

  void CheckCell(Cell& cell, uintptr_t address, bool writes, const void* site) {
    const std::array<uint32_t, kMostThreads>& clock = threads_[current_].current.clock;
    const auto race = [&](int other, const char* what) {
      char text[160];
      std::snprintf(text, sizeof(text), "race: a %s at %p (code at %p) and a %s of thread %d", writes ? "write" : "read",
                    reinterpret_cast<void*>(address), site, what, other);
      Fail(text);
    };
    if (cell.written > clock[cell.writer]) race(cell.writer, "write");
    if (!writes) {
      cell.read[current_] = clock[current_];
      return;
    }
    for (int thread = 0; thread < kMostThreads; ++thread) {
      if (cell.read[thread] > clock[thread]) race(thread, "read");
    }
    cell = {static_cast<uint8_t>(current_), clock[current_], {}};
  }

  void Say(const Alternative& chosen, const char* what, uint64_t value) {
    if (!says) return;
    const Event& event = threads_[chosen.thread].event;
    char text[160];
    std::snprintf(text, sizeof(text), "%d: %s of location %d: %llu (order %d, code at %p)", chosen.thread, what, event.location,
                  static_cast<unsigned long long>(value), event.order, event.site);
    steps_.push_back(text);
  }

 public:
  bool has_sleep_sets = true;
  bool says = false;  // a violation shows the steps that led to it

 private:
  const Scenario* scenario_ = nullptr;
  std::vector<Node> path_;
  std::array<Thread, kMostThreads> threads_;
  ucontext_t own_context_;
  int current_ = -1;
  bool is_exploring_ = true;
  bool has_failed_ = false;
  int64_t now_ns_ = kHourNs;
  std::string violation_;
  std::vector<std::string> steps_;
  std::vector<Alternative> asleep_;
  std::vector<Location> locations_;
  std::unordered_map<const volatile void*, int> numbers_;
  View ordered_;  // what events with memory_order_seq_cst have seen and written
  View woken_;    // what threads that called WakeAll had seen of the word
  std::vector<Tracked> tracked_;
  std::set<std::pair<uintptr_t, uintptr_t>> grow_;
  std::vector<Line> lines_;
  size_t used_lines_ = 0;
  std::vector<uint32_t*> touched_;
};

inline Explorer& The() {
  static auto& explorer = *new Explorer;
  return explorer;
}

// Runs a function of the explorer on behalf of the code under exploration.
template <typename Function>
auto FromCode(Function function) {
  in_code = false;
  struct Back {
    ~Back() { in_code = true; }
  } const back;
  return function();
}

Result ExploreAll(const Scenario& scenario) { return The().Run(scenario); }
void Track(const void* begin, size_t nbytes) { The().Track(begin, nbytes); }
void OnlyGrow(const void* begin, size_t nbytes) { The().OnlyGrow(begin, nbytes); }
void EndPrelude() {
  FromCode([] { The().WaitFor(kBegins); });
}
void Meet() {
  FromCode([] { The().WaitFor(kMeets); });
}
void FailRank() { The().FailRank(); }
bool IsInterrupted() { return The().IsInterrupted(); }
void Fail(const std::string& what) {
  in_code = false;
  The().Fail(what);
}

}  // namespace explore

// What the code under exploration calls of the kernel.
namespace pycollective {

bool SleepWhile(const void* word, uint32_t value, int64_t) {
  return explore::FromCode([&] { return explore::The().Sleep(word, value); });
}
void WakeAll(const void* word) {
  if (explore::in_code) explore::FromCode([&] { explore::The().WakeSleepers(word); });
}

}  // namespace pycollective

// What the compiler calls -----------------------------------------------------------------------------------------

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define EXPLORE_TOUCH(begin, nbytes, writes)                                       \
  do {                                                                             \
    if (!explore::in_code) return;                                                 \
    const void* const site = __builtin_return_address(0);                          \
    explore::FromCode([&] { explore::The().Touch(begin, nbytes, writes, site); }); \
  } while (false)
#define EXPLORE_ACCESSES(nbytes)                                                     \
  void __tsan_read##nbytes(void* at) { EXPLORE_TOUCH(at, nbytes, false); }           \
  void __tsan_write##nbytes(void* at) { EXPLORE_TOUCH(at, nbytes, true); }           \
  void __tsan_unaligned_read##nbytes(void* at) { EXPLORE_TOUCH(at, nbytes, false); } \
  void __tsan_unaligned_write##nbytes(void* at) { EXPLORE_TOUCH(at, nbytes, true); }
EXPLORE_ACCESSES(1)
EXPLORE_ACCESSES(2)
EXPLORE_ACCESSES(4)
EXPLORE_ACCESSES(8)
EXPLORE_ACCESSES(16)
void __tsan_read_range(void* at, size_t nbytes) { EXPLORE_TOUCH(at, nbytes, false); }
void __tsan_write_range(void* at, size_t nbytes) { EXPLORE_TOUCH(at, nbytes, true); }

#define EXPLORE_ATOMIC(address, nbytes, ...)                                                                             \
  [&](const void* site) {                                                                                                \
    return explore::FromCode([&] { return explore::The().Access(address, nbytes, explore::Event{__VA_ARGS__}, site); }); \
  }(__builtin_return_address(0))
#define EXPLORE_UPDATE(bits, name, function, builtin)                                                         \
  uint##bits##_t __tsan_atomic##bits##_##name(volatile uint##bits##_t* at, uint##bits##_t value, int order) { \
    if (!explore::in_code) return builtin(at, value, __ATOMIC_SEQ_CST);                                       \
    return static_cast<uint##bits##_t>(                                                                       \
        EXPLORE_ATOMIC(at, bits / 8, explore::kUpdate, order, -1, explore::function, value));                 \
  }
#define EXPLORE_ATOMICS(bits)                                                                      \
  uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* at, int order) {        \
    if (!explore::in_code) return __atomic_load_n(at, __ATOMIC_SEQ_CST);                           \
    return static_cast<uint##bits##_t>(EXPLORE_ATOMIC(at, bits / 8, explore::kLoad, order));       \
  }                                                                                                \
  void __tsan_atomic##bits##_store(volatile uint##bits##_t* at, uint##bits##_t value, int order) { \
    if (!explore::in_code) return __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                   \
    EXPLORE_ATOMIC(at, bits / 8, explore::kStore, order, -1, explore::kExchange, value);           \
  }                                                                                                \
  EXPLORE_UPDATE(bits, exchange, kExchange, __atomic_exchange_n)                                   \
  EXPLORE_UPDATE(bits, fetch_add, kAdd, __atomic_fetch_add)                                        \
  EXPLORE_UPDATE(bits, fetch_sub, kSub, __atomic_fetch_sub)                                        \
  EXPLORE_UPDATE(bits, fetch_and, kAnd, __atomic_fetch_and)                                        \
  EXPLORE_UPDATE(bits, fetch_or, kOr, __atomic_fetch_or)                                           \
  EXPLORE_UPDATE(bits, fetch_xor, kXor, __atomic_fetch_xor)
EXPLORE_ATOMICS(32)
EXPLORE_ATOMICS(64)

// The guards of static objects in functions. They are made before an exploration, or by one thread.
uint8_t __tsan_atomic8_load(const volatile uint8_t* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }

void __tsan_atomic_thread_fence(int order) {
  if (explore::in_code) EXPLORE_ATOMIC(nullptr, 0, explore::kFence, order);
}

// The linker calls these in the place of memcpy and the like (--wrap).
void* __real_memcpy(void* to, const void* from, size_t nbytes);
void* __real_memmove(void* to, const void* from, size_t nbytes);
void* __real_memset(void* to, int value, size_t nbytes);
static void TouchCopied(void* to, const void* from, size_t nbytes, const void* site) {
  explore::FromCode([&] {
    explore::The().Touch(from, nbytes, false, site);
    explore::The().Touch(to, nbytes, true, site);
  });
}
void* __wrap_memcpy(void* to, const void* from, size_t nbytes) {
  if (explore::in_code) TouchCopied(to, from, nbytes, __builtin_return_address(0));
  return __real_memcpy(to, from, nbytes);
}
void* __wrap_memmove(void* to, const void* from, size_t nbytes) {
  if (explore::in_code) TouchCopied(to, from, nbytes, __builtin_return_address(0));
  return __real_memmove(to, from, nbytes);
}
void* __wrap_memset(void* to, int value, size_t nbytes) {
  if (explore::in_code) {
    const void* const site = __builtin_return_address(0);
    explore::FromCode([&] { explore::The().Touch(to, nbytes, true, site); });
  }
  return __real_memset(to, value, nbytes);
}

size_t __real_strlen(const char* text);
size_t __wrap_strlen(const char* text) {
  const size_t nbytes = __real_strlen(text);
  if (explore::in_code) {
    const void* const site = __builtin_return_address(0);
    explore::FromCode([&] { explore::The().Touch(text, nbytes + 1, false, site); });
  }
  return nbytes;
}

// What a wait calls in each round, and the clock of its limit.
int __wrap_sched_yield() {
  if (explore::in_code) explore::FromCode([] { explore::The().Yield(); });
  return 0;
}
int64_t __wrap__ZNSt6chrono3_V212steady_clock3nowEv() { return explore::The().now_ns(); }

}  // extern "C"

#endif  // PYCOLLECTIVE_TESTS_NATIVE_EXPLORE_H_
