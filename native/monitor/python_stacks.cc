// Implementation of python_stacks.h.

#include "monitor/python_stacks.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/exports.h"

namespace pycollective {
namespace {

// How long Python's thread may take. Its time is counted in looks, since it does not run while this process is stopped.
constexpr int kLooks = 20;
constexpr auto kLook = std::chrono::milliseconds(50);

constexpr char kThread[] = "Thread 0x";
constexpr char kCurrentThread[] = "Current thread 0x";
constexpr char kCallbacks[] = "/jax/_src/callback.py";  // in the stack of each thread in which XLA calls the user's function

// The number of the thread whose frames follow a line of a dump; 0: the line begins no thread.
uint64_t ThreadOf(const std::string& line) {
  for (const std::string& head : {std::string(kThread), std::string(kCurrentThread)}) {
    if (line.rfind(head, 0) == 0) return std::strtoull(line.c_str() + head.size(), nullptr, 16);
  }
  return 0;
}

std::string ContentOf(int file) {
  std::string all;
  char part[4096];
  for (ssize_t n; (n = pread(file, part, sizeof(part), static_cast<off_t>(all.size()))) > 0;) {
    all.append(part, static_cast<size_t>(n));
  }
  return all;
}

}  // namespace

PythonFrames FramesIn(const std::string& dump, uint64_t main_thread) {
  PythonFrames frames;
  std::istringstream lines(dump);
  uint64_t thread = 0;
  std::string own;  // the frames of this thread
  const auto end_thread = [&] {
    if (thread == main_thread) {
      frames.main_thread += own;
    } else if (own.find(kCallbacks) != std::string::npos) {
      frames.callbacks += own;
    }
    own.clear();
  };
  for (std::string line; std::getline(lines, line);) {
    if (const uint64_t next = ThreadOf(line); next != 0) {
      end_thread();
      thread = next;
    } else if (thread != 0 && !line.empty()) {
      own += line + '\n';
    }
  }
  end_thread();
  return frames;
}

void PythonStacks::SetSignal(int signal, int file, uint64_t main_thread) {
  const std::lock_guard<std::mutex> lock(mutex_);
  signal_ = signal;
  file_ = file;
  main_thread_ = main_thread;
  ended_ = false;
}

PythonFrames PythonStacks::Now() {
  const std::lock_guard<std::mutex> one(asking_);
  std::unique_lock<std::mutex> lock(mutex_);
  if (phase_ == kAbsent) return {};
  asked_ = phase_ == kIdle || phase_ == kReturns;  // else it has not answered the last ask yet
  if (asked_) changed_.notify_all();
  const int64_t before = answers_;
  for (int look = 0; look < kLooks && answers_ == before && !ended_; ++look) changed_.wait_for(lock, kLook);
  if (answers_ != before) return std::exchange(answer_, {});
  return (phase_ == kWantsLock || phase_ == kReturns) && !ended_ ? BySignal() : PythonFrames();
}

bool PythonStacks::NextAsk() {
  std::unique_lock<std::mutex> lock(mutex_);
  phase_ = kIdle;
  changed_.wait(lock, [this] { return asked_ || ended_; });
  phase_ = ended_ ? kAbsent : kWantsLock;
  return !ended_ && std::exchange(asked_, false);
}

void PythonStacks::Reads() {
  const std::lock_guard<std::mutex> lock(mutex_);
  phase_ = kReads;
}

void PythonStacks::Answer(const std::string& dump, const std::string& without_main) {
  const std::lock_guard<std::mutex> lock(mutex_);
  answer_ = FramesIn(dump, main_thread_);
  if (answer_.main_thread.empty()) answer_.main_thread = without_main;
  ++answers_;
  phase_ = kReturns;
  changed_.notify_all();
}

void PythonStacks::End() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

PythonFrames PythonStacks::BySignal() const {
  if (signal_ == 0 || ftruncate(file_, 0) != 0 || lseek(file_, 0, SEEK_SET) != 0) return {};
  if (pthread_kill(pthread_self(), signal_) != 0) return {};  // it has run when this returns: it is for this thread
  PythonFrames frames = FramesIn(ContentOf(file_), main_thread_);
  frames.by_signal = true;
  return frames;
}

PythonStacks& StacksOfPython() {
  static auto& stacks = *new PythonStacks;  // never destroyed: threads may use it while the process ends
  return stacks;
}

}  // namespace pycollective

// What Python calls ----------------------------------------------------------------------------------------------

using pycollective::StacksOfPython;

PYCOLLECTIVE_EXPORT void pycollective_stacks_set_signal(int32_t signal, int32_t file, int64_t main_thread) {
  StacksOfPython().SetSignal(signal, file, static_cast<uint64_t>(main_thread));
}
PYCOLLECTIVE_EXPORT bool pycollective_stacks_next_ask() { return StacksOfPython().NextAsk(); }
PYCOLLECTIVE_EXPORT void pycollective_stacks_read() { StacksOfPython().Reads(); }
PYCOLLECTIVE_EXPORT void pycollective_stacks_answer(const char* dump, const char* without_main) {
  StacksOfPython().Answer(dump, without_main);
}
PYCOLLECTIVE_EXPORT void pycollective_stacks_end() { StacksOfPython().End(); }

// For tests: asks so many times, as a report does. `came`: how often the main thread's frames came; `by_signal`: how many of
// these were read without the interpreter's lock. Returns the last ones, which the caller gives back to
// pycollective_text_free.
PYCOLLECTIVE_EXPORT char* pycollective_stacks_take(int64_t times, int64_t* came, int64_t* by_signal) {
  pycollective::PythonFrames frames;
  *came = *by_signal = 0;
  for (int64_t i = 0; i < times; ++i) {
    frames = StacksOfPython().Now();
    if (frames.main_thread.empty()) continue;
    ++*came;
    if (frames.by_signal) ++*by_signal;
  }
  return strdup(frames.main_thread.c_str());
}

namespace {
const pycollective::Listed listed{
    PYCOLLECTIVE_TYPED(stacks_set_signal), PYCOLLECTIVE_TYPED(stacks_next_ask), PYCOLLECTIVE_TYPED(stacks_read),
    PYCOLLECTIVE_TYPED(stacks_answer), PYCOLLECTIVE_TYPED(stacks_end), PYCOLLECTIVE_TYPED(stacks_take)};
}  // namespace
